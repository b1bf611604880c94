# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import contextlib

import pytest
import torch

from vllm.device_allocator.copy_engine import StreamCopies


class FakeRuntime:
    """Streams whose work is done when an event after it is waited for."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: list[int] = []
        self.queued: dict[int, list[tuple[int, int, int]]] = {}
        self.done: list[tuple[int, int, int]] = []
        self.events: dict[int, tuple[int, int]] = {}
        self.failing = ""
        self.synchronized: list[int] = []
        self._next = 100

    def _check(self, name: str) -> None:
        if self.failing == name:
            raise RuntimeError(f"{name} failed")

    def _handle(self) -> int:
        self._next += 1
        return self._next

    def create_stream(self) -> int:
        self._check("create_stream")
        self.streams.append(self.device)
        stream = self._handle()
        self.queued[stream] = []
        return stream

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._check("copy")
        self.queued[stream].append((target, source, size))

    def record(self, stream: int) -> int:
        self._check("record")
        event = self._handle()
        self.events[event] = stream, len(self.queued[stream])
        return event

    def wait(self, event: int) -> None:
        self._check("wait")
        stream, length = self.events[event]
        self.done += self.queued[stream][len(self.done) : length]

    def destroy_event(self, event: int) -> None:
        self._check("destroy_event")
        del self.events[event]


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()

    @contextlib.contextmanager
    def on(device):
        before, fake.device = fake.device, device
        yield
        fake.device = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: fake.device)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronized.append)
    return fake


def test_a_mark_covers_what_was_started_before_it(runtime):
    copies = StreamCopies(runtime)
    copies.start(0, 1, 2, 10)
    first = copies.mark()
    copies.start(0, 3, 4, 20)
    second = copies.mark()
    copies.wait(first)
    assert runtime.done == [(1, 2, 10)]
    copies.wait(second)
    assert runtime.done == [(1, 2, 10), (3, 4, 20)]
    assert not runtime.events


def test_one_stream_per_device_made_on_that_device(runtime):
    copies = StreamCopies(runtime)
    for device in (1, 0, 1, 0):
        copies.start(device, 1, 2, 10)
    assert runtime.streams == [1, 0]
    assert len(copies.mark()) == 2


def test_no_copies_need_no_stream(runtime):
    copies = StreamCopies(runtime)
    copies.wait(copies.mark())
    copies.abandon()
    assert not runtime.streams and not runtime.synchronized


@pytest.mark.parametrize("failing", ["record", "wait"])
def test_abandoned_copies_are_waited_for_and_leave_no_event(runtime, failing):
    copies = StreamCopies(runtime)
    copies.start(0, 1, 2, 10)
    mark = copies.mark()
    runtime.failing = failing
    with pytest.raises(RuntimeError, match=failing):
        copies.wait(mark)
        copies.mark()
    copies.abandon()
    assert runtime.synchronized == [0]
    assert not runtime.events


def test_an_event_that_cannot_be_destroyed_fails_nothing(runtime):
    copies = StreamCopies(runtime)
    copies.start(0, 1, 2, 10)
    runtime.failing = "destroy_event"
    copies.wait(copies.mark())
    assert runtime.done
