# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whole FP8 layers: equal to the released vllm, parameters and configuration too."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.moe.conversion_cases import (
    FORMATS,
    MODELS,
    Inputs,
    convert,
    model_case,
)
from tests.kernels.moe.conversion_oracle import check_case, oracle

SMALL = dict(experts=3, hidden=256, intermediate=128, gated=True)
FORMAT_NAMES = ("fp8_tensor", "fp8_block", "mxfp8")


@pytest.mark.parametrize("tp", (2, 8))
@pytest.mark.parametrize("format", FORMAT_NAMES)
@pytest.mark.parametrize("model", MODELS)
def test_models(model, format, tp):
    case = model_case(format, model, tp)
    expected, answer = oracle().convert(case), convert(case)
    if "error" in expected:  # sizes that this format does not take
        assert "error" in answer, (case, expected)
    else:
        assert answer == expected, case


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("format", FORMAT_NAMES[:2])
def test_cutlass(format, gated):
    check_case(dict(SMALL, format=format, gated=gated, trtllm=False))


@pytest.mark.parametrize("view", ["gap", "rows"])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_views(format, view):
    check_case(dict(SMALL, format=format, view=view))


@pytest.mark.parametrize("trtllm", [True, False])
@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_parameters_keep_their_storage(format, trtllm):
    inputs = Inputs(dict(SMALL, format=format, trtllm=trtllm or format == "mxfp8"))
    build, run = FORMATS[format]
    build(inputs)
    before = {n: p.data_ptr() for n, p in inputs.layer.named_parameters()}
    run(inputs)
    after = {n: p.data_ptr() for n, p in inputs.layer.named_parameters()}
    assert after == before


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(FORMAT_NAMES),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 8),
    st.booleans(),
)
def test_drawn_shapes(format, experts, hidden, intermediate, gated):
    sizes = dict(hidden=64 * hidden, intermediate=32 * intermediate)
    case = dict(format=format, experts=experts, gated=gated, **sizes)
    expected, answer = oracle().convert(case), convert(case)
    if "error" in expected:
        assert "error" in answer, (case, expected)
    else:
        assert answer == expected, case


def test_near_zero_block_scales_are_clamped_in_the_layer():
    inputs = Inputs(dict(SMALL, format="fp8_block", trtllm=False))
    build, run = FORMATS["fp8_block"]
    build(inputs)
    inputs.layer.w2_weight_scale.data.zero_()
    run(inputs)
    assert torch.all(inputs.layer.w2_weight_scale == 1e-10)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_processing_a_layer_twice(format):
    case = dict(SMALL, format=format, times=2)
    check_case(case, error=format == "fp8_block")
