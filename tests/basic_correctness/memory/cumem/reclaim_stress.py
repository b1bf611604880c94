# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A load that reclaims while other threads allocate, free and read statistics.

For a real card and for a simulated one, where kernels do nothing: contents are written
and read by copies.
"""

import os
import threading
import time
from collections.abc import Callable

import torch

from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.generations import reclaim

MIB = 1 << 20
SECONDS = float(os.environ.get("POOL_STRESS_SECONDS", "2"))


def filled(size: int, value: int) -> torch.Tensor:
    """On the device, written by a copy."""
    return torch.full((size,), value, dtype=torch.uint8).cuda()


def holds(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor.cpu() == value).all())


class Threads:
    """Runs functions in a loop, each on a thread, until the time is over."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.rounds: dict[str, int] = {}
        self._end = time.monotonic() + SECONDS

    def run(self, *works: Callable[[int], None]) -> None:
        threads = [
            threading.Thread(target=self._loop, args=(work, number))
            for number, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _loop(self, work: Callable[[int], None], number: int) -> None:
        name = f"{work.__name__}-{number}"
        try:
            while time.monotonic() < self._end and not self.errors:
                work(number)
                self.rounds[name] = self.rounds.get(name, 0) + 1
        except BaseException as error:
            self.errors.append(error)


def reclaim_against_other_threads(allocator: CuMemAllocator) -> None:
    """No deadlock, and no live tensor loses its contents."""
    sizes = (3 * MIB, 11 * MIB, 21 * MIB)
    handed_over: list[torch.Tensor] = []

    def load_and_reclaim(number: int) -> None:
        with allocator.use_memory_pool("weights"):
            weights = [filled(size, number) for size in sizes]
            reclaim(force=True)
            for index, size in enumerate(sizes):
                weights[index] = filled(size + 2 * MIB, number + index)
                reclaim(force=index == 1)
            for index, weight in enumerate(weights):
                assert holds(weight, number + index)
            # Freed by another thread, after this generation was retired.
            handed_over.append(weights[0])

    def free(number: int) -> None:
        if handed_over:
            handed_over.pop(0)
        time.sleep(0.001)

    def allocate_and_free(number: int) -> None:
        tensors = [filled(size, 100 + number) for size in sizes]
        assert all(holds(tensor, 100 + number) for tensor in tensors)
        del tensors[1]
        torch.accelerator.empty_cache()
        assert all(holds(tensor, 100 + number) for tensor in tensors)

    def read_statistics(number: int) -> None:
        torch.accelerator.memory_stats()
        allocator.memory_by_tag()
        allocator._table.segments()
        time.sleep(0.0005)

    threads = Threads()
    threads.run(
        load_and_reclaim,
        load_and_reclaim,
        allocate_and_free,
        allocate_and_free,
        free,
        read_statistics,
        read_statistics,
    )
    assert len(threads.rounds) == 7, threads.rounds
