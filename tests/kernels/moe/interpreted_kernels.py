# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Triton kernels of the weight conversions, run on the CPU."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

UTILS = "vllm.model_executor.layers.quantization.utils"
#: leaves first: a module takes the kernels of those before it
KERNELS = (
    "turns_triton",
    "block_tiling_triton",
    "expand_rows_triton",
    "weight_permutation_triton",
)


@contextlib.contextmanager
def interpreted_kernels(*more: str) -> Iterator[SimpleNamespace]:
    """The modules of `KERNELS`, and `more` of them, by name, their kernels run by
    Triton's interpreter.

    They are imported anew, and the ones that were imported before are put back.
    """
    triton = pytest.importorskip("triton")
    package = importlib.import_module(UTILS)
    kernels = (*KERNELS, *more)
    names = [f"{UTILS}.{name}" for name in kernels]
    saved = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # Without a GPU vllm puts a stand-in in its place.
        patch.setattr("vllm.triton_utils.triton", triton)
        patch.setattr("vllm.triton_utils.tl", triton.language)
        modules = [importlib.import_module(name) for name in names]
        for name, short in zip(names, kernels, strict=True):
            sys.modules.pop(name)
            delattr(package, short)
            if name in saved:
                sys.modules[name] = saved[name]
                setattr(package, short, saved[name])
        yield SimpleNamespace(**dict(zip(kernels, modules, strict=True)))
