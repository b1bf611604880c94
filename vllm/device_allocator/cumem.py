# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sleep mode's allocator on pool generations: what replaces upstream's definitions."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any

import torch

from vllm import envs
from vllm.device_allocator import AllocationData
from vllm.device_allocator.alloc_conf import (
    bounded_splits,
    non_expandable_allocations,
)
from vllm.device_allocator.extension import extension, libcudart
from vllm.device_allocator.generations import PoolGenerations, open_generation
from vllm.device_allocator.load_report import (
    LoadReport,
    TagMemory,
    by_tag,
    last_load_report,
)
from vllm.device_allocator.segment_table import (
    Segment,
    SegmentTable,
    make_segment_table,
)
from vllm.device_allocator.sleep_report import total_size
from vllm.device_allocator.sleeper import Sleeper, make_mover
from vllm.platforms import current_platform

SPLIT_LIMIT_MB = 20
"""The least that PyTorch accepts."""


def generations_enabled() -> bool:
    """Whether a load may retire pools before its end; never on ROCm, where the
    extension's callbacks take the GIL under PyTorch's allocator lock."""
    return envs.VLLM_CUMEM_POOL_GENERATIONS and not current_platform.is_rocm()


def _tags(tags: tuple[str, ...] | str | None) -> tuple[str, ...]:
    """The tags meant: one may come without its tuple, and None is the default tag."""
    if tags is None:
        return (CuMemAllocator.default_tag,)
    return (tags,) if isinstance(tags, str) else tuple(tags)


def map_segment(segment: Segment) -> None:
    create_and_map(segment.allocation)


def unmap_segment(segment: Segment) -> None:
    unmap_and_release(segment.allocation)


def clear_segment(segment: Segment) -> None:
    """Overwrite what amdgpu before 6.14 may leave in the pages that it maps."""
    if current_platform.is_rocm():
        libcudart.cudaMemset(segment.address, 0, segment.size)
        torch.accelerator.synchronize()


class CuMemAllocator:
    def __init__(self) -> None:
        callbacks: Any = self._table.callbacks
        self.python_malloc_callback, self.python_free_callback = callbacks
        self._mover = make_mover(self._table, map_segment, unmap_segment, clear_segment)
        self._sleeper = Sleeper(
            self._table, self._mover, lambda: self._generations.drain()
        )

    @cached_property
    def _table(self) -> SegmentTable:
        """The segments that the extension has handed out."""
        assert extension is not None
        return make_segment_table(extension)

    @cached_property
    def _allocator(self) -> torch.cuda.memory.CUDAPluggableAllocator:
        """The one pluggable allocator: every segment is freed through it."""
        return get_pluggable_allocator(
            self.python_malloc_callback, self.python_free_callback
        )

    @cached_property
    def _generations(self) -> PoolGenerations:
        return PoolGenerations(
            self._make_pool, self._set_tag, enabled=generations_enabled()
        )

    @cached_property
    def _cudagraph_pools(self) -> list[torch.cuda.MemPool]:
        """At most one: the pool that graphs are captured into."""
        return []

    def _make_pool(self) -> torch.cuda.MemPool:
        return torch.cuda.MemPool(self._allocator._allocator)

    def _set_tag(self, tag: str) -> None:
        self.current_tag = tag

    @property
    def current_tag(self) -> str:
        """The tag of what this thread allocates next in a pool of this allocator."""
        return self._table.get_scope()[0]

    @current_tag.setter
    def current_tag(self, tag: str) -> None:
        self._table.set_scope(tag, open_generation())

    @property
    def pointer_to_data(self) -> dict[int, AllocationData]:
        """The segments by address, as they are now; changing it changes nothing.

        A host copy holds the segment's contents until it wakes, and other bytes after.
        """
        return {
            segment.address: AllocationData(
                handle=segment.allocation,
                tag=segment.tag,
                cpu_backup_tensor=self._mover.host_contents(segment),
                is_asleep=segment.asleep,
            )
            for segment in self._table.segments()
        }

    def load_report(self) -> LoadReport | None:
        """What the last load took; None before the first one, and on ROCm."""
        return last_load_report()

    def memory_by_tag(self) -> dict[str, TagMemory]:
        """Mapped and sleeping bytes of each tag that has a segment, as they are now."""
        return by_tag(self._table.segments())

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Allocate this thread's tensors from CuMem segments with ``tag``.

        While it is open, `vllm.device_allocator.generations.reclaim` gives memory back
        to the device. At the end everything that was freed inside goes back.

        Args:
            tag: what ``sleep``, ``discard`` and ``wake_up`` select by; the default tag
                if None.

        """
        if tag is None:
            tag = CuMemAllocator.default_tag
        assert isinstance(tag, str)
        generations = self._generations
        with (
            # A pool with an allocator of its own cannot use expandable segments, see
            # https://github.com/pytorch/pytorch/issues/147851
            non_expandable_allocations(),
            # A weight in the front of a larger freed block pins the block. Without a
            # limit, 12 layers of gpt-oss-120b pinned 3.7 GiB like that while their
            # conversion still copied whole layers.
            bounded_splits(SPLIT_LIMIT_MB) if generations.enabled else nullcontext(),
            generations.open(tag, outer_tag=self.current_tag),
        ):
            yield

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Label captured allocations ``cudagraph`` and yield the id of their pool.

        The pool is one for the process and is never retired: graphs keep using it.
        Freed segments of other pools are returned before the capture starts, because
        nothing can be unmapped during one.
        """
        if not self._cudagraph_pools:
            self._cudagraph_pools.append(self._make_pool())
        self._generations.drain()
        outer_tag = self.current_tag
        self.current_tag = "cudagraph"
        try:
            yield self._cudagraph_pools[0].id
        finally:
            self.current_tag = outer_tag

    def release_pools(self) -> None:
        """Drop the pools that are still held and return what is free in them.

        Tensors that live on keep their segments. Calling it again is harmless.
        """
        self._cudagraph_pools.clear()
        gc.collect()
        # A device in an error state must not keep a shutdown from ending.
        with suppress(RuntimeError):
            self._generations.drain()

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Free the device memory of every segment.

        Args:
            offload_tags: the contents of segments with these tags are kept on the host;
                those of all others are lost. The default tag if None.

        Raises:
            RuntimeError: the driver or the host refused. Every segment is mapped again,
                with what it was to keep, and the call can be repeated.

        """
        self._sleeper.sleep(_tags(offload_tags))

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Free the device memory of segments with the tags; their contents are lost.

        Args:
            tags: the tags to select.

        Raises:
            RuntimeError: the driver refused. Every segment is mapped again, and the
                call can be repeated.

        """
        self._sleeper.discard(_tags(tags))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Give segments device memory again, and their contents where they were kept.

        Args:
            tags: of the deferrable tags (weights, kv_cache) only these wake; every
                other tag always does. All of them if None.

        Raises:
            RuntimeError: the device lacks memory, or the driver refused. Every segment
                is asleep as before, and the call can be repeated.

        """
        self._sleeper.wake_up(tags)

    def prepare_sleep(self, tags: tuple[str, ...] = ("weights",)) -> None:
        """Make the host memory for the first sleep in the background.

        Does nothing unless VLLM_CUMEM_HOST_MEMORY is "prepare". Call it once the
        segments are those that will sleep, such as after a load.

        Args:
            tags: whose contents the sleep is going to keep.

        """
        segments = [
            segment for segment in self._table.segments() if segment.tag in tags
        ]
        self._mover.store.prepare(segment.size for segment in segments)

    def release_host_memory(self) -> None:
        """Give the system back the host memory that is kept for the next sleep."""
        self._mover.store.release_free()

    def take_moves(self) -> dict[str, dict[str, float]]:
        """Bytes and seconds of the calls since the last time, by operation.

        Operations are "sleep", "wake" and "discard"; each has bytes whose contents were
        ``copied``, bytes ``emptied``, and ``seconds``.
        """
        return self._sleeper.totals.take()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of device memory behind the segments that are awake."""
        return total_size(s for s in self._table.segments() if not s.asleep)
