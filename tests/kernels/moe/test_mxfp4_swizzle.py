# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MXFP4 swizzle for SM 9.0: equal to the released vllm, values in place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.moe.conversion_cases import FORMATS, Inputs, model_case
from tests.kernels.moe.conversion_oracle import check_case
from tests.kernels.moe.interpreted_kernels import interpreted_kernels
from vllm.model_executor.layers.quantization.utils import mxfp4_layouts

pytest_plugins = ["tests.kernels.moe.interpreted_kernels"]

SMALL = dict(format="mxfp4_swizzle", experts=3, hidden=128, intermediate=64, gated=True)


@pytest.fixture(scope="module")
def interpreted():
    with interpreted_kernels("mxfp4_layouts_triton") as modules:
        yield modules


@pytest.mark.parametrize("tp", (1, 2, 4, 8))
def test_gpt_oss(tp):
    """TP 2 and more need padding to blocks of 32 bytes."""
    case = model_case("mxfp4_swizzle", "gpt-oss", tp, experts=1 if tp == 1 else 2)
    check_case(case | dict(intermediate=-(-case["intermediate"] // 64) * 64))


@pytest.mark.parametrize("view", [None, "gap"])
@pytest.mark.parametrize("gated", [True, False])
def test_small(view, gated):
    check_case(dict(SMALL, view=view, gated=gated))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 10), st.integers(1, 10), st.booleans())
def test_drawn_shapes(experts, hidden, intermediate, gated):
    sizes = dict(hidden=32 * hidden, intermediate=32 * intermediate)
    check_case(dict(SMALL, experts=experts, gated=gated, **sizes))


def test_values_keep_their_storage():
    inputs = Inputs(SMALL)
    build, run = FORMATS["mxfp4_swizzle"]
    build(inputs)
    before = [inputs.layer.w13_weight.data_ptr(), inputs.layer.w2_weight.data_ptr()]
    w13, _, w2, _ = run(inputs)
    assert [w13.storage.data.data_ptr(), w2.storage.data.data_ptr()] == before


def plain_swizzle(values):
    """By torch, with triton_kernels' own layout class."""
    from vllm.utils.import_utils import import_triton_kernels

    import_triton_kernels()
    from triton_kernels.tensor_details.layout import HopperMXValueLayout

    layout = HopperMXValueLayout(values.mT.shape, mx_axis=1)
    return mxfp4_layouts.swizzle_values(values, layout)


def random_values(experts, rows, columns):
    return torch.randint(0, 256, (experts, rows, columns), dtype=torch.uint8)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 2), st.integers(1, 50), st.integers(1, 12))
def test_interpreted_kernel(interpreted, experts, rows, cells):
    values = random_values(experts, rows, 8 * cells)
    expected = plain_swizzle(values.clone())
    tall, wide = rows + -rows % 16, 8 * cells + -8 * cells % 32
    out = values.new_full((experts, tall // 4, 4 * wide), 99)
    interpreted.mxfp4_layouts_triton.swizzle(values, out)
    assert torch.equal(out.mT, expected)


def test_interpreted_kernel_in_place(interpreted):
    values = random_values(2, 48, 96)
    expected = plain_swizzle(values.clone())
    interpreted.mxfp4_layouts_triton.swizzle(values, values.view(2, 12, 384))
    assert torch.equal(values.view(2, 12, 384).mT, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows, columns", [(5760, 1440), (2880, 720), (1440, 1440)])
def test_kernel_on_gpu(rows, columns):
    values = random_values(4, rows, columns)
    expected = plain_swizzle(values.clone())
    assert torch.equal(plain_swizzle(values.cuda()).cpu(), expected)
