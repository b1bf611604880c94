# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernels of `marlin_in_place`: all experts of a tensor in one launch.

A result lies in its source's memory, in another order, so an expert is packed into
scratch first and copied back when it is whole (`turns_triton`).

Marlin's weights are tiles of 16 inputs (k) by 64 outputs (n). The thread 4 * c + t of
a warp holds, of inputs 2t, 2t + 1, 2t + 8 and 2t + 9, output c of each of the eight
groups of eight.
"""

import functools
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
from vllm.utils.math_utils import cdiv

PIECE_BYTES = 32 * 1024  # that one program packs of weights, or copies back
BLOCKS = 4  # of 64 outputs, in a piece
OUTPUTS, GROUPS = 128, 64  # of scales, in a piece


@triton.jit
def _places(memory, scratch, counts, expert, experts, slots, size):
    """Of an expert its place and its slot, and the counts of its pieces that were
    packed and that were copied back."""
    place = memory + expert.to(tl.int64) * size
    slot = scratch + (expert % slots).to(tl.int64) * size
    packed = counts + 1 + expert
    return place, slot, packed, packed + experts


@triton.jit
def _pack(cell, value, inside, expert, packed, copied, copies, slots):
    """Store what was loaded, once the expert before has left the slot."""
    if expert >= slots:
        wait(copied - slots, copies)
    tl.store(cell, value, inside)
    done(packed)


@triton.jit
def _copy_back(slot, place, piece, size, packed, copied, packs, SIZE: tl.constexpr):
    wait(packed, packs)
    index = piece * SIZE + tl.arange(0, SIZE)
    # Not through a cache that may hold the expert that was in the slot before.
    value = tl.load(slot + index, index < size, cache_modifier=".cg")
    tl.store(place + index, value, index < size)
    done(copied)


@triton.jit
def _apart(word, shift):
    """The two values of a byte of each word, at bits 0 and 16."""
    byte = word >> shift
    return (byte & 0xF) | ((byte & 0xF0) << 12)


@triton.jit
def _word_of_4_bits(lower, upper, shift):
    """What thread `shift // 8` of each four holds; `lower` and `upper` are pairs of
    words of an output, and of the one eight further."""
    value = _apart(lower[0], shift) | _apart(lower[1], shift) << 4
    return value | _apart(upper[0], shift) << 8 | _apart(upper[1], shift) << 12


@triton.jit
def _word_of_8_bits(near, far, shift):
    near, far = near >> shift, far >> shift
    value = (near & 0xFF) | ((far & 0xFF) << 8)
    return value | ((near & 0xFF00) << 8) | ((far & 0xFF00) << 16)


@triton.jit
def _packed(words, BITS: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr):
    """Of rows of one output each, [BLOCKS * 64, TILES * BITS / 2] words, the words of
    Marlin's tiles, [TILES, BLOCKS * 32 * BITS]."""
    # Outputs are block, part of 16, half of that, and c; words of a row are tile, half
    # of the inputs, and with 8 bits half of that.
    if BITS == 4:
        words = tl.reshape(words, (BLOCKS, 4, 2, 8, TILES, 2))
        near, far = tl.split(tl.permute(words, (4, 0, 3, 1, 2, 5)))
        near, near_upper = tl.split(near)
        far, far_upper = tl.split(far)
        lower, upper = (near, far), (near_upper, far_upper)
        even = tl.join(
            _word_of_4_bits(lower, upper, 0), _word_of_4_bits(lower, upper, 16)
        )
        odd = tl.join(
            _word_of_4_bits(lower, upper, 8), _word_of_4_bits(lower, upper, 24)
        )
        # tile, block, c, part, and the two bits of t
        value = tl.permute(tl.join(even, odd), (0, 1, 2, 4, 5, 3))
    else:
        words = tl.reshape(words, (BLOCKS, 4, 2, 8, TILES, 2, 2))
        near, far = tl.split(tl.permute(words, (4, 0, 3, 1, 2, 6, 5)))
        value = tl.join(_word_of_8_bits(near, far, 0), _word_of_8_bits(near, far, 16))
        # tile, block, c, part, half, and the two bits of t
        value = tl.permute(value, (0, 1, 2, 5, 6, 3, 4))
    return tl.reshape(value, (TILES, BLOCKS * 32 * BITS))


@triton.jit
def _repack(
    weight,
    scratch,
    counts,
    experts,
    packs,
    copies,
    slots,
    tiles,
    outputs,
    row_words,
    BITS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Experts [outputs, row words] become [tiles, words], TILES by BLOCKS a piece.

    counts: zeros; the turns taken, then of each expert the pieces that were packed, and
        those that were copied back.
    """
    packing, expert, piece = through_slots(take_turn(counts), packs, copies, slots)
    if expert < experts:
        size = outputs * row_words
        place, slot, packed, copied = _places(
            weight, scratch, counts, expert, experts, slots, size
        )
        if packing:
            across = (outputs // 64 + BLOCKS - 1) // BLOCKS
            tile = piece // across * TILES
            block = piece % across * BLOCKS
            row = (block * 64 + tl.arange(0, BLOCKS * 64))[:, None]
            column = (tile * (BITS // 2) + tl.arange(0, TILES * (BITS // 2)))[None, :]
            inside = (row < outputs) & (column < row_words)
            words = tl.load(place + row * row_words + column, inside, other=0)
            value = _packed(words, BITS, TILES, BLOCKS)
            tile += tl.arange(0, TILES)[:, None]
            word = (block * (32 * BITS) + tl.arange(0, BLOCKS * 32 * BITS))[None, :]
            inside = (tile < tiles) & (word < outputs * BITS // 2)
            cell = slot + tile * (outputs * BITS // 2) + word
            _pack(cell, value, inside, expert, packed, copied, copies, slots)
        else:
            _copy_back(slot, place, piece, size, packed, copied, packs, SIZE)


@triton.jit
def _map_scales(
    scales,
    scratch,
    counts,
    table,
    experts,
    packs,
    copies,
    slots,
    outputs,
    groups,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Experts [outputs, groups] become [groups, outputs], each byte by a table.

    counts: as of `_repack`.
    """
    packing, expert, piece = through_slots(take_turn(counts), packs, copies, slots)
    if expert < experts:
        size = outputs * groups
        place, slot, packed, copied = _places(
            scales, scratch, counts, expert, experts, slots, size
        )
        if packing:
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
            _pack(cell, value, inside, expert, packed, copied, copies, slots)
        else:
            _copy_back(slot, place, piece, size, packed, copied, packs, SIZE)


class Turns:
    """Launches of a kernel that takes turns, on tensors of one shape.

    Args:
        kernel: what to launch.
        experts: how many, of `size` elements each.
        element: bytes of an element.
        slots: of scratch, of one expert each.
        packs: pieces that an expert is packed in.
        more: further numbers that the kernel takes.
        constants: those that it takes before SIZE.

    """

    def __init__(
        self,
        kernel: Any,
        experts: int,
        size: int,
        element: int,
        slots: int,
        packs: int,
        more: tuple[int, ...],
        constants: dict[str, int],
    ):
        slots = min(slots, experts)
        piece = PIECE_BYTES // element
        pieces = experts, packs, cdiv(size, piece), slots
        self.grid = turns(*pieces), 1, 1
        self.scratch, self.counts = slots * size, 1 + 2 * experts
        constants = constants | dict(SIZE=piece)
        self.launch = Launcher(kernel, (*pieces, *more), constants, num_warps=8)

    def __call__(self, memory: torch.Tensor, *tables: torch.Tensor) -> None:
        scratch = memory.new_empty(self.scratch)
        counts = torch.zeros(self.counts, dtype=torch.int32, device=memory.device)
        self.launch(self.grid, memory, scratch, counts, *tables)


@functools.cache
def _repack_of(
    experts: int, outputs: int, row_bytes: int, bits: int, slots: int, _: torch.device
) -> Turns:
    """For all layers of one shape on one device, which compiled kernels belong to."""
    n_tiles, row_words = row_bytes // (2 * bits), row_bytes // 4
    tiles = PIECE_BYTES // (BLOCKS * 64 * 2 * bits)
    packs = cdiv(n_tiles, tiles) * cdiv(outputs // 64, BLOCKS)
    constants = dict(BITS=bits, TILES=tiles, BLOCKS=BLOCKS)
    sizes = n_tiles, outputs, row_words
    return Turns(
        _repack, experts, outputs * row_words, 4, slots, packs, sizes, constants
    )


@functools.cache
def _map_of(
    experts: int, outputs: int, groups: int, slots: int, _: torch.device
) -> Turns:
    """As `_repack_of`."""
    packs = cdiv(outputs, OUTPUTS) * cdiv(groups, GROUPS)
    sizes, constants = (outputs, groups), dict(OUTPUTS=OUTPUTS, GROUPS=GROUPS)
    return Turns(
        _map_scales, experts, outputs * groups, 1, slots, packs, sizes, constants
    )


def repack(weight: torch.Tensor, bits: int, slots: int) -> torch.Tensor:
    """Repack contiguous uint8 [experts, outputs, row bytes] where they are.

    Returns:
        int32 [experts, inputs / 16, outputs * bits / 2], in the same memory.

    """
    experts, outputs, row_bytes = weight.shape
    words = weight.view(torch.int32)
    _repack_of(experts, outputs, row_bytes, bits, slots, weight.device)(words)
    return words.view(experts, row_bytes // (2 * bits), outputs * bits // 2)


def map_scales(scales: torch.Tensor, table: torch.Tensor, slots: int) -> torch.Tensor:
    """Order contiguous uint8 [experts, outputs, groups] for Marlin where they are, each
    byte replaced by `table`, uint8 [256].

    Returns:
        uint8 [experts, groups, outputs], in the same memory.

    """
    experts, outputs, groups = scales.shape
    _map_of(experts, outputs, groups, slots, scales.device)(scales, table)
    return scales.view(experts, groups, outputs)
