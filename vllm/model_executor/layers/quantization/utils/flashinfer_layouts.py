# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""FlashInfer's MoE weight layouts as conversions.

The row orders come from FlashInfer itself, which owns them; here they are joined
with the swap of gate and up, with padding, and with a tiling, so that one pass
does all of it.
"""

import functools

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.utils.weight_permutation import (
    ROW_MAJOR,
    Conversion,
    Tiling,
    check_experts,
    check_multiple,
    convert_,
    expert_bytes,
)

logger = init_logger(__name__)

FP8 = torch.float8_e4m3fn
BYTE_DTYPES = (torch.uint8, torch.float8_e4m3fn)


def shuffle_block(epilogue_tile_m: int) -> int:
    """Rows that FlashInfer's row shuffle permutes among themselves."""
    return 32 if epilogue_tile_m % 128 == 0 else 16


def padded_halves(half: int, padded: int, halves: int, swap: bool) -> torch.Tensor:
    """Source rows of [gate; up] (or of the one projection), each padded at its end
    to `padded` rows, in reverse order with `swap`; -1 for padding."""
    order = range(halves - 1, -1, -1) if swap else range(halves)
    filler = torch.full((padded - half,), -1)
    parts = [torch.cat((torch.arange(i * half, (i + 1) * half), filler)) for i in order]
    return torch.cat(parts)


@functools.cache
def moe_layout(
    rows: int,
    row_bytes: int,
    *,
    halves: int = 1,
    padded_half: int | None = None,
    padded_row_bytes: int | None = None,
    swap: bool = False,
    interleave: bool = False,
    epilogue_tile_m: int | None = None,
    tiling: Tiling = ROW_MAJOR,
    fill: int = 0,
) -> Conversion:
    """Conversion of expert matrices of `rows` rows of `row_bytes` bytes.

    In this order: each of the `halves` of the rows is padded to `padded_half`
    rows, their order is reversed with `swap`, the rows of both halves alternate
    with `interleave`, and rows are shuffled for the transposed MMA output of
    FlashInfer's kernels if `epilogue_tile_m` is given.
    """
    # Index tables are made outside any default device, inside or outside a load.
    with torch.device("cpu"):
        return _moe_layout(
            rows,
            row_bytes,
            halves,
            padded_half,
            padded_row_bytes,
            swap,
            interleave,
            epilogue_tile_m,
            tiling,
            fill,
        )


def _moe_layout(
    rows: int,
    row_bytes: int,
    halves: int,
    padded_half: int | None,
    padded_row_bytes: int | None,
    swap: bool,
    interleave: bool,
    epilogue_tile_m: int | None,
    tiling: Tiling,
    fill: int,
) -> Conversion:
    half = rows // halves
    order = padded_halves(half, padded_half or half, halves, swap)
    if interleave:
        from flashinfer.fused_moe.core import (
            get_reorder_rows_for_gated_act_gemm_row_indices,
        )

        shape_only = torch.empty((order.numel(), 1), device="meta")
        order = order[get_reorder_rows_for_gated_act_gemm_row_indices(shape_only)]
    if epilogue_tile_m is not None and order.numel():
        from flashinfer.utils import get_shuffle_matrix_a_row_indices

        shape_only = torch.empty((order.numel(), 1), device="meta")
        order = order[get_shuffle_matrix_a_row_indices(shape_only, epilogue_tile_m)]
    return Conversion(order, (rows, row_bytes), padded_row_bytes, tiling, fill)


def layout_of(
    name: str, weight: torch.Tensor, *, halves: int = 1, **options
) -> Conversion:
    """`moe_layout` for `weight`, [experts, rows, columns]; errors name the tensor.

    Raises ValueError where the rows or row bytes, after padding, do not fit the
    layout.
    """
    rows, row_bytes = expert_bytes(weight).shape[1:]
    check_multiple(name, "rows", rows, halves)
    padded_rows = halves * (options.get("padded_half") or rows // halves)
    padded_bytes = options.get("padded_row_bytes") or row_bytes
    if options.get("epilogue_tile_m") is not None:
        block = shuffle_block(options["epilogue_tile_m"])
        check_multiple(name, "rows", padded_rows, block)
    options.get("tiling", ROW_MAJOR).check(name, padded_rows, padded_bytes)
    return moe_layout(rows, row_bytes, halves=halves, **options)


def padded(
    name: str,
    weight: torch.Tensor,
    *,
    halves: int = 1,
    half: int | None = None,
    columns: int | None = None,
    fill: int = 0,
) -> torch.Tensor:
    """A copy of `weight`, [experts, rows, columns], each of its halves padded to
    `half` rows and its rows to `columns` elements, with bytes `fill`."""
    check_experts(name, weight)
    row_bytes = None if columns is None else columns * weight.element_size()
    layout = layout_of(
        name,
        weight,
        halves=halves,
        padded_half=half,
        padded_row_bytes=row_bytes,
        fill=fill,
    )
    (result,) = convert_((weight, layout))
    return result.view(weight.dtype)


def log_padding(what: str, size: int, aligned: int) -> None:
    """Say once per size that weights are padded."""
    if what == "hidden":
        logger.warning_once(
            "FlashInfer's MoE kernel needs hidden size %d, so the weights of hidden "
            "size %d are padded. Activations are padded and trimmed at run time.",
            aligned,
            size,
        )
        return
    logger.info_once(
        "FlashInfer's MoE kernel needs %s size %d, so the weights of %s size %d "
        "are padded.",
        what,
        aligned,
        what,
        size,
    )


def check_fp8(name: str, weight: torch.Tensor) -> None:
    """Raise ValueError unless `weight` is FP8, or its bytes, per expert."""
    check_experts(name, weight, BYTE_DTYPES)
