# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NVFP4 MoE conversions that replace upstream's, in place where bytes allow.

Ownership: `prepare_nvfp4_moe_layer_*` and `reorder_*` work on a layer's weights and
overwrite them; `prepare_static_*` leaves the tensors that it is given intact.
"""

from typing import TYPE_CHECKING

import torch

from vllm.model_executor.layers.quantization.utils.flashinfer_layouts import (
    layout_of,
    log_padding,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_layouts import (
    shuffled_nvfp4,
    swizzled_nvfp4,
    trtllm_sizes,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    amax_for_moe_activation_quant,
)
from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    check_multiple,
    convert_,
    expert_bytes,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend


def reorder_w1w3_to_w3w1(
    weight: torch.Tensor, scale: torch.Tensor, dim: int = -2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Swap the two halves of `weight` and of `scale` along `dim`, in place.

    Args:
        weight: contiguous, any dtype, `[w1, w3]` along `dim`.
        scale: contiguous, its scales, halves along the same dimension.
        dim: the dimension that holds both projections.

    Returns:
        The arguments.

    Raises:
        ValueError: a tensor is not contiguous or has an odd size in `dim`.

    """
    steps = []
    for name, tensor in (("weight", weight), ("scale", scale)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()} and must be contiguous"
            )
        check_multiple(name, f"entries in dimension {dim}", tensor.shape[dim], 2)
        at = dim % tensor.dim()
        outer = tensor.shape[:at].numel()
        if tensor.numel() == 0:
            continue
        matrix = tensor.data.view(outer, tensor.shape[at], -1)
        steps.append((matrix, layout_of(name, matrix, halves=2, swap=True)))
    convert_(*steps)
    return weight, scale


def prepare_static_weights_for_trtllm_fp4_moe(
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm1_scales_linear_fp4_bytes: torch.Tensor,
    gemm2_scales_linear_fp4_bytes: torch.Tensor,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    is_gated_activation: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shuffle NVFP4 weights and scales for FlashInfer's TRT-LLM kernel.

    Shapes of the tensors given, of bytes, up to a reshape:
    gemm1 [experts, (2 *) intermediate, hidden / 2 or hidden / 16],
    gemm2 [experts, hidden, intermediate / 2 or intermediate / 16].

    Returns:
        New tensors: gemm1 weights (uint8), gemm1 scales (float8_e4m3fn, in 128x4
        tiles), gemm2 weights, gemm2 scales.

    """
    rows = intermediate_size * (2 if is_gated_activation else 1)
    named = {
        "gemm1_weights": (gemm1_weights, rows, hidden_size // 2),
        "gemm2_weights": (gemm2_weights, hidden_size, intermediate_size // 2),
        "gemm1_scales_linear_fp4_bytes": (
            gemm1_scales_linear_fp4_bytes,
            rows,
            hidden_size // 16,
        ),
        "gemm2_scales_linear_fp4_bytes": (
            gemm2_scales_linear_fp4_bytes,
            hidden_size,
            intermediate_size // 16,
        ),
    }
    matrices = []
    for name, (tensor, height, width) in named.items():
        if tensor.element_size() != 1 or tensor.numel() != num_experts * height * width:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, {tensor.dtype}, and must "
                f"hold {num_experts} x {height} x {width} bytes"
            )
        matrices.append(expert_bytes(tensor).reshape(num_experts, height, width))
    w13, w2, w13_scale, w2_scale = matrices
    return shuffled_nvfp4(
        w13, w2, w13_scale, w2_scale, is_gated_activation, swap=False, overwrite=False
    )


def prepare_nvfp4_moe_layer_for_fi_or_cutlass(
    backend: "NvFp4MoeBackend",
    layer: "RoutedExperts",
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_scale_2: torch.Tensor,
    a13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_scale_2: torch.Tensor,
    a2_scale: torch.Tensor,
    is_act_and_mul: bool,
    trtllm_hidden_alignment: int = 256,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]:
    """Convert NVFP4 MoE weights to the layout of a FlashInfer or CUTLASS kernel.

    Weights and block scales are overwritten; what needs padding moves to a new
    tensor, and a parameter it came from is released at once.

    Args:
        backend: whose layout it is.
        layer: its `moe_config` learns the padded sizes.
        w13: packed FP4 bytes [experts, (2 *) intermediate, hidden / 2].
        w13_scale: float8_e4m3fn [experts, (2 *) intermediate, hidden / 16].
        w13_scale_2: per-tensor scales, returned as they are.
        a13_scale: activation scales, one for all experts where the backend shares them.
        w2: packed FP4 bytes [experts, hidden, intermediate / 2].
        w2_scale: float8_e4m3fn [experts, hidden, intermediate / 16].
        w2_scale_2: as w13_scale_2.
        a2_scale: as a13_scale.
        is_act_and_mul: w13 holds [gate; up].
        trtllm_hidden_alignment: multiple of the hidden size for TRT-LLM.

    Returns:
        w13, w13_scale, w13_scale_2, a13_scale, w2, w2_scale, w2_scale_2, a2_scale.

    """
    # The oracle imports this module.
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import (
        NvFp4MoeBackend,
        is_global_sf_supported_for_nvfp4_backend,
    )

    up_first = (
        NvFp4MoeBackend.FLASHINFER_CUTLASS,
        NvFp4MoeBackend.FLASHINFER_TRTLLM,
        NvFp4MoeBackend.FLASHINFER_B12X,
    )
    others = (NvFp4MoeBackend.VLLM_CUTLASS, NvFp4MoeBackend.FLASHINFER_CUTEDSL_BATCHED)
    assert backend in up_first + others, f"{backend} has another layout"
    config = layer.moe_config
    gated = layer.activation.is_gated
    swap = gated and is_act_and_mul and backend in up_first
    trtllm = backend == NvFp4MoeBackend.FLASHINFER_TRTLLM

    if trtllm:
        hidden, intermediate = trtllm_sizes(w13, w2, gated, trtllm_hidden_alignment)
        for what, size, aligned in (
            ("hidden", 2 * w13.shape[2], hidden),
            ("intermediate", 2 * w2.shape[2], intermediate),
        ):
            if size != aligned:
                log_padding(what, size, aligned)
        w13, w13_scale, w2, w2_scale = shuffled_nvfp4(
            w13, w2, w13_scale, w2_scale, gated, swap, hidden, intermediate
        )
        if config.hidden_dim_unpadded is None:
            config.hidden_dim_unpadded = config.hidden_dim
        config.hidden_dim = hidden
        config.intermediate_size_per_partition = intermediate
    else:
        w13, w13_scale, w2, w2_scale = swizzled_nvfp4(
            w13, w2, w13_scale, w2_scale, is_act_and_mul, swap, backend.value
        )

    experts = w13.shape[0]
    if is_global_sf_supported_for_nvfp4_backend(backend):
        eplb = config.moe_parallel_config.enable_eplb
        a13_scale, a2_scale = (
            # As `repeat` does, which takes longer.
            amax_for_moe_activation_quant(scale, eplb)
            .expand(experts)
            .clone(memory_format=torch.contiguous_format)
            for scale in (a13_scale, a2_scale)
        )
    else:
        a13_scale = a13_scale.max(dim=1).values.to(torch.float32)
    return w13, w13_scale, w13_scale_2, a13_scale, w2, w2_scale, w2_scale_2, a2_scale
