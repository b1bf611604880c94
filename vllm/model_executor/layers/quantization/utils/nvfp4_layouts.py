# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""NVFP4 expert weights in the layouts of FlashInfer's and CUTLASS kernels."""

from typing import Any

import torch

from vllm.model_executor.layers.quantization.utils.flashinfer_layouts import (
    BYTE_DTYPES,
    FP8,
    layout_of,
)
from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    SCALE_128X4,
    check_experts,
    convert_layer,
)
from vllm.utils.math_utils import round_up

#: NvFp4MoeBackend names whose scales are tiled without a shuffle of rows
TILED_BACKENDS = (
    "FLASHINFER_CUTLASS",
    "FLASHINFER_B12X",
    "VLLM_CUTLASS",
    "FLASHINFER_CUTEDSL_BATCHED",
)


def trtllm_sizes(
    w13: torch.Tensor, w2: torch.Tensor, gated: bool, hidden_alignment: int
) -> tuple[int, int]:
    """Hidden and intermediate size that TRT-LLM's kernel needs. Its shuffle works on
    128 rows of w13: 64 of each projection when gated."""
    hidden = round_up(2 * w13.shape[2], hidden_alignment)
    return hidden, round_up(2 * w2.shape[2], 64 if gated else 128)


def tiled_sizes(
    w13: torch.Tensor, w2: torch.Tensor, w13_scale: torch.Tensor, w2_scale: torch.Tensor
) -> list[tuple[int, int]]:
    """Rows and columns per expert of w13, w2 and their scales in whole 128x4 tiles."""
    rows = round_up(w13.shape[1], 128)
    padding = rows - w13.shape[1]
    return [
        (rows, w13.shape[2]),
        (w2.shape[1], w2.shape[2] + padding // 2),
        (rows, round_up(w13_scale.shape[2], 4)),
        (
            round_up(w2_scale.shape[1], 128),
            round_up(w2_scale.shape[2] + padding // 16, 4),
        ),
    ]


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

    Returns:
        w13, w13 scale, w2, w2 scale.

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
        w13: packed FP4 bytes [experts, rows, columns / 2].
        w2: as w13.
        w13_scale: float8_e4m3fn [experts, rows, columns / 16].
        w2_scale: as w13_scale.
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
    sizes = tiled_sizes(w13, w2, w13_scale, w2_scale)
    if sizes[0][0] != rows and gated:
        raise NotImplementedError(
            f"The {backend} NVFP4 backend cannot pad gate and up: w13 has {rows} rows "
            "and must have a multiple of 128"
        )
    halves = 2 if swap else 1
    up = dict(halves=halves, padded_half=sizes[0][0] // halves, swap=swap)
    tiled = dict(tiling=SCALE_128X4)
    plan: tuple[tuple[str, torch.Tensor, int, dict[str, Any]], ...] = (
        ("w13", w13, sizes[0][1], up),
        ("w13_scale", w13_scale, sizes[2][1], up | tiled),
        ("w2", w2, sizes[1][1], {}),
        ("w2_scale", w2_scale, sizes[3][1], tiled | {"padded_half": sizes[3][0]}),
    )
    results = convert_layer(
        *(
            (
                tensor,
                layout_of(name, tensor, padded_row_bytes=columns, **options),
                tensor.dtype,
            )
            for name, tensor, columns, options in plan
        )
    )
    return results[0], results[1], results[2], results[3]
