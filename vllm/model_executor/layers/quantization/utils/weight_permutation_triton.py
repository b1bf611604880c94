# SPDX-License-Identifier: Apache-2.0
"""Triton executor of `weight_permutation`.

Into a new tensor: one gather kernel for all experts. In place: the permutation
of an expert's cells (rows, or the runs of a tiled layout) is cut along its
cycles into groups of cells that one program loads whole and then stores. A
group reads only its own cells, except where a cycle was cut; those few source
cells are copied aside first. That is one read and one write of the weight,
with scratch of about 1/128 of it. Tilings with runs too short for that go
through scratch of several experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

import torch
import triton
import triton.language as tl

from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    Conversion,
    Job,
)

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
        mask=(origin >= 0)[:, None] & (column < source_units),
        other=FILL,
    )
    if RUN == 0:
        place = column
    else:
        place = column // RUN * step + column % RUN * INNER
    target = tl.multiple_of(target, ALIGN)[:, None]
    tl.store(
        out + expert * out_expert + target + place,
        value,
        mask=exists[:, None] & (column < out_units),
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
    mask = (target >= 0)[:, None] & (column < cell_units)
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
            conversion.rows.to(torch.int32).to(device),
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


def _plan_gather(job: Job, out: torch.Tensor) -> Gather:
    """A gather of the job's experts into memory like `out`, uint8 [experts, bytes]."""
    conversion, source = job.conversion, job.source
    sizes = (
        conversion.shape[1],
        conversion.source_shape[1],
        conversion.tiling.run if conversion.tiling.whole_runs else 1,
        *source.stride()[:2],
        out.stride(0),
        source.data_ptr(),
        out.data_ptr(),
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


def run(jobs: Sequence[Job], budget: int) -> None:
    """Convert these tensors, all on one device; scratch is at most `budget`
    bytes, or what one expert needs."""
    planned: list[tuple[Job, InPlace | None, int]] = []  # job, plan, experts at once
    need = 16
    for job in jobs:
        plan, per_expert = None, 0
        if job.out is None:
            tiling = job.conversion.tiling
            if tiling.run in range(1, MIN_CELL_BYTES) or not tiling.whole_runs:
                per_expert = prod(job.conversion.shape)
            else:
                plan = _plan_in_place(job)
                per_expert = plan.scratch_per_expert
        at_once = min(MAX_EXPERTS, job.source.shape[0])
        if per_expert:
            at_once = min(at_once, max(1, budget // per_expert))
        need = max(need, at_once * per_expert)
        planned.append((job, plan, at_once))
    scratch = torch.empty(need, dtype=torch.uint8, device=jobs[0].source.device)
    # Index tables too are made here, before the first write.
    steps = [
        (job, plan, at_once, None if plan else _plan_gather(job, _target(job, scratch)))
        for job, plan, at_once in planned
    ]
    for job, plan, at_once, gather in steps:
        for first in range(0, job.source.shape[0], at_once):
            chunk = slice(first, first + at_once)
            experts = job.source[chunk]
            if plan is not None:
                _move(plan, experts, scratch)
            elif gather is not None and job.out is not None:
                gather(chunk, job.out[chunk])
            elif gather is not None:
                result = _target(job, scratch)[: len(experts)]
                gather(chunk, result)
                experts.copy_(result.view(experts.shape))


def _target(job: Job, scratch: torch.Tensor) -> torch.Tensor:
    """Where a gather of this job writes, uint8 [experts, bytes]."""
    if job.out is not None:
        return job.out
    size = prod(job.conversion.shape)
    whole = scratch.numel() // size
    return scratch[: whole * size].view(whole, size)
