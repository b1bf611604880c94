# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from hypothesis import given
from hypothesis import strategies as st

from vllm.device_allocator.reclaim_policy import (
    DRAIN_BYTES,
    RETIRE_BYTES,
    ReclaimPolicy,
)


@given(st.integers(0, 1 << 40), st.integers(0, DRAIN_BYTES - 1))
def test_what_a_drain_could_not_return_is_no_reason_for_another(cached, more):
    policy = ReclaimPolicy()
    policy.reclaimed(cached)
    assert not policy.worth_draining(cached + more)
    assert policy.worth_draining(cached + DRAIN_BYTES)


@given(st.integers(0, 1 << 40))
def test_retiring_must_return_much(cached):
    assert ReclaimPolicy().worth_retiring(cached) is (cached >= RETIRE_BYTES)
