# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Padding of expert weights: equal to the released vllm, sources intact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.moe.conversion_cases import TENSOR_PARALLEL, model_case
from tests.kernels.moe.conversion_oracle import check_case

SMALL = dict(experts=3, hidden=256, intermediate=128, gated=True)


@pytest.mark.parametrize("intermediate", [128, 112])
@pytest.mark.parametrize("format", ["align_fp4", "align_fp4_hidden"])
@pytest.mark.parametrize("gated", [True, False])
def test_padding_helpers(format, gated, intermediate):
    arguments = [gated, 64] if format == "align_fp4" else [384]
    case = dict(SMALL, format=format, gated=gated, intermediate=intermediate)
    answer = check_case(case | dict(arguments=arguments))
    padded = 128 if format == "align_fp4" else 384
    assert answer["results"][4] == padded


@pytest.mark.parametrize("tp", TENSOR_PARALLEL)
@pytest.mark.parametrize("model", ["Nemotron-3-Nano", "Gemma-4-26B-A4B"])
def test_bf16_models(model, tp):
    case = model_case("align", model, tp, experts=1)
    check_case(case | dict(arguments=[case["gated"], 128]))


@pytest.mark.parametrize("view", ["gap", "rows"])
def test_views_with_gaps(view):
    case = dict(SMALL, intermediate=120, view=view)
    check_case(case | dict(format="align", arguments=[True, 16]))
    check_case(case | dict(format="align_fp4", intermediate=96, arguments=[True, 64]))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from((16, 24, 128)),
)
def test_drawn_shapes(experts, hidden, intermediate, gated, alignment):
    sizes = dict(experts=experts, hidden=hidden, intermediate=intermediate, gated=gated)
    check_case(dict(sizes, format="align", arguments=[gated, alignment]))


def test_wrong_shapes_are_named():
    from vllm.model_executor.layers.quantization.utils import flashinfer_utils

    w13, w2 = torch.zeros(2, 24, 8), torch.zeros(2, 8, 10)
    with pytest.raises(ValueError, match=r"w13 has shape \(2, 24, 8\).*\[2, 20, 8\]"):
        flashinfer_utils.align_moe_weights_for_fi(w13, w2, True, 16)
