# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launches on tensors of one kind, with a kernel that notes how it is launched."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.quantization.utils.triton_launcher import Launcher

GRID, LARGER = (3, 1, 1), (5, 2, 1)


class Kernel:
    """As Triton's: a launch binds its arguments, and returns what it compiled."""

    def __init__(self, compiles: bool = True):
        self.log: list[tuple] = []
        self.compiles = compiles

    def __getitem__(self, grid):
        def bind(*arguments, **options):
            self.log.append(("bound", grid, arguments[1:], options))
            return Compiled(self.log) if self.compiles else None

        return bind


class Compiled:
    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append(("kept", grid, arguments[1:]))


def launcher(kernel) -> Launcher:
    return Launcher(kernel, (7, 8), dict(FILL=0, ROWS=16), num_warps=4)


BOUND = ("bound", GRID, (7, 8), dict(FILL=0, ROWS=16, num_warps=4))


def test_the_compiled_kernel_is_kept():
    kernel, tensor = Kernel(), torch.zeros(64, dtype=torch.uint8)
    launch = launcher(kernel)
    launch(GRID, tensor)
    launch(GRID, tensor)
    launch(LARGER, torch.ones(64, dtype=torch.uint8))
    arguments = (7, 8, 0, 16)
    assert kernel.log == [BOUND, ("kept", GRID, arguments), ("kept", LARGER, arguments)]


def test_other_alignment_is_another_kernel():
    """Triton compiles vector accesses for addresses that are multiples of 16."""
    memory = torch.zeros(64, dtype=torch.uint8)
    kernel = Kernel()
    launch = launcher(kernel)
    for tensor in (memory, memory[4:], memory[16:], memory[8:]):
        launch(GRID, tensor)
    assert [entry[0] for entry in kernel.log] == ["bound", "bound", "kept", "kept"]


def test_the_interpreter_compiles_nothing():
    kernel, tensor = Kernel(compiles=False), torch.zeros(64, dtype=torch.uint8)
    launch = launcher(kernel)
    launch(GRID, tensor)
    launch(GRID, tensor)
    assert kernel.log == [BOUND, BOUND]


def test_rocm_binds_every_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "version", SimpleNamespace(hip="7.0"))
    kernel, tensor = Kernel(), torch.zeros(64, dtype=torch.uint8)
    launch = launcher(kernel)
    launch(GRID, tensor)
    launch(GRID, tensor)
    assert kernel.log == [BOUND, BOUND]
