# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The swap of w1 and w3: equal to the released vllm, and in place."""

import pytest
import torch

from tests.kernels.moe.conversion_cases import MODELS, model_case
from tests.kernels.moe.conversion_oracle import check_case

SMALL = dict(experts=3, hidden=256, intermediate=128, gated=True)
GATED = [name for name, (_, _, gated) in MODELS.items() if gated]


@pytest.mark.parametrize("tp", (2, 8))
@pytest.mark.parametrize("model", GATED)
def test_models(model, tp):
    check_case(model_case("reorder_w1w3", model, tp))


@pytest.mark.parametrize("dim", [-2, 1, 0])
def test_reorder(dim):
    check_case(SMALL | dict(format="reorder_w1w3", dim=dim, experts=4))


def test_reorder_errors_name_the_tensor():
    from vllm.model_executor.layers.quantization.utils.flashinfer_fp4_moe import (
        reorder_w1w3_to_w3w1,
    )

    weight, scale = torch.zeros(2, 4, 8), torch.zeros(2, 4, 1)
    with pytest.raises(ValueError, match="scale has 3 entries in dimension -2"):
        reorder_w1w3_to_w3w1(weight, torch.zeros(2, 3, 1))
    with pytest.raises(ValueError, match="weight has strides .* must be contiguous"):
        reorder_w1w3_to_w3w1(weight.transpose(0, 1), scale)


def test_no_entries():
    from vllm.model_executor.layers.quantization.utils.flashinfer_fp4_moe import (
        reorder_w1w3_to_w3w1,
    )

    weight, scale = torch.zeros(0, 4, 8), torch.zeros(0, 4, 1)
    results = reorder_w1w3_to_w3w1(weight, scale)
    assert results[0] is weight and results[1] is scale
