# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MXFP8 layout and padding: equal to the released vllm, sources intact."""

import pytest
import torch

from tests.kernels.moe.conversion_cases import model_case
from tests.kernels.moe.conversion_oracle import check_case

SMALL = dict(
    format="mxfp8_shuffle", experts=3, hidden=256, intermediate=128, gated=True
)


@pytest.mark.parametrize("tp", (1, 2))
def test_models(tp):
    check_case(model_case("mxfp8_shuffle", "Qwen3-30B-A3B", tp))


@pytest.mark.parametrize("view", [None, "gap", "rows"])
@pytest.mark.parametrize("gated", [True, False])
def test_views(view, gated):
    check_case(dict(SMALL, view=view, gated=gated))


@pytest.mark.parametrize("hidden, intermediate", [(256, 96), (192, 128), (192, 96)])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_padding(gated, flat, hidden, intermediate):
    sizes = dict(hidden=hidden, intermediate=intermediate, gated=gated)
    case = dict(SMALL, format="align_mxfp8", flat_scales=flat, **sizes)
    check_case(case | dict(arguments=[gated, 128, 256]))


def test_no_padding_returns_the_arguments():
    case = dict(SMALL, format="align_mxfp8", arguments=[True, 128, 256])
    assert check_case(case)["results"][-1][:4] == [True] * 4


def test_errors_name_the_tensor():
    from vllm.model_executor.layers.quantization.utils import flashinfer_utils

    w13 = torch.zeros(2, 256, 256).to(torch.float8_e4m3fn)
    w2 = torch.zeros(2, 256, 128).to(torch.float8_e4m3fn)
    s13 = torch.zeros(2, 256, 8, dtype=torch.uint8)
    s2 = torch.zeros(2, 256, 4, dtype=torch.uint8)
    shuffle = flashinfer_utils._shuffle_mxfp8_moe_weights
    with pytest.raises(ValueError, match="w13_scale is torch.float32"):
        shuffle(w13, w2, s13.float(), s2, True)
    with pytest.raises(ValueError, match=r"w2_scale has shape \(2, 128, 4\)"):
        shuffle(w13, w2, s13, s2[:, :128], True)
    with pytest.raises(ValueError, match="w13_scale has blocks of 96"):
        flashinfer_utils.align_mxfp8_moe_weights_for_fi_trtllm(
            w13[:, :, :192], w2[:, :192], s13[:, :, :2], s2[:, :192], True, 128, 256
        )
