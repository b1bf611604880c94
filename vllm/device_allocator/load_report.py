# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a load into CuMem memory took, and what the memory is used for now.

The figures are the extension's own counts and PyTorch's block lists. Nothing here
resets a statistic that PyTorch keeps; the extension's peak starts anew with each load.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch

from vllm.device_allocator.extension import extension
from vllm.device_allocator.generations import PoolGenerations, open_owner
from vllm.device_allocator.segment_table import Segment
from vllm.logger import init_logger

logger = init_logger(__name__)

GIB = 1 << 30


@dataclass(frozen=True)
class LoadReport:
    """One load; sizes in bytes of this process, on all its devices."""

    live: int
    """In tensors, when the load had ended."""
    mapped: int
    """Device memory behind segments that are awake, when the load had ended."""
    peak_mapped: int
    """The most that was mapped at any time of the load."""
    returned: int
    """Given back to the device during the load."""
    generations: int
    """Pools that the weights came from, one after the other."""
    reclaim_seconds: float
    """Spent waiting for the device and emptying PyTorch's cache."""

    def __str__(self) -> str:
        return (
            f"{self.live / GIB:.2f} GiB live in {self.mapped / GIB:.2f} GiB mapped, "
            f"peak {self.peak_mapped / GIB:.2f} GiB; "
            f"{self.returned / GIB:.2f} GiB returned during the load, "
            f"{self.generations} generation(s), "
            f"{self.reclaim_seconds:.2f} s reclaiming"
        )


@dataclass(frozen=True)
class TagMemory:
    """The segments of one tag; sizes in bytes."""

    mapped: int = 0
    """With device memory behind them."""
    asleep: int = 0
    """Without."""


class LoadWatch:
    """Counts from its making on.

    Args:
        counts: the CuMem extension.
        generations: the generations that the load allocates from.

    """

    def __init__(self, counts: ModuleType, generations: PoolGenerations) -> None:
        self._counts = counts
        self._generations = generations
        counts.reset_peak()
        self._returned = counts.counters()["returned_bytes"]
        self._retired = generations.retired
        self._drain_seconds = generations.drain_seconds

    def report(self) -> LoadReport:
        """The figures until now."""
        counters = self._counts.counters()
        segments = (Segment(*row) for row in self._counts.segments())
        return LoadReport(
            live=live_bytes(segments),
            mapped=counters["mapped_bytes"],
            peak_mapped=counters["peak_mapped_bytes"],
            returned=counters["returned_bytes"] - self._returned,
            generations=self._generations.retired - self._retired + 1,
            reclaim_seconds=self._generations.drain_seconds - self._drain_seconds,
        )


def live_bytes(segments: Iterable[Segment]) -> int:
    """Bytes of the blocks that PyTorch has handed out from the segments."""
    addresses = {segment.address for segment in segments}
    if not addresses:
        return 0
    return sum(
        segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot(include_traces=False)
        if segment["address"] in addresses
    )


def by_tag(segments: Iterable[Segment]) -> dict[str, TagMemory]:
    """What the segments of each tag take."""
    tags: dict[str, TagMemory] = {}
    for segment in segments:
        known = tags.get(segment.tag, TagMemory())
        tags[segment.tag] = TagMemory(
            mapped=known.mapped + (0 if segment.asleep else segment.size),
            asleep=known.asleep + (segment.size if segment.asleep else 0),
        )
    return tags


_last: LoadReport | None = None


def last_load_report() -> LoadReport | None:
    """The report of the last load that succeeded; None if there was none."""
    return _last


@contextmanager
def load_reported(pool: AbstractContextManager) -> Iterator[None]:
    """Enter the pool of a load, and log a report once it has closed.

    Nothing is reported of a load that fails, that goes to the default allocator, or
    whose extension does not count (ROCm).

    Args:
        pool: the memory pool's context, or one that does nothing.

    """
    global _last
    watch = None
    with pool:
        owner = open_owner()
        if owner is not None and extension and hasattr(extension, "counters"):
            watch = LoadWatch(extension, owner)
        yield
    if watch is not None:
        _last = watch.report()
        logger.info("CuMem load: %s", _last)
