# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Room for padding in the parameters of MoE layers, from the time they are created.

Which conversion will pad a layer follows from the backend that its quantization method
has chosen. Each tensor that will grow gets a storage of its final size; the conversion
then pads it where it is. Where no backend is known, or the layer's tensors have other
names, nothing is changed, and a tensor that grows goes to a new one.
"""

from collections.abc import Iterator

import torch

from vllm.model_executor.layers.quantization.utils.weight_room import reserve

FP4_PER_BYTE, NVFP4_GROUP = 2, 16


def reserve_padding(layer: torch.nn.Module, method: object) -> None:
    """Give the parameters of `layer`, just created by the quantization method `method`,
    storages of the size that their conversion will pad them to.

    Values, shapes, strides, dtypes and attributes stay as they are. Weights that were
    saved after their conversion are not converted again and get no room.
    """
    from vllm.model_executor.utils import is_weights_pre_processed

    if is_weights_pre_processed():
        return
    for parameter, shape in padded_shapes(layer, method):
        size = parameter.shape[0] * shape[0] * shape[1] * parameter.element_size()
        reserve(parameter, size)


def padded_shapes(
    layer: torch.nn.Module, method: object
) -> Iterator[tuple[torch.nn.Parameter, tuple[int, int]]]:
    """Parameters of `layer` with each expert's rows and columns after conversion."""
    backend = getattr(method, "nvfp4_backend", None)
    if backend is not None:
        return _nvfp4(layer, method, backend.name)
    backend = getattr(method, "fp8_backend", getattr(method, "mxfp8_backend", None))
    if backend is not None:
        return _fp8(layer, backend.name)
    backend = getattr(method, "mxfp4_backend", None)
    if backend is not None:
        return _mxfp4(layer, backend)
    return iter(())


def _parameters(layer: torch.nn.Module, *names: str) -> list[torch.nn.Parameter]:
    """The layer's parameters of these names, if they are all [experts, rows, columns]
    and contiguous; else none. Weights may be called "packed"."""
    found = []
    for name in names:
        parameter = getattr(layer, name, getattr(layer, f"{name}_packed", None))
        if not isinstance(parameter, torch.nn.Parameter):
            return []
        if parameter.dim() != 3 or not parameter.is_contiguous():
            return []
        found.append(parameter)
    return found


WEIGHTS = ("w13_weight", "w2_weight")
SCALES = ("w13_weight_scale", "w2_weight_scale")


def _nvfp4(layer, method, backend: str):
    from vllm.model_executor.layers.quantization.utils import nvfp4_layouts
    from vllm.model_executor.layers.quantization.utils.flashinfer_utils import (
        trtllm_nvfp4_hidden_alignment,
    )

    parameters = _parameters(layer, *WEIGHTS, *SCALES)
    if not parameters or parameters[0].element_size() != 1:
        return
    w13, w2, w13_scale, w2_scale = parameters
    gated, both = layer.activation.is_gated, layer.moe_config.is_act_and_mul
    if backend == "FLASHINFER_TRTLLM":
        alignment = trtllm_nvfp4_hidden_alignment(
            per_token_activation=getattr(method, "per_token_activation", False),
            is_act_and_mul=both,
        )
        hidden, intermediate = nvfp4_layouts.trtllm_sizes(w13, w2, gated, alignment)
        rows = intermediate * (2 if gated else 1)
        yield w13, (rows, hidden // FP4_PER_BYTE)
        yield w2, (hidden, intermediate // FP4_PER_BYTE)
        yield w13_scale, (rows, hidden // NVFP4_GROUP)
        yield w2_scale, (hidden, intermediate // NVFP4_GROUP)
    elif backend in nvfp4_layouts.TILED_BACKENDS:
        if w13.shape[1] % 128 and both:
            return  # cannot be padded
        sizes = nvfp4_layouts.tiled_sizes(w13, w2, w13_scale, w2_scale)
        yield from zip(parameters, sizes, strict=True)


def _fp8(layer, backend: str):
    weights = _parameters(layer, *WEIGHTS)
    if not weights or weights[0].element_size() != 1:
        return
    w13, w2 = weights
    both = layer.moe_config.is_act_and_mul
    scales = _parameters(layer, *SCALES)
    if scales and scales[0].dtype == torch.uint8:
        if backend != "FLASHINFER_TRTLLM":
            return
        from vllm.model_executor.layers.quantization.utils.mxfp8_layouts import (
            Mxfp8Sizes,
        )

        sizes = Mxfp8Sizes(w13, w2, both, min_alignment=128, hidden_alignment=256)
        hidden, intermediate = sizes.aligned_hidden, sizes.aligned_intermediate
        rows = intermediate * sizes.halves
        blocks = sizes.blocks(scales[0])
        yield w13, (rows, hidden)
        yield w2, (hidden, intermediate)
        yield scales[0], (rows, blocks[0])
        yield scales[1], (hidden, blocks[1])
        return
    by_block = scales or hasattr(layer, "w13_weight_scale_inv")
    if by_block or backend not in ("FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS"):
        return  # does not grow
    from vllm.model_executor.layers.quantization.utils.fp8_layouts import (
        aligned_intermediate,
    )

    intermediate = aligned_intermediate(w2, layer.activation.is_gated)
    yield w13, (intermediate * (2 if both else 1), w13.shape[2])
    yield w2, (w2.shape[1], intermediate)


def _mxfp4(layer, backend):
    from vllm.model_executor.layers.quantization.utils import mxfp4_layouts

    if not mxfp4_layouts.swizzled_for_sm90(backend):
        return
    for parameter in _parameters(layer, *WEIGHTS):
        yield parameter, mxfp4_layouts.value_sizes(*parameter.shape[1:])
    for parameter in _parameters(layer, *SCALES):
        yield parameter, mxfp4_layouts.scale_sizes(*parameter.shape[1:])
