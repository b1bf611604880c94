# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""BF16 block layout: equal to the released vllm, and in place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.moe.conversion_cases import FORMATS, Inputs, convert, model_case
from tests.kernels.moe.conversion_oracle import check_case, oracle

SMALL = dict(format="bf16_trtllm", experts=3, hidden=256, intermediate=128, gated=True)
#: Those whose hidden size the block layout takes, and the ranks that need no padding.
CASES = [
    ("Qwen3-30B-A3B", (1, 2)),
    ("Qwen3-235B-A22B", (4,)),
    ("DeepSeek-V3", (8,)),
    ("Nemotron-3-Super", (1,)),
]


@pytest.mark.parametrize(
    "model, tp", [(model, tp) for model, ranks in CASES for tp in ranks]
)
def test_models(model, tp):
    check_case(model_case("bf16_trtllm", model, tp))


@pytest.mark.parametrize("view", [None, "gap"])
@pytest.mark.parametrize("gated", [True, False])
def test_views_are_converted_in_place(view, gated):
    case = dict(SMALL, view=view, gated=gated, experts=5)
    check_case(case)
    inputs = Inputs(case)
    build, run = FORMATS["bf16_trtllm"]
    build(inputs)
    before = [p.data_ptr() for p in inputs.layer.parameters()]
    assert [result.data_ptr() for result in run(inputs)] == before


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_drawn_shapes(experts, hidden, intermediate, gated):
    sizes = dict(hidden=32 * hidden, intermediate=32 * intermediate)
    case = dict(SMALL, experts=experts, gated=gated, **sizes)
    expected, answer = oracle().convert(case), convert(case)
    if "error" in expected:
        assert "error" in answer, (case, expected)
    else:
        assert answer == expected, case


def layer_of(**change):
    inputs = Inputs(SMALL | change)
    FORMATS["bf16_trtllm"][0](inputs)
    return inputs.layer


@pytest.mark.parametrize(
    "w13, w2, message",
    [
        (
            torch.zeros(2, 256, 256),
            None,
            "w13_weight is torch.float32 and must be torch.bfloat16",
        ),
        (None, torch.zeros(256, 256, dtype=torch.bfloat16), "w2_weight .* 3-D"),
        (
            torch.zeros(2, 264, 256, dtype=torch.bfloat16),
            None,
            "w13_weight has 264 rows per expert and must have a multiple of 32",
        ),
        (
            None,
            torch.zeros(2, 256, 96, dtype=torch.bfloat16),
            "w2_weight: rows of 192 bytes .* multiple of 128 bytes",
        ),
        (
            torch.zeros(2, 256, 512, dtype=torch.bfloat16)[:, :, ::2],
            None,
            "w13_weight has strides .* last dimension must be contiguous",
        ),
        (
            torch.zeros(2, 256, 512, dtype=torch.bfloat16)[:, :, :256],
            None,
            "w13_weight has strides .* each expert must be contiguous",
        ),
    ],
)
def test_errors_name_the_tensor(w13, w2, message):
    from vllm.model_executor.layers.quantization.utils import flashinfer_utils

    good = torch.ones(2, 256, 256, dtype=torch.bfloat16)
    w13 = good.clone() if w13 is None else w13
    w2 = good.clone() if w2 is None else w2
    before = w13.clone()
    with pytest.raises(ValueError, match=message):
        flashinfer_utils.convert_moe_weights_to_flashinfer_trtllm_block_layout(
            {}, w13, w2
        )
    assert torch.equal(w13, before)


def test_no_experts():
    case = dict(SMALL, experts=0)
    shapes = [result["shape"] for result in convert(case)["results"]]
    assert shapes == [[0, 4, 256, 64], [0, 2, 256, 64]]
