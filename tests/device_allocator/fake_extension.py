# SPDX-License-Identifier: Apache-2.0
"""Segments in host memory, with the extension's rules and faults on demand."""

import ctypes
import itertools

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
        self.copies_left = 1 << 60
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
        self.memory[address] = bytearray(b"\xa5" * size)
        self.rows[address] = self.rows[address]._replace(asleep=False)

    def unmap_and_release(self, allocation) -> None:
        _, _, address, _ = allocation
        assert address in self.held
        assert not self.rows[address].asleep
        del self.memory[address]
        self.rows[address] = self.rows[address]._replace(asleep=True)

    def cudaMemcpy(self, target: int, source: int, size: int) -> None:
        if not self.copies_left:
            raise RuntimeError("cudaMemcpy failed")
        self.copies_left -= 1
        if source in self.memory:
            ctypes.memmove(target, bytes(self.memory[source]), size)
        else:
            self.memory[target][:] = ctypes.string_at(source, size)
