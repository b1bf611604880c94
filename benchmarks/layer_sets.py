# SPDX-License-Identifier: Apache-2.0
"""Weights of real models as plain tensors, and what a load does to them.

A layer set allocates what one rank of a model allocates when it is created, then
converts layer after layer with the sizes and lifetimes that vLLM 0.33.0 has, so that an
allocator can be measured without an engine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Layer = dict[str, torch.Tensor]
MIB = 1 << 20


@dataclass(frozen=True)
class Step:
    """A step of a load that has just ended: a place where vLLM reclaims."""

    weights: list[Layer]
    """Everything that lives on."""
    layer: Layer | None
    """The layer that was converted; None after ``load_weights``."""


@dataclass(frozen=True)
class LayerSet:
    """One rank's weights.

    Args:
        name: the model, the format and the tensor-parallel size.
        load: loads them on the current device; yields after every step.
    """

    name: str
    load: Callable[[], Iterator[Step]]


def _converted_after_loading(
    layers: int,
    create: Callable[[], Layer],
    convert: Callable[[Layer], None],
    others: tuple[int, ...],
) -> Callable[[], Iterator[Step]]:
    """All layers are created, then converted one by one.

    Args:
        layers: number of layers that are converted.
        create: makes one such layer.
        convert: replaces the tensors of a layer by what the kernels take.
        others: byte sizes of the weights that stay as they are.
    """

    def load() -> Iterator[Step]:
        weights = [{"weight": _bytes(size)} for size in others]
        made = [create() for _ in range(layers)]
        weights += made
        yield Step(weights, None)
        for layer in made:
            convert(layer)
            yield Step(weights, layer)

    return load


def _quantized_while_loading(
    layers: int, create: Callable[[], Iterator[Layer]], others: tuple[int, ...]
) -> Callable[[], Iterator[Step]]:
    """Each linear layer is made, filled and quantized when its weights have arrived.

    Args:
        layers: number of decoder layers.
        create: makes the quantized linear layers of one decoder layer, in the order of
            the checkpoint.
        others: byte sizes of the weights that stay as they are.
    """

    def load() -> Iterator[Step]:
        weights = [{"weight": _bytes(size)} for size in others]
        for _ in range(layers):
            for layer in create():
                weights.append(layer)
                yield Step(weights, layer)
        yield Step(weights, None)

    return load


def _bytes(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="cuda")


def _swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """[E, M, K] block scales to the tiled layout of tensor-core kernels.

    M is padded to 128 rows and K to 4 columns; tiles of 128 x 4 are stored with their
    32 x 4 x 4 elements transposed (the cuBLAS block-scaling layout).
    """
    experts, rows, columns = scales.shape
    tall, wide = -(-rows // 128) * 128, -(-columns // 4) * 4
    padded = scales.new_zeros((experts, tall, wide))
    padded[:, :rows, :columns] = scales
    tiles = padded.view(experts, tall // 128, 4, 32, wide // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).contiguous().view(experts, tall, wide)


def _nvfp4_layer(experts: int, hidden: int, inner: int) -> Layer:
    """Two 4-bit values per byte, one FP8 scale per 16 values."""
    return {
        "w13": _bytes(experts, inner, hidden // 2),
        "w13_scale": _bytes(experts, inner, hidden // 16),
        "w2": _bytes(experts, hidden, inner // 2),
        "w2_scale": _bytes(experts, hidden, inner // 16),
        "w13_alpha": torch.ones(experts, device="cuda"),
        "w2_alpha": torch.ones(experts, device="cuda"),
    }


def _pad_nvfp4(layer: Layer) -> None:
    """The padding branch of vLLM's NVFP4 MoE: rows follow the swizzled scales."""
    w13_scale = _swizzle_scales(layer["w13_scale"])
    rows = w13_scale.size(1) - layer["w13"].size(1)
    w13 = F.pad(layer["w13"], (0, 0, 0, rows))
    w2 = F.pad(layer["w2"], (0, rows // 2))
    w2_scale = F.pad(layer["w2_scale"], (0, rows // 16))
    w2_scale = _swizzle_scales(w2_scale)
    layer.update(w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale)


def _half(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")


def _qwen3_moe_layer() -> Layer:
    """Qwen3-235B at TP 4, with the layer's attention, in the order of its making."""
    return {
        "qkv": _half((16 + 2) * 128, 4096),
        "o": _half(4096, 16 * 128),
        "gate": _half(128, 4096),
        "w13": _half(128, 2 * 384, 4096),
        "w2": _half(128, 4096, 384),
    }


def _to_block_layout(layer: Layer) -> None:
    """FlashInfer's block layout: in place, with one expert as scratch."""
    block = 128
    for name in ("w13", "w2"):
        weight = layer[name]
        rows, columns = weight[0].view(torch.uint8).shape
        scratch = _bytes(columns // block, rows, block)
        order = torch.arange(rows)
        for expert in weight:
            source = expert.view(torch.uint8)
            blocks = source.view(rows, columns // block, block).permute(1, 0, 2)
            torch.index_select(blocks, 1, order.to("cuda"), out=scratch)
            source.copy_(scratch.view(rows, columns))


def _gpt_oss_layer() -> Layer:
    """gpt-oss-120b, sizes padded for the TRTLLM kernels (2880 to 3072 and to 2944)."""
    hidden, inner, experts = 3072, 2944, 128
    return {
        "qkv": _half((64 + 2 * 8) * 64, 2880),
        "qkv_bias": _half((64 + 2 * 8) * 64),
        "o": _half(2880, 64 * 64),
        "router": _half(experts, 2880),
        "w13": _bytes(experts, 2 * inner, hidden // 2),
        "w13_scale": _bytes(experts, 2 * inner, hidden // 32),
        "w2": _bytes(experts, hidden, inner // 2),
        "w2_scale": _bytes(experts, hidden, inner // 32),
        "w13_bias": _half(experts, 2 * inner),
        "w2_bias": _half(experts, hidden),
    }


def _swap_pairs(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Each two neighbours along the axis change places."""
    shape = tensor.shape
    pairs = tensor.reshape(*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :])
    return pairs.flip(axis + 1).reshape(shape)


def _shuffle_mxfp4(layer: Layer) -> None:
    """The TRTLLM layout of SM 10.0: a swapped copy of w13, then a copy per expert, and
    one more when they are stacked; the sources live to the end."""
    names = ("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias")
    source = {name: layer[name] for name in names}
    for name in ("w13_bias", "w2_bias"):
        source[name] = source[name].to(torch.float32)
    for name in ("w13_scale", "w13", "w13_bias"):
        source[name] = _swap_pairs(source[name], 1)
    experts = len(source["w13"])
    order = {name: torch.arange(source[name].size(1)) for name in names}
    shuffled: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for expert in range(experts):
        for name in names:
            rows = source[name][expert]
            if name.endswith("bias"):
                rows = rows.clone().reshape(-1, 1)
            rows = rows[order[name].to("cuda")]
            if name.endswith("scale"):
                rows = _swizzle_scales(rows[None])[0]
            shuffled[name].append(rows)
        del rows
    for name in ("w13", "w13_scale", "w2", "w2_scale", "w13_bias", "w2_bias"):
        source[name] = torch.stack(shuffled[name])
    layer.update(source)


def _quantize(rows: int, columns: int, bias: bool = False) -> Layer:
    """Online FP8: the BF16 weight exists until the FP8 one does."""
    weight = _half(rows, columns)
    layer = {"bias": _half(rows)} if bias else {}
    layer["weight_scale"] = torch.empty(1, device="cuda")
    layer["weight"] = torch.empty_like(weight, dtype=torch.float8_e4m3fn).t()
    return layer


def _qwen2_linears() -> Iterator[Layer]:
    hidden, inner, kv = 3584, 18944, 512
    yield _quantize(hidden, inner)
    yield _quantize(2 * inner, hidden)
    yield _quantize(hidden, hidden)
    yield _quantize(hidden + 2 * kv, hidden, bias=True)


NEMOTRON_NANO = LayerSet(
    "nemotron-3-nano-30b-nvfp4-tp2",
    _converted_after_loading(
        layers=23,
        create=lambda: _nvfp4_layer(experts=128, hidden=2688, inner=928),
        convert=_pad_nvfp4,
        others=(27 * MIB,) * 52,
    ),
)

QWEN3_235B = LayerSet(
    "qwen3-235b-bf16-tp4",
    _converted_after_loading(
        layers=94,
        create=_qwen3_moe_layer,
        convert=_to_block_layout,
        others=(151936 // 4 * 4096 * 2,) * 2,
    ),
)

GPT_OSS_120B = LayerSet(
    "gpt-oss-120b-mxfp4",
    _converted_after_loading(
        layers=36,
        create=_gpt_oss_layer,
        convert=_shuffle_mxfp4,
        others=(201088 * 2880 * 2,) * 2,
    ),
)

QWEN2_5_7B = LayerSet(
    "qwen2.5-7b-online-fp8",
    _quantized_while_loading(
        layers=28, create=_qwen2_linears, others=(152064 * 3584 * 2,) * 2
    ),
)

LAYER_SETS = {
    layer_set.name: layer_set
    for layer_set in (NEMOTRON_NANO, QWEN3_235B, GPT_OSS_120B, QWEN2_5_7B)
}
