# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launches of a Triton kernel on tensor after tensor of the same kind."""

from typing import Any

import torch

Grid = tuple[int, int, int]


class Launcher:
    """A kernel whose launches differ in their tensors and their grid alone.

    Triton binds and specializes all arguments anew at every launch, in Python that
    takes longer than many of these kernels. Here the kernel that the first launch
    compiled is kept, and launched as it is for tensors that are aligned as those were.
    It belongs to the device that was current then. Not on ROCm, where Triton also
    specializes on the size of storages.

    Args:
        kernel: takes tensors, then numbers, then constants.
        numbers: integers.
        constants: by name, in the kernel's order.
        num_warps: of a program.

    """

    def __init__(
        self,
        kernel: Any,
        numbers: tuple[int, ...],
        constants: dict[str, Any],
        num_warps: int,
    ):
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self.num_warps = num_warps
        self.arguments = *numbers, *constants.values()
        self.compiled: dict[tuple[bool, ...], Any] = {}

    def __call__(self, grid: Grid, *tensors: torch.Tensor) -> None:
        # All that Triton makes of an address.
        aligned = tuple([tensor.data_ptr() % 16 == 0 for tensor in tensors])
        compiled = self.compiled.get(aligned)
        if compiled is not None:
            compiled[grid](*tensors, *self.arguments)
            return
        compiled = self.kernel[grid](
            *tensors, *self.numbers, **self.constants, num_warps=self.num_warps
        )
        # Triton's interpreter compiles nothing.
        if compiled is not None and torch.version.hip is None:
            self.compiled[aligned] = compiled
