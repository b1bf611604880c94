# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NVFP4 MoE conversions: equal to the released vllm, in place, and safe."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.moe.conversion_cases import (
    FORMATS,
    MODELS,
    TENSOR_PARALLEL,
    Inputs,
    convert,
    describe,
    model_case,
)
from tests.kernels.moe.conversion_oracle import check_case, oracle

SMALL = dict(experts=3, hidden=256, intermediate=128, gated=True)


def fork_case(case):
    """The layer and results of a case, on the fork."""
    inputs = Inputs(case)
    build, run = FORMATS[case["format"]]
    build(inputs)
    before = {n: p.data_ptr() for n, p in inputs.layer.named_parameters()}
    return inputs.layer, run(inputs), before


@pytest.mark.parametrize("tp", TENSOR_PARALLEL)
@pytest.mark.parametrize("model", MODELS)
def test_trtllm_layout_of_models(model, tp):
    check_case(model_case("nvfp4", model, tp, experts=3 if tp > 2 else 2))


@pytest.mark.parametrize("tp", TENSOR_PARALLEL)
@pytest.mark.parametrize("backend", ["FLASHINFER_CUTLASS", "VLLM_CUTLASS"])
@pytest.mark.parametrize("model", MODELS)
def test_cutlass_layout_of_models(model, backend, tp):
    case = model_case("nvfp4", model, tp, backend=backend)
    rows = case["intermediate"] * (2 if case["gated"] else 1)
    check_case(case, error=case["gated"] and rows % 128 != 0)


@pytest.mark.parametrize("hidden, intermediate", [(2688, 928), (1024, 336), (320, 96)])
def test_padding_of_one_projection(hidden, intermediate):
    """The branch that fails on 16 GB cards."""
    case = SMALL | dict(
        format="nvfp4",
        backend="FLASHINFER_CUTLASS",
        hidden=hidden,
        intermediate=intermediate,
        gated=False,
    )
    check_case(case)


@pytest.mark.parametrize("alignment", [256, 512])
def test_trtllm_hidden_alignment(alignment):
    case = model_case("nvfp4", "Nemotron-3-Nano", 4, hidden_alignment=alignment)
    check_case(case)


def test_more_backends():
    for backend in ("FLASHINFER_CUTEDSL_BATCHED", "FLASHINFER_B12X"):
        check_case(SMALL | dict(format="nvfp4", backend=backend))


@pytest.mark.parametrize("view", ["gap", "rows"])
@pytest.mark.parametrize("backend", ["FLASHINFER_CUTEDSL_BATCHED", "VLLM_CUTLASS"])
def test_views_with_gaps(view, backend):
    check_case(SMALL | dict(format="nvfp4", backend=backend, view=view))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from(("FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "VLLM_CUTLASS")),
    st.integers(0, 99),
)
def test_drawn_shapes(experts, hidden, intermediate, gated, backend, seed):
    case = dict(
        format="nvfp4",
        experts=experts,
        hidden=64 * hidden,
        intermediate=32 * intermediate,
        gated=gated,
        backend=backend,
        seed=seed,
    )
    expected, answer = oracle().convert(case), convert(case)
    if "error" in expected:
        assert "error" in answer, (case, expected)
    else:
        assert answer == expected, case


@pytest.mark.parametrize(
    "backend, hidden", [("FLASHINFER_TRTLLM", 256), ("VLLM_CUTLASS", 256)]
)
def test_parameters_keep_their_storage(backend, hidden):
    case = dict(SMALL, format="nvfp4", backend=backend, hidden=hidden)
    layer, _, before = fork_case(case)
    assert {n: p.data_ptr() for n, p in layer.named_parameters()} == before


def test_padded_parameters_release_their_source():
    """Without room for padding: when w2 is converted, the unpadded w13 is gone."""
    from vllm.model_executor.layers.quantization.utils import weight_permutation

    case = dict(SMALL, format="nvfp4", gated=False, intermediate=96, room=False)
    inputs = Inputs(case)
    build, run = FORMATS["nvfp4"]
    build(inputs)
    w13 = inputs.layer.w13_weight
    shapes = []
    convert_ = weight_permutation.convert_

    def watched(*steps, **options):
        shapes.append(tuple(w13.shape))
        return convert_(*steps, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_permutation, "convert_", watched)
        run(inputs)
    assert shapes[0] == (3, 96, 128) and shapes[-1] == (3, 128, 128)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(w13_weight_scale=torch.uint8), "w13_scale is torch.uint8 and must be"),
        (dict(w2_weight_scale=torch.float16), "w2_scale is torch.float16"),
        (dict(w13_weight=torch.bfloat16), "w13"),
    ],
)
def test_wrong_dtypes_are_named(change, message):
    case = dict(SMALL, format="nvfp4", backend="VLLM_CUTLASS")
    inputs = Inputs(case)
    build, run = FORMATS["nvfp4"]
    build(inputs)
    for name, dtype in change.items():
        getattr(inputs.layer, name).data = getattr(inputs.layer, name).data.to(dtype)
    before = describe(list(inputs.layer.parameters()))
    with pytest.raises(ValueError, match=message):
        run(inputs)
    assert describe(list(inputs.layer.parameters())) == before


def test_a_refused_layer_is_as_it_was():
    """Gate and up cannot be padded for CUTLASS; nothing may have been swapped."""
    case = dict(SMALL, format="nvfp4", backend="FLASHINFER_CUTLASS", intermediate=96)
    inputs = Inputs(case)
    build, run = FORMATS["nvfp4"]
    build(inputs)
    before = describe(list(inputs.layer.parameters()))
    with pytest.raises(NotImplementedError, match="w13 has 192 rows"):
        run(inputs)
    assert describe(list(inputs.layer.parameters())) == before


@pytest.mark.parametrize("backend", ["FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS"])
@pytest.mark.parametrize("hidden, gated", [(256, True), (320, False)])
def test_processing_a_layer_twice(backend, hidden, gated):
    """Nothing guards against it, so the bytes must be the release's then too."""
    sizes = dict(hidden=hidden, gated=gated, intermediate=128)
    check_case(dict(SMALL, format="nvfp4", backend=backend, times=2, **sizes))


@pytest.mark.parametrize("backend", ["FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS"])
def test_reload_into_the_same_storage(backend):
    """A reload converts new tensors and copies them into the first ones."""
    first = dict(SMALL, format="nvfp4", backend=backend)
    kernel_layer, _, before = fork_case(first)
    second = first | dict(seed=1)
    loaded, _, _ = fork_case(second)
    for name, parameter in kernel_layer.named_parameters():
        parameter.data.copy_(getattr(loaded, name))
    after = {n: p.data_ptr() for n, p in kernel_layer.named_parameters()}
    assert after == before
    expected = oracle().convert(second)["parameters"]
    for name, parameter in kernel_layer.named_parameters():
        assert describe(parameter)["digest"] == expected[name]["digest"]


def test_out_of_memory_leaves_the_layer():
    """Scratch is taken before the first byte is written."""
    inputs = Inputs(dict(SMALL, format="nvfp4"))
    build, run = FORMATS["nvfp4"]
    build(inputs)
    before = describe(list(inputs.layer.parameters()))

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("no memory left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run(inputs)
    assert describe(list(inputs.layer.parameters())) == before
