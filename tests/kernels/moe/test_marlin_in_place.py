# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Marlin repacks: equal to the released vllm, in a parameter's storage."""

import pytest
import torch

from tests.kernels.moe.conversion_cases import FORMATS, Inputs
from tests.kernels.moe.conversion_oracle import check_case
from vllm.model_executor.layers.quantization.utils import marlin_in_place

SMALL = dict(experts=3, hidden=256, intermediate=128, gated=True)
FORMAT_NAMES = ("marlin_nvfp4", "marlin_fp8", "marlin_mxfp8")


@pytest.mark.parametrize("view", [None, "gap"])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_equal_to_the_release(format, view):
    check_case(dict(SMALL, format=format, view=view))


@pytest.mark.parametrize("gated", [True, False])
def test_padding(gated):
    check_case(dict(SMALL, format="marlin_nvfp4", intermediate=96, gated=gated))


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_weights_keep_their_storage(format):
    inputs = Inputs(dict(SMALL, format=format))
    build, run = FORMATS[format]
    build(inputs)
    layer = inputs.layer
    before = layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()
    run(inputs)
    assert (layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()) == before


def reversed_words(expert: torch.Tensor) -> torch.Tensor:
    return expert.view(torch.int32).flatten().flip(0).view(2, -1)


def test_plain_tensors_are_left_intact():
    weight = torch.randint(0, 256, (3, 4, 8), dtype=torch.uint8)
    before = weight.clone()
    result = marlin_in_place.repack_experts(weight, reversed_words)
    assert torch.equal(weight, before)
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    in_place = marlin_in_place.repack_experts(parameter, reversed_words)
    assert in_place.data_ptr() == weight.data_ptr()
    assert torch.equal(in_place, result)
    assert not torch.equal(weight, before)


def test_a_repack_that_fails_at_once_changes_nothing():
    parameter = torch.nn.Parameter(torch.ones(3, 4, 8), requires_grad=False)

    def no_memory(_):
        raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(torch.OutOfMemoryError):
        marlin_in_place.repack_experts(parameter, no_memory)
    assert torch.all(parameter == 1)
