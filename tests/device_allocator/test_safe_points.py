# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A load reclaims where a step has ended, and at no other place."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import base_loader, dummy_loader, utils
from vllm.model_executor.model_loader.reload import layerwise

CPU = torch.device("cpu")


class Method(QuantizeMethodBase):
    """Converts a layer by noting that it was converted."""

    def __init__(self, events: list) -> None:
        self.events = events

    def create_weights(self, layer, *args, **kwargs) -> None:
        raise NotImplementedError

    def apply(self, layer, *args, **kwargs):
        raise NotImplementedError

    def process_weights_after_loading(self, layer) -> None:
        self.events.append(("convert", layer))


class Attention(torch.nn.Module):
    def __init__(self, events: list) -> None:
        super().__init__()
        self.events = events

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.events.append(("attention", self))


class Model(torch.nn.Module):
    def __init__(self, events: list) -> None:
        super().__init__()
        self.events = events
        self.first = torch.nn.Linear(2, 2)
        self.attention = Attention(events)
        self.second = torch.nn.Linear(2, 2)
        for layer in (self.first, self.second):
            layer.quant_method = Method(events)

    def process_weights_after_loading(self) -> None:
        self.events.append(("hook", self))


@pytest.fixture
def events(monkeypatch):
    """What happened, in order, in every module that reclaims."""
    happened: list = []

    def note(*, force=False):
        happened.append("reclaim all" if force else "reclaim")

    for module in (base_loader, dummy_loader, layerwise, utils):
        monkeypatch.setattr(module, "reclaim", note)
    monkeypatch.setattr(utils, "maybe_retie_word_embeddings", lambda *_: None)
    monkeypatch.setattr(
        utils, "is_deferred_attention_layer", lambda m: isinstance(m, Attention)
    )
    return happened


def test_conversions_attention_and_hook(events):
    model = Model(events)
    config = SimpleNamespace(dtype=torch.float32, quantization=None)
    utils.process_weights_after_loading(model, config, CPU)
    assert events == [
        ("convert", model.first),
        "reclaim",
        ("convert", model.second),
        "reclaim",
        ("attention", model.attention),
        "reclaim",
        ("hook", model),
        "reclaim",
    ]


def test_after_all_weights_are_loaded_and_before_any_conversion(events, monkeypatch):
    class Loader(base_loader.BaseModelLoader):
        def download_model(self, model_config) -> None:
            raise NotImplementedError

        def load_weights(self, model, model_config) -> None:
            events.append(("load", model))

        def create_model(self, vllm_config, model_config, prefix=""):
            return Model(events)

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    config = SimpleNamespace(
        device_config=SimpleNamespace(device="cpu"),
        load_config=SimpleNamespace(device=None),
        quant_config=None,
    )
    model_config = SimpleNamespace(dtype=torch.float32, quantization=None)
    model = Loader(config.load_config).load_model(config, model_config)
    assert events[:3] == [
        ("load", model),
        "reclaim all",
        ("convert", model.first),
    ]


@pytest.mark.parametrize("loader", ["weights", "dummy"])
def test_online_quantization_reclaims_once_the_buffers_are_dropped(
    events, monkeypatch, loader
):
    layer = torch.nn.Linear(2, 2)
    layer.quant_method = Method(events)
    info = layerwise.get_layerwise_info(layer)
    info.load_numel_total = 6
    for module in (layerwise, dummy_loader):
        monkeypatch.setattr(module, "materialize_layer", lambda *_: None)
        monkeypatch.setattr(
            module,
            "reclaim",
            lambda: events.append(("reclaim", info.can_load())),
        )
    if loader == "weights":
        layerwise._layerwise_process(layer, info)
    else:
        config = SimpleNamespace(model_loader_extra_config=None, load_format="dummy")
        dummy_loader.DummyModelLoader(config)._process_online_quant_layer(layer, info)
    assert events == [("convert", layer), ("reclaim", False)]
