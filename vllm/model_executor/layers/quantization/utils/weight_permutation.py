# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Layout conversions of MoE weights: one description, two executors.

Every kernel layout for expert weights is a permutation of the bytes of each
expert, sometimes with padding. A `Conversion` says which source row each
result row comes from, how the result rows are tiled in memory, and what fills
the padding. `convert_` runs it: inside the weight's own storage where the
bytes fit (`weight_room` makes room for padding), else into one new tensor. All
scratch is allocated before the first byte is written.

On CUDA tensors the work is done by Triton (`weight_permutation_triton`), else
by plain torch operators, one expert at a time.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch

from vllm.model_executor.layers.quantization.utils.weight_room import (
    has_room,
    room_for,
)

Made = TypeVar("Made")


def outside_pools(build: Callable[[], Made]) -> Made:
    """What `build` makes, for tables on the device that outlive a load.

    It runs on another thread, because memory pools route one thread: sleep mode drops
    what a load allocates in its pool.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(build).result()


@dataclass(frozen=True)
class Tiling:
    """The order in memory of the bytes of one expert's [rows, row_bytes] matrix.

    Rows are split into dimensions [-1, *row_split], row bytes into
    [-1, run]; `order` lists the resulting dimensions, outermost first. `run` 0
    means the whole row.
    """

    name: str
    row_split: tuple[int, ...] = ()
    run: int = 0
    order: tuple[int, ...] = (0, 1, 2)

    def check(self, what: str, rows: int, row_bytes: int) -> None:
        multiple = prod(self.row_split)
        if rows % multiple:
            raise ValueError(
                f"{what}: {rows} rows cannot be tiled as {self.name}, "
                f"which needs a multiple of {multiple} rows"
            )
        if self.run and row_bytes % self.run:
            raise ValueError(
                f"{what}: rows of {row_bytes} bytes cannot be tiled as {self.name}, "
                f"which needs a multiple of {self.run} bytes"
            )

    def split_shape(self, rows: int, row_bytes: int) -> tuple[int, ...]:
        """Dimensions of the split matrix, in the order of the rows and columns."""
        run = self.run or row_bytes
        outer = rows // prod(self.row_split)
        return (outer, *self.row_split, row_bytes // run if run else 1, run)

    def tiled_view(self, memory: torch.Tensor, rows: int, row_bytes: int):
        """View `memory`, [experts, rows * row_bytes], with split dimensions.

        Element [e, *i] of the view is where the split matrix's element [*i]
        of expert e belongs.
        """
        shape = self.split_shape(rows, row_bytes)
        stored = [shape[d] for d in self.order]
        back = [self.order.index(d) for d in range(len(shape))]
        view = memory.view(memory.shape[0], *stored)
        return view.permute(0, *(1 + d for d in back))

    def strides(self, rows: int, row_bytes: int) -> list[int]:
        """Bytes in memory from one entry to the next, of each split dimension."""
        shape = self.split_shape(rows, row_bytes)
        steps = [0] * len(shape)
        size = 1
        for dimension in reversed(self.order):
            steps[dimension] = size
            size *= shape[dimension]
        return steps

    def row_starts(self, rows: int, row_bytes: int) -> torch.Tensor:
        """The byte at which each row begins: int64 [rows]."""
        shape = self.split_shape(rows, row_bytes)[:-2]
        start = torch.zeros(1, dtype=torch.int64)
        for size, step in zip(shape, self.strides(rows, row_bytes), strict=False):
            start = (start[:, None] + torch.arange(size) * step).flatten()
        return start

    @property
    def whole_runs(self) -> bool:
        """Whether the bytes of a run are neighbours in memory."""
        return self.order[-1] == len(self.order) - 1


ROW_MAJOR = Tiling("row-major")
# Columns cut into blocks of 128 bytes, blocks outermost.
BLOCK_MAJOR_K = Tiling("BlockMajorK", run=128, order=(1, 0, 2))
# Block scales, one byte each: tiles of 128 rows by 4 columns, in a tile the 32
# rows of a warp outermost, then the four row groups, then the columns.
SCALE_128X4 = Tiling("128x4 scale tiles", (4, 32), run=4, order=(0, 3, 2, 1, 4))


class Conversion:
    """What one layout conversion does to each expert. Immutable.

    Args:
        rows: source row of each result row; -1 makes a row of padding.
        source_shape: (rows, bytes per row) of each expert before.
        row_bytes: bytes per row of the result; more than the source's means
            padding at the end of each row. Default: as in the source.
        tiling: order in memory of the result.
        fill: value of padding bytes.

    """

    def __init__(
        self,
        rows: Sequence[int] | torch.Tensor,
        source_shape: tuple[int, int],
        row_bytes: int | None = None,
        tiling: Tiling = ROW_MAJOR,
        fill: int = 0,
    ):
        self.rows = torch.as_tensor(rows, dtype=torch.int64, device="cpu").clone()
        self.source_shape = source_shape
        self.shape = (
            self.rows.numel(),
            source_shape[1] if row_bytes is None else row_bytes,
        )
        self.tiling = tiling
        self.fill = fill
        if self.shape[1] < source_shape[1]:
            raise ValueError(
                f"a conversion cannot shorten rows of {source_shape[1]} bytes "
                f"to {self.shape[1]}"
            )
        # A row may be padding (-1) but never come from outside the source.
        if self.rows.numel() and not (
            int(self.rows.min()) >= -1 and int(self.rows.max()) < source_shape[0]
        ):
            raise ValueError(
                f"source rows must lie between -1 and {source_shape[0] - 1}, found "
                f"{int(self.rows.min())} to {int(self.rows.max())}"
            )
        self.tiling.check("conversion", *self.shape)
        kept = self.rows[self.rows >= 0]
        self.padded_rows = kept.numel() < self.rows.numel()
        #: every source row has one place in the result, so it can be done in place
        self.keeps_rows = kept.numel() == source_shape[0] and bool(
            (kept.sort().values == torch.arange(source_shape[0])).all()
        )
        self.in_place = self.shape == source_shape and self.keeps_rows
        self.is_identity = (
            self.in_place
            and tiling.order == tuple(range(len(tiling.order)))
            and bool((self.rows == torch.arange(self.rows.numel())).all())
        )
        self._tables: dict[tuple[Hashable, torch.device], Any] = {}

    def __repr__(self) -> str:
        return (
            f"Conversion({self.source_shape} -> {self.shape}, {self.tiling.name}, "
            f"{'in place' if self.in_place else 'one output'})"
        )

    def table(
        self, key: Hashable, device: torch.device, build: Callable[[], Any]
    ) -> Any:
        """Index tables and plans of an executor, made once per device and kept."""
        found = self._tables.get((key, device))
        if found is None:
            found = self._tables[key, device] = outside_pools(build)
        return found

    @functools.cached_property
    def row_order(self) -> "Conversion":
        """The source's rows, in place and row-major, in the order of the result."""
        return Conversion(self.rows[self.rows >= 0], self.source_shape)

    @functools.cached_property
    def tiles_alone(self) -> "Conversion":
        """The tiling of rows that have their order and their padding already."""
        return Conversion(range(self.shape[0]), self.shape, tiling=self.tiling)

    @functools.cached_property
    def padded_before(self) -> "Conversion":
        """What remains to do where the padding is in place and the rows between it are
        in the source's order."""
        kept = (self.rows >= 0).nonzero().flatten()
        rows = torch.arange(self.shape[0], device="cpu")
        rows[kept] = kept[self.rows[kept]]
        return Conversion(rows, self.shape, tiling=self.tiling, fill=self.fill)

    def row_index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(result rows, source rows) of the rows that are not padding."""

        def build():
            kept = (self.rows >= 0).nonzero().flatten()
            return kept.to(device), self.rows[kept].to(device)

        return self.table("rows", device, build)


def use_triton(weight: torch.Tensor) -> bool:
    """Whether Triton runs the conversions of this tensor, else plain torch."""
    return weight.is_cuda and _device_has_triton(weight.device)


@functools.cache
def _device_has_triton(device: torch.device) -> bool:
    kernels = _triton_kernels()
    return kernels is not None and kernels.supported(device)


@functools.cache
def _triton_kernels():
    try:
        from vllm.model_executor.layers.quantization.utils import (
            weight_permutation_triton,
        )
    except ImportError:
        return None
    return weight_permutation_triton


def expert_bytes(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [experts, rows, columns] as a uint8 view with the same strides."""
    data = weight.data
    return data if data.dtype == torch.uint8 else data.view(torch.uint8)


def check_experts(
    name: str,
    weight: torch.Tensor,
    dtypes: Sequence[torch.dtype] | None = None,
    shape: Sequence[int | None] | None = None,
) -> None:
    """Raise ValueError, naming the tensor, unless it is [experts, rows, columns]
    of one of `dtypes` with the sizes of `shape` (None: any), and its rows are
    contiguous."""
    if dtypes is not None and weight.dtype not in dtypes:
        wanted = " or ".join(str(d) for d in dtypes)
        raise ValueError(f"{name} is {weight.dtype} and must be {wanted}")
    if weight.dim() != 3:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)} and must be 3-D, "
            "[experts, rows, columns]"
        )
    if shape is not None and any(
        want is not None and have != want
        for have, want in zip(weight.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)} and must be [{wanted}]"
        )
    if weight.shape[2] > 1 and weight.stride(2) != 1:
        raise ValueError(
            f"{name} has strides {weight.stride()}: its last dimension must be "
            "contiguous"
        )


def check_multiple(name: str, what: str, size: int, multiple: int) -> None:
    """Raise ValueError, naming the tensor, unless `size` is a multiple."""
    if size % multiple:
        raise ValueError(
            f"{name} has {size} {what} per expert and must have a multiple of "
            f"{multiple}"
        )


def experts_contiguous(weight: torch.Tensor) -> bool:
    """Whether each expert is one contiguous run of bytes (gaps between experts
    are allowed)."""
    return weight.shape[0] == 0 or weight[0].is_contiguous()


@dataclass(frozen=True)
class Job:
    """One tensor to convert: `source` uint8 [experts, rows, row_bytes], and the
    result, `out` uint8 [experts, rows * row_bytes], None for in place. `expands`:
    the result begins where the source does, and is larger."""

    source: torch.Tensor
    conversion: Conversion
    out: torch.Tensor | None = None
    expands: bool = False


def can_expand(weight: torch.Tensor, conversion: Conversion) -> bool:
    """Whether the weight's storage has room for the result, and the executor can pad
    the weight there."""
    size = prod(conversion.shape)
    if not conversion.keeps_rows or conversion.in_place or not weight.numel():
        return False
    if not has_room(weight, weight.shape[0] * size):
        return False
    if not use_triton(weight):
        return True
    can = _triton_kernels().can_expand
    return conversion.table("can expand", weight.device, lambda: can(conversion))


def convert_(
    *steps: tuple[torch.Tensor, Conversion],
    budget: int | None = None,
    gaps: bool = False,
    overwrite: bool = True,
) -> list[torch.Tensor]:
    """Convert the tensors of one layer.

    Args:
        steps: pairs of a weight, [experts, rows, columns] of any dtype, and its
            conversion. A weight is overwritten when it is contiguous and its
            conversion keeps its size, or its storage has room for the result; one
            that stays as it is, is returned; else a new tensor is made.
        budget: bytes that scratch may take, default the larger of one expert
            and 2 % of all the weights given. More is used only where a single
            expert needs it.
        gaps: overwrite also weights with gaps between their experts.
        overwrite: False leaves every weight as it is.

    Returns:
        Per step a uint8 tensor [experts, rows, row_bytes] in the memory order of
        the conversion's tiling, sharing the weight's storage where it was
        overwritten.

    Scratch and results are allocated before the first write, so running out of
    memory leaves every weight as it was.

    """
    if budget is None:
        budget = _budget([weight for weight, _ in steps])
    results, jobs = [], []
    for weight, conversion in steps:
        found = _in_own_storage(weight, conversion, gaps) if overwrite else None
        result, job = found or _in_new_tensor(weight, conversion)
        results.append(result)
        jobs.append(job)
    _run(jobs, budget)
    return results


def _budget(weights: Sequence[torch.Tensor]) -> int:
    total = sum([w.numel() * w.element_size() for w in weights])
    experts = max([1, *(w.shape[0] for w in weights)])
    # Some room is left for index tables and the allocator's rounding.
    return max(total // experts * 3 // 4, total // 64)


def _source(weight: torch.Tensor, conversion: Conversion) -> torch.Tensor:
    source = expert_bytes(weight)
    if source.shape[1:] != conversion.source_shape:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)}, {weight.dtype}, has "
            f"{tuple(source.shape[1:])} rows and row bytes per expert; its "
            f"conversion is for {conversion.source_shape}"
        )
    return source


def _in_own_storage(
    weight: torch.Tensor, conversion: Conversion, gaps: bool = False
) -> tuple[torch.Tensor, Job | None] | None:
    """The result and what makes it, where the weight can be overwritten."""
    source = _source(weight, conversion)
    if conversion.is_identity:
        return source, None
    if conversion.in_place:
        if source.is_contiguous() or (gaps and experts_contiguous(source)):
            return source, Job(source, conversion) if source.numel() else None
        return None
    if not can_expand(weight, conversion):
        return None
    experts = source.shape[0]
    room = room_for(source, experts, prod(conversion.shape))
    result = room_for(source, experts, *conversion.shape)
    return result, Job(source, conversion, room, expands=True)


def _in_new_tensor(
    weight: torch.Tensor, conversion: Conversion
) -> tuple[torch.Tensor, Job | None]:
    source = _source(weight, conversion)
    shape = source.shape[0], *conversion.shape
    result = torch.empty(shape, dtype=torch.uint8, device=source.device)
    if not result.numel():
        return result, None
    return result, Job(source, conversion, result.flatten(1))


def _run(found: Sequence[Job | None], budget: int) -> None:
    jobs = [job for job in found if job is not None]
    if not jobs:
        return
    device = jobs[0].source.device
    if any(job.source.device != device for job in jobs):
        devices = sorted({str(job.source.device) for job in jobs})
        raise ValueError(f"a layer's weights must be on one device, not {devices}")
    run = _triton_kernels().run if use_triton(jobs[0].source) else run_torch
    run(jobs, budget)


def release(weight: torch.Tensor, result: torch.Tensor) -> None:
    """Free the storage of a converted weight now, if it is a layer's parameter.

    The parameter is pointed at `result`, where it is about to end up anyway. A
    plain tensor belongs to the caller and is left alone.
    """
    if isinstance(weight, torch.nn.Parameter):
        weight.data = result


def convert_layer(
    *steps: tuple[torch.Tensor, Conversion, torch.dtype], overwrite: bool = True
) -> list[torch.Tensor]:
    """Convert a layer's tensors and view the results as the given dtypes.

    As `convert_`, but tensors that need a new, larger one are converted last, each by
    itself, and released when its result is complete, so that only one source and its
    result exist side by side. With `overwrite` False every tensor given is left as it
    is.
    """
    if not overwrite:
        pairs = [(weight, conversion) for weight, conversion, _ in steps]
        results = convert_(*pairs, overwrite=False)
        return [r.view(step[2]) for r, step in zip(results, steps, strict=True)]
    found: list[tuple[torch.Tensor, Job | None] | None] = []
    for weight, conversion, _ in steps:
        own = _in_own_storage(weight, conversion)
        if own is None and conversion.in_place:
            own = _in_new_tensor(weight, conversion)
        found.append(own)
    now = [step[0] for step, pair in zip(steps, found, strict=True) if pair]
    _run([pair[1] for pair in found if pair], _budget(now))
    results = []
    for (weight, conversion, dtype), pair in zip(steps, found, strict=True):
        if pair:
            results.append(pair[0].view(dtype))
            continue
        (result,) = convert_((weight, conversion), overwrite=False)
        results.append(result.view(dtype))
        release(weight, results[-1])
    return results


def run_torch(jobs: Sequence[Job], budget: int) -> None:
    """Plain torch executor: one expert of scratch at a time, whatever `budget`."""
    del budget
    device = jobs[0].source.device
    need = max(sum(_torch_scratch(job.conversion)) for job in jobs)
    scratch = torch.empty(need, dtype=torch.uint8, device=device)
    for job in jobs:
        job.conversion.row_index(device)
    for job in jobs:
        _convert_experts(job, scratch)


def _torch_scratch(conversion: Conversion) -> tuple[int, int]:
    """Bytes of scratch: for an expert's gathered rows, and for the padded matrix
    where the result is both padded and tiled."""
    kept = int((conversion.rows >= 0).sum())
    gathered = kept * conversion.source_shape[1]
    padded = (kept, conversion.source_shape[1]) != conversion.shape
    if padded and conversion.tiling is not ROW_MAJOR:
        return gathered, prod(conversion.shape)
    return gathered, 0


def _convert_experts(job: Job, scratch: torch.Tensor) -> None:
    conversion, source = job.conversion, job.source
    rows, row_bytes = conversion.shape
    columns = conversion.source_shape[1]
    to_rows, from_rows = conversion.row_index(source.device)
    kept = to_rows.numel()
    size, padded_size = _torch_scratch(conversion)
    gathered = scratch[:size].view(kept, columns)
    padded = None
    if padded_size:
        padded = scratch[size : size + padded_size].view(rows, row_bytes)
        padded.fill_(conversion.fill)
    split = conversion.tiling.split_shape(rows, row_bytes)
    experts = range(source.shape[0])
    # A result that begins where its source does is written from its end.
    for expert in reversed(experts) if job.expands else experts:
        memory = source[expert].view(1, -1) if job.out is None else job.out[expert]
        torch.index_select(source[expert], 0, from_rows, out=gathered)
        if padded is not None:
            padded[:, :columns].index_copy_(0, to_rows, gathered)
        elif (kept, columns) != (rows, row_bytes):
            memory.fill_(conversion.fill)
            memory.view(rows, row_bytes)[:, :columns].index_copy_(0, to_rows, gathered)
            continue
        matrix = gathered if padded is None else padded
        place = conversion.tiling.tiled_view(memory.view(1, -1), rows, row_bytes)
        place[0].copy_(matrix.view(split))
