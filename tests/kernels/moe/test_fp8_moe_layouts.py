# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FP8 shuffle for per-tensor scales: equal to the released vllm, and in place."""

import pytest
import torch

from tests.kernels.moe.conversion_cases import FORMATS, Inputs, model_case
from tests.kernels.moe.conversion_oracle import check_case

SMALL = dict(
    format="fp8_tensor_rotate", experts=3, hidden=256, intermediate=128, gated=True
)


@pytest.mark.parametrize("tp", (2, 8))
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "Qwen3-235B-A22B"])
def test_models(model, tp):
    check_case(model_case("fp8_tensor_rotate", model, tp))


@pytest.mark.parametrize("view", [None, "gap", "rows"])
@pytest.mark.parametrize("gated", [True, False])
def test_views(view, gated):
    check_case(dict(SMALL, view=view, gated=gated))


@pytest.mark.parametrize("gated", [True, False])
def test_contiguous_weights_keep_their_storage(gated):
    inputs = Inputs(dict(SMALL, gated=gated))
    build, run = FORMATS["fp8_tensor_rotate"]
    build(inputs)
    before = [p.data_ptr() for p in inputs.layer.parameters()]
    run(inputs)
    assert [p.data_ptr() for p in inputs.layer.parameters()] == before


@pytest.mark.parametrize(
    "shape, dtype, message",
    [
        ((2, 256, 64), torch.bfloat16, "gemm1_weights is torch.bfloat16"),
        ((2, 200, 64), torch.float8_e4m3fn, "gemm1_weights has 200 rows"),
        ((2, 256), torch.float8_e4m3fn, "gemm1_weights .* must be 3-D"),
    ],
)
def test_errors_name_the_tensor(shape, dtype, message):
    from vllm.model_executor.layers.quantization.utils import flashinfer_utils

    w2 = torch.zeros(2, 64, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=message):
        flashinfer_utils.rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(
            torch.zeros(shape).to(dtype), w2, True
        )
