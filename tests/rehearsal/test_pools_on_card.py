# SPDX-License-Identifier: Apache-2.0
"""Pool generations with the real PyTorch and extension: pool_checks.py on a card."""

import pytest

CHECKS = [
    "replaced_weights_go_back_during_the_load",
    "a_tight_card_loads",
    "a_tight_card_does_not_load_switched_off",
    "switched_off_keeps_one_pool_to_its_end",
    "the_report_agrees_with_the_card",
    "out_of_memory_in_the_pool_can_be_retried",
    "torch_retries_by_itself_with_what_was_retired",
    "nested_pools_keep_their_tags",
    "a_weight_deleted_while_asleep_is_unmapped_once",
    "a_thread_without_a_pool_is_left_alone",
    "expandable_segments_are_off_in_a_pool_only",
    "tables_of_conversions_lie_outside_the_pool",
    "capture_is_left_alone",
    "a_scope_that_ends_in_a_capture_is_drained_after_it",
    "a_capture_after_a_load_finds_nothing_to_free",
    "stress_of_reclaim_against_other_threads",
    "stress_of_reclaim_against_out_of_memory",
    "a_pool_that_cannot_be_made_leaves_the_open_generation",
    "a_device_that_fails_in_a_switch_leaves_an_open_generation",
    "an_unmap_that_fails_is_reported_and_nothing_else_is_lost",
    "every_call_of_an_allocation_fails_in_turn",
    "a_load_that_fails_is_followed_by_one_that_passes",
    "an_engine_after_an_engine",
    "exit_with_tensors_alive",
    "exit_after_release_pools",
    "exit_while_a_pool_is_open",
    "exit_while_a_load_fails",
    "exit_while_another_thread_has_a_pool_open",
    "exit_while_asleep",
    "exit_with_a_graph_alive",
]


@pytest.fixture(scope="module")
def outcomes(checked):
    return checked("pool_checks")


@pytest.mark.parametrize("name", CHECKS)
def test_on_card(outcomes, name):
    assert outcomes[name]["clean"], outcomes[name]["text"]
