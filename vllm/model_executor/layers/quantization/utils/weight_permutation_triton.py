# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton executor of `weight_permutation`.

Into a new tensor: one gather kernel for all experts. In place: the permutation
of an expert's cells (rows, or the runs of a tiled layout) is cut along its
cycles into groups of cells that one program loads whole and then stores. A
group reads only its own cells, except where a cycle was cut; those few source
cells are copied aside first. That is one read and one write of the weight,
with scratch of about 1/128 of it. Tiles of scales (`block_tiling_triton`) and
padding where there is room (`expand_rows_triton`) have kernels of their own, which
follow the moves. Other tilings with short runs go through scratch of several experts.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import torch

from vllm.model_executor.layers.quantization.utils import (
    block_tiling_triton,
    expand_rows_triton,
)
from vllm.model_executor.layers.quantization.utils.triton_launcher import Launcher
from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    ROW_MAJOR,
    Conversion,
    Job,
    Tiling,
)
from vllm.triton_utils import tl, triton

GROUP_BYTES = 32 * 1024  # what one program holds in registers
STRIP_BYTES = 256  # of each cell, in one program
MIN_CELL_BYTES = 32  # one sector: shorter cells waste the memory's bandwidth
MAX_EXPERTS = 65535  # limit of the grid's third dimension


def supported(device: torch.device) -> bool:
    """Whether the kernels run on this device: NVIDIA since SM 7.0, and ROCm."""
    if torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device)[0] >= 7


@triton.jit
def _gather_rows(
    source,
    out,
    from_rows,
    to_units,
    n_rows,
    source_units,
    out_units,
    source_expert,
    source_row,
    out_expert,
    step,
    FILL: tl.constexpr,
    RUN: tl.constexpr,
    INNER: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[expert, to_units[r] + place of column] = source[expert, from_rows[r], column]

    Sizes and strides count units of the pointers' type. Column c lies at
    c // RUN * step + c % RUN * INNER from the start of its row, at c when RUN is 0.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    expert = tl.program_id(2).to(tl.int64)
    exists = row < n_rows
    origin = tl.load(from_rows + row, mask=exists, other=-1)
    target = tl.load(to_units + row, mask=exists, other=0)
    start = tl.multiple_of(origin * source_row, ALIGN)[:, None]
    value = tl.load(
        source + expert * source_expert + start + column,
        mask=(origin >= 0)[:, None] & (column // ALIGN < source_units // ALIGN),
        other=FILL,
    )
    place = column
    if RUN != 0:
        place = column // RUN * step + column % RUN * INNER
    target = tl.multiple_of(target, ALIGN)[:, None]
    tl.store(
        out + expert * out_expert + target + place,
        value,
        mask=exists[:, None] & (column // ALIGN < out_units // ALIGN),
    )


@triton.jit
def _move_cells(
    weight,
    saved,
    to_cells,
    from_cells,
    cell_units,
    weight_expert,
    saved_expert,
    ALIGN: tl.constexpr,
    CELLS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Move a group of cells inside each expert: to_cells[i] = from_cells[i].

    A negative source -k - 1 is saved cell k; a negative target is no move.
    """
    index = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    expert = tl.program_id(2).to(tl.int64)
    target = tl.load(to_cells + index)
    origin = tl.load(from_cells + index)
    mask = (target >= 0)[:, None] & (column // ALIGN < cell_units // ALIGN)
    weight += expert * weight_expert
    saved += expert * saved_expert
    own = tl.multiple_of(tl.maximum(origin, 0) * cell_units, ALIGN)[:, None]
    aside = tl.multiple_of(tl.maximum(-1 - origin, 0) * cell_units, ALIGN)[:, None]
    from_weight = mask & (origin >= 0)[:, None]
    from_saved = mask & (origin < 0)[:, None]
    value = tl.load(weight + own + column, mask=from_weight, other=0)
    value |= tl.load(saved + aside + column, mask=from_saved, other=0)
    # Other warps of this program still read the cells that this one overwrites.
    tl.debug_barrier()
    place = tl.multiple_of(tl.maximum(target, 0) * cell_units, ALIGN)[:, None]
    tl.store(weight + place + column, value, mask=mask)


_UNITS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _unit(*sizes: int) -> int:
    """Widest unit, at most 4 bytes, that divides all of these byte counts."""
    return gcd(4, *sizes)


def _align(unit: int, *sizes: int) -> int:
    """Units in the widest access, at most 16 bytes, that divides these counts."""
    return gcd(16, *sizes) // unit


def _pow2(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _unit_view(data: torch.Tensor, unit: int) -> torch.Tensor:
    return data if unit == 1 else data.view(_UNITS[unit])


@dataclass(frozen=True)
class Moves:
    """In-place moves of one expert's cells, cut into groups."""

    to_cells: torch.Tensor  # int32 [groups * cells per group], -1: nothing
    from_cells: torch.Tensor  # int32, -k - 1: saved cell k
    saved_cells: torch.Tensor  # int32, the cells to copy aside first
    groups: int


def plan_moves(source_cells: Sequence[int], cells: int) -> Moves:
    """Cut a permutation into groups of at most `cells` moves.

    `source_cells[i]` is the cell whose content belongs into cell i. Cells that
    stay are left out. Whole cycles share a group where they fit; a longer cycle
    is cut, and the cell that one part reads from the next is to be saved.
    """
    n = len(source_cells)
    seen = bytearray(n)
    groups: list[list[int]] = []
    open_groups: list[list[int]] = []

    def put(part: list[int]) -> None:
        for group in open_groups:
            if len(group) + len(part) <= cells:
                group.extend(part)
                return
        group = list(part)
        groups.append(group)
        if len(group) < cells:
            open_groups.append(group)
            if len(open_groups) > 16:
                open_groups.pop(0)

    for first in range(n):
        if seen[first]:
            continue
        seen[first] = 1
        cycle, cell = [first], source_cells[first]
        while cell != first:
            seen[cell] = 1
            cycle.append(cell)
            cell = source_cells[cell]
        if len(cycle) > 1:
            for start in range(0, len(cycle), cells):
                put(cycle[start : start + cells])

    owner = [-1] * n
    for number, group in enumerate(groups):
        for cell in group:
            owner[cell] = number
    to_cells: list[int] = []
    from_cells: list[int] = []
    saved: list[int] = []
    for number, group in enumerate(groups):
        for cell in group:
            source = source_cells[cell]
            if owner[source] != number:
                saved.append(source)
                source = -len(saved)
            to_cells.append(cell)
            from_cells.append(source)
        padding = [-1] * (cells - len(group))
        to_cells += padding
        from_cells += padding
    as_index = dict(dtype=torch.int32)
    return Moves(
        torch.tensor(to_cells, **as_index),
        torch.tensor(from_cells, **as_index),
        torch.tensor(saved, **as_index),
        len(groups),
    )


@dataclass(frozen=True)
class Spec:
    """What the launches for a tensor depend on, besides its contents and address."""

    conversion: Conversion
    experts: int
    strides: tuple[int, int]  # bytes from expert to expert and from row to row
    out_expert: int  # bytes from expert to expert of the result; 0: in place
    expands: bool
    address: int  # the widest access, at most 16 bytes, that all addresses allow
    device: torch.device

    def row_table(self) -> torch.Tensor:
        """int32, the source row of each result row; -1 for padding."""
        return self.conversion.table(
            "source rows",
            self.device,
            lambda: self.conversion.rows.to(torch.int32).to(self.device),
        )

    def with_conversion(self, conversion: Conversion, **changes) -> "Spec":
        return replace(self, conversion=conversion, **changes)


def spec_of(job: Job) -> Spec:
    source, out = job.source, job.out
    address = gcd(16, source.data_ptr(), 0 if out is None else out.data_ptr())
    return Spec(
        job.conversion,
        source.shape[0],
        (source.stride(0), source.stride(1)),
        0 if out is None else out.stride(0),
        job.expands,
        address,
        source.device,
    )


class Gather:
    """Launches of `_gather_rows`."""

    def __init__(
        self,
        from_rows: torch.Tensor,
        to_bytes: torch.Tensor,
        source_bytes: int,
        row_bytes: int,
        strides: tuple[int, int, int],
        address: int,
        tiling: Tiling = ROW_MAJOR,
        step: int = 0,
        inner: int = 1,
        fill: int = 0,
    ):
        """Rows of `source_bytes` become rows of `row_bytes` that begin at `to_bytes`.
        `strides` are bytes from expert to expert and from row to row of the source, and
        from expert to expert of the result; all addresses are multiples of `address`.
        """
        run = tiling.run if tiling.whole_runs else 1
        sizes = (source_bytes, row_bytes, run, *strides, address)
        self.unit = unit = _unit(*sizes)
        n_rows, width = from_rows.numel(), row_bytes // unit
        columns = min(_pow2(width), 128)
        rows = min(_pow2(n_rows), 4096 // columns)
        self.grid = triton.cdiv(n_rows, rows), triton.cdiv(width, columns)
        to_units = (to_bytes // unit).to(torch.int32).to(from_rows.device)
        self.tables = from_rows, to_units
        steps = [stride // unit for stride in (*strides, step)]
        constants: dict[str, Any] = dict(
            FILL=fill * sum(256**i for i in range(unit)),
            RUN=tiling.run // unit,
            INNER=inner,
            ALIGN=_align(unit, *sizes),
            ROWS=rows,
            COLUMNS=columns,
        )
        numbers = n_rows, source_bytes // unit, width, *steps
        self.launch = Launcher(_gather_rows, numbers, constants, num_warps=4)

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """From uint8 [experts, rows, bytes] to uint8 [experts, bytes]."""
        self.launch(
            (*self.grid, source.shape[0]),
            _unit_view(source, self.unit),
            _unit_view(out, self.unit),
            *self.tables,
        )


def _gather(spec: Spec, out_expert: int) -> Gather:
    conversion = spec.conversion
    *_, step, inner = conversion.tiling.strides(*conversion.shape)
    return Gather(
        spec.row_table(),
        conversion.tiling.row_starts(*conversion.shape),
        conversion.source_shape[1],
        conversion.shape[1],
        (*spec.strides, out_expert),
        spec.address,
        conversion.tiling,
        step,
        inner,
        conversion.fill,
    )


def _moves(spec: Spec, cell_bytes: int, cells: int) -> Moves:
    """`plan_moves` for the cells of a conversion, on the device."""
    conversion = spec.conversion
    rows, row_bytes = conversion.shape

    def build():
        runs = torch.arange(row_bytes // cell_bytes)
        step = conversion.tiling.strides(rows, row_bytes)[-2]
        starts = conversion.tiling.row_starts(rows, row_bytes)
        place = (starts[:, None] + runs * step) // cell_bytes
        source_cells = torch.empty(rows * runs.numel(), dtype=torch.int64)
        source_cells[place] = conversion.rows[:, None] * runs.numel() + runs
        moves = plan_moves(source_cells.tolist(), cells)
        return Moves(
            moves.to_cells.to(spec.device),
            moves.from_cells.to(spec.device),
            moves.saved_cells.to(spec.device),
            moves.groups,
        )

    return conversion.table("moves", spec.device, build)


def can_expand(conversion: Conversion) -> bool:
    """Whether a tensor with room behind it can be padded where it is."""
    if torch.version.hip is not None:
        # Loads of other wavefronts may still be under way behind a barrier there.
        return False
    if conversion.shape[1] > expand_rows_triton.MAX_ROW_BYTES:
        return False
    return conversion.tiling is ROW_MAJOR or block_tiling_triton.fits(conversion)


class Work:
    """What one tensor's conversion launches. Made before any byte is written, and kept
    for the next tensor of the same spec."""

    scratch_bytes = 0
    flags = 0  # int32 zeros

    def __call__(self, job: Job, scratch: torch.Tensor, flags: torch.Tensor) -> None:
        raise NotImplementedError


class GatherAll(Work):
    """Into a new tensor."""

    def __init__(self, spec: Spec):
        self.gather = _gather(spec, spec.out_expert)

    def __call__(self, job, scratch, flags):
        for first in range(0, job.source.shape[0], MAX_EXPERTS):
            experts = slice(first, first + MAX_EXPERTS)
            self.gather(job.source[experts], job.out[experts])


class TileBlocks(Work):
    """Blocks of rows into tiles, from one tensor into another or where they are."""

    def __init__(self, spec: Spec):
        conversion, strides = spec.conversion, spec.strides
        source_bytes = conversion.source_shape[1]
        run = conversion.tiling.run if conversion.tiling.whole_runs else 1
        sizes = (source_bytes, *strides, spec.address)
        self.unit = _unit(conversion.shape[1], run, spec.out_expert, *sizes)
        self.launch = block_tiling_triton.BlockTiling(
            spec.row_table(),
            conversion,
            spec.experts,
            self.unit,
            _align(self.unit, *sizes),
            tuple(stride // self.unit for stride in strides),
            (spec.out_expert or strides[0]) // self.unit,
        )

    def __call__(self, job, scratch, flags):
        # What was padded before lies in the result already.
        source = job.out if job.expands else job.source
        out = job.source if job.out is None else job.out
        self.launch(_unit_view(source, self.unit), _unit_view(out, self.unit))


class MoveCells(Work):
    """Cells of a weight in place, by groups along the permutation's cycles."""

    def __init__(self, spec: Spec, budget: int):
        conversion = spec.conversion
        rows, row_bytes = conversion.shape
        self.cell = cell = conversion.tiling.run or row_bytes
        self.unit = unit = _unit(cell, spec.strides[0], spec.address)
        n_cells = rows * row_bytes // cell
        cells = min(_pow2(n_cells), GROUP_BYTES // min(_pow2(cell), STRIP_BYTES))
        self.moves = moves = _moves(spec, cell, cells)
        saved = moves.saved_cells.numel()
        self.per_expert = per_expert = saved * cell
        self.at_once = _experts_at_once(spec.experts, per_expert, budget)
        self.scratch_bytes = self.at_once * per_expert
        self.copy_aside = None
        if saved:
            to_bytes = torch.arange(saved) * cell
            strides = spec.strides[0], cell, per_expert
            self.copy_aside = Gather(
                moves.saved_cells, to_bytes, cell, cell, strides, spec.address
            )
        columns = min(_pow2(cell // unit), STRIP_BYTES // unit)
        self.grid = moves.groups, triton.cdiv(cell // unit, columns)
        align = _align(unit, cell, spec.strides[0], spec.address)
        self.launch = Launcher(
            _move_cells,
            (cell // unit, spec.strides[0] // unit, per_expert // unit),
            dict(ALIGN=align, CELLS=cells, COLUMNS=columns),
            num_warps=8,
        )

    def __call__(self, job, scratch, flags):
        if not self.moves.groups:
            return
        for experts in job.source.split(self.at_once):
            self._move(experts, scratch)

    def _move(self, experts: torch.Tensor, scratch: torch.Tensor) -> None:
        n_experts, unit, cell = experts.shape[0], self.unit, self.cell
        saved = scratch[: max(n_experts * self.per_expert, 16)]
        if self.copy_aside is not None:
            shape = n_experts, experts.shape[1] * experts.shape[2] // cell, cell
            cells = experts.as_strided(shape, (experts.stride(0), cell, 1))
            self.copy_aside(cells, saved.view(n_experts, self.per_expert))
        self.launch(
            (*self.grid, n_experts),
            _unit_view(experts, unit),
            _unit_view(saved, unit),
            self.moves.to_cells,
            self.moves.from_cells,
        )


class ThroughScratch(Work):
    """In place by way of scratch, some experts at a time."""

    def __init__(self, spec: Spec, budget: int):
        self.size = prod(spec.conversion.shape)
        self.at_once = _experts_at_once(spec.experts, self.size, budget)
        self.scratch_bytes = self.at_once * self.size
        self.gather = _gather(spec, self.size)

    def __call__(self, job, scratch, flags):
        result = scratch[: self.scratch_bytes].view(self.at_once, self.size)
        for experts in job.source.split(self.at_once):
            self.gather(experts, result[: len(experts)])
            experts.copy_(result[: len(experts)].view(experts.shape))


class PadRows(Work):
    """Rows to the places that padding leaves them, in one launch."""

    def __init__(self, launch: expand_rows_triton.Launch):
        self.launch, self.flags = launch, launch.flags
        self.scratch_bytes = launch.scratch_bytes

    def __call__(self, job, scratch, flags):
        self.launch(_unit_view(job.out, self.launch.unit), scratch, flags)


def expand_rows(spec: Spec) -> PadRows:
    """Of all experts, in their order."""
    conversion = spec.conversion
    tables = conversion.table(
        "expand", spec.device, lambda: _expansion_tables(conversion, spec.device)
    )
    shape = _launch_shape(spec)
    return PadRows(expand_rows_triton.Expansion(spec.experts, tables, *shape))


def _launch_shape(spec: Spec) -> tuple[int, ...]:
    """What a launch of `expand_rows_triton` takes after its tables."""
    conversion = spec.conversion
    rows, row_bytes = conversion.shape
    source_rows, source_bytes = conversion.source_shape
    unit = _unit(row_bytes, source_bytes, spec.address)
    align = _align(unit, row_bytes, source_bytes, spec.address)
    return rows, source_rows, row_bytes, source_bytes, unit, align, conversion.fill


def _expansion_tables(conversion: Conversion, device: torch.device):
    kept = conversion.rows >= 0
    from_rows = torch.where(kept, kept.cumsum(0) - 1, -1)
    tables = from_rows, kept.nonzero().flatten()
    return tuple(table.to(torch.int32).to(device) for table in tables)


def padded_rows(spec: Spec, budget: int) -> PadRows:
    """Rows in the result's order, with room for padding."""
    if spec.conversion.row_order.is_identity:
        return expand_rows(spec)
    table, shape = spec.row_table(), _launch_shape(spec)
    return PadRows(expand_rows_triton.Placement(spec.experts, budget, table, *shape))


def _experts_at_once(experts: int, per_expert: int, budget: int) -> int:
    experts = min(MAX_EXPERTS, experts)
    return min(experts, max(1, budget // per_expert)) if per_expert else experts


def plan(spec: Spec, budget: int) -> list[Work]:
    """The launches that convert one tensor, in order."""
    conversion, tiling = spec.conversion, spec.conversion.tiling
    blocks = block_tiling_triton.fits(conversion)
    if spec.out_expert and not spec.expands:
        return [TileBlocks(spec) if blocks else GatherAll(spec)]
    if not blocks and not spec.expands:
        if tiling.run in range(1, MIN_CELL_BYTES) or not tiling.whole_runs:
            return [ThroughScratch(spec, budget)]
        return [MoveCells(spec, budget)]
    if tiling is ROW_MAJOR:
        return [padded_rows(spec, budget)]
    work: list[Work] = []
    tiles = conversion.padded_before if spec.expands else conversion
    if block_tiling_triton.stays_in_blocks(tiles):
        # The kernel that tiles a block reads its rows in any order.
        if spec.expands:
            work.append(expand_rows(spec))
    else:
        tiles = conversion.tiles_alone
        if spec.expands:
            work.append(padded_rows(spec, budget))
        else:
            work.append(MoveCells(spec.with_conversion(conversion.row_order), budget))
    strides = spec.strides
    if spec.expands:
        strides = prod(conversion.shape), conversion.shape[1]
    work.append(TileBlocks(spec.with_conversion(tiles, strides=strides)))
    return work


def run(jobs: Sequence[Job], budget: int) -> None:
    """Convert these tensors, all on one device; scratch is at most `budget`
    bytes, or what one expert needs."""
    device = jobs[0].source.device
    work: list[tuple[Job, Work]] = []
    for job in jobs:
        spec = spec_of(job)
        found = job.conversion.table(
            ("plan", spec, budget), device, functools.partial(plan, spec, budget)
        )
        work += [(job, launch) for launch in found]
    need = max([16, *(launch.scratch_bytes for _, launch in work)])
    scratch = torch.empty(need, dtype=torch.uint8, device=device)
    total = sum(launch.flags for _, launch in work)
    flags = torch.zeros(total, dtype=torch.int32, device=device) if total else scratch
    used = 0
    for job, launch in work:
        launch(job, scratch, flags[used : used + launch.flags])
        used += launch.flags
