# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernels of `weight_permutation` that pad rows inside a tensor's own storage.

The rows of all experts move towards the end of the storage, each to an address that is
not below its old one. Groups of rows are handled from the last to the first. A program
loads its group, says so, waits until the groups whose source it is about to overwrite
have been loaded too, and stores. Those have been started before it, and none waits
before it has loaded, so every program ends. One read and one write, and no scratch but
flags.

`_expand_rows` keeps the order of an expert's rows, `_place_rows` takes them in any. An
expert whose new place begins behind its old one is written there at once: nobody's rows
lie there but those of later experts. The few first ones, whose places overlap, go
through slots of scratch (`turns_triton`).
"""

from typing import Any

import torch

from vllm.model_executor.layers.quantization.utils.triton_launcher import Launcher
from vllm.model_executor.layers.quantization.utils.turns_triton import (
    done,
    take_turn,
    through_slots,
    turns,
    wait,
)
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv, round_up

GROUP_BYTES = 32 * 1024  # what one program holds in registers, at most
MAX_ROW_BYTES = 64 * 1024


@triton.jit
def _load(memory, start, column, kept, source_units, FILL, ALIGN: tl.constexpr):
    inside = kept[:, None] & (column // ALIGN < source_units // ALIGN)
    # Not through a cache that may hold what was in a slot before.
    return tl.load(memory + start + column, inside, other=FILL, cache_modifier=".cg")


@triton.jit
def _store(memory, start, column, value, exists, units, ALIGN: tl.constexpr):
    inside = column // ALIGN < units // ALIGN
    tl.store(memory + start + column, value, mask=exists[:, None] & inside)


@triton.jit
def _expand_rows(
    memory,
    flags,
    from_rows,
    to_rows,
    groups,
    all_rows,
    all_source_rows,
    rows,
    source_rows,
    units,
    source_units,
    FILL: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
):
    """Make each expert's `rows` by `units` of its `source_rows` by `source_units`.

    from_rows: source row of each result row of an expert, rising, -1 for padding.
    to_rows: the result row of each source row.
    flags: zeros; the first counts started programs, then one for each group.
    """
    group = groups - 1 - take_turn(flags)
    row = group.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < all_rows
    origin = tl.load(from_rows + row % rows, mask=exists, other=-1)
    # The groups whose source lies where this one's result belongs.
    begin = group.to(tl.int64) * ROWS * units
    first = begin // source_units
    last = tl.minimum((begin + ROWS * units - 1) // source_units, all_source_rows - 1)
    needed = tl.load(to_rows + first % source_rows)
    needed = (first // source_rows * rows + needed) // ROWS
    final = tl.load(to_rows + last % source_rows)
    final = (last // source_rows * rows + final) // ROWS
    kept = (origin >= 0) & exists
    start = tl.where(kept, row // rows * source_rows + origin, 0) * source_units
    start = tl.multiple_of(start, ALIGN)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    value = _load(memory, start, column, kept, source_units, FILL, ALIGN)
    if REST:
        behind = COLUMNS + tl.arange(0, REST)[None, :]
        rest = _load(memory, start, behind, kept, source_units, FILL, ALIGN)
    done(flags + 1 + group)
    if first <= last:
        while needed <= final:
            wait(flags + 1 + needed, 1)
            needed += 1
    place = tl.multiple_of(row * units, ALIGN)[:, None]
    _store(memory, place, column, value, exists, units, ALIGN)
    if REST:
        _store(memory, place, behind, rest, exists, units, ALIGN)


@triton.jit
def _place_rows(
    memory,
    scratch,
    counts,
    from_rows,
    experts,
    first,
    slots,
    groups,
    asides,
    rows,
    source_rows,
    units,
    source_units,
    FILL: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """As `_expand_rows`, of experts from the last downwards, `groups` programs each.

    from_rows: source row of each result row of an expert, -1 for padding.
    first: experts before it go through `slots` of scratch, put aside in pieces of SIZE.
    counts: zeros; the turns taken, then of each expert the pieces of its source that
        have been loaded, then of those before `first` the groups that were written.
    """
    turn = take_turn(counts)
    straight = (experts - first) * groups
    later = turn - straight
    aside, number, piece = through_slots(tl.maximum(later, 0), asides, groups, slots)
    aside = aside & (later >= 0)
    expert = tl.where(later < 0, experts - 1 - turn // groups, first - 1 - number)
    piece = tl.where(later < 0, turn % groups, piece)
    size = source_rows * source_units
    loaded, written = counts + 1, counts + 1 + experts
    source = memory + expert.to(tl.int64) * size
    slot = scratch + (expert % slots).to(tl.int64) * size
    if aside:
        if expert >= 0:
            index = piece * SIZE + tl.arange(0, SIZE)
            value = tl.load(source + index, index < size)
            if expert + slots < first:
                wait(written + expert + slots, groups)
            tl.store(slot + index, value, index < size)
            done(loaded + expert)
    else:
        if later >= 0:
            wait(loaded + expert, asides)
        row = piece * ROWS + tl.arange(0, ROWS)
        exists = row < rows
        origin = tl.load(from_rows + row, mask=exists, other=-1)
        kept = (origin >= 0) & exists
        begin = tl.where(later < 0, source, slot)
        start = tl.multiple_of(tl.where(kept, origin * source_units, 0), ALIGN)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        value = _load(begin, start, column, kept, source_units, FILL, ALIGN)
        if REST:
            behind = COLUMNS + tl.arange(0, REST)[None, :]
            rest = _load(begin, start, behind, kept, source_units, FILL, ALIGN)
        if later < 0:
            done(loaded + expert)
        # The experts whose source lies where this group's result belongs.
        target = (expert.to(tl.int64) * rows + piece * ROWS) * units
        needed = target // size
        final = tl.minimum((target + ROWS * units - 1) // size, experts - 1)
        while needed <= final:
            wait(loaded + needed, tl.where(needed < first, asides, groups))
            needed += 1
        place = (expert.to(tl.int64) * rows + row) * units
        place = tl.multiple_of(place, ALIGN)[:, None]
        _store(memory, place, column, value, exists, units, ALIGN)
        if REST:
            _store(memory, place, behind, rest, exists, units, ALIGN)
        if later >= 0:
            done(written + expert)


def columns_of(units: int) -> tuple[int, int]:
    """Rows of `units` in two parts, both powers of two, the second perhaps nothing:
    fewer lanes are idle than in one part."""
    whole = triton.next_power_of_2(units)
    half = whole // 2
    rest = triton.next_power_of_2(max(units - half, 1))
    return (half, rest) if 0 < rest < half else (whole, 0)


def first_apart(experts: int, source_bytes: int, result_bytes: int) -> int:
    """The first expert whose result begins where its source has ended, or behind."""
    return min(experts, cdiv(source_bytes, max(result_bytes - source_bytes, 1)))


class Launch:
    """Launches of one kernel for tensors of one kind.

    Args:
        rows, source_rows: of an expert, after and before.
        row_bytes, source_bytes: of a row, after and before.
        unit: bytes of the elements that the tensor is given in.
        align: units of an access.
        fill: value of padding bytes.

    """

    flags: int
    """How many int32 zeros a launch needs: a multiple of 16 bytes."""
    scratch_bytes = 0

    def __init__(
        self,
        rows: int,
        source_rows: int,
        row_bytes: int,
        source_bytes: int,
        unit: int,
        align: int,
        fill: int,
    ):
        self.unit = unit
        units = row_bytes // unit
        columns, rest = columns_of(units)
        self.group_rows = 1
        while 2 * self.group_rows * (columns + rest) * unit <= GROUP_BYTES:
            self.group_rows *= 2
        self.shape = rows, source_rows, units, source_bytes // unit
        self.constants: dict[str, Any] = dict(
            FILL=fill * sum(256**i for i in range(unit)),
            ALIGN=align,
            ROWS=self.group_rows,
            COLUMNS=columns,
            REST=rest,
        )

    def __call__(
        self, memory: torch.Tensor, scratch: torch.Tensor, flags: torch.Tensor
    ) -> None:
        """Move the rows that `memory` begins with. `scratch` are at least
        `scratch_bytes` bytes, `flags` zeros."""
        raise NotImplementedError


class Expansion(Launch):
    """`_expand_rows` of all of `experts`; `tables` are from_rows and to_rows."""

    def __init__(
        self, experts: int, tables: tuple[torch.Tensor, torch.Tensor], *shape: int
    ):
        super().__init__(*shape)
        rows, source_rows, *_ = self.shape
        groups = cdiv(experts * rows, self.group_rows)
        self.grid = groups, 1, 1
        self.flags = round_up(1 + groups, 4)
        self.tables = tables
        numbers = groups, experts * rows, experts * source_rows, *self.shape
        self.launch = Launcher(_expand_rows, numbers, self.constants, num_warps=8)

    def __call__(self, memory, scratch, flags):
        self.launch(self.grid, memory, flags, *self.tables)


class Placement(Launch):
    """`_place_rows` of all of `experts`, with at most `budget` bytes of scratch, or one
    expert's."""

    def __init__(self, experts: int, budget: int, from_rows: torch.Tensor, *shape: int):
        super().__init__(*shape)
        rows, source_rows, units, source_units = self.shape
        size = source_rows * source_units
        first = first_apart(experts, size, rows * units)
        slots = max(1, min(budget // (size * self.unit), first))
        self.scratch_bytes = slots * size * self.unit
        piece = GROUP_BYTES // self.unit
        groups, asides = cdiv(rows, self.group_rows), cdiv(size, piece)
        straight = (experts - first) * groups
        self.grid = straight + turns(first, asides, groups, slots), 1, 1
        self.flags = round_up(1 + experts + first, 4)
        self.from_rows = from_rows
        numbers = experts, first, slots, groups, asides, *self.shape
        constants = self.constants | dict(SIZE=piece)
        self.launch = Launcher(_place_rows, numbers, constants, num_warps=8)

    def __call__(self, memory, scratch, flags):
        scratch = scratch[: self.scratch_bytes].view(memory.dtype)
        self.launch(self.grid, memory, scratch, flags, self.from_rows)
