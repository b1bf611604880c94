# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernel of `mxfp4_layouts`: swizzle and pack MXFP4 values for SM 9.0."""

import torch

from vllm.triton_utils import tl, triton


@triton.jit
def _nibbles(word, shift: tl.constexpr):
    """The two FP4 values of byte `shift` / 8 of each word, at bits 0 and 16, with
    other bits above each."""
    return ((word >> shift) & 0xFF) * 0x1001


@triton.jit
def _packed(a, b, shift: tl.constexpr):
    """One 32-bit word of each thread of the MMA: byte `shift` / 8 of the four words
    that rows 0 and 8 (a, b) and both of their halves hold.

    Sign, exponent and mantissa of the first go to bits 15 and 6 to 8 of each half
    word, of the second to 12 and 3 to 5, of the third to 9 and 0 to 2, of the fourth
    to where there is room: 14, 10, 11 and 13.
    """
    x = _nibbles(a.to(tl.int32), shift)
    word = ((x & 0x80008) << 12) | ((x & 0x70007) << 6)
    x = _nibbles(b.to(tl.int32), shift)
    word |= ((x & 0x80008) << 9) | ((x & 0x70007) << 3)
    x = _nibbles((a >> 32).to(tl.int32), shift)
    word |= ((x & 0x80008) << 6) | (x & 0x70007)
    x = _nibbles((b >> 32).to(tl.int32), shift)
    return word | ((x & 0x80008) << 11) | ((x & 0x60006) << 9) | ((x & 0x10001) << 13)


@triton.jit
def _load(values, rows, columns, values_row, block, first, CELLS: tl.constexpr):
    """Cells of rows 0 to 7 and of rows 8 to 15 of a block."""
    row = block * 16 + tl.arange(0, 8)[:, None]
    cell = first + tl.arange(0, CELLS)[None, :]
    inside = cell < columns
    start = values + row * values_row + cell
    a = tl.load(start, inside & (row < rows), other=0)
    b = tl.load(start + 8 * values_row, inside & (row + 8 < rows), other=0)
    return a, b


@triton.jit
def _store(out, a, b, out_columns, out_row, block, first, CELLS: tl.constexpr):
    """Of each pair of rows, the words of four threads for four cells are neighbours:
    memory holds [row / 2, cell / 4, row % 2, thread, cell % 4]."""
    even = tl.join(_packed(a, b, 0), _packed(a, b, 16))
    odd = tl.join(_packed(a, b, 8), _packed(a, b, 24))
    words = tl.reshape(tl.join(even, odd), (4, 2, CELLS // 4, 4, 2, 2))
    words = tl.reshape(tl.permute(words, (0, 2, 1, 4, 5, 3)), (4, 8 * CELLS))
    row = block * 4 + tl.arange(0, 4)[:, None]
    place = 8 * first + tl.arange(0, 8 * CELLS)[None, :]
    tl.store(out + row * out_row + place, words, mask=place < 8 * out_columns)


@triton.jit
def _swizzle_rows(
    values,
    out,
    blocks,
    rows,
    columns,
    out_columns,
    values_expert,
    values_row,
    out_expert,
    out_row,
    CELLS: tl.constexpr,
    MORE: tl.constexpr,
):
    """Swizzle 16 rows. `values` counts 8 bytes, `out` 4 bytes.

    A cell is 8 bytes of a row: two groups of four bytes, one byte for each of four
    threads. Rows r and r + 8 belong together. A program holds CELLS and MORE cells of
    each row.
    """
    block = tl.program_id(0) % blocks
    expert = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(1) * (CELLS + MORE)
    values += expert * values_expert
    out += expert * out_expert
    a, b = _load(values, rows, columns, values_row, block, first, CELLS)
    if MORE:
        c, d = _load(values, rows, columns, values_row, block, first + CELLS, MORE)
    # In place, other warps of this program still read what this one overwrites.
    tl.debug_barrier()
    _store(out, a, b, out_columns, out_row, block, first, CELLS)
    if MORE:
        _store(out, c, d, out_columns, out_row, block, first + CELLS, MORE)


def swizzle(values: torch.Tensor, out: torch.Tensor) -> None:
    """Swizzle uint8 [experts, rows, columns] into [experts, rows / 4, 4 * columns],
    both padded in `out` to whole blocks of 16 rows and 32 bytes; `out` may be the
    same memory when nothing is padded. Columns are a multiple of 8."""
    experts, rows, columns = values.shape
    blocks, out_columns = out.shape[1] // 4, out.shape[2] // 4
    source, target = values.view(torch.int64), out.view(torch.int32)
    needed = out_columns // 8
    # Powers of two that waste few lanes; in place, one program holds whole rows.
    cells = max(triton.next_power_of_2(needed + 1) // 2, 4)
    rest = needed - cells
    more = max(triton.next_power_of_2(rest), 4) if rest > 0 else 0
    if more == cells:
        cells, more = 2 * cells, 0
    if values.data_ptr() != out.data_ptr() and needed > 128:
        cells, more = 128, 0
    _swizzle_rows[(blocks * experts, triton.cdiv(needed, cells + more))](
        source,
        target,
        blocks,
        rows,
        columns // 8,
        needed,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        CELLS=cells,
        MORE=more,
        num_warps=min(max(cells * 8 // 256, 1), 16),
    )
