# SPDX-License-Identifier: Apache-2.0
"""Labels for the allocator's history: which step of a load is under way.

PyTorch stamps each entry of its history with a text of ours, so an allocation
is attributed to the step that made it without any clock. Steps are found by
wrapping methods of vLLM's loader; one that a version lacks is left out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

START = "outside the loader"
CREATE = "create the model"
LOAD = "load weights"
CONVERT = "convert"
AFTER = "after load"


class Phases:
    """The step that is under way. Nested steps give back the outer label."""

    def __init__(self, set_label: Callable[[str], None]) -> None:
        self._set_label = set_label
        self._label = ""
        self.enter(START)

    def enter(self, label: str) -> None:
        """From now on, `label`."""
        self._label = label
        self._set_label(label)

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """`label` within the block."""
        outer = self._label
        self.enter(label)
        try:
            yield
        finally:
            self.enter(outer)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None:
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def _watch_conversions(model: Any, phases: Phases) -> None:
    """Label each module's conversion with the module's name."""
    names = {id(module): name for name, module in model.named_modules()}
    method = "process_weights_after_loading"

    def convert(original: Any, self: Any, layer: Any, *args: Any, **kw: Any) -> Any:
        name = names.get(id(layer), type(layer).__name__)
        with phases.step(f"{CONVERT} {name}"):
            return original(self, layer, *args, **kw)

    owners = {
        next(c for c in type(quantizer).__mro__ if method in vars(c))
        for module in model.modules()
        if hasattr(quantizer := getattr(module, "quant_method", None), method)
    }
    # One class may call its parent's: the same label twice does no harm.
    for owner in owners:
        _wrap(owner, method, convert)


def watch_loader(phases: Phases) -> None:
    """Label the steps of every load from now on."""
    from vllm.model_executor.model_loader import base_loader, dummy_loader

    def create(original: Any, *args: Any, **kwargs: Any) -> Any:
        with phases.step(CREATE):
            model = original(*args, **kwargs)
        _watch_conversions(model, phases)
        return model

    def load(original: Any, *args: Any, **kwargs: Any) -> Any:
        with phases.step(LOAD):
            return original(*args, **kwargs)

    def convert(original: Any, *args: Any, **kwargs: Any) -> Any:
        with phases.step(CONVERT):
            return original(*args, **kwargs)

    _wrap(base_loader.BaseModelLoader, "create_model", create)
    _wrap(dummy_loader.DummyModelLoader, "load_weights", load)
    _wrap(base_loader, "process_weights_after_loading", convert)
