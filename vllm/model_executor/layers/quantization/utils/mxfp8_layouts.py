# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MXFP8 expert weights and scales in the layout of FlashInfer's TRT-LLM kernel."""

from typing import Any

import torch

from vllm.model_executor.layers.quantization.utils.flashinfer_layouts import (
    FP8,
    check_fp8,
    layout_of,
    log_padding,
)
from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    SCALE_128X4,
    check_experts,
    convert_layer,
)
from vllm.utils.math_utils import round_up

SCALE_BYTES = (torch.uint8, torch.float8_e8m0fnu)


class Mxfp8Sizes:
    """Sizes of one layer's MXFP8 experts before and after padding."""

    def __init__(
        self,
        w13: torch.Tensor,
        w2: torch.Tensor,
        is_act_and_mul: bool,
        min_alignment: int,
        hidden_alignment: int,
    ):
        experts, self.hidden, self.intermediate = w2.shape
        self.halves = 2 if is_act_and_mul else 1
        rows = self.halves * self.intermediate
        check_experts("w13", w13, shape=(experts, rows, self.hidden))
        self.aligned_intermediate = round_up(self.intermediate, min_alignment)
        self.aligned_hidden = round_up(self.hidden, hidden_alignment)

    @property
    def padding(self) -> bool:
        return (self.intermediate, self.hidden) != (
            self.aligned_intermediate,
            self.aligned_hidden,
        )

    def log(self) -> None:
        for what, size, aligned in (
            ("intermediate", self.intermediate, self.aligned_intermediate),
            ("hidden", self.hidden, self.aligned_hidden),
        ):
            if size != aligned:
                log_padding(what, size, aligned)

    def blocks(self, w13_scale: torch.Tensor) -> tuple[int, int]:
        """Scales per padded row of w13 and of w2; `w13_scale` is 3-D."""
        block = self.hidden // w13_scale.shape[2]
        for what, size in (
            ("hidden", self.aligned_hidden),
            ("intermediate", self.aligned_intermediate),
        ):
            if size % block:
                raise ValueError(
                    f"w13_scale has blocks of {block} values, which do not divide "
                    f"the padded {what} size {size}"
                )
        return self.aligned_hidden // block, self.aligned_intermediate // block


def scale_matrix(name: str, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Block scales of `weight` as [experts, rows, blocks], also when given flat."""
    experts, rows = weight.shape[:2]
    if scale.shape[0] != experts or (scale.numel() and scale[0].numel() % rows):
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)}, which cannot be divided into "
            f"{experts} experts of {rows} rows"
        )
    return scale.data.reshape(experts, rows, -1) if scale.dim() == 2 else scale


def shuffled_mxfp8(
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    interleave: bool,
    swap: bool = False,
    sizes: Mxfp8Sizes | None = None,
    overwrite: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """MXFP8 weights and scales for the TRT-LLM kernel, in one pass each.

    Args:
        w13: FP8 [experts, rows, columns].
        w2: as w13.
        w13_scale: UE8M0 bytes [experts, rows, columns / 32], or flat.
        w2_scale: as w13_scale.
        interleave: alternate the rows of the two projections of w13.
        swap: first make [up; gate] of w13's [gate; up].
        sizes: pad to these before all else.
        overwrite: convert in place what does not grow.

    """
    halves = 2 if swap or interleave else 1
    up: dict[str, Any] = dict(
        halves=halves, swap=swap, interleave=interleave, epilogue_tile_m=128
    )
    down: dict[str, Any] = dict(epilogue_tile_m=128)
    w13_3d = scale_matrix("w13_scale", w13_scale, w13)
    w2_3d = scale_matrix("w2_scale", w2_scale, w2)
    columns: tuple[int | None, ...] = (None, None, None, None)
    if sizes is not None and sizes.padding:
        up["padded_half"] = sizes.aligned_intermediate * sizes.halves // halves
        down["padded_half"] = sizes.aligned_hidden
        columns = (
            sizes.aligned_hidden,
            sizes.aligned_intermediate,
            *sizes.blocks(w13_3d),
        )
    check_fp8("w13", w13)
    check_fp8("w2", w2)
    for name, scale, weight in (("w13_scale", w13_3d, w13), ("w2_scale", w2_3d, w2)):
        check_experts(name, scale, SCALE_BYTES, (*weight.shape[:2], None))
    tiled: dict[str, Any] = dict(tiling=SCALE_128X4, fill=127)
    steps = [
        (w13, layout_of("w13", w13, **up, padded_row_bytes=columns[0]), FP8),
        (w2, layout_of("w2", w2, **down, padded_row_bytes=columns[1]), FP8),
        (
            w13_3d,
            layout_of("w13_scale", w13_3d, **up, padded_row_bytes=columns[2], **tiled),
            w13_scale.dtype,
        ),
        (
            w2_3d,
            layout_of("w2_scale", w2_3d, **down, padded_row_bytes=columns[3], **tiled),
            w2_scale.dtype,
        ),
    ]
    new_w13, new_w2, new_w13_scale, new_w2_scale = convert_layer(
        *steps, overwrite=overwrite
    )
    return (
        new_w13,
        new_w2,
        new_w13_scale.flatten(1) if w13_scale.dim() == 2 else new_w13_scale,
        new_w2_scale.flatten(1) if w2_scale.dim() == 2 else new_w2_scale,
    )
