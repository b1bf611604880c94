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

from typing import Any

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


class Expansion:
    """Launches of `_expand_rows` for all experts of tensors of one kind.

    Args:
        experts: how many.
        from_rows: int32, source row of each result row, rising; -1 for padding.
        to_rows: int32, the result row of each source row.
        row_bytes, source_bytes: of a row, after and before.
        unit: bytes of the elements that the tensor is given in.
        align: units of an access.
        fill: value of padding bytes.

    """

    def __init__(
        self,
        experts: int,
        from_rows: torch.Tensor,
        to_rows: torch.Tensor,
        row_bytes: int,
        source_bytes: int,
        unit: int,
        align: int,
        fill: int,
    ):
        self.tables = from_rows, to_rows
        rows, source_rows = from_rows.numel(), to_rows.numel()
        units = row_bytes // unit
        columns = triton.next_power_of_2(units)
        group_rows = max(1, GROUP_BYTES // (columns * unit))
        groups = triton.cdiv(experts * rows, group_rows)
        self.grid = (groups,)
        #: how many int32 zeros a launch needs: a multiple of 16 bytes
        self.flags = (1 + groups + 3) // 4 * 4
        self.sizes = (
            groups,
            experts * rows,
            experts * source_rows,
            rows,
            source_rows,
            units,
            source_bytes // unit,
        )
        self.constants: dict[str, Any] = dict(
            FILL=fill * sum(256**i for i in range(unit)),
            ALIGN=align,
            ROWS=group_rows,
            COLUMNS=columns,
            num_warps=8,
        )

    def __call__(self, memory: torch.Tensor, flags: torch.Tensor) -> None:
        """Pad the source at the beginning of `memory`; `flags` are zeros."""
        _expand_rows[self.grid](
            memory, flags, *self.tables, *self.sizes, **self.constants
        )
