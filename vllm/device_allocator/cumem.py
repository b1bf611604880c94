# SPDX-License-Identifier: Apache-2.0
"""Sleep mode's allocator on pool generations: what replaces upstream's definitions."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any

import torch

from vllm import envs
from vllm.device_allocator import DEFERRABLE_TAGS, AllocationData
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
from vllm.platforms import current_platform
from vllm.utils.torch_utils import PIN_MEMORY

GIB = 1 << 30

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


class CuMemAllocator:
    def __init__(self) -> None:
        assert extension is not None
        self._table: SegmentTable = make_segment_table(extension)
        callbacks: Any = self._table.callbacks
        self.python_malloc_callback, self.python_free_callback = callbacks
        self._host_copies: dict[tuple[int, int], torch.Tensor] = {}

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
        """The segments by address, as they are now; changing it changes nothing."""
        return {
            segment.address: AllocationData(
                handle=segment.allocation,
                tag=segment.tag,
                cpu_backup_tensor=self._host_copy(segment),
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

    def _host_copy(self, segment: Segment) -> torch.Tensor | None:
        return self._host_copies.get((segment.address, segment.serial))

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
            # limit, loading 12 layers of gpt-oss-120b (MXFP4) pins 3.9 GiB like that.
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
            RuntimeError: the driver refused; segments not yet asleep are unchanged.
        """
        kept_tags = _tags(offload_tags)
        # What PyTorch could give back must not be copied to the host instead.
        gc.collect()
        self._generations.drain()
        self._drop_stale_host_copies()

        freed = kept = 0
        policy_conflict = False
        for segment in self._table.segments():
            keep = segment.tag in kept_tags
            if segment.asleep:
                policy_conflict |= keep != (self._host_copy(segment) is not None)
            elif self._suspend(segment, keep=keep):
                freed += segment.size
                kept += segment.size if keep else 0
        self._report_errors()

        logger.info(
            "Sleep freed %.2f GiB of device memory: %.2f GiB kept on the host, "
            "%.2f GiB discarded.",
            freed / GIB,
            kept / GIB,
            (freed - kept) / GIB,
        )
        if policy_conflict:
            logger.warning(
                "Some segments were already asleep with another choice of what to "
                "keep; they stay as they were put to sleep."
            )

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Free the device memory of segments with the tags; their contents are lost.

        Args:
            tags: the tags to select.
        """
        chosen_tags = _tags(tags)
        self._generations.drain()
        self._drop_stale_host_copies()

        discarded = 0
        policy_conflict = False
        for segment in self._table.segments():
            if segment.tag not in chosen_tags:
                continue
            if segment.asleep:
                policy_conflict |= self._host_copy(segment) is not None
            elif self._suspend(segment, keep=False):
                discarded += segment.size
        self._report_errors()

        logger.info("Discarded %.2f GiB with tags %s.", discarded / GIB, chosen_tags)
        if policy_conflict:
            logger.warning(
                "Some segments to discard were already asleep with their contents on "
                "the host; they stay as they were put to sleep."
            )

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Give segments device memory again, and their contents where they were kept.

        Args:
            tags: of the deferrable tags (weights, kv_cache) only these wake; every
                other tag always does. All of them if None.

        Raises:
            RuntimeError: the device lacks memory. The segments woken so far stay awake,
                the others asleep with their host copies, and the call can be repeated.
        """
        gc.collect()
        self._generations.drain()
        self._drop_stale_host_copies()
        for segment in self._table.segments():
            deferred = (
                tags is not None
                and segment.tag in DEFERRABLE_TAGS
                and segment.tag not in tags
            )
            if segment.asleep and not deferred:
                self._resume(segment)
        self._report_errors()

    def _suspend(self, segment: Segment, *, keep: bool) -> bool:
        """Put a mapped segment to sleep; False if it was freed meanwhile."""
        if not self._table.hold(segment):
            return False
        try:
            copy = None
            if keep:
                copy = torch.empty(
                    segment.size, dtype=torch.uint8, device="cpu", pin_memory=PIN_MEMORY
                )
                libcudart.cudaMemcpy(copy.data_ptr(), segment.address, segment.size)
            try:
                unmap_and_release(segment.allocation)
            except RuntimeError:
                # ROCm's extension leaves such a segment without its chunks.
                if current_platform.is_rocm():
                    self._table.mark(segment, asleep=True)
                raise
            self._table.mark(segment, asleep=True)
            if copy is not None:
                self._host_copies[segment.address, segment.serial] = copy
        finally:
            self._table.unhold(segment)
        return True

    def _resume(self, segment: Segment) -> None:
        """Wake a sleeping segment, unless it was freed meanwhile."""
        if not self._table.hold(segment):
            return
        try:
            create_and_map(segment.allocation)
            self._table.mark(segment, asleep=False)
            copy = self._host_copy(segment)
            if copy is not None:
                try:
                    libcudart.cudaMemcpy(segment.address, copy.data_ptr(), segment.size)
                except RuntimeError:
                    unmap_and_release(segment.allocation)
                    self._table.mark(segment, asleep=True)
                    raise
                del self._host_copies[segment.address, segment.serial]
            elif current_platform.is_rocm():
                # amdgpu before 6.14 may map pages with old contents.
                libcudart.cudaMemset(segment.address, 0, segment.size)
                torch.accelerator.synchronize()
        finally:
            self._table.unhold(segment)

    def _drop_stale_host_copies(self) -> None:
        """Free the host copies of segments that were freed while asleep."""
        alive = {(s.address, s.serial) for s in self._table.segments()}
        for key in self._host_copies.keys() - alive:
            del self._host_copies[key]

    def _report_errors(self) -> None:
        for error in self._table.take_errors():
            logger.warning("CuMem: %s", error)
