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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
@pytest.mark.parametrize("gated", [True, False])
def test_nvfp4_scales_of_other_sizes(dtype, gated):
    case = dict(SMALL, format="marlin_nvfp4", gated=gated, dtype=str(dtype))
    check_case(case | dict(experts=5, seed=3, intermediate=192))


def test_nvfp4_scales_keep_their_storage():
    inputs = Inputs(dict(SMALL, format="marlin_nvfp4"))
    build, run = FORMATS["marlin_nvfp4"]
    build(inputs)
    layer = inputs.layer
    before = layer.w13_weight_scale.data_ptr(), layer.w2_weight_scale.data_ptr()
    run(inputs)
    after = layer.w13_weight_scale.data_ptr(), layer.w2_weight_scale.data_ptr()
    assert after == before


@pytest.mark.parametrize("largest", [0.0, 1.0, 448.0])
def test_scale_factor_of_the_largest_scales(largest):
    """Also of scales that are zero, negative or no number."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

    scales = torch.rand(3, 4, 8) * largest
    scales[1, 2, 3], scales[0, 0, 0], scales[2, 1, 1] = largest, -500.0, torch.nan
    scales = scales.to(torch.float8_e4m3fn)
    found = marlin_in_place.largest_scales(scales, torch.bfloat16)
    factor = marlin_utils_fp4._nvfp4_compute_scale_factor
    expected = factor(scales.to(torch.bfloat16), torch.bfloat16)
    assert factor(found, torch.bfloat16) == expected


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
