# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run one MoE weight conversion of whatever vllm is imported, and say what came out.

The same code runs on the fork, in the tests' process, and on the released vllm in a
process of its own (`python conversion_cases.py`, one JSON case per line on stdin, one
JSON answer per line on stdout).

A case is {"format", "experts", "hidden", "intermediate", "gated", ...}; `FORMATS` lists
the formats.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Case = dict[str, Any]
FP8 = torch.float8_e4m3fn

#: hidden size, intermediate size, gated
MODELS = {
    "Qwen3-30B-A3B": (2048, 768, True),
    "Qwen3-235B-A22B": (4096, 1536, True),
    "DeepSeek-V3": (7168, 2048, True),
    "gpt-oss": (2880, 2880, True),
    "Nemotron-3-Nano": (2688, 1856, False),
    "Nemotron-3-Super": (1024, 2688, False),
    "Gemma-4-26B-A4B": (2816, 704, True),
}
TENSOR_PARALLEL = (1, 2, 4, 8)


def model_case(format: str, model: str, tp: int, experts: int = 2, **more) -> Case:
    hidden, intermediate, gated = MODELS[model]
    return dict(
        format=format,
        experts=experts,
        hidden=hidden,
        intermediate=intermediate // tp,
        gated=gated,
        **more,
    )


class Inputs:
    """The tensors of one layer, the same bytes for the same case everywhere.

    `view` "gap" makes every tensor a view with gaps between experts, "rows" one with
    gaps between rows.
    """

    def __init__(self, case: Case, device: str = "cpu", parameters: bool = True):
        self.case, self.device, self.parameters = case, device, parameters
        self.generator = torch.Generator(device).manual_seed(case.get("seed", 0))
        self.layer = torch.nn.Module()
        # Per expert: what a checkpoint would bring.
        self.ones = torch.ones(case["experts"], device=device)
        rising = torch.arange(1.0, case["experts"] + 2, device=device)
        self.a13, self.a2 = rising[:-1], rising[1:]

    def add(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill=None
    ) -> torch.Tensor:
        wide = list(shape)
        view = self.case.get("view")
        if view == "gap":
            wide[0] *= 2
        elif view == "rows" and len(shape) == 3:
            wide[2] += 32
        if fill is not None or dtype == torch.float32:
            data = torch.rand(wide, generator=self.generator, device=self.device)
            data = (data if fill is None else torch.full_like(data, fill)).to(dtype)
        else:
            wide[-1] *= dtype.itemsize
            data = torch.randint(
                0,
                256,
                wide,
                dtype=torch.uint8,
                device=self.device,
                generator=self.generator,
            ).view(dtype)
        if view == "gap":
            data = data[::2]
        elif view == "rows" and len(shape) == 3:
            data = data[:, :, : shape[2]]
        assert tuple(data.shape) == tuple(shape)
        if self.parameters:
            parameter = torch.nn.Parameter(data, requires_grad=False)
            parameter.weight_loader = len
            parameter.marker = name
            self.layer.register_parameter(name, parameter)
            return parameter
        setattr(self.layer, name, data)
        return data

    def add_weights(self, w13: tuple[int, ...], w2: tuple[int, ...], dtype) -> None:
        self.add("w13_weight", w13, dtype)
        self.add("w2_weight", w2, dtype)

    def configure(self) -> None:
        case = self.case
        gated = case["gated"]
        self.layer.activation = SimpleNamespace(is_gated=gated)
        self.layer.moe_config = SimpleNamespace(
            is_act_and_mul=gated,
            intermediate_size_per_partition=case["intermediate"],
            hidden_dim=case["hidden"],
            hidden_dim_unpadded=None,
            moe_parallel_config=SimpleNamespace(enable_eplb=False),
        )


def _rows(case: Case) -> int:
    return case["intermediate"] * (2 if case["gated"] else 1)


def _nvfp4_inputs(inputs: Inputs) -> None:
    case = inputs.case
    e, h, i = case["experts"], case["hidden"], case["intermediate"]
    inputs.add_weights((e, _rows(case), h // 2), (e, h, i // 2), torch.uint8)
    inputs.add("w13_weight_scale", (e, _rows(case), h // 16), FP8)
    inputs.add("w2_weight_scale", (e, h, i // 16), FP8)
    inputs.configure()


def _fp8_inputs(inputs: Inputs) -> None:
    case = inputs.case
    e, h, i = case["experts"], case["hidden"], case["intermediate"]
    inputs.add_weights((e, _rows(case), h), (e, h, i), FP8)
    inputs.configure()


def _fp8_block_inputs(inputs: Inputs) -> None:
    _fp8_inputs(inputs)
    case = inputs.case
    e, h, i = case["experts"], case["hidden"], case["intermediate"]
    inputs.add("w13_weight_scale", (e, _rows(case) // 128, h // 128), torch.float32)
    inputs.add("w2_weight_scale", (e, h // 128, i // 128), torch.float32)
    inputs.layer.weight_block_size = [128, 128]


def _mxfp8_inputs(inputs: Inputs) -> None:
    _fp8_inputs(inputs)
    case = inputs.case
    e, h, i = case["experts"], case["hidden"], case["intermediate"]
    inputs.add("w13_weight_scale", (e, _rows(case), h // 32), torch.uint8)
    inputs.add("w2_weight_scale", (e, h, i // 32), torch.uint8)
    inputs.layer.weight_block_size = [1, 32]


def _bf16_inputs(inputs: Inputs) -> None:
    case = inputs.case
    e, h, i = case["experts"], case["hidden"], case["intermediate"]
    inputs.add_weights((e, _rows(case), h), (e, h, i), torch.bfloat16)
    inputs.configure()


def _mxfp4_inputs(inputs: Inputs) -> None:
    case = inputs.case
    e, h, i = case["experts"], case["hidden"], case["intermediate"]
    inputs.add_weights((e, _rows(case), h // 2), (e, h, i // 2), torch.uint8)
    inputs.add("w13_weight_scale", (e, _rows(case), h // 32), torch.uint8)
    inputs.add("w2_weight_scale", (e, h, i // 32), torch.uint8)
    inputs.configure()


def _weights(layer) -> list[torch.Tensor]:
    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
    return [getattr(layer, name) for name in names if hasattr(layer, name)]


def _replace(layer, **tensors) -> None:
    """What a quantization method does with the results."""
    from vllm.model_executor.utils import replace_parameter

    for name, tensor in tensors.items():
        replace_parameter(layer, name, tensor)


def _finish(layer, w13, w2, w13_scale, w2_scale) -> list:
    _replace(
        layer,
        w13_weight=w13,
        w2_weight=w2,
        w13_weight_scale=w13_scale,
        w2_weight_scale=w2_scale,
    )
    return []


@functools.cache
def _utils():
    # Imported first, flashinfer_utils ends in a circular import.
    import vllm.model_executor.layers.fused_moe  # noqa: F401
    from vllm.model_executor.layers.quantization.utils import flashinfer_utils

    return flashinfer_utils


@functools.cache
def _fp4():
    _utils()
    from vllm.model_executor.layers.quantization.utils import flashinfer_fp4_moe

    return flashinfer_fp4_moe


@functools.cache
def _nvfp4_backend(name: str):
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend

    return NvFp4MoeBackend[name]


def _prepare_nvfp4(inputs: Inputs) -> list:
    module = _fp4()
    layer, case = inputs.layer, inputs.case
    backend = _nvfp4_backend(case.get("backend", "FLASHINFER_TRTLLM"))
    shared = backend.name != "VLLM_CUTLASS"
    a13 = inputs.a13
    w13, w13_scale, _, a13_scale, w2, w2_scale, _, a2_scale = (
        module.prepare_nvfp4_moe_layer_for_fi_or_cutlass(
            backend=backend,
            layer=layer,
            w13=layer.w13_weight,
            w13_scale=layer.w13_weight_scale,
            w13_scale_2=inputs.ones,
            a13_scale=a13 if shared else torch.stack((a13, a13 + 1), dim=1),
            w2=layer.w2_weight,
            w2_scale=layer.w2_weight_scale,
            w2_scale_2=inputs.ones,
            a2_scale=inputs.a2,
            is_act_and_mul=case["gated"],
            trtllm_hidden_alignment=case.get("hidden_alignment", 256),
        )
    )
    return [*_finish(layer, w13, w2, w13_scale, w2_scale), a13_scale, a2_scale]


def _static_nvfp4(inputs: Inputs) -> list:
    case, layer = inputs.case, inputs.layer
    w13, w13_scale, w2, w2_scale = _fp4().prepare_static_weights_for_trtllm_fp4_moe(
        layer.w13_weight,
        layer.w2_weight,
        layer.w13_weight_scale,
        layer.w2_weight_scale,
        hidden_size=case["hidden"],
        intermediate_size=case["intermediate"],
        num_experts=case["experts"],
        is_gated_activation=case["gated"],
    )
    return [w13, w13_scale, w2, w2_scale]


def _reorder(inputs: Inputs) -> list:
    layer, dim = inputs.layer, inputs.case.get("dim", -2)
    results = _fp4().reorder_w1w3_to_w3w1(
        layer.w13_weight, layer.w13_weight_scale, dim=dim
    )
    return [results[0] is layer.w13_weight, results[1] is layer.w13_weight_scale]


def _prepare_fp8(inputs: Inputs) -> list:
    layer, case = inputs.layer, inputs.case
    scale = inputs.ones
    results = _utils().prepare_fp8_moe_layer_for_fi(
        layer,
        layer.w13_weight,
        layer.w2_weight,
        w13_scale=getattr(layer, "w13_weight_scale", scale),
        w13_input_scale=scale,
        w2_scale=getattr(layer, "w2_weight_scale", scale),
        w2_input_scale=scale,
        is_trtllm=case.get("trtllm", True),
    )
    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
    kept = {n: r for n, r in zip(names, results, strict=True) if hasattr(layer, n)}
    _replace(layer, **kept)
    return []


def _rotate_fp8(inputs: Inputs) -> list:
    layer = inputs.layer
    _utils().rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(
        layer.w13_weight, layer.w2_weight, inputs.case["gated"]
    )
    return []


def _shuffle_fp8_block(inputs: Inputs) -> list:
    layer = inputs.layer
    return list(
        _utils()._shuffle_deepseek_fp8_moe_weights(layer.w13_weight, layer.w2_weight)
    )


def _shuffle_mxfp8(inputs: Inputs) -> list:
    return list(
        _utils()._shuffle_mxfp8_moe_weights(
            *_weights(inputs.layer), inputs.case["gated"]
        )
    )


def _bf16_trtllm(inputs: Inputs) -> list:
    layer = inputs.layer
    return list(
        _utils().convert_moe_weights_to_flashinfer_trtllm_block_layout(
            {}, layer.w13_weight, layer.w2_weight, inputs.case["gated"]
        )
    )


def _align(name: str, order: tuple[int, ...]) -> Callable[[Inputs], list]:
    def run(inputs: Inputs) -> list:
        case = inputs.case
        weights = _weights(inputs.layer)
        if case.get("flat_scales"):
            weights[2:] = [scale.flatten(1) for scale in weights[2:]]
        results = getattr(_utils(), name)(
            *(weights[i] for i in order), *case["arguments"]
        )
        same = [any(r is w for w in weights) for r in results]
        return [*results, same]

    return run


def _swizzle_mxfp4(inputs: Inputs) -> list:
    """With the layouts that an SM 9.0 device takes, whatever device this is."""
    import vllm.model_executor.layers.fused_moe  # noqa: F401
    from vllm.model_executor.layers.quantization.utils import mxfp4_utils
    from vllm.utils.import_utils import import_triton_kernels

    import_triton_kernels()
    from triton_kernels.tensor_details import layout as layouts

    class Hopper:
        def is_cuda(self):
            return True

        def is_rocm(self):
            return False

        def is_device_capability(self, capability):
            return capability == 90

        def is_device_capability_family(self, _):
            return False

    saved = (mxfp4_utils.current_platform, layouts.cuda_capability_geq)
    hip = layouts.is_hip_cdna4
    mxfp4_utils.current_platform = Hopper()
    layouts.cuda_capability_geq = lambda major, minor=0: (major, minor) <= (9, 0)
    layouts.is_hip_cdna4 = lambda: False
    try:
        layer = inputs.layer
        results = []
        for name in ("w13", "w2"):
            weight, _, scale = mxfp4_utils._swizzle_mxfp4(
                getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale")
            )
            # As the callers do: the layer's parameters go.
            delattr(layer, f"{name}_weight")
            delattr(layer, f"{name}_weight_scale")
            results += [weight, scale]
        return results
    finally:
        mxfp4_utils.current_platform, layouts.cuda_capability_geq = saved
        layouts.is_hip_cdna4 = hip


@functools.cache
def _marlin_modules():
    import vllm.model_executor.layers.fused_moe  # noqa: F401
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import (
        marlin_utils_fp4,
        marlin_utils_fp8,
    )

    return ops, marlin_utils_fp4, marlin_utils_fp8


def _marlin(inputs: Inputs, name: str, *arguments: Any, **options: Any) -> tuple:
    """Without a GPU, a plain permutation of bytes stands in for the repack kernel."""
    ops, marlin_utils_fp4, marlin_utils_fp8 = _marlin_modules()

    def repack(b_q_weight, size_k, size_n, num_bits, is_a_8bit=False):
        shape = (size_k // 16, size_n * 16 * num_bits // 32)
        return b_q_weight.flatten().flip(0).view(shape).contiguous()

    case, layer = inputs.case, inputs.layer
    layer.num_experts, layer.hidden_size = case["experts"], case["hidden"]
    layer.intermediate_size_per_partition = case["intermediate"]
    dtype = getattr(torch, case.get("dtype", "torch.bfloat16").removeprefix("torch."))
    layer.params_dtype = layer.orig_dtype = dtype
    module = marlin_utils_fp4 if hasattr(marlin_utils_fp4, name) else marlin_utils_fp8
    kernel = ops.gptq_marlin_repack
    if inputs.device == "cpu":
        ops.gptq_marlin_repack = repack
    try:
        return getattr(module, name)(layer, *arguments, **options)
    finally:
        ops.gptq_marlin_repack = kernel


def _marlin_nvfp4(inputs: Inputs) -> list:
    layer = inputs.layer
    w13, w13_scale, g13, w2, w2_scale, g2 = _marlin(
        inputs,
        "prepare_nvfp4_moe_layer_for_marlin",
        layer.w13_weight,
        layer.w13_weight_scale,
        inputs.ones,
        layer.w2_weight,
        layer.w2_weight_scale,
        inputs.ones,
        is_act_and_mul=inputs.case["gated"],
    )
    return [*_finish(layer, w13, w2, w13_scale, w2_scale), g13, g2]


def _marlin_fp8(inputs: Inputs) -> list:
    results = _marlin(
        inputs, "prepare_fp8_moe_layer_for_marlin", *_weights(inputs.layer)
    )
    return _finish(inputs.layer, *results)


def _marlin_mxfp8(inputs: Inputs) -> list:
    results = _marlin(
        inputs, "prepare_mxfp8_moe_layer_for_marlin", *_weights(inputs.layer)
    )
    return _finish(inputs.layer, *results)


def _finite_scales(build: Callable[[Inputs], None]) -> Callable[[Inputs], None]:
    """Marlin computes with scales, and not every byte is a number."""

    def make(inputs: Inputs) -> None:
        build(inputs)
        for name in ("w13_weight_scale", "w2_weight_scale"):
            bytes_ = getattr(inputs.layer, name).data.view(torch.uint8)
            bytes_.remainder_(64).add_(1)

    return make


def _with_room(
    build: Callable[[Inputs], None], attribute: str, default: str
) -> Callable[[Inputs], None]:
    """As a layer's parameters are created: in the fork, tensors that the backend will
    pad have room for it; not with "room" False."""

    def make(inputs: Inputs) -> None:
        build(inputs)
        _utils()
        try:
            from vllm.model_executor.layers.quantization.utils import (
                moe_room,
                mxfp4_layouts,
            )
        except ImportError:  # the release
            return
        case = inputs.case
        if not case.get("room", True):
            return
        on_sm90 = mxfp4_layouts.swizzled_for_sm90
        mxfp4_layouts.swizzled_for_sm90 = lambda _: True
        backend = SimpleNamespace(name=case.get("backend", default))
        if not case.get("trtllm", True):
            backend.name = "FLASHINFER_CUTLASS"
        try:
            moe_room.reserve_padding(
                inputs.layer, SimpleNamespace(**{attribute: backend})
            )
        finally:
            mxfp4_layouts.swizzled_for_sm90 = on_sm90

    return make


ALIGN_FP4 = (0, 2, 1, 3)
TRTLLM = "FLASHINFER_TRTLLM"

#: name -> (what makes the layer, what converts it and returns further results)
FORMATS: dict[str, tuple[Callable[[Inputs], None], Callable[[Inputs], list]]] = {
    "bf16_trtllm": (_bf16_inputs, _bf16_trtllm),
    "nvfp4": (_with_room(_nvfp4_inputs, "nvfp4_backend", TRTLLM), _prepare_nvfp4),
    "nvfp4_static": (_nvfp4_inputs, _static_nvfp4),
    "reorder_w1w3": (_nvfp4_inputs, _reorder),
    "fp8_tensor": (_with_room(_fp8_inputs, "fp8_backend", TRTLLM), _prepare_fp8),
    "fp8_tensor_rotate": (_fp8_inputs, _rotate_fp8),
    "fp8_block": (_fp8_block_inputs, _prepare_fp8),
    "fp8_block_shuffle": (_fp8_block_inputs, _shuffle_fp8_block),
    "mxfp8": (_with_room(_mxfp8_inputs, "mxfp8_backend", TRTLLM), _prepare_fp8),
    "mxfp8_shuffle": (_mxfp8_inputs, _shuffle_mxfp8),
    "align_fp4": (_nvfp4_inputs, _align("align_fp4_moe_weights_for_fi", ALIGN_FP4)),
    "align_fp4_hidden": (
        _nvfp4_inputs,
        _align("align_fp4_moe_hidden_dim_for_fi", ALIGN_FP4),
    ),
    "align": (_bf16_inputs, _align("align_moe_weights_for_fi", (0, 1))),
    "align_mxfp8": (
        _mxfp8_inputs,
        _align("align_mxfp8_moe_weights_for_fi_trtllm", (0, 1, 2, 3)),
    ),
    "mxfp4_swizzle": (
        _with_room(_mxfp4_inputs, "mxfp4_backend", "TRITON"),
        _swizzle_mxfp4,
    ),
    "marlin_nvfp4": (_finite_scales(_nvfp4_inputs), _marlin_nvfp4),
    "marlin_fp8": (_fp8_block_inputs, _marlin_fp8),
    "marlin_mxfp8": (_finite_scales(_mxfp8_inputs), _marlin_mxfp8),
}


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


def describe(value: Any) -> Any:
    """A result as JSON: of tensors shape, strides, dtype, class, attributes, bytes."""
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        return {
            "shape": list(value.shape),
            "stride": list(value.stride()) if value.numel() else None,
            "dtype": str(value.dtype),
            "class": type(value).__name__,
            "attributes": sorted(value.__dict__),
            "digest": digest(plain.view(torch.uint8) if plain.dim() == 0 else plain),
        }
    if hasattr(value, "storage") and hasattr(value, "shape_max"):  # triton_kernels
        layout = value.storage.layout
        public = {
            k: list(v) if isinstance(v, (list, tuple, torch.Size)) else v
            for k, v in vars(layout).items()
        }
        return {
            "data": describe(value.storage.data),
            "layout": [layout.name, public],
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "shape_max": list(value.shape_max),
        }
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    return value


def describe_layer(layer: torch.nn.Module) -> dict[str, Any]:
    config = vars(layer.moe_config).copy()
    config.pop("moe_parallel_config")
    state = {name: describe(p) for name, p in layer.named_parameters()}
    return {"config": config, "parameters": state}


def use_stand_ins() -> None:
    """Stand in for what released conversions need a GPU, or a compiler, for."""
    import flashinfer
    import flashinfer.quantization.fp4_quantization as fp4_quantization

    # A no-op for tensors on the GPU.
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    fp4_quantization.block_scale_interleave = interleave_scales
    flashinfer.nvfp4_block_scale_interleave = interleave_scales


def interleave_scales(scales: torch.Tensor) -> torch.Tensor:
    """FlashInfer's 128x4 interleave of block scales, [experts, rows, columns]."""
    batch = scales.view(torch.uint8)
    batch = batch[None] if batch.dim() == 2 else batch
    experts, rows, columns = batch.shape
    tall, wide = -(-rows // 128) * 128, -(-columns // 4) * 4
    board = batch.new_zeros((experts, tall, wide))
    board[:, :rows, :columns] = batch
    tiles = board.reshape(experts, tall // 128, 4, 32, wide // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(-1).view(scales.dtype)


def convert(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Run a case and describe the layer and the results, or name the error."""
    build, run = FORMATS[case["format"]]
    inputs = Inputs(case, device, case.get("parameters", True))
    build(inputs)
    try:
        for _ in range(case.get("times", 1)):
            results = run(inputs)
    except Exception as error:  # noqa: BLE001
        return {"error": type(error).__name__, "message": str(error)}
    answer = describe_layer(inputs.layer)
    answer["results"] = describe(results)
    return json.loads(json.dumps(answer))


def serve() -> None:
    """Answer cases from stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import vllm

    use_stand_ins()
    print(json.dumps(vllm.__file__), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(convert(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve()
