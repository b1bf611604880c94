# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from vllm.device_allocator.reclaim_policy import DRAIN_BYTES, DrainPolicy


@given(st.integers(0, 1 << 40), st.integers(0, DRAIN_BYTES - 1))
def test_what_a_drain_could_not_return_is_no_reason_for_another(cached, more):
    policy = DrainPolicy()
    policy.drained(cached)
    assert not policy.worth_draining(cached + more)
    assert policy.worth_draining(cached + DRAIN_BYTES)
