# SPDX-License-Identifier: Apache-2.0
"""Swizzled MXFP4 expert weights for SM 9.0, with little scratch.

triton_kernels swizzles all experts at once through several tensors of four bytes per
weight byte. Here values and scales are converted in their own storage where their
size stays the same, else into one tensor.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    Conversion,
    Tiling,
    convert_,
    use_triton,
)

ROWS, COLUMNS = 16, 32  # rows by bytes that the value swizzle permutes and packs
SCALE_GROUPS = 4  # the kernel reads this many scales of a row at a time


def convert_experts(
    convert_layout: Callable[..., Any], tensor: Any, layout: Any, **options: Any
) -> Any:
    """`convert_layout(tensor, layout, **options)`, of triton_kernels.

    For the layouts of SM 9.0 the tensor is overwritten (it shares its storage with
    the result) when its size stays the same, and the rows of scales are padded to a
    multiple of four.

    Args:
        convert_layout: what converts every other layout.
        tensor: a triton_kernels tensor over a strided [experts, columns, rows] view
            of a contiguous uint8 [experts, rows, columns].
        layout: a layout class of triton_kernels.
    """
    name = getattr(layout, "name", None)
    data = tensor.storage.data.mT
    usable = data.dim() == 3 and data.dtype == torch.uint8 and data.numel()
    if name not in ("HOPPER_VALUE", "HOPPER_SCALE") or not usable:
        return convert_layout(tensor, layout, **options)
    shape = list(tensor.shape)
    if name == "HOPPER_SCALE":
        shape[1] += -shape[1] % SCALE_GROUPS
        new_layout = layout(torch.Size(shape), **options)
        result = swizzle_scales(data, new_layout.num_warps)
    else:
        new_layout = layout(tensor.storage.data.shape, **options)
        result = swizzle_values(data, new_layout)
    storage = type(tensor.storage)(result, new_layout)
    return type(tensor)(storage, dtype=tensor.dtype, shape=shape)


def swizzle_values(values: torch.Tensor, layout: Any) -> torch.Tensor:
    """Swizzle uint8 [experts, rows, columns] for the MMA of SM 9.0.

    In place where rows are a multiple of 16, columns of 32 and the values are
    contiguous; else into a new tensor, padded with zeros.

    Returns:
        uint8 [experts, 4 * columns, rows / 4], the last two dimensions transposed.
    """
    experts, rows, columns = values.shape
    tall, wide = rows + -rows % ROWS, columns + -columns % COLUMNS
    if (tall, wide) != (rows, columns) or not values.is_contiguous():
        out = values.new_empty((experts, tall // 4, 4 * wide))
    else:
        out = values.view(experts, rows // 4, 4 * columns)
    words = columns % 8 == values.stride(0) % 8 == values.stride(1) % 8 == 0
    words = words and values.stride(2) == 1 and values.data_ptr() % 8 == 0
    if words and use_triton(values):
        from vllm.model_executor.layers.quantization.utils.mxfp4_layouts_triton import (
            swizzle,
        )

        swizzle(values, out)
        return out.mT
    # Blocks of 16 rows stay apart, so an eighth of an expert at a time keeps the
    # swizzle's own scratch, about seven times its input, below one expert.
    step = max(tall // 8 // ROWS, 1) * ROWS
    for expert in range(experts):
        for first in range(0, rows, step):
            part = values[expert : expert + 1, first : first + step]
            swizzled = layout.swizzle_data(part.mT).mT
            out[expert, first // 4 : first // 4 + swizzled.shape[1]].copy_(swizzled[0])
    return out.mT


@functools.cache
def scale_layout(rows: int, groups: int, num_warps: int) -> Conversion:
    """Scales [rows, groups] for SM 9.0: tiles of 32 rows per warp by two groups, in
    the order of the threads that read them, padded with zeros."""
    tile = 32 * num_warps
    tall = rows + -rows % tile
    tiling = Tiling(
        "SM 9.0 scale tiles",
        (2, num_warps, 2, 8),
        run=2,
        order=(0, 2, 5, 1, 4, 6, 3),
    )
    with torch.device("cpu"):
        order = torch.arange(tall)
        order[rows:] = -1
        wide = groups + -groups % SCALE_GROUPS
        return Conversion(order, (rows, groups), wide, tiling)


def swizzle_scales(scales: torch.Tensor, num_warps: int) -> torch.Tensor:
    """Swizzle scales, uint8 [experts, rows, groups of 32 values], for SM 9.0.

    In place if rows are a multiple of 32 per warp, groups of four, and the scales are
    contiguous; else into a new tensor.

    Returns:
        uint8 [experts, 32 * groups, rows / 32], the last two dimensions transposed.
    """
    layout = scale_layout(scales.shape[1], scales.shape[2], num_warps)
    # Scales are a seventeenth of a layer, of which scratch may take 2 %.
    (result,) = convert_((scales, layout), budget=scales.numel() * 17 // 64)
    experts, rows, groups = result.shape
    return result.view(experts, rows // 32, 32 * groups).mT
