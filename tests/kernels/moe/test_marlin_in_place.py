# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Marlin repacks: equal to the released vllm, in a parameter's storage."""

from unittest.mock import Mock

import pytest
import torch

from tests.kernels.moe.conversion_cases import FORMATS, Inputs
from tests.kernels.moe.conversion_oracle import check_case
from tests.kernels.moe.interpreted_kernels import interpreted_kernels
from vllm.model_executor.layers.quantization.utils import marlin_in_place

SMALL = dict(experts=3, hidden=256, intermediate=128, gated=True)
FORMAT_NAMES = ("marlin_nvfp4", "marlin_fp8", "marlin_mxfp8")


@pytest.fixture(scope="module")
def interpreted():
    with interpreted_kernels("marlin_in_place_triton") as modules:
        yield modules


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
    factor = marlin_utils_fp4._nvfp4_compute_scale_factor
    expected = factor(scales.to(torch.bfloat16), torch.bfloat16)
    scans = marlin_in_place.scan_scales(torch.bfloat16, w2=scales)
    assert scans["w2"].scale_factor == expected


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


def marlin_reference(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """By vllm's own description of the layout, of packed bytes [outputs, bytes]."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_test

    values = weight.to(torch.int32)
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=2).flatten(1)
    size_n, size_k = values.shape
    perm = marlin_utils_test.get_weight_perm(bits)
    return marlin_utils_test.marlin_weights(
        values.T.contiguous(), size_k, size_n, bits, perm
    )


@pytest.mark.parametrize("slots", [1, 2, 9])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size_n, size_k", [(64, 16), (192, 64), (1088, 80)])
def test_interpreted_repack(interpreted, bits, size_n, size_k, slots):
    weight = torch.randint(0, 256, (5, size_n, size_k * bits // 8), dtype=torch.uint8)
    expected = [marlin_reference(expert, bits) for expert in weight]
    result = interpreted.marlin_in_place_triton.repack(weight, bits, slots)
    assert result.data_ptr() == weight.data_ptr()
    assert result.dtype == torch.int32
    for words, expert in zip(result, expected, strict=True):
        assert torch.equal(words, expert)


@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize("bad", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half])
def test_interpreted_scales(interpreted, monkeypatch, dtype, bad, parameter):
    """As by torch, also with negative scales and with what is no number."""
    from vllm.model_executor.layers.quantization import utils

    scales = torch.randint(0, 256 if bad else 127, (3, 128, 10), dtype=torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    if parameter:
        scales = torch.nn.Parameter(scales, requires_grad=False)

    def convert(given):
        other = torch.ones(2, 3).to(torch.float8_e4m3fn)
        scan = marlin_in_place.scan_scales(dtype, w13=other, w2=given)["w2"]
        sizes = dict(size_k=160, size_n=128, is_a_8bit=False)
        result = marlin_in_place.process_nvfp4_scales(given, scan, **sizes)
        return scan.scale_factor, result.view(torch.uint8)

    expected = convert(scales.clone())
    monkeypatch.setattr(marlin_in_place, "use_triton", lambda _: True)
    monkeypatch.setattr(marlin_in_place, "recorded_event", Mock())
    monkeypatch.setattr(
        utils,
        "marlin_in_place_triton",
        interpreted.marlin_in_place_triton,
        raising=False,
    )
    result = convert(scales)
    assert result[0] == expected[0]
    assert torch.equal(result[1], expected[1])
    assert (result[1].data_ptr() == scales.data_ptr()) is parameter


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", [4, 8])
def test_repack_on_gpu(bits):
    """As by Marlin's own kernel."""
    from vllm import _custom_ops as ops

    # Many experts in few slots: one that was copied back too soon is not equal.
    weight = torch.randint(0, 256, (128, 1536, 2048), dtype=torch.uint8, device="cuda")
    size_n, size_k = 1536, 2048 * 8 // bits
    own = torch.nn.Parameter(weight.clone(), requires_grad=False)
    result = marlin_in_place.repack_by_triton(own, size_n, size_k, bits)
    assert result is not None and result.data_ptr() == own.data_ptr()
    for expert, words in zip(weight, result, strict=True):
        packed = expert.view(torch.int32).T.contiguous()
        assert torch.equal(
            words,
            ops.gptq_marlin_repack(
                b_q_weight=packed, size_k=size_k, size_n=size_n, num_bits=bits
            ),
        )
