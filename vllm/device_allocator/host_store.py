# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Host memory that holds the contents of sleeping segments.

Allocating locked memory is what makes a first sleep slow. Here it is mapped with huge
pages where the system grants them, touched by several threads, and only then registered
with the driver; while one piece is registered and filled, the next ones are touched.
Each segment has a piece of its exact size, which later cycles use again.

Memory that cannot be registered, or must not be, holds contents as well as any other;
only the copies are slower. It is given back when its segment wakes.
"""

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from vllm.device_allocator.host_limits import available_bytes, processors_near
from vllm.logger import init_logger

logger = init_logger(__name__)

Policy = Literal["keep", "release", "prepare", "pageable"]

HUGE_PAGE_BYTES = 2 << 20
SLICE_BYTES = 64 << 20
"""What one thread touches at a time."""

MAX_THREADS = 16
PREPARING_THREADS = 4
"""Preparing must not take the processors of an engine that is starting."""

SPARE_BYTES = 1 << 30
"""Host memory that registering leaves alone: what is locked cannot be swapped out."""


class Locker(Protocol):
    """Locks host memory for the device; both raise RuntimeError."""

    def register(self, address: int, size: int) -> None: ...

    def unregister(self, address: int) -> None: ...


@dataclass(eq=False)
class HostPiece:
    """Host memory for the contents of one segment, aligned to its pages."""

    memory: mmap.mmap
    address: int
    size: int
    registered: bool = False
    will_register: bool = False
    touching: list[Future] = field(default_factory=list)

    @property
    def contents(self) -> torch.Tensor:
        """The bytes, as a tensor that keeps the memory alive: uint8 [size]."""
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        start = self.address - whole.data_ptr()
        return whole[start : start + self.size]

    def touch(self, start: int) -> None:
        """Make the system give pages to one slice."""
        # One byte per page is enough, and torch lets other threads run meanwhile.
        self.contents[start : start + SLICE_BYTES : mmap.PAGESIZE] = 0


def map_piece(size: int) -> HostPiece:
    """New host memory, without pages until it is touched.

    Raises:
        RuntimeError: the system has none.

    """
    slack = HUGE_PAGE_BYTES if size >= HUGE_PAGE_BYTES else 0
    try:
        memory = mmap.mmap(-1, size + slack, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"the host has no {size} bytes for the contents of a segment: {error}"
        ) from error
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    with suppress(OSError):
        # A child process has no use for it, and would copy what is locked.
        memory.madvise(mmap.MADV_DONTFORK)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    address = start + (-start % HUGE_PAGE_BYTES if slack else 0)
    return HostPiece(memory, address, size)


def _run_on(processors: set[int]) -> None:
    """Keep this thread on the processors; one that was taken away is no error."""
    with suppress(OSError):
        os.sched_setaffinity(0, processors)


class Reservation:
    """The memory for one sleep; `take` each piece once.

    Pieces of earlier cycles are there already. The others are being touched, in the
    order of the sizes.
    """

    def __init__(self, store: "HostStore", sizes: list[int], max_threads: int) -> None:
        self._store = store
        self._pool: ThreadPoolExecutor | None = None
        self._refused = False
        self._pieces: dict[int, deque[HostPiece]] = {}
        missing = store._claim(sizes, self._pieces)
        try:
            pieces = [map_piece(size) for size in missing]
            for piece in pieces:
                self._pieces.setdefault(piece.size, deque()).append(piece)
            store._choose_what_to_register(pieces)
            self._touch([p for p in pieces if p.will_register], max_threads)
        except BaseException:
            self.close()
            raise

    def _touch(self, pieces: list[HostPiece], max_threads: int) -> None:
        slices = [(p, start) for p in pieces for start in range(0, p.size, SLICE_BYTES)]
        if not slices:
            return
        near = processors_near(torch.accelerator.current_device_index())
        # A page comes from the node of the processor that touches it first.
        self._pool = ThreadPoolExecutor(
            min(max_threads, len(near), len(slices)),
            "touch",
            _run_on,
            (near,),
        )
        for piece, start in slices:
            piece.touching.append(self._pool.submit(piece.touch, start))

    def take(self, size: int) -> HostPiece:
        """A piece of that size, registered if it can be; the taker's until `give`."""
        piece = self._pieces[size].popleft()
        for touched in piece.touching:
            touched.result()
        piece.touching.clear()
        if piece.will_register:
            piece.will_register = False
            if not self._refused:
                self._refused = not self._store._register(piece)
        return piece

    def close(self) -> None:
        """Give back what was not taken."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for pieces in self._pieces.values():
            for piece in pieces:
                piece.touching.clear()
                self._store._put_away(piece)
        self._pieces.clear()


class HostStore:
    """The host memory of one process.

    Args:
        runtime: registers the memory with the driver; None if nothing can.
        policy: "keep" memory for the next sleep, "release" it on wake, "prepare" it
            before the first sleep and keep it, or "pageable": register nothing.
        budget: bytes that may be registered; None for no limit.

    """

    def __init__(
        self,
        runtime: "Locker | None",
        policy: Policy = "keep",
        budget: int | None = None,
    ) -> None:
        self.policy = policy
        self.registered_bytes = 0
        self._runtime = runtime if policy != "pageable" else None
        self._budget = budget
        self._free: dict[int, list[HostPiece]] = {}
        self._warned = False
        self._preparing: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for the next sleep."""
        return sum(size * len(pieces) for size, pieces in self._free.items())

    @contextmanager
    def reserve(
        self, sizes: Iterable[int], max_threads: int = MAX_THREADS
    ) -> Iterator[Reservation]:
        """The memory for a sleep, in the order in which it will be taken.

        Kept memory that does not fit goes back to the system first, if more is needed,
        so the process never holds more than one sleep's worth.

        Raises:
            RuntimeError: the system has no memory; nothing has changed then.

        """
        self._stop_preparing()
        reservation = Reservation(self, list(sizes), max_threads)
        try:
            yield reservation
        finally:
            reservation.close()

    def give(self, piece: HostPiece) -> None:
        """Take back a piece whose contents are no longer needed. Never raises."""
        if self.policy == "release" or not piece.registered:
            self._release(piece)
        else:
            self._put_away(piece)

    def prepare(self, sizes: Iterable[int]) -> None:
        """Make the memory for a sleep on a thread of its own.

        Does nothing unless the policy is "prepare". Stops at the next sleep, at
        `release_free`, and when the interpreter ends.
        """
        if self.policy != "prepare" or self._runtime is None:
            return
        self._stop_preparing()
        self._preparing = threading.Thread(
            target=self._prepare,
            args=(list(sizes), torch.accelerator.current_device_index()),
            name="prepare-sleep",
        )
        self._preparing.start()

    def _prepare(self, sizes: list[int], device: int) -> None:
        taken = []
        try:
            # A new thread would register with the first device.
            torch.accelerator.set_device_index(device)
            reservation = Reservation(self, sizes, PREPARING_THREADS)
            try:
                for size in sizes:
                    # The interpreter's end waits for this thread.
                    if self._stop.is_set() or not threading.main_thread().is_alive():
                        break
                    taken.append(reservation.take(size))
            finally:
                reservation.close()
                for piece in taken:
                    self.give(piece)
        except RuntimeError as error:
            logger.warning("Could not prepare host memory for sleep: %s", error)

    def wait_until_prepared(self) -> None:
        """Block until `prepare` has done its work."""
        if self._preparing is not None:
            self._preparing.join()

    def _stop_preparing(self) -> None:
        if self._preparing is not None:
            self._stop.set()
            self._preparing.join()
            self._preparing = None
            self._stop.clear()

    def release_free(self) -> None:
        """Give the system back what is kept for the next sleep."""
        self._stop_preparing()
        pieces, self._free = self._free, {}
        for piece in [p for kept in pieces.values() for p in kept]:
            self._release(piece)

    def _claim(self, sizes: list[int], into: dict[int, deque[HostPiece]]) -> list[int]:
        """Move fitting pieces to ``into``; the sizes without one, in their order."""
        missing = []
        for size in sizes:
            if kept := self._free.get(size):
                into.setdefault(size, deque()).append(kept.pop())
            else:
                missing.append(size)
        if missing:
            unfit, self._free = self._free, {}
            for piece in [p for kept in unfit.values() for p in kept]:
                self._release(piece)
        return missing

    def _choose_what_to_register(self, pieces: list[HostPiece]) -> None:
        if self._runtime is None or not pieces:
            return
        room, reason = self._room_to_register()
        for piece in pieces:
            piece.will_register = piece.size <= room
            if piece.will_register:
                room -= piece.size
        left_out = sum(piece.size for piece in pieces if not piece.will_register)
        if left_out:
            self._warn_once(f"{reason}, so {left_out} bytes stay unregistered")

    def _room_to_register(self) -> tuple[int, str]:
        rooms = []
        available = available_bytes()
        if available is not None:
            rooms.append(
                (max(0, available - SPARE_BYTES), "the host is short of memory")
            )
        if self._budget is not None:
            left = max(0, self._budget - self.registered_bytes)
            rooms.append((left, f"the budget is {self._budget} bytes"))
        return min(rooms, default=(1 << 62, ""))

    def _register(self, piece: HostPiece) -> bool:
        assert self._runtime is not None
        try:
            self._runtime.register(piece.address, piece.size)
        except RuntimeError as error:
            self._warn_once(f"the driver did not lock {piece.size} bytes ({error})")
            return False
        piece.registered = True
        self.registered_bytes += piece.size
        return True

    def _put_away(self, piece: HostPiece) -> None:
        if piece.registered:
            self._free.setdefault(piece.size, []).append(piece)

    def _release(self, piece: HostPiece) -> None:
        if piece.registered:
            assert self._runtime is not None
            try:
                self._runtime.unregister(piece.address)
            except RuntimeError as error:
                # Locked memory must not be unmapped; it can still be used.
                logger.warning("Host memory stays locked: %s", error)
                self._free.setdefault(piece.size, []).append(piece)
                return
            piece.registered = False
            self.registered_bytes -= piece.size
        # The mapping ends with its last reference; a tensor on it may live on.
        del piece.memory

    def _warn_once(self, reason: str) -> None:
        log = logger.debug if self._warned else logger.warning
        self._warned = True
        log("Sleep uses pageable host memory, which copies slower: %s.", reason)
