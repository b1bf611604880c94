# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Moves segments off the device and back, all of them or none.

One rule makes every interruption safe to repeat: **while a segment has a host copy, the
copy is its contents**, whatever is or is not mapped on the device. The copy is noted
before the segment is unmapped, and dropped only when all copies of a wake are done.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from vllm.device_allocator.copy_engine import Copies, Mark
from vllm.device_allocator.host_store import HostPiece, HostStore
from vllm.device_allocator.segment_table import Segment, SegmentTable
from vllm.logger import init_logger

logger = init_logger(__name__)

BATCH_BYTES = 64 << 20
"""Small segments are waited for together."""

PROGRESS_SECONDS = 2.0

Key = tuple[int, int]


class MapError(RuntimeError):
    """The device gave no memory for a segment."""


def key_of(segment: Segment) -> Key:
    return segment.address, segment.serial


def batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Runs of segments of at least `BATCH_BYTES` each, but for the last one."""
    batch: list[Segment] = []
    size = 0
    for segment in segments:
        batch.append(segment)
        size += segment.size
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class SegmentMover:
    """Puts the segments of one table to sleep, and wakes them.

    Args:
        table: the segments.
        store: gives the host memory.
        copies: copies between it and the device.
        map_segment: gives a segment device memory.
        unmap_segment: takes it away.
        clear: called for each segment that wakes without contents.

    """

    def __init__(
        self,
        table: SegmentTable,
        store: HostStore,
        copies: Copies,
        map_segment: Callable[[Segment], None],
        unmap_segment: Callable[[Segment], None],
        clear: Callable[[Segment], None],
    ) -> None:
        self.store = store
        self.host_copies: dict[Key, HostPiece] = {}
        self._table = table
        self._copies = copies
        self._map = map_segment
        self._unmap = unmap_segment
        self._clear = clear

    def host_copy(self, segment: Segment) -> HostPiece | None:
        """What holds the segment's contents instead of the device, if anything does."""
        return self.host_copies.get(key_of(segment))

    def host_contents(self, segment: Segment) -> torch.Tensor | None:
        """The bytes of `host_copy`, uint8 [size], without a copy of them."""
        piece = self.host_copy(segment)
        return None if piece is None else piece.contents

    def drop_stale_copies(self) -> None:
        """Take back the host memory of segments that were freed while asleep."""
        alive = {key_of(segment) for segment in self._table.segments()}
        for key in self.host_copies.keys() - alive:
            self.store.give(self.host_copies.pop(key))

    def suspend(
        self,
        kept: Sequence[Segment],
        dropped: Sequence[Segment],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Put mapped segments to sleep. Nothing may be running on the device.

        Args:
            kept: their contents move to the host.
            dropped: their contents are lost.
            meanwhile: called once, while the copies go on.

        Raises:
            RuntimeError: the driver or the host refused. Every segment is mapped as
                before, with its contents but for those of ``dropped``. A segment that
                could not be put back is asleep with its host copy.

        """
        with self._holding(kept) as kept, self._holding(dropped) as dropped:
            earlier = set(self.host_copies)
            try:
                self._move_to_host(kept, meanwhile)
                # Last, because nothing brings these contents back.
                for segment in dropped:
                    self._put_to_sleep(segment)
            except BaseException:
                self._copies.abandon()
                self._put_back([*kept, *dropped], earlier)
                raise

    def resume(self, segments: Sequence[Segment]) -> None:
        """Wake segments, and restore the contents of those with a host copy.

        Raises:
            MapError: the device has no memory.
            RuntimeError: another failure. In both cases every segment is as it was.

        """
        with self._holding(segments) as segments:
            mapped: list[Segment] = []
            try:
                self._start_to_restore(segments, mapped)
                self._copies.wait(self._copies.mark())
            except BaseException:
                self._copies.abandon()
                self._unmap_again(mapped)
                raise
            for segment in segments:
                self._drop_copy(segment)

    @contextmanager
    def _holding(self, segments: Sequence[Segment]) -> Iterator[list[Segment]]:
        """Those of the segments that still exist, and go on existing in the body."""
        with ExitStack() as held:
            existing = []
            for segment in segments:
                if self._table.hold(segment):
                    held.callback(self._table.unhold, segment)
                    existing.append(segment)
            yield existing

    def _move_to_host(
        self, segments: Sequence[Segment], meanwhile: Callable[[], None]
    ) -> None:
        progress = _Progress("Falling asleep", segments)
        under_way: list[tuple[list[tuple[Segment, HostPiece]], Mark]] = []
        pieces: list[HostPiece] = []
        with self.store.reserve(segment.size for segment in segments) as memory:
            try:
                for batch in batches(segments):
                    filled = []
                    for segment in batch:
                        piece = memory.take(segment.size)
                        pieces.append(piece)
                        self._copies.start(
                            segment.device, piece.address, segment.address, segment.size
                        )
                        filled.append((segment, piece))
                        progress.add(segment, "on their way to the host")
                    under_way.append((filled, self._copies.mark()))
                meanwhile()
                progress.restart()
                for filled, mark in under_way:
                    self._copies.wait(mark)
                    for segment, piece in filled:
                        self.host_copies[key_of(segment)] = piece
                        self._put_to_sleep(segment)
                        progress.add(segment, "on the host")
            except BaseException:
                self._copies.abandon()
                noted = set(map(id, self.host_copies.values()))
                for piece in pieces:
                    if id(piece) not in noted:
                        self.store.give(piece)
                raise

    def _put_to_sleep(self, segment: Segment) -> None:
        self._unmap(segment)
        self._table.mark(segment, asleep=True)

    def _put_back(self, segments: Sequence[Segment], earlier: set[Key]) -> None:
        """Undo a failed sleep of segments that were all mapped.

        Args:
            segments: as they were before.
            earlier: the host copies from before the sleep, which are not dropped.

        """
        now = {key_of(segment): segment for segment in self._table.segments()}
        asleep = []
        for segment in segments:
            current = now.get(key_of(segment))
            if current is not None and current.asleep:
                asleep.append(current)
            elif key_of(segment) not in earlier:
                # Never unmapped, or freed meanwhile.
                self._drop_copy(segment)
        try:
            self.resume(asleep)
        except RuntimeError as error:
            logger.error(
                "%d segments could not be put back after a failed sleep: %s. They are "
                "asleep, those to keep with their contents on the host; wake_up() "
                "restores them.",
                len(asleep),
                error,
            )

    def _start_to_restore(
        self, segments: Sequence[Segment], mapped: list[Segment]
    ) -> None:
        progress = _Progress("Waking", segments)
        # Those with contents first: the others are mapped while these are copied.
        for segment in sorted(
            segments, key=lambda s: key_of(s) not in self.host_copies
        ):
            if segment.asleep:
                try:
                    self._map(segment)
                except RuntimeError as error:
                    raise MapError(f"{error}, for the tag {segment.tag}") from error
                self._table.mark(segment, asleep=False)
                mapped.append(segment)
            piece = self.host_copy(segment)
            if piece is not None:
                self._copies.start(
                    segment.device, segment.address, piece.address, segment.size
                )
            elif segment.asleep:
                self._clear(segment)
            progress.add(segment, "mapped")

    def _unmap_again(self, segments: list[Segment]) -> None:
        for segment in segments:
            try:
                self._put_to_sleep(segment)
            except RuntimeError as error:
                # It keeps its host copy, from which the next wake restores it.
                logger.error("A segment stays mapped after a failed wake: %s", error)

    def _drop_copy(self, segment: Segment) -> None:
        piece = self.host_copies.pop(key_of(segment), None)
        if piece is not None:
            self.store.give(piece)


class _Progress:
    """Says how far a sleep or a wake is, every `PROGRESS_SECONDS`."""

    def __init__(self, what: str, segments: Sequence[Segment]) -> None:
        self._what = what
        self._total = sum(segment.size for segment in segments)
        self._done = 0
        self._next = time.monotonic() + PROGRESS_SECONDS

    def restart(self) -> None:
        """Count from nothing again: the next step begins."""
        self._done = 0

    def add(self, segment: Segment, where: str) -> None:
        self._done += segment.size
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_SECONDS
            logger.info(
                "%s: %.1f of %.1f GB are %s.",
                self._what,
                self._done / 1e9,
                self._total / 1e9,
                where,
            )
