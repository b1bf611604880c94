# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernel of `weight_permutation` that pads rows inside a tensor's own storage.

The rows of all experts move towards the end of the storage, each to an address that is
not below its old one. Groups of rows are handled from the last to the first. A program
loads its group, says so, waits until the groups whose source it is about to overwrite
have been loaded too, and stores. Those have been started before it, and none waits
before it has loaded, so every program ends. One read and one write, and no scratch but
flags.
"""

from dataclasses import dataclass

import torch

from vllm.triton_utils import tl, triton

GROUP_BYTES = 32 * 1024  # what one program holds in registers
MAX_ROW_BYTES = 64 * 1024


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
):
    """Make each expert's `rows` by `units` of its `source_rows` by `source_units`.

    from_rows: source row of each result row of an expert, rising, -1 for padding.
    to_rows: the result row of each source row.
    flags: zeros; the first counts started programs, then one for each group.
    """
    group = groups - 1 - tl.atomic_add(flags, 1)
    row = group.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    exists = row < all_rows
    expert = row // rows
    origin = tl.load(from_rows + row % rows, mask=exists, other=-1)
    kept = (origin >= 0) & exists
    start = tl.where(kept, expert * source_rows + origin, 0) * source_units
    start = tl.multiple_of(start, ALIGN)[:, None]
    inside = column // ALIGN < source_units // ALIGN
    value = tl.load(memory + start + column, mask=kept[:, None] & inside, other=FILL)
    # All warps have loaded before the group's flag says so.
    tl.debug_barrier()
    tl.atomic_xchg(flags + 1 + group, 1)
    begin = group.to(tl.int64) * ROWS * units
    first = begin // source_units
    last = tl.minimum((begin + ROWS * units - 1) // source_units, all_source_rows - 1)
    if first <= last:
        target = tl.load(to_rows + first % source_rows)
        needed = ((first // source_rows) * rows + target) // ROWS
        target = tl.load(to_rows + last % source_rows)
        final = ((last // source_rows) * rows + target) // ROWS
        while needed <= final:
            while tl.atomic_add(flags + 1 + needed, 0) == 0:
                pass
            needed += 1
    tl.debug_barrier()
    place = tl.multiple_of(row * units, ALIGN)[:, None]
    wanted = exists[:, None] & (column // ALIGN < units // ALIGN)
    tl.store(memory + place + column, value, mask=wanted)


@dataclass(frozen=True)
class Expansion:
    """A launch of `_expand_rows` for all experts of one tensor."""

    memory: torch.Tensor  # in units, one dimension: source in front, then the room
    experts: int
    from_rows: torch.Tensor  # int32
    to_rows: torch.Tensor  # int32
    row_bytes: int
    source_bytes: int
    unit: int
    align: int
    fill: int

    @property
    def columns(self) -> int:
        return triton.next_power_of_2(self.row_bytes // self.unit)

    @property
    def group_rows(self) -> int:
        return max(1, GROUP_BYTES // (self.columns * self.unit))

    @property
    def groups(self) -> int:
        return triton.cdiv(self.experts * self.from_rows.numel(), self.group_rows)

    @property
    def flags(self) -> int:
        """How many int32 zeros a launch needs: a multiple of 16 bytes."""
        return (1 + self.groups + 3) // 4 * 4

    def __call__(self, flags: torch.Tensor) -> None:
        rows, source_rows = self.from_rows.numel(), self.to_rows.numel()
        _expand_rows[(self.groups,)](
            self.memory,
            flags,
            self.from_rows,
            self.to_rows,
            self.groups,
            self.experts * rows,
            self.experts * source_rows,
            rows,
            source_rows,
            self.row_bytes // self.unit,
            self.source_bytes // self.unit,
            FILL=self.fill * sum(256**i for i in range(self.unit)),
            ALIGN=self.align,
            ROWS=self.group_rows,
            COLUMNS=self.columns,
            num_warps=8,
        )
