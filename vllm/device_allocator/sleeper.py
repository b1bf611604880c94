# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sleep, discard, wake: which segments move by their tags, and what is said of it."""

import gc
import time
from collections.abc import Callable, Collection

import torch

from vllm import envs
from vllm.device_allocator import DEFERRABLE_TAGS
from vllm.device_allocator.copy_engine import BlockingCopies, Copies, StreamCopies
from vllm.device_allocator.cuda_runtime import CudaRuntime, loaded_runtime
from vllm.device_allocator.extension import cumem_available, libcudart
from vllm.device_allocator.host_store import HostStore
from vllm.device_allocator.segment_mover import MapError, SegmentMover
from vllm.device_allocator.segment_table import Segment, SegmentTable
from vllm.device_allocator.sleep_report import (
    GIB,
    MoveTotals,
    log_residual,
    missing_bytes,
    shortage,
    total_size,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.torch_utils import PIN_MEMORY

logger = init_logger(__name__)


def make_mover(
    table: SegmentTable,
    map_segment: Callable[[Segment], None],
    unmap_segment: Callable[[Segment], None],
    clear_segment: Callable[[Segment], None],
) -> SegmentMover:
    """What moves the table's segments, as this platform and the environment want it.

    Args:
        table: the segments.
        map_segment: gives a segment device memory.
        unmap_segment: takes it away.
        clear_segment: called for each segment that wakes without contents.

    """
    runtime: CudaRuntime | None = None
    if cumem_available:
        runtime = loaded_runtime(current_platform.is_rocm())
    store = HostStore(
        runtime if PIN_MEMORY else None,
        envs.VLLM_CUMEM_HOST_MEMORY,
        envs.VLLM_CUMEM_HOST_BUDGET or None,
    )
    copies: Copies
    if runtime is None or current_platform.is_rocm():
        copies = BlockingCopies(lambda *copy: libcudart.cudaMemcpy(*copy))
    else:
        copies = StreamCopies(runtime)
    return SegmentMover(table, store, copies, map_segment, unmap_segment, clear_segment)


class Sleeper:
    """Puts the segments of one table to sleep by their tags, and wakes them.

    Args:
        table: the segments.
        mover: moves them.
        drain: waits for the device, and returns what PyTorch has free to it.

    """

    def __init__(
        self, table: SegmentTable, mover: SegmentMover, drain: Callable[[], None]
    ) -> None:
        self._table = table
        self._mover = mover
        self._drain = drain
        self._reminded = False
        self.totals = MoveTotals()

    def _settle(self) -> list[Segment]:
        """Wait for the device, and let go of what nobody uses: it must not move.

        Returns:
            The segments that are left.

        """
        self._drain()
        self._mover.drop_stale_copies()
        return self._table.segments()

    def _suspend(
        self,
        kept: list[Segment],
        dropped: list[Segment],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        if torch.cuda.is_initialized():
            # `_drain` waited for the current device alone.
            for device in {segment.device for segment in kept + dropped}:
                torch.accelerator.synchronize(device)
        self._mover.suspend(kept, dropped, meanwhile)

    def sleep(self, kept_tags: Collection[str]) -> None:
        """Put every segment to sleep.

        Args:
            kept_tags: the contents of segments with these tags move to the host.

        Raises:
            RuntimeError: the driver or the host refused; all is as it was.

        """
        start = time.perf_counter()
        segments = self._settle()
        kept: list[Segment] = []
        dropped: list[Segment] = []
        policy_conflict = False
        for segment in segments:
            keep = segment.tag in kept_tags
            has_copy = self._mover.host_copy(segment) is not None
            if segment.asleep:
                policy_conflict |= keep != has_copy
            elif keep and not has_copy:
                kept.append(segment)
            else:
                dropped.append(segment)
        self._suspend(kept, dropped, meanwhile=self._collect_garbage)
        self._mover.drop_stale_copies()
        self._report_errors()

        seconds = time.perf_counter() - start
        on_host, lost = total_size(kept), total_size(dropped)
        self.totals.add("sleep", on_host, lost, seconds)
        logger.info(
            "Sleep freed %.2f GiB of device memory in %.2f s: %.2f GiB kept on the "
            "host (%.1f GB/s), %.2f GiB discarded.",
            (on_host + lost) / GIB,
            seconds,
            on_host / GIB,
            on_host / 1e9 / seconds,
            lost / GIB,
        )
        if policy_conflict:
            logger.warning(
                "Some segments were already asleep with another choice of what to "
                "keep; they stay as they were put to sleep."
            )
        log_residual(self._table.segments())

    def discard(self, tags: Collection[str]) -> None:
        """Put the segments with these tags to sleep without their contents.

        Raises:
            RuntimeError: the driver refused; every segment is mapped.

        """
        start = time.perf_counter()
        segments = self._settle()
        dropped: list[Segment] = []
        policy_conflict = False
        for segment in segments:
            if segment.tag not in tags:
                continue
            if self._mover.host_copy(segment) is not None:
                policy_conflict = True
            elif not segment.asleep:
                dropped.append(segment)
        self._suspend([], dropped)
        self._report_errors()
        seconds = time.perf_counter() - start
        self.totals.add("discard", 0, total_size(dropped), seconds)
        logger.info(
            "Discarded %.2f GiB of device memory with tags %s in %.2f s.",
            total_size(dropped) / GIB,
            ", ".join(tags),
            seconds,
        )
        if policy_conflict:
            logger.warning(
                "Some segments to discard were already asleep with their contents on "
                "the host; they stay as they were put to sleep."
            )

    def wake_up(self, tags: Collection[str] | None) -> None:
        """Wake segments.

        Args:
            tags: of the deferrable tags only these; every other tag always wakes. All
                if None.

        Raises:
            RuntimeError: the device lacks memory, or the driver refused; all is as it
                was.

        """
        start = time.perf_counter()
        segments = self._settle()
        woken: list[Segment] = []
        restored: list[Segment] = []
        for segment in segments:
            deferred = (
                tags is not None
                and segment.tag in DEFERRABLE_TAGS
                and segment.tag not in tags
            )
            has_copy = self._mover.host_copy(segment) is not None
            if (segment.asleep or has_copy) and not deferred:
                woken.append(segment)
                if has_copy:
                    restored.append(segment)
        if missing_bytes(woken):
            self._collect_garbage()
        try:
            self._mover.resume(woken)
        except MapError as error:
            raise RuntimeError(f"{error}. {shortage(woken)}") from error
        self._report_errors()
        if not woken:
            return

        seconds = time.perf_counter() - start
        mapped, copied = total_size(woken), total_size(restored)
        self.totals.add("wake", copied, mapped - copied, seconds)
        logger.info(
            "Woke %.2f GiB of device memory in %.2f s, %.2f GiB of it with contents "
            "from the host (%.1f GB/s).",
            mapped / GIB,
            seconds,
            copied / GIB,
            copied / 1e9 / seconds,
        )
        lost = {s.tag for s in woken} - {s.tag for s in restored}
        if "weights" in lost and not self._reminded:
            self._reminded = True
            logger.warning(
                "The weights were put to sleep without their contents (level 2) and "
                "are undefined now. Load them before generating, such as by "
                "reload_weights."
            )

    def _collect_garbage(self) -> None:
        """Break cycles, and give the device back what only they kept allocated.

        It takes a good part of the time of a sleep, which is why it is done beside
        copies, and for a wake only when memory is short.
        """
        before = (
            torch.accelerator.memory_allocated() if torch.cuda.is_initialized() else 0
        )
        gc.collect()
        if before and torch.accelerator.memory_allocated() < before:
            self._drain()

    def _report_errors(self) -> None:
        for error in self._table.take_errors():
            logger.warning("CuMem: %s", error)
