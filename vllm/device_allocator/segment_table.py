# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The segments that the CuMem extension has handed to PyTorch, and their state.

A segment is one allocation of the pluggable allocator: an address range, and the
physical memory behind it unless it is asleep. `NativeTable` reads the table that the
CUDA extension keeps, so that PyTorch's calls into it, made under PyTorch's allocator
lock, never wait for the GIL. `CallbackTable` keeps a table in Python for an extension
that reports through callbacks (ROCm).
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from vllm.device_allocator import HandleType


class Segment(NamedTuple):
    """A segment as it was when the table was read; sizes in bytes."""

    device: int
    size: int
    address: int
    handle: list[int] | int
    tag: str
    asleep: bool
    serial: int
    """Tells this segment from an earlier one at the same address."""
    generation: int

    @property
    def allocation(self) -> HandleType:
        """The tuple that the extension's functions take."""
        return self.device, self.size, self.address, self.handle


Callbacks = tuple[Callable[[HandleType], None], Callable[[int], HandleType]]


class SegmentTable(Protocol):
    callbacks: Callbacks | tuple[None, None]
    """What the extension's ``init_module`` must be given."""

    def segments(self) -> list[Segment]:
        """All segments, in order of address."""

    def hold(self, segment: Segment) -> bool:
        """Keep the segment from being freed; False if that already happened."""

    def unhold(self, segment: Segment) -> None:
        """Let go of a held segment; a free that came meanwhile happens now."""

    def mark(self, segment: Segment, *, asleep: bool) -> None:
        """Note that the segment was unmapped or mapped again."""

    def set_scope(self, tag: str, generation: int) -> None:
        """Label what this thread allocates next."""

    def get_scope(self) -> tuple[str, int]:
        """The label of this thread's next allocations."""

    def take_errors(self) -> list[str]:
        """Errors that could not be raised where they happened, each given once."""


class NativeTable:
    """The table of the CUDA extension.

    Args:
        extension: the module ``vllm.cumem_allocator``.

    """

    callbacks: Callbacks | tuple[None, None] = (None, None)

    def __init__(self, extension: Any) -> None:
        self._extension = extension

    def segments(self) -> list[Segment]:
        return [Segment(*row) for row in self._extension.segments()]

    def hold(self, segment: Segment) -> bool:
        return self._extension.hold(segment.address, segment.serial)

    def unhold(self, segment: Segment) -> None:
        self._extension.unhold(segment.address)

    def mark(self, segment: Segment, *, asleep: bool) -> None:
        """Nothing to do: the extension marks what it maps and unmaps."""

    def set_scope(self, tag: str, generation: int) -> None:
        self._extension.set_scope(tag, generation)

    def get_scope(self) -> tuple[str, int]:
        return self._extension.get_scope()

    def take_errors(self) -> list[str]:
        return self._extension.take_errors()


class _ThreadScope(threading.local):
    scope = ("default", 0)


class CallbackTable:
    """A table fed by the extension's callbacks, which hold the GIL.

    Args:
        before_free: called with the device's index before a mapped segment goes.

    """

    def __init__(self, before_free: Callable[[int], None]) -> None:
        self._segments: dict[int, Segment] = {}
        self._serials = itertools.count(1)
        self._thread = _ThreadScope()
        self._before_free = before_free
        # Kept because the extension only borrows its references to the two.
        self.callbacks: Callbacks | tuple[None, None] = (self._allocated, self._freed)

    def _allocated(self, allocation: HandleType) -> None:
        device, size, address, handle = allocation
        tag, generation = self._thread.scope
        self._segments[address] = Segment(
            device, size, address, handle, tag, False, next(self._serials), generation
        )

    def _freed(self, address: int) -> HandleType:
        segment = self._segments.pop(address)
        if segment.asleep:
            # No chunk is left to unmap; the extension frees the address range alone.
            return segment.device, segment.size, segment.address, []
        self._before_free(segment.device)
        return segment.allocation

    def segments(self) -> list[Segment]:
        return [segment for _, segment in sorted(self._segments.items())]

    def hold(self, segment: Segment) -> bool:
        current = self._segments.get(segment.address)
        return current is not None and current.serial == segment.serial

    def unhold(self, segment: Segment) -> None:
        """Nothing to do: `hold` only looks, as the callback cannot postpone a free."""

    def mark(self, segment: Segment, *, asleep: bool) -> None:
        if self.hold(segment):
            current = self._segments[segment.address]
            self._segments[segment.address] = current._replace(asleep=asleep)

    def set_scope(self, tag: str, generation: int) -> None:
        self._thread.scope = (tag, generation)

    def get_scope(self) -> tuple[str, int]:
        return self._thread.scope

    def take_errors(self) -> list[str]:
        return []


def make_segment_table(extension: Any) -> SegmentTable:
    """The table that suits the extension; make one for the process."""
    if hasattr(extension, "segments"):
        return NativeTable(extension)
    return CallbackTable(before_free=torch.accelerator.synchronize)
