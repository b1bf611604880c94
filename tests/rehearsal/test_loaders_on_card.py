# SPDX-License-Identifier: Apache-2.0
"""vLLM's loaders into a CuMem pool: loader_checks.py on a card. See docs/loaders.md."""

import pytest

CHECKS = [
    "safetensors",
    "safetensors_on_threads",
    "sharded_state",
    "dummy",
    "online_quantization",
    "online_quantization_of_dummies",
]


@pytest.fixture(scope="module")
def outcomes(checked):
    return checked("loader_checks")


@pytest.mark.parametrize("name", CHECKS)
def test_gives_memory_back_while_it_loads(outcomes, name):
    assert outcomes[name]["clean"], outcomes[name]["text"]
