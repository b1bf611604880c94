# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled when they are first used: here they are not.

FlashInfer compiles with nvcc, which a machine without a GPU need not have, and
Triton takes minutes to tune what a simulated card never runs. The Python around
the kernels, which allocates their outputs, stays real.
"""

from typing import Any


class Nothing(int):
    """What a module, its functions and their results are: callable, and zero."""

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "Nothing":
        return self


class Launched(Nothing):
    """What a launch by Triton returns: the compiled kernel, to be launched again."""

    __iter__ = None  # else it would go on for ever

    def __getitem__(self, grid: Any) -> "Launched":
        return self


def compile_nothing() -> set[str]:
    """Replace both compilers; the set grows by each FlashInfer module asked for."""
    asked: set[str] = set()
    _skip_triton()
    _skip_flashinfer(asked)
    return asked


def _skip_triton() -> None:
    try:
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction
    except ImportError:
        return

    def run(self: Any, *args: Any, **kwargs: Any) -> Launched:
        return Launched()

    JITFunction.run = run
    Autotuner.run = run


def _skip_flashinfer(asked: set[str]) -> None:
    try:
        from flashinfer.jit.core import JitSpec
    except ImportError:
        return

    def build_and_load(self: Any) -> Nothing:
        asked.add(str(self.name))
        return Nothing()

    JitSpec.build_and_load = build_and_load
