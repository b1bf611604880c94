# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from hypothesis import given
from hypothesis import strategies as st

from vllm.device_allocator.reclaim_policy import (
    DRAIN_BYTES,
    RESERVE_BYTES,
    RETIREMENT_COST_BYTES,
    LoadPressure,
    worth_retiring,
)

SIZES = st.integers(min_value=0, max_value=1 << 40)


@given(SIZES)
def test_first_step_may_take_four_layers(layer):
    assert LoadPressure().next_step(layer) == 4 * layer + RESERVE_BYTES


@given(st.integers(1, 1 << 40), SIZES, SIZES)
def test_next_step_is_the_largest_seen_and_a_quarter(taken, layer, free):
    pressure = LoadPressure()
    pressure.restart(free + taken, 0)
    pressure.finish_step(free)
    assert pressure.next_step(layer) == taken * 5 // 4 + RESERVE_BYTES


@given(st.lists(SIZES, min_size=1))
def test_returned_memory_is_not_a_step(frees):
    """Memory that comes back between steps neither grows nor hides the estimate."""
    pressure = LoadPressure()
    largest, before = 0, frees[0]
    pressure.restart(before, 0)
    for free in frees:
        pressure.finish_step(free)
        largest = max(largest, before - free)
        before = free
    assert pressure.largest_step == largest


def test_retiring_must_gain_more_than_it_costs():
    assert not worth_retiring(0)
    assert not worth_retiring(RETIREMENT_COST_BYTES)
    assert worth_retiring(RETIREMENT_COST_BYTES + 1)


@given(SIZES, st.integers(0, DRAIN_BYTES - 1))
def test_what_a_drain_could_not_return_is_no_reason_for_another(cached, more):
    pressure = LoadPressure()
    pressure.restart(0, cached)
    assert not pressure.worth_draining(cached + more)
    assert pressure.worth_draining(cached + DRAIN_BYTES)
