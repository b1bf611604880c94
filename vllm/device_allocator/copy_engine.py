# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Copies between host and device that go on while the caller does something else."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol

import torch

from vllm.device_allocator.cuda_runtime import CudaRuntime

Mark = tuple[int, ...]


class Copies(Protocol):
    def start(self, device: int, target: int, source: int, size: int) -> None:
        """Start to copy ``size`` bytes; one of the two addresses is the device's.

        Nothing may be done to either end until a later mark is waited for.
        """

    def mark(self) -> Mark:
        """Names all copies that were started so far."""

    def wait(self, mark: Mark) -> None:
        """Block until all copies that the mark names are done. Wait once for each."""

    def abandon(self) -> None:
        """Wait for every copy, as far as the device still answers; forget all marks."""


def _on(device: int) -> AbstractContextManager[None]:
    """Make the device the current one for a while."""
    if device == torch.accelerator.current_device_index():
        return nullcontext()
    return torch.cuda.device(device)


class StreamCopies:
    """Copies on one stream per device, which lives as long as the process."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._streams: dict[int, int] = {}
        self._marked: set[int] = set()

    def start(self, device: int, target: int, source: int, size: int) -> None:
        # A thread that has used no device yet would make a context on the first one.
        with _on(device):
            if device not in self._streams:
                self._streams[device] = self._runtime.create_stream()
            self._runtime.copy(target, source, size, self._streams[device])

    def mark(self) -> Mark:
        events: list[int] = []
        for device, stream in self._streams.items():
            with _on(device):
                events.append(self._runtime.record(stream))
            self._marked.add(events[-1])
        return tuple(events)

    def wait(self, mark: Mark) -> None:
        for event in mark:
            self._runtime.wait(event)
            self._marked.discard(event)
            # The copies are done. An event that stays behind is not worth failing for.
            with suppress(RuntimeError):
                self._runtime.destroy_event(event)

    def abandon(self) -> None:
        for device in self._streams:
            with suppress(RuntimeError):
                torch.cuda.synchronize(device)
        for event in self._marked:
            with suppress(RuntimeError):
                self._runtime.destroy_event(event)
        self._marked.clear()


class BlockingCopies:
    """Copies that are done when they are started.

    Args:
        copy: takes target and source address and the number of bytes.

    """

    def __init__(self, copy: Callable[[int, int, int], None]) -> None:
        self._copy = copy

    def start(self, device: int, target: int, source: int, size: int) -> None:
        self._copy(target, source, size)

    def mark(self) -> Mark:
        return ()

    def wait(self, mark: Mark) -> None:
        pass

    def abandon(self) -> None:
        pass
