# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Turns that the programs of one Triton launch take, in a fixed order.

Programs start in any order. Each takes a turn first, which says what it is to do, and
waits only for turns before its own. Those have been taken by programs that have
started, so every program ends.

What must leave its place before its result can be written goes through slots of
scratch: as many experts are put aside as there are slots, then one is written back and
the next one put aside, and so on.
"""

from vllm.triton_utils import tl, triton


@triton.jit
def take_turn(count):
    return tl.atomic_add(count, 1, sem="relaxed")


@triton.jit
def through_slots(turn, asides, backs, slots):
    """Whether to put aside or to write back, which expert, and which piece of it.

    An expert is put aside in `asides` pieces and written back in `backs`.
    """
    later = turn - slots * asides  # from here on, both alternate
    alternating = tl.maximum(later, 0)
    expert, piece = alternating // (asides + backs), alternating % (asides + backs)
    aside = (later < 0) | (piece >= backs)
    expert = tl.where(later < 0, turn // asides, expert + tl.where(aside, slots, 0))
    piece = tl.where(later < 0, turn % asides, piece - tl.where(aside, backs, 0))
    return aside, expert, piece


@triton.jit
def wait(count, pieces):
    """Until `count` has reached `pieces`, and what they wrote can be read."""
    while tl.atomic_add(count, 0, sem="acquire") < pieces:
        pass
    tl.debug_barrier()


@triton.jit
def done(count):
    """All warps of this program have loaded, or stored, their piece."""
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release")


def turns(experts: int, asides: int, backs: int, slots: int) -> int:
    """How many programs it takes; of the last turns some have nothing to do."""
    return slots * asides + experts * (asides + backs)
