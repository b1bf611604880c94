# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FlashInfer MoE conversions that replace upstream's, in place where bytes allow.

Ownership: `prepare_*`, `rotate_*` and `convert_*` work on a layer's weights and
overwrite them; `_shuffle_*` and `align_*` leave the tensors that they are given
intact.
"""

import torch

from vllm.model_executor.layers.quantization.utils.flashinfer_layouts import (
    FP8,
    check_fp8,
    layout_of,
    log_padding,
    padded,
)
from vllm.model_executor.layers.quantization.utils.fp8_layouts import (
    block_major_fp8,
    swapped,
    swapped_and_aligned,
)
from vllm.model_executor.layers.quantization.utils.mxfp8_layouts import (
    Mxfp8Sizes,
    scale_matrix,
    shuffled_mxfp8,
)
from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    BLOCK_MAJOR_K,
    check_experts,
    check_multiple,
    convert_,
)
from vllm.utils.math_utils import round_up


def rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(
    gemm1_weights: torch.Tensor, gemm2_weights: torch.Tensor, is_gated_activation: bool
):
    """Shuffle FP8 weights with per-tensor scales for FlashInfer's TRT-LLM kernel.

    Args:
        gemm1_weights: FP8 [experts, (2 *) intermediate, hidden], overwritten.
        gemm2_weights: FP8 [experts, hidden, intermediate], overwritten.
        is_gated_activation: interleave the rows of the two projections of gemm1.

    """
    check_fp8("gemm1_weights", gemm1_weights)
    check_fp8("gemm2_weights", gemm2_weights)
    check_multiple("gemm1_weights", "rows", gemm1_weights.shape[1], 2)
    gemm1 = layout_of(
        "gemm1_weights",
        gemm1_weights,
        halves=2 if is_gated_activation else 1,
        interleave=is_gated_activation,
        epilogue_tile_m=128,
    )
    gemm2 = layout_of("gemm2_weights", gemm2_weights, epilogue_tile_m=128)
    results = convert_((gemm1_weights, gemm1), (gemm2_weights, gemm2))
    gemm1_weights.data = results[0].view(FP8)
    gemm2_weights.data = results[1].view(FP8)


def convert_moe_weights_to_flashinfer_trtllm_block_layout(
    cache_permute_indices: dict[torch.Size, torch.Tensor],
    w13_weight: torch.Tensor,
    w2_weight: torch.Tensor,
    is_gated_act_gemm: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert BF16 expert weights to the block layout of FlashInfer's TRT-LLM kernel.

    Args:
        cache_permute_indices: not used; index tables are kept with the layout.
        w13_weight: bfloat16 [experts, (2 *) intermediate, hidden], overwritten.
        w2_weight: bfloat16 [experts, hidden, intermediate], overwritten.
        is_gated_act_gemm: w13 holds [gate; up] and becomes [up; gate], interleaved.

    Returns:
        Views of both weights, [experts, row bytes / 128, rows, 64].

    """
    del cache_permute_indices
    weights = {"w13_weight": w13_weight, "w2_weight": w2_weight}
    steps, shapes = [], []
    for name, weight in weights.items():
        check_experts(name, weight, (torch.bfloat16,))
        if weight.shape[0] and not weight[0].is_contiguous():
            raise ValueError(
                f"{name} has strides {weight.stride()}: each expert must be "
                "contiguous, because it is converted in place"
            )
        gated = is_gated_act_gemm and name == "w13_weight"
        layout = layout_of(
            name,
            weight,
            halves=2 if gated else 1,
            swap=gated,
            interleave=gated,
            epilogue_tile_m=128,
            tiling=BLOCK_MAJOR_K,
        )
        steps.append((weight, layout))
        experts, rows, columns = weight.shape
        shapes.append((experts, columns * 2 // 128, rows, 128))
    w13, w2 = convert_(*steps, gaps=True)
    return (
        w13.view(shapes[0]).view(torch.bfloat16),
        w2.view(shapes[1]).view(torch.bfloat16),
    )


def align_fp4_moe_weights_for_fi(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    is_act_and_mul: bool,
    min_alignment: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Zero-pad the intermediate size of packed FP4 weights and their block scales.

    Gate and up are padded each on its own. Without padding the arguments are
    returned as they are.

    Args:
        w13: [experts, (2 *) intermediate, hidden / 2], two values a byte.
        w13_scale: [experts, (2 *) intermediate, hidden / 16].
        w2: [experts, hidden, intermediate / 2].
        w2_scale: [experts, hidden, intermediate / 16].
        is_act_and_mul: w13 holds two projections.
        min_alignment: the intermediate size becomes a multiple of this.

    Returns:
        The four tensors and the padded intermediate size.

    """
    experts, hidden, packed = w2.shape
    intermediate = 2 * packed
    aligned = round_up(intermediate, min_alignment)
    if aligned == intermediate:
        return w13, w13_scale, w2, w2_scale, intermediate
    log_padding("intermediate", intermediate, aligned)
    halves = 2 if is_act_and_mul else 1
    rows = halves * intermediate
    check_experts("w13", w13, shape=(experts, rows, hidden // 2))
    check_experts("w13_scale", w13_scale, shape=(experts, rows, hidden // 16))
    check_experts("w2_scale", w2_scale, shape=(experts, hidden, None))
    return (
        padded("w13", w13, halves=halves, half=aligned),
        padded("w13_scale", w13_scale, halves=halves, half=aligned),
        padded("w2", w2, columns=aligned // 2),
        padded("w2_scale", w2_scale, columns=aligned // 16),
        aligned,
    )


def align_fp4_moe_hidden_dim_for_fi(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    min_alignment: int = 256,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Zero-pad the hidden size of packed FP4 weights and their block scales.

    Shapes as in `align_fp4_moe_weights_for_fi`; activations are padded to the
    returned hidden size at run time. Without padding the arguments are returned
    as they are.
    """
    hidden = 2 * w13.shape[2]
    aligned = round_up(hidden, min_alignment)
    if aligned == hidden:
        return w13, w13_scale, w2, w2_scale, hidden
    log_padding("hidden", hidden, aligned)
    return (
        padded("w13", w13, columns=aligned // 2),
        padded("w13_scale", w13_scale, columns=aligned // 16),
        padded("w2", w2, half=aligned),
        padded("w2_scale", w2_scale, half=aligned),
        aligned,
    )


def align_moe_weights_for_fi(
    w13: torch.Tensor, w2: torch.Tensor, is_act_and_mul: bool, min_alignment: int = 16
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Zero-pad the intermediate size of expert weights of any dtype.

    Args:
        w13: [experts, (2 *) intermediate, hidden]; gate and up padded separately.
        w2: [experts, hidden, intermediate].
        is_act_and_mul: w13 holds two projections.
        min_alignment: the intermediate size becomes a multiple of this.

    Returns:
        Both weights, the arguments themselves without padding, and the padded
        intermediate size.

    """
    experts, hidden, intermediate = w2.shape
    aligned = round_up(intermediate, min_alignment)
    if aligned == intermediate:
        return w13, w2, intermediate
    log_padding("intermediate", intermediate, aligned)
    halves = 2 if is_act_and_mul else 1
    check_experts("w13", w13, shape=(experts, halves * intermediate, hidden))
    return (
        padded("w13", w13, halves=halves, half=aligned),
        padded("w2", w2, columns=aligned),
        aligned,
    )


def align_mxfp8_moe_weights_for_fi_trtllm(
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    is_act_and_mul: bool,
    min_alignment: int,
    hidden_alignment: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """Pad MXFP8 expert weights and UE8M0 scales for FlashInfer's TRT-LLM kernel.

    Weights are padded with 0, scales with 127, which stands for 1.0.

    Args:
        w13: FP8 [experts, (2 *) intermediate, hidden].
        w2: FP8 [experts, hidden, intermediate].
        w13_scale: uint8, one scale per block of columns, [experts, rows, blocks] or
            [experts, rows * blocks]; the result has as many dimensions.
        w2_scale: as w13_scale.
        is_act_and_mul: w13 holds two projections.
        min_alignment: multiple for the intermediate size.
        hidden_alignment: multiple for the hidden size.

    Returns:
        The four tensors and the padded intermediate and hidden sizes.

    """
    sizes = Mxfp8Sizes(w13, w2, is_act_and_mul, min_alignment, hidden_alignment)
    if not sizes.padding:
        return w13, w2, w13_scale, w2_scale, sizes.intermediate, sizes.hidden
    sizes.log()
    w13_3d = scale_matrix("w13_scale", w13_scale, w13)
    w2_3d = scale_matrix("w2_scale", w2_scale, w2)
    up = dict(halves=sizes.halves, half=sizes.aligned_intermediate)
    down = dict(half=sizes.aligned_hidden)
    hidden_blocks, intermediate_blocks = sizes.blocks(w13_3d)
    new_w13_scale = padded("w13_scale", w13_3d, **up, columns=hidden_blocks, fill=127)
    new_w2_scale = padded(
        "w2_scale", w2_3d, **down, columns=intermediate_blocks, fill=127
    )
    return (
        padded("w13", w13, **up, columns=sizes.aligned_hidden),
        padded("w2", w2, **down, columns=sizes.aligned_intermediate),
        new_w13_scale.flatten(1) if w13_scale.dim() == 2 else new_w13_scale,
        new_w2_scale.flatten(1) if w2_scale.dim() == 2 else new_w2_scale,
        sizes.aligned_intermediate,
        sizes.aligned_hidden,
    )


def _shuffle_deepseek_fp8_moe_weights(
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shuffle FP8 weights with block scales for FlashInfer's TRT-LLM kernel.

    Args:
        w13: FP8 [experts, 2 * intermediate, hidden].
        w2: FP8 [experts, hidden, intermediate].

    Returns:
        New tensors, FP8 [experts, columns / 128, rows, 128] (BlockMajorK).

    """
    return block_major_fp8(w13, w2, swap=False, overwrite=False)


def _shuffle_mxfp8_moe_weights(
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    is_gated: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shuffle MXFP8 weights and scales for FlashInfer's TRT-LLM kernel.

    Args:
        w13: FP8 [experts, (2 *) intermediate, hidden].
        w2: FP8 [experts, hidden, intermediate].
        w13_scale: UE8M0 bytes, [experts, rows, columns / 32].
        w2_scale: as w13_scale.
        is_gated: interleave the rows of the two projections of w13.

    Returns:
        New tensors of the same shapes, weights as float8_e4m3fn.

    """
    return shuffled_mxfp8(
        w13, w2, w13_scale, w2_scale, interleave=is_gated, overwrite=False
    )


def prepare_fp8_moe_layer_for_fi(
    layer: torch.nn.Module,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_input_scale: torch.Tensor | None,
    w2_scale: torch.Tensor,
    w2_input_scale: torch.Tensor | None,
    is_trtllm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert FP8 MoE weights to the layout of FlashInfer's kernels.

    Which scales the layer has decides: per tensor, per block (FP32), or MXFP8
    (uint8, with `weight_block_size`). Weights and block scales are overwritten, or
    replaced where they need padding; the layer's `moe_config` learns the padded
    sizes.

    Args:
        layer: has `activation`, `moe_config`, and perhaps `weight_block_size`.
        w13: FP8 [experts, (2 *) intermediate, hidden], gate before up.
        w2: FP8 [experts, hidden, intermediate].
        w13_scale: of w13.
        w13_input_scale: needed per tensor with TRT-LLM.
        w2_scale: of w2.
        w2_input_scale: as w13_input_scale.
        is_trtllm: for the TRT-LLM kernel, else for CUTLASS.

    Returns:
        w13, w2, w13_scale, w2_scale.

    """
    config = layer.moe_config
    gated = layer.activation.is_gated
    swap = config.is_act_and_mul
    blocks = getattr(layer, "weight_block_size", None) is not None

    if is_trtllm and blocks and w13_scale.dtype == torch.uint8:
        sizes = Mxfp8Sizes(w13, w2, swap, min_alignment=128, hidden_alignment=256)
        sizes.log()
        results = shuffled_mxfp8(w13, w2, w13_scale, w2_scale, gated, swap, sizes)
        config.intermediate_size_per_partition = sizes.aligned_intermediate
        config.hidden_dim = sizes.aligned_hidden
        return results

    if not blocks:
        if is_trtllm:
            assert w13_input_scale is not None and w2_input_scale is not None
        # The kernel's order is one of two projections, which have been swapped.
        at_once = is_trtllm and gated == swap
        w13, w2 = swapped_and_aligned(config, w13, w2, gated, shuffle=at_once)
        if is_trtllm and not at_once:
            rotate_weights_for_fi_trtllm_fp8_per_tensor_moe(w13, w2, gated)
        return w13, w2, w13_scale, w2_scale

    scales = swapped("w13_scale", w13_scale) if swap else w13_scale
    if is_trtllm:
        w13, w2 = block_major_fp8(w13, w2, swap)
    elif swap:
        w13 = swapped("w13", w13)
    # CUTLASS on SM 9.0 turns block scales near zero, those of experts that are
    # never used, into NaN.
    scales.clamp_(min=1e-10)
    w2_scale.clamp_(min=1e-10)
    return w13, w2, scales, w2_scale
