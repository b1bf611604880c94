# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernels of `marlin_in_place`: many experts in a launch.

Marlin's weights are tiles of 16 inputs (k) by 64 outputs (n). The thread 4 * c + t of
a warp holds, of inputs 2t, 2t + 1, 2t + 8 and 2t + 9, output c of each of the eight
groups of eight.
"""

import torch
import triton
import triton.language as tl

WORDS = 1024  # of the result, in one program


@triton.jit
def _apart(byte):
    """The two values of a byte, at bits 0 and 16."""
    byte = byte.to(tl.int32)
    return (byte & 0xF) | ((byte & 0xF0) << 12)


@triton.jit
def _repack(
    source,
    out,
    words,
    row_bytes,
    source_expert,
    out_expert,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Tiles of 16 inputs of each expert: bytes of outputs x inputs to words."""
    tile = tl.program_id(0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    expert = tl.program_id(2).to(tl.int64)
    inside = word < words
    PER_THREAD: tl.constexpr = 16 // BITS
    # A warp's words: thread, group of 16 outputs, and with 8 bits which half of it.
    part = word % PER_THREAD if BITS == 4 else (word % 8) // 2
    thread = word // (4 if BITS == 4 else 8) % 32
    output = word // (128 if BITS == 4 else 256) * 64 + part * 16 + thread // 4
    if BITS == 8:
        output += word % 2 * 8
    start = source + expert * source_expert + output * row_bytes + tile * 2 * BITS
    if BITS == 4:
        start += thread % 4
        lower = start + 8 * row_bytes
        value = _apart(tl.load(start, inside, other=0))
        value |= _apart(tl.load(start + 4, inside, other=0)) << 4
        value |= _apart(tl.load(lower, inside, other=0)) << 8
        value |= _apart(tl.load(lower + 4, inside, other=0)) << 12
    else:
        start += thread % 4 * 2
        value = tl.load(start, inside, other=0).to(tl.int32)
        value |= tl.load(start + 8, inside, other=0).to(tl.int32) << 8
        value |= tl.load(start + 1, inside, other=0).to(tl.int32) << 16
        value |= tl.load(start + 9, inside, other=0).to(tl.int32) << 24
    tl.store(out + expert * out_expert + tile * words + word, value, inside)


@triton.jit
def _map_scales(
    source,
    out,
    table,
    outputs,
    groups,
    source_expert,
    out_expert,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """out[e, g, p] = table[source[e, n(p), g]], of 64 outputs p at a time."""
    place = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    expert = tl.program_id(2).to(tl.int64)
    inside = (place < outputs) & (group < groups)
    # The kernel reads scales 0, 2, 1, 3 of each four, of outputs 8 apart.
    inner = place % 64
    order = inner // 4 * 4 + inner % 4 // 2 + inner % 2 * 2
    output = place // 64 * 64 + order // 8 + order % 8 * 8
    byte = tl.load(source + expert * source_expert + output * groups + group, inside)
    value = tl.load(table + byte.to(tl.int32), inside)
    tl.store(out + expert * out_expert + group * outputs + place, value, inside)


def repack(source: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """uint8 [experts, outputs, row bytes] to int32 [experts, inputs / 16,
    outputs * bits / 2], in other memory."""
    experts, _, row_bytes = source.shape
    tiles, words = out.shape[1:]
    _repack[(tiles, triton.cdiv(words, WORDS), experts)](
        source,
        out,
        words,
        row_bytes,
        source.stride(0),
        out.stride(0),
        BITS=bits,
        WORDS=WORDS,
    )


def map_scales(source: torch.Tensor, out: torch.Tensor, table: torch.Tensor) -> None:
    """uint8 [experts, outputs, groups] to uint8 [experts, groups, outputs], in other
    memory, each by `table`, uint8 [256]."""
    experts, outputs, groups = source.shape
    grid = triton.cdiv(outputs, 64), triton.cdiv(groups, 64), experts
    _map_scales[grid](
        source,
        out,
        table,
        outputs,
        groups,
        source.stride(0),
        out.stride(0),
        OUTPUTS=64,
        GROUPS=64,
    )
