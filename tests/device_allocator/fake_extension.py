# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Segments in host memory, with the extension's rules and faults on demand."""

import ctypes
import itertools
from collections.abc import Callable

from vllm.device_allocator.segment_table import Segment


class FakeExtension:
    """A table of segments whose memory is lost while they are asleep."""

    callbacks = (None, None)

    def __init__(self) -> None:
        self.rows: dict[int, Segment] = {}
        self.memory: dict[int, bytearray] = {}
        self.held: list[int] = []
        self.errors: list[str] = []
        self.capacity = 1 << 60
        self.calls: list[str] = []
        self.faults: dict[int, str] = {}
        self._serials = itertools.count(1)
        self._scope = ("default", 0)

    # What a test does.

    def allocate(self, address: int, tag: str, content: bytes) -> None:
        self.rows[address] = Segment(
            0, len(content), address, 1, tag, False, next(self._serials), 0
        )
        self.memory[address] = bytearray(content)

    def free(self, address: int) -> None:
        assert address not in self.held
        del self.rows[address]
        self.memory.pop(address, None)

    def mapped(self) -> int:
        return sum(len(memory) for memory in self.memory.values())

    def fail(self, nth: int, how: str = "before") -> None:
        """Let the nth call from now that maps, unmaps or copies fail.

        Args:
            how: "before" it did anything, or "after", as when memory was unmapped but
                could not be released.

        """
        self.faults[len(self.calls) + nth] = how

    def _call(self, name: str, work: Callable[[], None]) -> None:
        self.calls.append(name)
        fault = self.faults.pop(len(self.calls), None)
        if fault != "before":
            work()
        if fault is not None:
            raise RuntimeError(f"{name} failed")

    # The table.

    def segments(self) -> list[Segment]:
        return [segment for _, segment in sorted(self.rows.items())]

    def hold(self, segment: Segment) -> bool:
        current = self.rows.get(segment.address)
        if current is None or current.serial != segment.serial:
            return False
        self.held.append(segment.address)
        return True

    def unhold(self, segment: Segment) -> None:
        self.held.remove(segment.address)

    def mark(self, segment: Segment, *, asleep: bool) -> None:
        assert self.rows[segment.address].asleep is asleep

    def set_scope(self, tag: str, generation: int) -> None:
        self._scope = (tag, generation)

    def get_scope(self) -> tuple[str, int]:
        return self._scope

    def take_errors(self) -> list[str]:
        errors, self.errors = self.errors, []
        return errors

    # The functions that map and copy.

    def create_and_map(self, allocation) -> None:
        _, size, address, _ = allocation
        assert self.rows[address].asleep
        if self.mapped() + size > self.capacity:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
        self._call("create_and_map", lambda: self._map(address, size))

    def _map(self, address: int, size: int) -> None:
        self.memory[address] = bytearray(b"\xa5" * size)
        self.rows[address] = self.rows[address]._replace(asleep=False)

    def unmap_and_release(self, allocation) -> None:
        _, _, address, _ = allocation
        assert address in self.held
        assert not self.rows[address].asleep
        self._call("unmap_and_release", lambda: self._unmap(address))

    def _unmap(self, address: int) -> None:
        del self.memory[address]
        self.rows[address] = self.rows[address]._replace(asleep=True)

    def cudaMemcpy(self, target: int, source: int, size: int) -> None:
        def copy() -> None:
            if source in self.memory:
                ctypes.memmove(target, bytes(self.memory[source]), size)
            else:
                self.memory[target][:] = ctypes.string_at(source, size)

        self._call("cudaMemcpy", copy)
