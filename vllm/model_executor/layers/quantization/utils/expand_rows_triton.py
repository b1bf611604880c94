# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernels of `weight_permutation` that pad rows inside a tensor's own storage.

The rows of all experts move towards the end of the storage, each to an address that is
not below its old one. Groups of rows are handled from the last to the first. A program
loads its group, says so, waits until the groups whose source it is about to overwrite
have been loaded too, and stores. Those have been started before it, and none waits
before it has loaded, so every program ends. One read and one write, and no scratch but
flags.

`_expand_rows` keeps the order of an expert's rows, and works for all experts.
`_place_rows` takes them in any order, and works for the experts whose new place begins
behind their old one: nobody's rows lie there but those of later experts.
"""

from typing import Any

import torch

from vllm.triton_utils import tl, triton

GROUP_BYTES = 32 * 1024  # what one program holds in registers, at most
MAX_ROW_BYTES = 64 * 1024


@triton.jit
def _load(memory, start, column, kept, source_units, FILL, ALIGN: tl.constexpr):
    inside = column // ALIGN < source_units // ALIGN
    return tl.load(memory + start + column, mask=kept[:, None] & inside, other=FILL)


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
    group = groups - 1 - tl.atomic_add(flags, 1, sem="relaxed")
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
    # All warps have loaded before the group's flag says so.
    tl.debug_barrier()
    tl.atomic_xchg(flags + 1 + group, 1, sem="release")
    if first <= last:
        while needed <= final:
            while tl.atomic_add(flags + 1 + needed, 0, sem="acquire") == 0:
                pass
            needed += 1
    tl.debug_barrier()
    place = tl.multiple_of(row * units, ALIGN)[:, None]
    _store(memory, place, column, value, exists, units, ALIGN)
    if REST:
        _store(memory, place, behind, rest, exists, units, ALIGN)


@triton.jit
def _place_rows(
    memory,
    counts,
    from_rows,
    experts,
    groups,
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
    """As `_expand_rows`, of experts from the last downwards, `groups` programs each.

    from_rows: source row of each result row of an expert, -1 for padding.
    counts: zeros; the first counts started programs, then one for each expert the
        groups that have been loaded.
    """
    ticket = tl.atomic_add(counts, 1, sem="relaxed")
    expert = experts - 1 - ticket // groups
    row = ticket % groups * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    origin = tl.load(from_rows + row, mask=exists, other=-1)
    kept = (origin >= 0) & exists
    source = expert.to(tl.int64) * source_rows * source_units
    start = tl.where(kept, source + origin * source_units, 0)
    start = tl.multiple_of(start, ALIGN)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    value = _load(memory, start, column, kept, source_units, FILL, ALIGN)
    if REST:
        behind = COLUMNS + tl.arange(0, REST)[None, :]
        rest = _load(memory, start, behind, kept, source_units, FILL, ALIGN)
    tl.debug_barrier()
    tl.atomic_add(counts + 1 + expert, 1, sem="release")
    # The experts whose source lies where this group's result belongs.
    begin = (expert.to(tl.int64) * rows + ticket % groups * ROWS) * units
    size = source_rows * source_units
    needed = begin // size
    final = tl.minimum((begin + ROWS * units - 1) // size, experts - 1)
    while needed <= final:
        while tl.atomic_add(counts + 1 + needed, 0, sem="acquire") < groups:
            pass
        needed += 1
    tl.debug_barrier()
    place = (expert.to(tl.int64) * rows + row) * units
    place = tl.multiple_of(place, ALIGN)[:, None]
    _store(memory, place, column, value, exists, units, ALIGN)
    if REST:
        _store(memory, place, behind, rest, exists, units, ALIGN)


def columns_of(units: int) -> tuple[int, int]:
    """Rows of `units` in two parts, both powers of two, the second perhaps nothing:
    fewer lanes are idle than in one part."""
    whole = triton.next_power_of_2(units)
    half = whole // 2
    rest = triton.next_power_of_2(max(units - half, 1))
    return (half, rest) if 0 < rest < half else (whole, 0)


def first_apart(experts: int, source_bytes: int, result_bytes: int) -> int:
    """The first expert whose result begins where its source has ended, or behind."""
    return min(experts, -(-source_bytes // max(result_bytes - source_bytes, 1)))


class Launch:
    """Launches of one kernel for tensors of one kind.

    Args:
        tables: int32; what the kernel takes as tables.
        rows, source_rows: of an expert, after and before.
        row_bytes, source_bytes: of a row, after and before.
        unit: bytes of the elements that the tensor is given in.
        align: units of an access.
        fill: value of padding bytes.

    """

    kernel: Any
    grid: tuple[int]
    sizes: tuple[int, ...]
    flags: int
    """How many int32 zeros a launch needs: a multiple of 16 bytes."""

    def __init__(
        self,
        tables: tuple[torch.Tensor, ...],
        rows: int,
        source_rows: int,
        row_bytes: int,
        source_bytes: int,
        unit: int,
        align: int,
        fill: int,
    ):
        self.tables = tables
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
            num_warps=8,
        )

    def __call__(self, memory: torch.Tensor, flags: torch.Tensor) -> None:
        """Move the rows that `memory` begins with; `flags` are zeros."""
        self.kernel[self.grid](
            memory, flags, *self.tables, *self.sizes, **self.constants
        )


class Expansion(Launch):
    """`_expand_rows` of all of `experts`; its tables are from_rows and to_rows."""

    kernel = _expand_rows

    def __init__(self, experts: int, *args: Any):
        super().__init__(*args)
        rows, source_rows, *_ = self.shape
        groups = triton.cdiv(experts * rows, self.group_rows)
        self.grid = (groups,)
        self.flags = -(-(1 + groups) // 4) * 4
        self.sizes = groups, experts * rows, experts * source_rows, *self.shape


class Placement(Launch):
    """`_place_rows` of the experts from `first` on; its table is from_rows."""

    kernel = _place_rows

    def __init__(self, experts: int, first: int, *args: Any):
        super().__init__(*args)
        groups = triton.cdiv(self.shape[0], self.group_rows)
        self.grid = (groups * (experts - first),)
        self.flags = -(-(1 + experts) // 4) * 4
        self.sizes = experts, groups, *self.shape
