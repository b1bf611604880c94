# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernel of `weight_permutation` for tilings of whole blocks of rows.

Tiles of block scales keep the bytes of a block of rows (128 for NVFP4 and MXFP8)
where the block was. One program holds a block in registers and stores it in the tiles'
order, so reads and writes are both of neighbouring bytes, and the block can be its own
target.
"""

from math import prod
from typing import Any

import torch

from vllm.model_executor.layers.quantization.utils.triton_launcher import Launcher
from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    Conversion,
    Tiling,
)
from vllm.triton_utils import tl, triton

MAX_BLOCK_BYTES = 64 * 1024  # what a program can hold, and turn in shared memory


@triton.jit
def _tile_blocks(
    source,
    out,
    from_rows,
    blocks,
    source_units,
    out_units,
    source_expert,
    source_row,
    out_expert,
    FILL: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    ORDER: tl.constexpr,
    OUTER: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Tile one block of rows: result row r comes from row from_rows[r], or is padding.

    Sizes and strides count units of the pointers' type. `SPLIT` are the dimensions of
    a block of COLUMNS, `ORDER` their order in memory, `OUTER` the size of those before
    the columns.
    """
    block = tl.program_id(0) % blocks
    expert = (tl.program_id(0) // blocks).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    origin = tl.load(from_rows + row)
    start = tl.multiple_of(tl.maximum(origin, 0) * source_row, ALIGN)[:, None]
    inside = column // ALIGN < source_units // ALIGN
    if PADDED:
        inside = inside & (origin >= 0)[:, None]
    value = tl.load(
        source + expert * source_expert + start + column, mask=inside, other=FILL
    )
    value = tl.permute(tl.reshape(value, SPLIT), ORDER)
    value = tl.reshape(value, (OUTER, ROWS * COLUMNS // OUTER))
    # In place, other warps of this program still read what this one overwrites.
    tl.debug_barrier()
    size = out_units * (ROWS // OUTER)
    place = tl.arange(0, ROWS * COLUMNS // OUTER)[None, :]
    first = (tl.arange(0, OUTER) * size)[:, None]
    begin = expert * out_expert + block * ROWS * out_units
    tl.store(out + begin + first + place, value, mask=place < size)


def block_rows(tiling: Tiling) -> int:
    """Rows of a block that keeps its place in memory; 0 if there are none."""
    rows, run = prod(tiling.row_split), tiling.run
    powers = rows & (rows - 1) == 0 and run & (run - 1) == 0
    return rows if tiling.row_split and run and powers and tiling.order[0] == 0 else 0


def fits(conversion: Conversion) -> bool:
    """Whether one program can hold a block of the result."""
    rows, row_bytes = block_rows(conversion.tiling), conversion.shape[1]
    return 0 < rows * triton.next_power_of_2(row_bytes) <= MAX_BLOCK_BYTES


def stays_in_blocks(conversion: Conversion) -> bool:
    """Whether each block of result rows comes from the same block of source rows."""
    block, rows = block_rows(conversion.tiling), conversion.rows

    def compare():
        return bool((rows // block == torch.arange(rows.numel()) // block).all())

    return conversion.table("stays in blocks", rows.device, compare)


class BlockTiling:
    """Launches of `_tile_blocks` for all experts of tensors of one kind.

    Args:
        from_rows: int32, the source row of each result row; -1 for padding.
        conversion: what to do.
        experts: how many.
        unit: bytes of the elements that tensors are given in.
        align: units of an access.
        strides: units from expert to expert and from row to row of the source.
        out_expert: units from expert to expert of the result.

    """

    def __init__(
        self,
        from_rows: torch.Tensor,
        conversion: Conversion,
        experts: int,
        unit: int,
        align: int,
        strides: tuple[int, ...],
        out_expert: int,
    ):
        tiling, (rows, row_bytes) = conversion.tiling, conversion.shape
        block, run = block_rows(tiling), tiling.run // unit
        out_units = row_bytes // unit
        columns = triton.next_power_of_2(out_units)
        split = (*tiling.row_split, columns // run, run)
        order = tuple(dimension - 1 for dimension in tiling.order[1:])
        outer = prod(split[d] for d in order[: order.index(len(split) - 2)])
        blocks = rows // block
        self.grid = blocks * experts, 1, 1
        source_units = conversion.source_shape[1] // unit
        self.from_rows = from_rows
        constants: dict[str, Any] = dict(
            FILL=conversion.fill * sum(256**i for i in range(unit)),
            ALIGN=align,
            ROWS=block,
            COLUMNS=columns,
            SPLIT=split,
            ORDER=order,
            OUTER=outer,
            PADDED=bool(conversion.padded_rows),
        )
        self.launch = Launcher(
            _tile_blocks,
            (blocks, source_units, out_units, *strides, out_expert),
            constants,
            num_warps=8 if block * columns * unit > 16384 else 4,
        )

    def __call__(self, source: torch.Tensor, out: torch.Tensor) -> None:
        self.launch(self.grid, source, out, self.from_rows)
