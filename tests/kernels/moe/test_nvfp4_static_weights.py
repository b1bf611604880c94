# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""prepare_static_weights_for_trtllm_fp4_moe: equal to the released vllm."""

import pytest
import torch

from tests.kernels.moe.conversion_cases import convert
from tests.kernels.moe.conversion_oracle import check_case

SMALL = dict(experts=3, hidden=256, intermediate=128, gated=True)


@pytest.mark.parametrize("gated", [True, False])
def test_static_weights_leave_the_source(gated):
    """Equal parameters in the answers: neither side touched its sources."""
    check_case(SMALL | dict(format="nvfp4_static", gated=gated))


def test_plain_tensors_instead_of_parameters():
    check_case(SMALL | dict(format="nvfp4_static", parameters=False))


def test_no_experts():
    """A rank without experts; the release stops on an index."""
    case = dict(SMALL, format="nvfp4_static", experts=0)
    answer = convert(case)
    shapes = [r["shape"] for r in answer["results"]]
    assert shapes == [[0, 256, 128], [0, 256, 16], [0, 256, 64], [0, 256, 8]]


@pytest.mark.parametrize("view", ["gap", "rows"])
def test_views_with_gaps(view):
    check_case(SMALL | dict(format="nvfp4_static", view=view))


def test_errors_name_the_tensor():
    from vllm.model_executor.layers.quantization.utils import flashinfer_fp4_moe

    def prepare(w13, scale_columns=16):
        return flashinfer_fp4_moe.prepare_static_weights_for_trtllm_fp4_moe(
            w13,
            torch.zeros(2, 256, 64, dtype=torch.uint8),
            torch.zeros(2, 256, scale_columns, dtype=torch.uint8),
            torch.zeros(2, 256, 8, dtype=torch.uint8),
            hidden_size=256,
            intermediate_size=128,
            num_experts=2,
            is_gated_activation=True,
        )

    weights = torch.zeros(2, 256, 128, dtype=torch.uint8)
    with pytest.raises(ValueError, match="gemm1_weights .* hold 2 x 256 x 128 bytes"):
        prepare(weights[:, :128])
    with pytest.raises(ValueError, match="gemm1_weights .* torch.bfloat16"):
        prepare(weights.bfloat16())
    with pytest.raises(ValueError, match="gemm1_scales_linear_fp4_bytes .* 256 x 16"):
        prepare(weights, scale_columns=12)
