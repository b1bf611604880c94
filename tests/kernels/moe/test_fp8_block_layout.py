# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FP8 block-scale layout: equal to the released vllm."""

import pytest
import torch

from tests.kernels.moe.conversion_cases import FORMATS, Inputs, model_case
from tests.kernels.moe.conversion_oracle import check_case

SMALL = dict(
    format="fp8_block_shuffle", experts=3, hidden=256, intermediate=128, gated=True
)


@pytest.mark.parametrize("model, tp", [("DeepSeek-V3", 8), ("Qwen3-30B-A3B", 2)])
def test_models(model, tp):
    check_case(model_case("fp8_block_shuffle", model, tp))


@pytest.mark.parametrize("view", [None, "gap"])
@pytest.mark.parametrize("gated", [True, False])
def test_sources_are_left_intact(view, gated):
    """Equal parameters in both answers."""
    check_case(dict(SMALL, view=view, gated=gated))


@pytest.mark.parametrize("swap", [True, False])
def test_in_place(swap):
    from vllm.model_executor.layers.quantization.utils import fp8_layouts

    inputs = Inputs(SMALL)
    FORMATS["fp8_block_shuffle"][0](inputs)
    w13, w2 = inputs.layer.w13_weight.data, inputs.layer.w2_weight.data
    half = w13.shape[1] // 2
    raw = w13.view(torch.uint8)
    source = torch.cat((raw[:, half:], raw[:, :half]), dim=1) if swap else raw.clone()
    expected = fp8_layouts.block_major_fp8(
        source.view(w13.dtype), w2.clone(), swap=False, overwrite=False
    )
    results = fp8_layouts.block_major_fp8(w13, w2, swap)
    for result, other, weight in zip(results, expected, (w13, w2), strict=True):
        assert result.data_ptr() == weight.data_ptr()
        assert torch.equal(result.view(torch.uint8), other.view(torch.uint8))


def test_errors_name_the_tensor():
    from vllm.model_executor.layers.quantization.utils import flashinfer_utils

    good = torch.zeros(2, 256, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="w2: rows of 120 bytes"):
        flashinfer_utils._shuffle_deepseek_fp8_moe_weights(good, good[:, :, :120])
    with pytest.raises(ValueError, match="w13 has 250 rows"):
        flashinfer_utils._shuffle_deepseek_fp8_moe_weights(good[:, :250], good)
