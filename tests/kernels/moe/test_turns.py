# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Turns: everything is done once, and nothing waits for what comes later."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.moe.interpreted_kernels import interpreted_kernels

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


through_slots: Any = None  # of turns_triton, once it is interpreted


def note(out, asides, backs, slots):
    turn = tl.program_id(0)
    aside, expert, piece = through_slots(turn, asides, backs, slots)
    tl.store(out + 3 * turn, aside.to(tl.int32))
    tl.store(out + 3 * turn + 1, expert)
    tl.store(out + 3 * turn + 2, piece)


@pytest.fixture(scope="module")
def turn_of():
    """What each of all turns is: aside, expert, piece."""
    with interpreted_kernels() as modules:
        kernel = triton.jit(note)
        globals()["through_slots"] = modules.turns_triton.through_slots

        def run(experts: int, asides: int, backs: int, slots: int) -> list[list[int]]:
            count = modules.turns_triton.turns(experts, asides, backs, slots)
            out = torch.full((count, 3), -1, dtype=torch.int32)
            kernel[(count,)](out, asides, backs, slots)
            return out.tolist()

        yield run


@settings(max_examples=40, deadline=None)
@given(*(st.integers(1, most) for most in (7, 4, 4, 9)))
def test_slots(turn_of, experts, asides, backs, slots):
    slots = min(slots, experts)
    turns = turn_of(experts, asides, backs, slots)
    at = {tuple(turn): number for number, turn in enumerate(turns)}
    assert len(at) == len(turns)
    done = {key: number for key, number in at.items() if key[1] < experts}
    stages = ((1, asides), (0, backs))
    expected = {
        (aside, expert, piece)
        for aside, pieces in stages
        for expert in range(experts)
        for piece in range(pieces)
    }
    assert done.keys() == expected

    def first(aside, expert):
        return done[aside, expert, 0]

    def last(aside, expert):
        return done[aside, expert, (asides if aside else backs) - 1]

    for expert in range(experts):
        assert last(1, expert) < first(0, expert)
        if expert >= slots:
            assert last(0, expert - slots) < first(1, expert)
