# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FP8 expert weights in the layouts of FlashInfer's kernels."""

import torch

from vllm.model_executor.layers.quantization.utils.flashinfer_layouts import (
    FP8,
    check_fp8,
    layout_of,
    log_padding,
)
from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    BLOCK_MAJOR_K,
    check_experts,
    convert_,
    convert_layer,
)
from vllm.utils.math_utils import round_up


def swapped(name: str, weight: torch.Tensor) -> torch.Tensor:
    """[up; gate] for [gate; up], in place where `weight` is contiguous."""
    check_experts(name, weight)
    (result,) = convert_((weight, layout_of(name, weight, halves=2, swap=True)))
    return result.view(weight.dtype)


def aligned_intermediate(w2: torch.Tensor, gated: bool) -> int:
    """Intermediate size that FlashInfer's kernels need for per-tensor scales."""
    return round_up(w2.shape[2], 16 if gated else 128)


def swapped_and_aligned(
    config, w13: torch.Tensor, w2: torch.Tensor, gated: bool, shuffle: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[up; gate] for [gate; up], each padded to `aligned_intermediate`, and with
    `shuffle` in the order of the TRT-LLM kernel."""
    swap = config.is_act_and_mul
    experts, hidden, intermediate = w2.shape
    aligned = aligned_intermediate(w2, gated)
    halves = 2 if swap else 1
    check_experts("w13", w13, shape=(experts, halves * intermediate, hidden))
    check_experts("w2", w2)
    if aligned != intermediate:
        log_padding("intermediate", intermediate, aligned)
    down = dict(padded_row_bytes=aligned * w2.element_size())
    up = dict(halves=halves, padded_half=aligned, swap=swap)
    if shuffle:
        check_fp8("w13", w13)
        check_fp8("w2", w2)
        down |= dict(epilogue_tile_m=128)
        up |= dict(epilogue_tile_m=128, interleave=gated)
    layouts = layout_of("w13", w13, **up), layout_of("w2", w2, **down)
    results = [w13, w2]
    steps = [
        (weight, layout, weight.dtype)
        for weight, layout in zip(results, layouts, strict=True)
        if not layout.is_identity
    ]
    for (weight, _, _), result in zip(steps, convert_layer(*steps), strict=True):
        results[0 if weight is w13 else 1] = result
    config.intermediate_size_per_partition = aligned
    return results[0], results[1]


def block_major_fp8(
    w13: torch.Tensor, w2: torch.Tensor, swap: bool, overwrite: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 weights with block scales for the TRT-LLM kernel, BlockMajorK.

    Args:
        w13: FP8 [experts, (2 *) intermediate, hidden].
        w2: FP8 [experts, hidden, intermediate].
        swap: first make [up; gate] of w13's [gate; up].
        overwrite: convert in place.

    Returns:
        FP8 [experts, columns / 128, rows, 128] of both.

    """
    steps = []
    for name, weight in (("w13", w13), ("w2", w2)):
        check_fp8(name, weight)
        halves = 2 if swap and name == "w13" else 1
        layout = layout_of(
            name,
            weight,
            halves=halves,
            swap=halves == 2,
            epilogue_tile_m=64,
            tiling=BLOCK_MAJOR_K,
        )
        steps.append((weight, layout))
    results = []
    for result in convert_(*steps, overwrite=overwrite):
        experts, rows, row_bytes = result.shape
        results.append(result.view(experts, row_bytes // 128, rows, 128).view(FP8))
    return results[0], results[1]
