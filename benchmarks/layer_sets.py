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
class LayerSet:
    """One rank's weights.

    Args:
        name: the model, the format and the tensor-parallel size.
        layers: number of layers that are converted.
        create: makes one such layer on the current device.
        convert: replaces the tensors of a layer by what the kernels take.
        others: byte sizes of the weights that stay as they are.
    """

    name: str
    layers: int
    create: Callable[[], Layer]
    convert: Callable[[Layer], None]
    others: tuple[int, ...]

    def load(self) -> Iterator[list[Layer]]:
        """Create all, then convert layer by layer; yields after every step."""
        kept = [
            {"weight": torch.empty(size, dtype=torch.uint8, device="cuda")}
            for size in self.others
        ]
        layers = [self.create() for _ in range(self.layers)]
        yield kept + layers
        for layer in layers:
            self.convert(layer)
            yield kept + layers


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


NEMOTRON_NANO = LayerSet(
    name="nemotron-3-nano-30b-nvfp4-tp2",
    layers=23,
    create=lambda: _nvfp4_layer(experts=128, hidden=2688, inner=928),
    convert=_pad_nvfp4,
    others=(27 * MIB,) * 52,
)

LAYER_SETS = {layer_set.name: layer_set for layer_set in (NEMOTRON_NANO,)}
