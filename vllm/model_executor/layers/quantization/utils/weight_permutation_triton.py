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

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

import torch

from vllm.model_executor.layers.quantization.utils import (
    block_tiling_triton,
    expand_rows_triton,
)
from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    ROW_MAJOR,
    Conversion,
    Job,
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
class InPlace:
    """One in-place conversion, planned: cells of `cell_bytes`, moved in groups."""

    job: Job
    moves: Moves
    cell_bytes: int
    cells: int
    unit: int
    saved_units: torch.Tensor  # where each saved cell goes, in units

    @property
    def scratch_per_expert(self) -> int:
        return self.moves.saved_cells.numel() * self.cell_bytes


def _plan_in_place(job: Job) -> InPlace:
    conversion, source = job.conversion, job.source
    rows, row_bytes = conversion.shape
    cell_bytes = conversion.tiling.run or row_bytes
    strip = min(_pow2(cell_bytes), STRIP_BYTES)
    n_cells = rows * row_bytes // cell_bytes
    cells = min(_pow2(n_cells), GROUP_BYTES // strip)
    unit = _unit(cell_bytes, source.stride(0), source.data_ptr())

    def build():
        runs = torch.arange(row_bytes // cell_bytes)
        step = conversion.tiling.strides(rows, row_bytes)[-2]
        starts = conversion.tiling.row_starts(rows, row_bytes)
        place = (starts[:, None] + runs * step) // cell_bytes
        source_cells = torch.empty(n_cells, dtype=torch.int64)
        source_cells[place] = conversion.rows[:, None] * runs.numel() + runs
        moves = plan_moves(source_cells.tolist(), cells)
        return Moves(
            moves.to_cells.to(source.device),
            moves.from_cells.to(source.device),
            moves.saved_cells.to(source.device),
            moves.groups,
        )

    moves = conversion.table("moves", source.device, build)

    def saved_units():
        number = torch.arange(moves.saved_cells.numel(), dtype=torch.int32)
        return (number * (cell_bytes // unit)).to(source.device)

    return InPlace(
        job,
        moves,
        cell_bytes,
        cells,
        unit,
        conversion.table(f"saved{unit}", source.device, saved_units),
    )


@dataclass(frozen=True)
class GatherTable:
    from_rows: torch.Tensor  # int32, source row of each result row, -1: padding
    to_units: torch.Tensor  # int32, first unit of each result row
    step: int  # units from one run of a row to the next
    inner: int  # units from one unit of a run to the next


def _gather_table(conversion: Conversion, unit: int, device: torch.device):
    def build():
        starts = conversion.tiling.row_starts(*conversion.shape)
        *_, step, inner = conversion.tiling.strides(*conversion.shape)
        return GatherTable(
            _row_table(conversion, device),
            (starts // unit).to(torch.int32).to(device),
            step // unit,
            inner,
        )

    return conversion.table(f"gather{unit}", device, build)


@dataclass(frozen=True)
class Gather:
    """A launch of `_gather_rows`, ready but for the experts that it works on."""

    source: torch.Tensor  # in units, [experts, rows, columns]
    unit: int
    table: GatherTable
    source_bytes: int
    row_bytes: int
    align: int
    run: int = 0
    fill: int = 0

    def __call__(self, experts: slice, out: torch.Tensor) -> None:
        """Write these experts to `out`, uint8 [experts, bytes]."""
        source, result = self.source[experts], _unit_view(out, self.unit)
        n_rows, width = self.table.from_rows.numel(), self.row_bytes // self.unit
        columns = min(_pow2(width), 128)
        rows = min(_pow2(n_rows), 4096 // columns)
        grid = (triton.cdiv(n_rows, rows), triton.cdiv(width, columns), len(source))
        _gather_rows[grid](
            source,
            result,
            self.table.from_rows,
            self.table.to_units,
            n_rows,
            self.source_bytes // self.unit,
            width,
            source.stride(0),
            source.stride(1),
            result.stride(0),
            self.table.step,
            FILL=self.fill,
            RUN=self.run,
            INNER=self.table.inner,
            ALIGN=self.align,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=4,
        )


def _plan_gather(job: Job, out_expert: int, out_address: int) -> Gather:
    """A gather of the job's experts to an address, `out_expert` bytes for each."""
    conversion, source = job.conversion, job.source
    sizes = (
        conversion.shape[1],
        conversion.source_shape[1],
        conversion.tiling.run if conversion.tiling.whole_runs else 1,
        *source.stride()[:2],
        out_expert,
        source.data_ptr(),
        out_address,
    )
    unit = _unit(*sizes)
    return Gather(
        _unit_view(source, unit),
        unit,
        _gather_table(conversion, unit, source.device),
        conversion.source_shape[1],
        conversion.shape[1],
        align=_align(unit, *sizes),
        run=conversion.tiling.run // unit,
        fill=conversion.fill * sum(256**i for i in range(unit)),
    )


def _move(plan: InPlace, experts: torch.Tensor, scratch: torch.Tensor) -> None:
    """Convert some experts, uint8 [experts, rows, row_bytes], in place."""
    moves, cell, unit = plan.moves, plan.cell_bytes, plan.unit
    if not moves.groups:
        return
    n_experts, n_saved = experts.shape[0], moves.saved_cells.numel()
    cells = experts[0].numel() // cell
    flat = experts.as_strided((n_experts, cells, cell), (experts.stride(0), cell, 1))
    align = _align(unit, cell, experts.stride(0), experts.data_ptr())
    saved = scratch[: max(n_experts * n_saved * cell, unit)]
    data = _unit_view(flat, unit)
    if n_saved:
        table = GatherTable(moves.saved_cells, plan.saved_units, 0, 1)
        Gather(data, unit, table, cell, cell, align)(
            slice(None), saved.view(n_experts, -1)
        )
    columns = min(_pow2(cell // unit), STRIP_BYTES // unit)
    _move_cells[(moves.groups, triton.cdiv(cell // unit, columns), n_experts)](
        data,
        _unit_view(saved, unit),
        moves.to_cells,
        moves.from_cells,
        cell // unit,
        data.stride(0),
        n_saved * (cell // unit),
        ALIGN=align,
        CELLS=plan.cells,
        COLUMNS=columns,
        num_warps=8,
    )


def can_expand(conversion: Conversion) -> bool:
    """Whether a tensor with room behind it can be padded where it is."""
    if conversion.shape[1] > expand_rows_triton.MAX_ROW_BYTES:
        return False
    return conversion.tiling is ROW_MAJOR or block_tiling_triton.fits(conversion)


class Work:
    """What one tensor's conversion launches. Made before any byte is written."""

    scratch_bytes = 0
    flags = 0  # int32 zeros

    def __call__(self, scratch: torch.Tensor, flags: torch.Tensor) -> None:
        raise NotImplementedError


class GatherAll(Work):
    """Into a new tensor."""

    def __init__(self, job: Job):
        assert job.out is not None
        self.out = job.out
        self.gather = _plan_gather(job, job.out.stride(0), job.out.data_ptr())

    def __call__(self, scratch, flags):
        for first in range(0, len(self.out), MAX_EXPERTS):
            experts = slice(first, first + MAX_EXPERTS)
            self.gather(experts, self.out[experts])


class TileBlocks(Work):
    """Blocks of rows into tiles, from one tensor into another or where they are."""

    def __init__(self, source: torch.Tensor, conversion: Conversion, out: torch.Tensor):
        row_bytes, source_bytes = conversion.shape[1], conversion.source_shape[1]
        sizes = (
            row_bytes,
            source_bytes,
            conversion.tiling.run if conversion.tiling.whole_runs else 1,
            *source.stride()[:2],
            out.stride(0),
            source.data_ptr(),
            out.data_ptr(),
        )
        unit = _unit(*sizes)
        self.launch = block_tiling_triton.BlockTiling(
            _unit_view(source, unit),
            _unit_view(out, unit),
            _row_table(conversion, source.device),
            conversion,
            unit,
            source_bytes // unit,
            _align(unit, source_bytes, *source.stride()[:2], source.data_ptr()),
        )

    def __call__(self, scratch, flags):
        self.launch()


class MoveCells(Work):
    """Cells of a weight in place, by groups along the permutation's cycles."""

    def __init__(self, job: Job, budget: int):
        self.source = job.source
        self.plan = _plan_in_place(job)
        per_expert = self.plan.scratch_per_expert
        self.at_once = _experts_at_once(job.source, per_expert, budget)
        self.scratch_bytes = self.at_once * per_expert

    def __call__(self, scratch, flags):
        for experts in self.source.split(self.at_once):
            _move(self.plan, experts, scratch)


class ThroughScratch(Work):
    """In place by way of scratch, some experts at a time."""

    def __init__(self, job: Job, budget: int):
        self.source = job.source
        self.size = prod(job.conversion.shape)
        self.at_once = _experts_at_once(job.source, self.size, budget)
        self.scratch_bytes = self.at_once * self.size
        # Scratch begins at an address that any access is aligned to.
        self.gather = _plan_gather(job, self.size, 0)

    def __call__(self, scratch, flags):
        result = scratch[: self.scratch_bytes].view(self.at_once, self.size)
        for first in range(0, len(self.source), self.at_once):
            chunk = slice(first, first + self.at_once)
            experts = self.source[chunk]
            self.gather(chunk, result[: len(experts)])
            experts.copy_(result[: len(experts)].view(experts.shape))


class ExpandRows(Work):
    """Rows of all experts to the places that padding leaves them."""

    def __init__(self, job: Job):
        assert job.out is not None
        conversion, memory = job.conversion, job.out.view(-1)
        sizes = conversion.shape[1], conversion.source_shape[1], memory.data_ptr()
        unit = _unit(*sizes)
        from_rows, to_rows = conversion.table(
            "expand", memory.device, lambda: _expansion_tables(conversion, memory)
        )
        self.launch = expand_rows_triton.Expansion(
            _unit_view(memory, unit),
            len(job.source),
            from_rows,
            to_rows,
            conversion.shape[1],
            conversion.source_shape[1],
            unit,
            _align(unit, *sizes),
            conversion.fill,
        )
        self.flags = self.launch.flags

    def __call__(self, scratch, flags):
        self.launch(flags)


def _expansion_tables(conversion: Conversion, memory: torch.Tensor):
    kept = conversion.rows >= 0
    from_rows = torch.where(kept, kept.cumsum(0) - 1, -1)
    tables = from_rows, kept.nonzero().flatten()
    return tuple(table.to(torch.int32).to(memory.device) for table in tables)


def _row_table(conversion: Conversion, device: torch.device) -> torch.Tensor:
    return conversion.table(
        "source rows", device, lambda: conversion.rows.to(torch.int32).to(device)
    )


def _experts_at_once(source: torch.Tensor, per_expert: int, budget: int) -> int:
    experts = min(MAX_EXPERTS, len(source))
    return min(experts, max(1, budget // per_expert)) if per_expert else experts


def plan(job: Job, budget: int) -> list[Work]:
    """The launches that convert one tensor, in order."""
    conversion, source = job.conversion, job.source
    tiling = conversion.tiling
    blocks = block_tiling_triton.fits(conversion)
    if job.out is not None and not job.expands:
        if blocks:
            return [TileBlocks(source, conversion, job.out)]
        return [GatherAll(job)]
    order = conversion.row_order
    moves = [] if order.is_identity else [MoveCells(Job(source, order), budget)]
    if job.expands:
        assert job.out is not None
        work = [*moves, ExpandRows(job)]
        if tiling is not ROW_MAJOR:
            rows, row_bytes = conversion.shape
            tiles = conversion.tiles_alone
            work.append(TileBlocks(job.out.view(-1, rows, row_bytes), tiles, job.out))
        return work
    if blocks:
        if block_tiling_triton.stays_in_blocks(conversion):
            moves, tiles = [], conversion
        else:
            tiles = conversion.tiles_alone
        out = source.view(len(source), -1)
        return [*moves, TileBlocks(source, tiles, out)]
    if tiling.run in range(1, MIN_CELL_BYTES) or not tiling.whole_runs:
        return [ThroughScratch(job, budget)]
    return [MoveCells(job, budget)]


def run(jobs: Sequence[Job], budget: int) -> None:
    """Convert these tensors, all on one device; scratch is at most `budget`
    bytes, or what one expert needs."""
    work = [launch for job in jobs for launch in plan(job, budget)]
    device = jobs[0].source.device
    need = max(16, *(launch.scratch_bytes for launch in work))
    scratch = torch.empty(need, dtype=torch.uint8, device=device)
    flags = torch.zeros(sum(w.flags for w in work), dtype=torch.int32, device=device)
    used = 0
    for launch in work:
        launch(scratch, flags[used : used + launch.flags])
        used += launch.flags
