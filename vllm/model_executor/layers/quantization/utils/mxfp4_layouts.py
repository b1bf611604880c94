# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Swizzled MXFP4 expert weights for SM 9.0, with little scratch.

triton_kernels swizzles all experts at once through several tensors of four bytes per
weight byte. Here values and scales are converted in their own storage where their
size stays the same, else into one tensor.
"""

import enum
import functools
from collections.abc import Callable
from typing import Any

import torch

from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    Conversion,
    Tiling,
    can_expand,
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


def swizzled_for_sm90(backend: enum.Enum) -> bool:
    """Whether this Mxfp4MoeBackend's weights are swizzled here on this device."""
    from vllm.platforms import current_platform

    ours = backend.name in ("TRITON", "TRITON_UNFUSED")
    return (
        ours
        and current_platform.is_cuda()
        and current_platform.is_device_capability(90)
    )


def value_sizes(rows: int, columns: int) -> tuple[int, int]:
    """Rows and row bytes of an expert's values, padded for the swizzle."""
    return rows + -rows % ROWS, columns + -columns % COLUMNS


def scale_sizes(rows: int, groups: int, num_warps: int = 8) -> tuple[int, int]:
    """Rows and groups of an expert's scales, padded for the swizzle."""
    return rows + -rows % (32 * num_warps), groups + -groups % SCALE_GROUPS


@functools.cache
def padded_values(rows: int, columns: int) -> Conversion:
    """Padding alone, of values [rows, columns]."""
    tall, wide = value_sizes(rows, columns)
    with torch.device("cpu"):
        order = torch.arange(tall)
        order[rows:] = -1
        return Conversion(order, (rows, columns), wide)


def swizzle_values(values: torch.Tensor, layout: Any) -> torch.Tensor:
    """Swizzle uint8 [experts, rows, columns] for the MMA of SM 9.0.

    In place where rows are a multiple of 16, columns of 32 and the values are
    contiguous, or where their storage has room for the padding; else into a new
    tensor. Padding is zeros.

    Returns:
        uint8 [experts, 4 * columns, rows / 4], the last two dimensions transposed.

    """
    experts, rows, columns = values.shape
    tall, wide = value_sizes(rows, columns)
    if (tall, wide) != (rows, columns):
        padding = padded_values(rows, columns)
        if can_expand(values, padding):
            (values,) = convert_((values, padding))
            rows, columns = tall, wide
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
    tall, wide = scale_sizes(rows, groups, num_warps)
    tiling = Tiling(
        "SM 9.0 scale tiles",
        (2, num_warps, 2, 8),
        run=2,
        order=(0, 2, 5, 1, 4, 6, 3),
    )
    with torch.device("cpu"):
        order = torch.arange(tall)
        order[rows:] = -1
        return Conversion(order, (rows, groups), wide, tiling)


def swizzle_scales(scales: torch.Tensor, num_warps: int) -> torch.Tensor:
    """Swizzle scales, uint8 [experts, rows, groups of 32 values], for SM 9.0.

    In place if rows are a multiple of 32 per warp, groups of four, and the scales are
    contiguous, or if their storage has room for the padding; else into a new tensor.

    Returns:
        uint8 [experts, 32 * groups, rows / 32], the last two dimensions transposed.

    """
    layout = scale_layout(scales.shape[1], scales.shape[2], num_warps)
    # Scales are a seventeenth of a layer, of which scratch may take 2 %.
    (result,) = convert_((scales, layout), budget=scales.numel() * 17 // 64)
    experts, rows, groups = result.shape
    return result.view(experts, rows // 32, 32 * groups).mT
