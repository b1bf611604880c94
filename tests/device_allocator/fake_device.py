# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A device, and as much of PyTorch's pools on it as generations rely on.

One tensor has one segment. A freed segment stays in its pool until `empty_cache`,
which returns the free segments of dropped pools and of the default pool, and nothing of
a live pool: the rules of torch 2.13 and later.
"""

import contextlib
import itertools
import threading

import torch


class OutOfMemory(RuntimeError):
    pass


class FakePool:
    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self.key = next(device.keys)
        device.live_pools.add(self.key)

    def __del__(self) -> None:
        if self._device.capturing:
            self._device.destroyed_while_capturing += 1
        self._device.live_pools.discard(self.key)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, int]]:
        return [
            {"total_size": size, "allocated_size": 0 if free else size}
            for pool, size, free in self._device.segments.values()
            if pool == self.key
        ]


class FakeDevice:
    """``capacity`` bytes of device memory."""

    DEFAULT_POOL = 0

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys = itertools.count(1)
        self.live_pools: set[int] = set()
        self.segments: dict[int, tuple[int, int, bool]] = {}
        self.capturing = False
        self.destroyed_while_capturing = 0
        self.peak = 0
        self.synchronized: list[int | None] = []
        self._routing = threading.local()
        self._addresses = itertools.count(1)

    # What a test does.

    def allocate(self, size: int) -> int:
        pool = (self._stack() or [self.DEFAULT_POOL])[-1]
        for address, (owner, total, free) in self.segments.items():
            if free and owner == pool and total == size:
                self.segments[address] = (owner, total, False)
                return address
        if size > self.free_bytes():
            self.empty_cache()
        if size > self.free_bytes():
            raise OutOfMemory(size)
        address = next(self._addresses)
        self.segments[address] = (pool, size, False)
        self.peak = max(self.peak, self.capacity - self.free_bytes())
        return address

    def free(self, address: int) -> None:
        pool, size, free = self.segments[address]
        assert not free
        self.segments[address] = (pool, size, True)

    def free_bytes(self) -> int:
        return self.capacity - sum(size for _, size, _ in self.segments.values())

    def bytes_of(self, *, free: bool) -> int:
        return sum(
            size for _, size, is_free in self.segments.values() if is_free is free
        )

    # What generations call.

    def make_pool(self) -> FakePool:
        return FakePool(self)

    def _stack(self) -> list[int]:
        if not hasattr(self._routing, "stack"):
            self._routing.stack = []
        return self._routing.stack

    @contextlib.contextmanager
    def use_mem_pool(self, pool: FakePool):
        self._stack().append(pool.key)
        try:
            yield
        finally:
            self._stack().remove(pool.key)

    def empty_cache(self) -> None:
        kept = {
            address: segment
            for address, segment in self.segments.items()
            if not segment[2] or segment[0] in self.live_pools
        }
        self.segments = kept

    def install(self, monkeypatch) -> None:
        """Put the device where torch's functions are looked up."""
        cuda, accelerator = torch.cuda, torch.accelerator
        patch = monkeypatch.setattr
        patch(cuda, "use_mem_pool", self.use_mem_pool)
        patch(cuda, "is_initialized", lambda: True)
        patch(cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch(accelerator, "current_device_index", lambda: 0)
        patch(accelerator, "synchronize", self.synchronized.append)
        patch(accelerator, "empty_cache", self.empty_cache)
        patch(
            accelerator,
            "get_memory_info",
            lambda: (self.free_bytes(), self.capacity),
        )
        patch(accelerator, "memory_allocated", lambda: self.bytes_of(free=False))
        patch(
            accelerator,
            "memory_reserved",
            lambda: self.capacity - self.free_bytes(),
        )
