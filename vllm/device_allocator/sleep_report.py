# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What sleep and wake say about device memory."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from vllm.device_allocator.segment_table import Segment
from vllm.logger import init_logger

logger = init_logger(__name__)

GIB = 1 << 30


class MoveTotals:
    """Bytes and seconds of sleeps, wakes and discards, until they are taken."""

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, float]] = {}

    def add(self, operation: str, copied: int, emptied: int, seconds: float) -> None:
        """Count one call.

        Args:
            operation: "sleep", "wake" or "discard".
            copied: bytes of device memory whose contents were copied.
            emptied: bytes of those whose contents were not.
            seconds: how long the call took.

        """
        total = self._totals.setdefault(
            operation, {"copied": 0, "emptied": 0, "seconds": 0.0}
        )
        total["copied"] += copied
        total["emptied"] += emptied
        total["seconds"] += seconds

    def take(self) -> dict[str, dict[str, float]]:
        """The totals by operation since the last time."""
        totals, self._totals = self._totals, {}
        return totals


def total_size(segments: Iterable[Segment]) -> int:
    """Bytes of all segments, asleep or not."""
    return sum(segment.size for segment in segments)


def missing_bytes(segments: Iterable[Segment]) -> int:
    """How much more free memory the device needs to wake the segments."""
    if not torch.cuda.is_initialized():
        return 0
    needed = total_size(segment for segment in segments if segment.asleep)
    return max(0, needed - torch.accelerator.get_memory_info()[0])


def shortage(segments: Sequence[Segment]) -> str:
    """What a wake of the segments needs, by tag, and what the device lacks."""
    by_tag: Counter[str] = Counter()
    for segment in segments:
        by_tag[segment.tag] += segment.size if segment.asleep else 0
    needed = ", ".join(
        f"{size / GIB:.2f} GiB for {tag}" for tag, size in by_tag.items()
    )
    missing = missing_bytes(segments)
    free = by_tag.total() - missing
    lack = f"; {free / GIB:.2f} GiB are free, {missing / GIB:.2f} GiB are missing"
    return (
        f"The wake needs {needed}{lack if missing else ''}. Everything is asleep as "
        "before: free memory and repeat the call."
    )


def residual(segments: Sequence[Segment]) -> str:
    """What is on the current device beside segments that are asleep, by kind.

    Raises:
        RuntimeError: the device does not say.

    """
    if not torch.cuda.is_initialized():
        return "nothing"
    free, total = torch.accelerator.get_memory_info()
    mapped = total_size(segment for segment in segments if not segment.asleep)
    # PyTorch counts the segments that are asleep as well.
    others = torch.accelerator.memory_reserved() - total_size(segments)
    rest = total - free - mapped - others
    return (
        f"{mapped / GIB:.2f} GiB of sleep mode's segments, {others / GIB:.2f} GiB of "
        f"PyTorch's other memory, {rest / GIB:.2f} GiB of contexts, libraries, "
        "communicators and other processes"
    )


def log_residual(segments: Sequence[Segment]) -> None:
    """Log `residual`; a device that does not say is no reason to fail a sleep."""
    with suppress(RuntimeError):
        logger.info("Still on the device: %s.", residual(segments))
