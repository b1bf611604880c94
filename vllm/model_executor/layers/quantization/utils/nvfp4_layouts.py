# SPDX-License-Identifier: Apache-2.0
"""NVFP4 expert weights in the layouts of FlashInfer's and CUTLASS kernels."""

import torch

from vllm.model_executor.layers.quantization.utils.flashinfer_layouts import (
    BYTE_DTYPES,
    FP8,
    layout_of,
)
from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    SCALE_128X4,
    Conversion,
    check_experts,
    convert_layer,
)
from vllm.utils.math_utils import round_up


def shuffled_nvfp4(
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    gated: bool,
    swap: bool,
    hidden: int | None = None,
    intermediate: int | None = None,
    overwrite: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Swap [gate; up], pad to `hidden` and `intermediate`, shuffle: one pass each.

    Returns w13, w13 scale, w2, w2 scale.
    """
    hidden = hidden or 2 * w13.shape[2]
    intermediate = intermediate or 2 * w2.shape[2]
    halves = 2 if gated else 1
    up = dict(
        halves=halves,
        padded_half=intermediate,
        swap=swap,
        interleave=gated,
        epilogue_tile_m=128,
    )
    down = dict(padded_half=hidden, epilogue_tile_m=128)
    tiled = dict(tiling=SCALE_128X4)
    plan = (
        ("w13", w13, dict(up, padded_row_bytes=hidden // 2), torch.uint8),
        ("w13_scale", w13_scale, up | tiled | {"padded_row_bytes": hidden // 16}, FP8),
        ("w2", w2, dict(down, padded_row_bytes=intermediate // 2), torch.uint8),
        (
            "w2_scale",
            w2_scale,
            down | tiled | {"padded_row_bytes": intermediate // 16},
            FP8,
        ),
    )
    steps = []
    for name, tensor, options, dtype in plan:
        check_experts(name, tensor, BYTE_DTYPES)
        steps.append((tensor, layout_of(name, tensor, **options), dtype))
    results = convert_layer(*steps, overwrite=overwrite)
    return results[0], results[1], results[2], results[3]


def swizzled_nvfp4(
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    gated: bool,
    swap: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales in 128x4 tiles, and an intermediate size that fills whole tiles.

    Args:
        gated: w13 holds two projections, which cannot be padded.
        swap: make [up; gate] of [gate; up].
        backend: for the error message.

    Returns w13, w13 scale, w2, w2 scale.
    """
    check_experts("w13", w13, BYTE_DTYPES, (None, w13_scale.shape[1], None))
    check_experts("w2", w2, BYTE_DTYPES)
    check_experts("w13_scale", w13_scale, (FP8,))
    check_experts("w2_scale", w2_scale, (FP8,))
    rows = w13.shape[1]
    padding = round_up(rows, 128) - rows
    if padding and gated:
        raise NotImplementedError(
            f"The {backend} NVFP4 backend cannot pad gate and up: w13 has {rows} rows "
            "and must have a multiple of 128"
        )
    halves = 2 if swap else 1
    up = dict(halves=halves, padded_half=(rows + padding) // halves, swap=swap)
    results = convert_layer(
        (w13, layout_of("w13", w13, **up), w13.dtype),
        (w13_scale, _tiled("w13_scale", w13_scale, w13_scale.shape[2], **up), FP8),
        (
            w2,
            layout_of("w2", w2, padded_row_bytes=w2.shape[2] + padding // 2),
            w2.dtype,
        ),
        (
            w2_scale,
            _tiled(
                "w2_scale",
                w2_scale,
                w2_scale.shape[2] + padding // 16,
                padded_half=round_up(w2_scale.shape[1], 128),
            ),
            FP8,
        ),
    )
    return results[0], results[1], results[2], results[3]


def _tiled(name: str, scale: torch.Tensor, columns: int, **options) -> Conversion:
    return layout_of(
        name,
        scale,
        padded_row_bytes=round_up(columns, 4),
        tiling=SCALE_128X4,
        **options,
    )
