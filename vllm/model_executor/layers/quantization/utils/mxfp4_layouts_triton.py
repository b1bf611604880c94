# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernel of `mxfp4_layouts`: swizzle and pack MXFP4 values for SM 9.0."""

import torch

from vllm.triton_utils import tl, triton


@triton.jit
def _spread(word, shift: tl.constexpr):
    """Both FP4 values of byte `shift` / 8 of each word, sign to bit 15 of a half
    word, exponent and mantissa to bits 6 to 8."""
    low = word >> shift
    high = word >> (shift + 4)
    return (((low & 8) << 12) | ((low & 7) << 6)) | (
        (((high & 8) << 12) | ((high & 7) << 6)) << 16
    )


@triton.jit
def _spread_last(word, shift: tl.constexpr):
    """As `_spread` for the fourth byte, whose bits go where the others left room."""
    low = word >> shift
    high = word >> (shift + 4)
    low = ((low & 8) << 11) | ((low & 6) << 9) | ((low & 1) << 13)
    high = ((high & 8) << 11) | ((high & 6) << 9) | ((high & 1) << 13)
    return low | (high << 16)


@triton.jit
def _packed(a, b, shift: tl.constexpr):
    """One 32-bit word of each thread of the MMA: byte `shift` / 8 of the four words
    that rows 0 and 8 (a, b) and both of their halves hold."""
    first = _spread(a.to(tl.int32), shift)
    second = _spread(b.to(tl.int32), shift)
    third = _spread((a >> 32).to(tl.int32), shift)
    fourth = _spread_last((b >> 32).to(tl.int32), shift)
    return first | ((second >> 3) & 0x1FFFFFFF) | ((third >> 6) & 0x03FFFFFF) | fourth


@triton.jit
def _swizzle_rows(
    values,
    out,
    rows,
    columns,
    out_columns,
    values_expert,
    values_row,
    out_expert,
    out_row,
    CELLS: tl.constexpr,
):
    """Swizzle 16 rows. `values` counts 8 bytes, `out` 4 bytes.

    A cell is 8 bytes of a row: two groups of four bytes, one byte for each of four
    threads. Rows r and r + 8 belong together.
    """
    block = tl.program_id(0)
    expert = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, 8)[:, None]
    cell = (tl.program_id(2) * CELLS + tl.arange(0, CELLS))[None, :]
    inside = cell < columns
    values += expert * values_expert
    upper, lower = block * 16 + row, block * 16 + 8 + row
    a = tl.load(values + upper * values_row + cell, inside & (upper < rows), other=0)
    b = tl.load(values + lower * values_row + cell, inside & (lower < rows), other=0)
    thread0 = _packed(a, b, 0)
    thread1 = _packed(a, b, 8)
    thread2 = _packed(a, b, 16)
    thread3 = _packed(a, b, 24)
    # In place, other warps of this program still read what this one overwrites.
    tl.debug_barrier()
    out += expert * out_expert + (block * 4 + row // 2) * out_row
    out += cell // 4 * 32 + row % 2 * 16 + cell % 4
    wanted = (cell < out_columns) & (row >= 0)
    tl.store(out, thread0, wanted)
    tl.store(out + 4, thread1, wanted)
    tl.store(out + 8, thread2, wanted)
    tl.store(out + 12, thread3, wanted)


def swizzle(values: torch.Tensor, out: torch.Tensor) -> None:
    """Swizzle uint8 [experts, rows, columns] into [experts, rows / 4, 4 * columns],
    both padded in `out` to whole blocks of 16 rows and 32 bytes; `out` may be the
    same memory when nothing is padded. Columns are a multiple of 8."""
    experts, rows, columns = values.shape
    blocks, out_columns = out.shape[1] // 4, out.shape[2] // 4
    source, target = values.view(torch.int64), out.view(torch.int32)
    cells = triton.next_power_of_2(out_columns // 8)
    in_place = values.data_ptr() == out.data_ptr()
    if not in_place:
        cells = min(cells, 128)
    _swizzle_rows[(blocks, experts, triton.cdiv(out_columns // 8, cells))](
        source,
        target,
        rows,
        columns // 8,
        out_columns // 8,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        CELLS=cells,
        num_warps=min(max(cells * 8 // 256, 1), 16),
    )
