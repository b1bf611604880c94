# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Padding in the storage that a parameter got when it was created."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.moe.conversion_cases import FORMATS, Inputs
from tests.kernels.moe.conversion_oracle import check_case
from vllm.model_executor.layers.quantization.utils import moe_room

#: every case grows in at least one tensor
GROWING = {
    "NVFP4 TRTLLM": dict(format="nvfp4", hidden=192, intermediate=96, gated=False),
    "NVFP4 TRTLLM, gated": dict(
        format="nvfp4", hidden=256, intermediate=96, gated=True
    ),
    "NVFP4 CUTLASS": dict(
        format="nvfp4",
        backend="FLASHINFER_CUTLASS",
        hidden=192,
        intermediate=160,
        gated=False,
    ),
    "NVFP4 VLLM_CUTLASS": dict(
        format="nvfp4",
        backend="VLLM_CUTLASS",
        hidden=160,
        intermediate=128,
        gated=True,
    ),
    "FP8 per tensor": dict(
        format="fp8_tensor", hidden=128, intermediate=72, gated=True
    ),
    "FP8 per tensor, CUTLASS": dict(
        format="fp8_tensor", hidden=128, intermediate=72, gated=False, trtllm=False
    ),
    "MXFP8": dict(format="mxfp8", hidden=192, intermediate=96, gated=True),
    "MXFP8, not gated": dict(format="mxfp8", hidden=320, intermediate=96, gated=False),
    "MXFP4": dict(format="mxfp4_swizzle", hidden=160, intermediate=96, gated=True),
}


def case_of(name: str, **more) -> dict:
    return dict(experts=3) | GROWING[name] | more


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
@pytest.mark.parametrize("name", GROWING)
def test_equal_to_the_release(name, room):
    check_case(case_of(name, room=room))


def layer_storages(layer) -> dict[str, tuple[int, int]]:
    return {
        name: (p.untyped_storage().data_ptr(), p.untyped_storage().nbytes())
        for name, p in layer.named_parameters()
    }


@pytest.mark.parametrize("name", GROWING)
def test_tensors_keep_the_storage_they_were_created_with(name):
    """Also that no storage is larger than its tensor is in the end."""
    inputs = Inputs(case_of(name))
    build, run = FORMATS[inputs.case["format"]]
    build(inputs)
    before = layer_storages(inputs.layer)
    sizes = {
        name: p.numel() * p.element_size()
        for name, p in inputs.layer.named_parameters()
    }
    assert any(size < before[name][1] for name, size in sizes.items())
    results = run(inputs)
    if inputs.case["format"] == "mxfp4_swizzle":  # which leaves no parameters
        after = {
            name: (
                wrapped.storage.data.untyped_storage().data_ptr(),
                wrapped.storage.data.numel(),
            )
            for name, wrapped in zip(
                ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"),
                results,
                strict=True,
            )
        }
    else:
        after = {
            name: (p.untyped_storage().data_ptr(), p.numel() * p.element_size())
            for name, p in inputs.layer.named_parameters()
        }
    assert after == before


@pytest.mark.parametrize("name", GROWING)
def test_creation_looks_the_same_from_outside(name):
    """Values, shapes, strides, dtypes, classes and attributes."""
    seen = []
    for room in (True, False):
        inputs = Inputs(case_of(name, room=room))
        FORMATS[inputs.case["format"]][0](inputs)
        seen.append(
            {
                name: (p.shape, p.stride(), p.dtype, type(p), vars(p), p.tolist())
                if p.dtype == torch.uint8
                else (p.shape, p.stride(), p.dtype, type(p), vars(p))
                for name, p in inputs.layer.named_parameters()
            }
        )
    assert seen[0] == seen[1]


@pytest.mark.parametrize("view", ["gap", "rows"])
def test_views_get_no_room(view):
    """A parameter that is a part of a larger tensor stays where it is."""
    inputs = Inputs(case_of("NVFP4 TRTLLM", view=view))
    FORMATS["nvfp4"][0](inputs)
    plain = Inputs(case_of("NVFP4 TRTLLM", view=view, room=False))
    FORMATS["nvfp4"][0](plain)
    assert [size for _, size in layer_storages(inputs.layer).values()] == [
        size for _, size in layer_storages(plain.layer).values()
    ]


@pytest.mark.parametrize(
    "method",
    [
        SimpleNamespace(),
        SimpleNamespace(nvfp4_backend=SimpleNamespace(name="MARLIN")),
        SimpleNamespace(fp8_backend=SimpleNamespace(name="TRITON")),
        SimpleNamespace(mxfp4_backend=SimpleNamespace(name="MARLIN")),
    ],
)
def test_other_backends_get_no_room(method):
    inputs = Inputs(case_of("NVFP4 CUTLASS", room=False))
    FORMATS["nvfp4"][0](inputs)
    before = layer_storages(inputs.layer)
    moe_room.reserve_padding(inputs.layer, method)
    assert layer_storages(inputs.layer) == before


def test_meta_parameters_are_left_alone():
    """Of weights that are quantized while they are loaded."""
    layer = torch.nn.Module()
    layer.activation = SimpleNamespace(is_gated=False)
    layer.moe_config = SimpleNamespace(is_act_and_mul=False)
    for name, shape in (("w13_weight", (2, 96, 128)), ("w2_weight", (2, 128, 96))):
        data = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
    method = SimpleNamespace(fp8_backend=SimpleNamespace(name="FLASHINFER_TRTLLM"))
    moe_room.reserve_padding(layer, method)
    assert layer.w13_weight.is_meta and layer.w13_weight.shape == (2, 96, 128)


def test_a_second_conversion():
    """The release's bytes, or its refusal, the second time too."""
    check_case(case_of("NVFP4 CUTLASS", times=2))
