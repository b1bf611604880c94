# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import threading

import pytest

from vllm.device_allocator.segment_table import CallbackTable, make_segment_table

SIZE = 2 << 20


class Extension:
    """An extension without a table, as ROCm's: it reports through callbacks."""

    def __init__(self) -> None:
        self.synchronized: list[int] = []
        self.table = CallbackTable(before_free=self.synchronized.append)
        self.on_malloc, self.on_free = self.table.callbacks

    def malloc(self, address: int) -> None:
        self.on_malloc((0, SIZE, address, [address, SIZE]))


@pytest.fixture
def extension():
    return Extension()


def test_extension_without_a_table_gets_one():
    assert isinstance(make_segment_table(object()), CallbackTable)


def test_segments_carry_the_scope_they_were_made_in(extension):
    table = extension.table
    extension.malloc(8)
    table.set_scope("weights", 3)
    extension.malloc(4)
    assert [(s.address, s.tag, s.generation) for s in table.segments()] == [
        (4, "weights", 3),
        (8, "default", 0),
    ]
    assert table.get_scope() == ("weights", 3)


def test_mapped_segment_is_freed_after_its_device_is_idle(extension):
    extension.malloc(4)
    assert extension.on_free(4) == (0, SIZE, 4, [4, SIZE])
    assert extension.synchronized == [0]
    assert extension.table.segments() == []


def test_sleeping_segment_is_freed_without_its_chunks(extension):
    """They went when it was put to sleep; only its addresses are left."""
    extension.malloc(4)
    [segment] = extension.table.segments()
    extension.table.mark(segment, asleep=True)
    assert extension.on_free(4) == (0, SIZE, 4, [])
    assert extension.synchronized == []


def test_reused_address_is_another_segment(extension):
    extension.malloc(4)
    [old] = extension.table.segments()
    extension.on_free(4)
    extension.malloc(4)
    [new] = extension.table.segments()
    assert not extension.table.hold(old)
    assert extension.table.hold(new)
    extension.table.mark(old, asleep=True)
    assert not extension.table.segments()[0].asleep


@pytest.mark.parametrize("kind", ["native", "callbacks"])
def test_scope_of_another_thread_is_its_own(kind):
    from vllm import cumem_allocator

    table = make_segment_table(cumem_allocator if kind == "native" else object())
    before = table.get_scope()
    table.set_scope("weights", 7)
    try:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(table.get_scope()))
        thread.start()
        thread.join()
        assert seen == [("default", 0)]
        assert table.get_scope() == ("weights", 7)
    finally:
        table.set_scope(*before)
