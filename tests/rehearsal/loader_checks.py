# SPDX-License-Identifier: Apache-2.0
"""vLLM's loaders into a CuMem pool, on a card: each gives memory back while it loads.

Functions for `forked.run_checks`. The loaders, the layerwise processing and
`process_weights_after_loading` are vLLM's; the model is a few plain layers whose
conversion replaces each weight by a larger tensor.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from pool_checks import MIB, assert_nothing_left, only, start
from safetensors.torch import save_file

from vllm.config.load import LoadConfig
from vllm.device_allocator.extension import extension
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.layerwise import (
    initialize_online_processing,
)
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

LAYERS = 4
WEIGHT = 24 * MIB
CONVERTED = WEIGHT + 2 * MIB
QUANTIZED = WEIGHT // 2


class Convert(QuantizeMethodBase):
    """Replaces the weight by a larger tensor with the same first bytes."""

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        converted = torch.empty(CONVERTED, dtype=torch.uint8, device="cuda")
        converted[:WEIGHT].copy_(layer.weight)
        layer.weight = torch.nn.Parameter(converted, requires_grad=False)


class Quantize(Convert):
    """Online: the weight exists on the meta device until its layer is loaded."""

    uses_meta_device = True

    def process_weights_after_loading(self, layer: Any) -> None:
        if layer.weight.nbytes == QUANTIZED:
            return
        quantized = torch.empty(QUANTIZED, dtype=torch.uint8, device="cuda")
        quantized.copy_(layer.weight[:QUANTIZED])
        layer.weight = torch.nn.Parameter(quantized, requires_grad=False)


class Layer(torch.nn.Module):
    def __init__(self, online: bool) -> None:
        super().__init__()
        device = "meta" if online else "cuda"
        weight = torch.empty(WEIGHT, dtype=torch.uint8, device=device)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = Quantize() if online else Convert()
        if online:
            initialize_online_processing(self)


class Model(torch.nn.Module):
    def __init__(self, online: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(online) for _ in range(LAYERS))
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            parameter = parameters[name]
            loader = getattr(parameter, "weight_loader", None)
            if loader:
                loader(parameter, weight)
            else:
                parameter.data.copy_(weight)
            loaded.add(name)
        return loaded


def checkpoint(folder: Path, load_format: str) -> None:
    weights = {
        f"layers.{i}.weight": torch.full((WEIGHT,), i + 1, dtype=torch.uint8)
        for i in range(LAYERS)
    }
    if load_format == "sharded_state":
        save_file(weights, folder / "model-rank-0-part-0.safetensors")
    elif load_format != "dummy":
        save_file(weights, folder / "model.safetensors")


def load(load_format: str, online: bool = False, **extra: Any) -> None:
    """Load on a card with too little room for the weights and what they replace."""
    allocator = start()
    # What asks for the engine's configuration or its process groups.
    DefaultModelLoader._init_ep_weight_filter = lambda *_: None
    ShardedStateLoader._render_default_pattern = staticmethod(
        lambda pattern, part: f"model-rank-0-part-{part}.safetensors"
    )
    BaseModelLoader.create_model = lambda *_, **__: Model(online)
    weight = QUANTIZED if online else CONVERTED
    only(LAYERS * weight + WEIGHT + 4 * 22 * MIB)
    with tempfile.TemporaryDirectory() as name:
        checkpoint(Path(name), load_format)
        load_config = LoadConfig(
            load_format=load_format, model_loader_extra_config=extra
        )
        model_config = SimpleNamespace(
            dtype=torch.float32,
            model=name,
            model_weights=None,
            multimodal_config=None,
            quantization=None,
            revision=None,
            word_embeddings_untied_by_checkpoint=False,
        )
        config = SimpleNamespace(
            device_config=SimpleNamespace(device="cuda"),
            load_config=load_config,
            quant_config=None,
        )
        before = extension.counters()["returned_bytes"]
        with allocator.use_memory_pool("weights"):
            model = get_model_loader(load_config).load_model(config, model_config)
            returned = extension.counters()["returned_bytes"] - before
            # Online, each layer's source has the place of the one before it.
            assert returned >= (1 if online else LAYERS - 2) * WEIGHT, returned
            assert allocator._generations.retired >= 1
    for index, layer in enumerate(model.layers):
        assert layer.weight.nbytes == weight
        if load_format != "dummy":
            assert bool((layer.weight[:QUANTIZED].cpu() == index + 1).all())
    if not online:  # vLLM's records for reloading keep such a layer
        del model, layer
        assert_nothing_left(allocator)


def safetensors() -> None:
    load("safetensors")


def safetensors_on_threads() -> None:
    load("safetensors", enable_multithread_load=True)


def sharded_state() -> None:
    load("sharded_state")


def dummy() -> None:
    load("dummy")


def online_quantization() -> None:
    load("safetensors", online=True)


def online_quantization_of_dummies() -> None:
    load("dummy", online=True)
