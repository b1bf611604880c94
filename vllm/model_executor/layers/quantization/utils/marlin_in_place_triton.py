# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernels of `marlin_in_place`: all experts of a tensor in one launch.

A result lies in its source's memory, in another order, so an expert is packed into
scratch first and copied back when it is whole. There are slots for a few experts. The
programs take their turns in order: as many experts are packed as there are slots, then
one is copied back and the next one packed, and so on. A program waits only for turns
before its own, which have been taken, so every program ends.

Marlin's weights are tiles of 16 inputs (k) by 64 outputs (n). The thread 4 * c + t of
a warp holds, of inputs 2t, 2t + 1, 2t + 8 and 2t + 9, output c of each of the eight
groups of eight.
"""

from typing import Any

import torch

from vllm.triton_utils import tl, triton

TILES, WORDS = 4, 1024  # of a packed expert, in one program
OUTPUTS, GROUPS = 128, 64  # scales of an expert, in one program


@triton.jit
def _take_turn(counts, pieces, slots):
    """Whether to pack or to copy back, which expert, and which piece of it."""
    turn = tl.atomic_add(counts, 1, sem="relaxed")
    stage = turn // pieces
    later = stage - slots  # from here on, copies and packs alternate
    packs = (later < 0) | (later % 2 == 1)
    expert = tl.where(later < 0, stage, later // 2 + tl.where(packs, slots, 0))
    return packs, expert, turn % pieces


@triton.jit
def _wait(count, pieces):
    """Until all pieces of a stage are done."""
    while tl.atomic_add(count, 0, sem="acquire") < pieces:
        pass
    tl.debug_barrier()


@triton.jit
def _done(count):
    """Of all warps of this program."""
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release")


@triton.jit
def _places(memory, scratch, counts, expert, experts, slots, size):
    """Of an expert its place and its slot, and the counts of its pieces that were
    packed and that were copied back."""
    place = memory + expert.to(tl.int64) * size
    slot = scratch + (expert % slots).to(tl.int64) * size
    packed = counts + 1 + expert
    return place, slot, packed, packed + experts


@triton.jit
def _pack(cell, value, inside, expert, packed, copied, pieces, slots):
    """Store what was loaded, once the expert before has left the slot."""
    if expert >= slots:
        _wait(copied - slots, pieces)
    tl.store(cell, value, inside)
    _done(packed)


@triton.jit
def _copy_back(slot, place, piece, size, packed, copied, pieces, SIZE: tl.constexpr):
    _wait(packed, pieces)
    index = piece * SIZE + tl.arange(0, SIZE)
    # Not through a cache that may hold the expert that was in the slot before.
    value = tl.load(slot + index, index < size, cache_modifier=".cg")
    tl.store(place + index, value, index < size)
    _done(copied)


@triton.jit
def _apart(word, shift):
    """The two values of a byte of each word, at bits 0 and 16."""
    byte = word >> shift
    return (byte & 0xF) | ((byte & 0xF0) << 12)


@triton.jit
def _packed_words(source, tile, word, row_words, inside, BITS: tl.constexpr):
    """Words of Marlin's tiles, of rows of one output each, in words."""
    PER_THREAD: tl.constexpr = 16 // BITS
    # A warp's words: thread, group of 16 outputs, and with 8 bits which half of it.
    part = word % PER_THREAD if BITS == 4 else (word % 8) // 2
    thread = word // (4 if BITS == 4 else 8) % 32
    output = word // (128 if BITS == 4 else 256) * 64 + part * 16 + thread // 4
    if BITS == 8:
        output += word % 2 * 8
    # Whole words are loaded, also by the other threads that need a part of them.
    start = source + output * row_words + tile * (BITS // 2)
    if BITS == 4:
        shift = thread % 4 * 8
        lower = start + 8 * row_words
        value = _apart(tl.load(start, inside, other=0), shift)
        value |= _apart(tl.load(start + 1, inside, other=0), shift) << 4
        value |= _apart(tl.load(lower, inside, other=0), shift) << 8
        value |= _apart(tl.load(lower + 1, inside, other=0), shift) << 12
    else:
        start += thread % 4 // 2
        shift = thread % 2 * 16
        near = tl.load(start, inside, other=0) >> shift
        far = tl.load(start + 2, inside, other=0) >> shift
        value = (near & 0xFF) | ((far & 0xFF) << 8)
        value |= ((near & 0xFF00) << 8) | ((far & 0xFF00) << 16)
    return value


@triton.jit
def _repack(
    weight,
    scratch,
    counts,
    experts,
    pieces,
    slots,
    tiles,
    words,
    row_words,
    BITS: tl.constexpr,
    TILES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Experts [outputs, row words] become [tiles, words], TILES by WORDS a piece.

    counts: zeros; the turns taken, then of each expert the pieces that were packed, and
        those that were copied back.
    """
    packs, expert, piece = _take_turn(counts, pieces, slots)
    if expert < experts:
        size = tiles * words
        place, slot, packed, copied = _places(
            weight, scratch, counts, expert, experts, slots, size
        )
        if packs:
            across = (words + WORDS - 1) // WORDS
            tile = piece // across * TILES + tl.arange(0, TILES)[:, None]
            word = piece % across * WORDS + tl.arange(0, WORDS)[None, :]
            inside = (tile < tiles) & (word < words)
            value = _packed_words(place, tile, word, row_words, inside, BITS)
            cell = slot + tile * words + word
            _pack(cell, value, inside, expert, packed, copied, pieces, slots)
        else:
            _copy_back(slot, place, piece, size, packed, copied, pieces, TILES * WORDS)


@triton.jit
def _map_scales(
    scales,
    scratch,
    counts,
    experts,
    pieces,
    slots,
    outputs,
    groups,
    table,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Experts [outputs, groups] become [groups, outputs], each byte by a table.

    counts: as of `_repack`.
    """
    packs, expert, piece = _take_turn(counts, pieces, slots)
    if expert < experts:
        size = outputs * groups
        place, slot, packed, copied = _places(
            scales, scratch, counts, expert, experts, slots, size
        )
        if packs:
            across = (groups + GROUPS - 1) // GROUPS
            target = piece // across * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
            group = piece % across * GROUPS + tl.arange(0, GROUPS)[None, :]
            inside = (target < outputs) & (group < groups)
            # The kernel reads scales 0, 2, 1, 3 of each four, of outputs 8 apart.
            inner = target % 64
            order = inner // 4 * 4 + inner % 4 // 2 + inner % 2 * 2
            output = target // 64 * 64 + order // 8 + order % 8 * 8
            byte = tl.load(place + output * groups + group, inside, other=0)
            value = tl.load(table + byte.to(tl.int32), inside)
            cell = slot + group * outputs + target
            _pack(cell, value, inside, expert, packed, copied, pieces, slots)
        else:
            _copy_back(
                slot, place, piece, size, packed, copied, pieces, OUTPUTS * GROUPS
            )


def _launch(
    kernel: Any,
    memory: torch.Tensor,
    slots: int,
    pieces: int,
    *more: Any,
    **constants: Any,
) -> None:
    """Launch a kernel that takes turns, over the experts in `memory`, of as many pieces
    each, with `slots` of scratch."""
    experts = len(memory)
    slots = min(slots, experts)
    scratch = memory.new_empty(slots * memory[0].numel())
    counts = torch.zeros(1 + 2 * experts, dtype=torch.int32, device=memory.device)
    kernel[(pieces * (slots + 2 * experts),)](
        memory, scratch, counts, experts, pieces, slots, *more, **constants, num_warps=8
    )


def repack(weight: torch.Tensor, bits: int, slots: int) -> torch.Tensor:
    """Repack contiguous uint8 [experts, outputs, row bytes] where they are.

    Returns:
        int32 [experts, inputs / 16, outputs * bits / 2], in the same memory.

    """
    experts, outputs, row_bytes = weight.shape
    tiles, words = row_bytes // (2 * bits), outputs * bits // 2
    result = weight.view(experts, -1).view(torch.int32).view(experts, tiles, words)
    pieces = triton.cdiv(tiles, TILES) * triton.cdiv(words, WORDS)
    sizes = tiles, words, row_bytes // 4
    constants = dict(BITS=bits, TILES=TILES, WORDS=WORDS)
    _launch(_repack, result, slots, pieces, *sizes, **constants)
    return result


def map_scales(scales: torch.Tensor, table: torch.Tensor, slots: int) -> torch.Tensor:
    """Order contiguous uint8 [experts, outputs, groups] for Marlin where they are, each
    byte replaced by `table`, uint8 [256].

    Returns:
        uint8 [experts, groups, outputs], in the same memory.

    """
    experts, outputs, groups = scales.shape
    pieces = triton.cdiv(outputs, OUTPUTS) * triton.cdiv(groups, GROUPS)
    constants = dict(OUTPUTS=OUTPUTS, GROUPS=GROUPS)
    _launch(_map_scales, scales, slots, pieces, outputs, groups, table, **constants)
    return scales.view(experts, groups, outputs)
