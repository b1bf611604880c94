# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sleep and wake with a fault at every step: all or nothing, and repeatable."""

from types import SimpleNamespace

import pytest

from tests.device_allocator.fake_extension import FakeExtension
from vllm.device_allocator import segment_mover
from vllm.device_allocator.copy_engine import BlockingCopies
from vllm.device_allocator.host_store import HostStore
from vllm.device_allocator.segment_mover import BATCH_BYTES, SegmentMover, batches
from vllm.device_allocator.segment_table import Segment

KEPT = {0x1000: b"first weights", 0x3000: b"second", 0x5000: b"third weights"}
DROPPED = {0x2000: b"keys and values", 0x4000: b"scratch"}


class Device(FakeExtension):
    """With copies that are under way until they are waited for."""

    def __init__(self) -> None:
        super().__init__()
        for address, content in sorted((KEPT | DROPPED).items()):
            tag = "weights" if address in KEPT else "other"
            self.allocate(address, tag, content)
        self.mover = SegmentMover(
            self,
            HostStore(None),
            BlockingCopies(self.cudaMemcpy),
            lambda segment: self.create_and_map(segment.allocation),
            lambda segment: self.unmap_and_release(segment.allocation),
            lambda segment: None,
        )

    def sleep(self) -> None:
        awake = [s for s in self.segments() if not s.asleep]
        copied = self.mover.host_copies
        keys = [(s.address, s.serial) for s in awake]
        kept = [
            s
            for s, key in zip(awake, keys, strict=True)
            if s.tag == "weights" and key not in copied
        ]
        self.mover.suspend(kept, [s for s in awake if s not in kept])

    def wake(self) -> None:
        self.mover.resume(self.segments())

    def state(self) -> dict[int, bool]:
        return {segment.address: segment.asleep for segment in self.segments()}

    def kept_contents(self) -> dict[int, bytes]:
        return {a: bytes(data) for a, data in self.memory.items() if a in KEPT}


@pytest.fixture
def device(monkeypatch):
    # Every segment is a batch, so that batches overlap.
    monkeypatch.setattr(segment_mover, "BATCH_BYTES", 1)
    return Device()


ALL_AWAKE = dict.fromkeys(KEPT | DROPPED, False)
ALL_ASLEEP = dict.fromkeys(KEPT | DROPPED, True)
SLEEP_CALLS = 2 * len(KEPT) + len(DROPPED)


def test_the_calls_are_those_that_the_faults_below_count(device):
    device.sleep()
    assert len(device.calls) == SLEEP_CALLS
    device.wake()
    assert len(device.calls) == 2 * SLEEP_CALLS


def test_all_copies_start_before_the_first_unmap(device):
    order = []

    def mark():
        order.append("mark")
        return (len(order),)

    device.mover._copies.mark = mark
    device.mover._copies.wait = lambda mark: order.append("wait")
    device.mover.suspend(
        device.segments(), [], meanwhile=lambda: order.append("meanwhile")
    )
    assert order == ["mark"] * 5 + ["meanwhile"] + ["wait"] * 5
    assert [name[0] for name in device.calls] == list("cccccuuuuu")


def test_mapping_overlaps_copies_and_contents_come_first(device):
    device.sleep()
    device.calls.clear()
    device.wake()
    assert device.calls[:6] == ["create_and_map", "cudaMemcpy"] * 3
    assert device.calls[6:] == ["create_and_map"] * 2


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("nth", range(1, SLEEP_CALLS + 1))
def test_failed_sleep_leaves_everything_awake(device, nth, how):
    device.fail(nth, how)
    with pytest.raises(RuntimeError, match="failed"):
        device.sleep()
    assert device.state() == ALL_AWAKE
    assert device.kept_contents() == KEPT
    assert not device.mover.host_copies
    assert not device.held
    device.sleep()
    assert device.state() == ALL_ASLEEP
    device.wake()
    assert device.kept_contents() == KEPT


@pytest.mark.parametrize("nth", range(1, SLEEP_CALLS + 1))
def test_failed_wake_leaves_everything_asleep(device, nth):
    device.sleep()
    device.fail(nth)
    with pytest.raises(RuntimeError, match="failed"):
        device.wake()
    assert device.state() == ALL_ASLEEP
    assert len(device.mover.host_copies) == len(KEPT)
    assert not device.held
    device.wake()
    assert device.state() == ALL_AWAKE
    assert device.kept_contents() == KEPT
    assert not device.mover.host_copies


@pytest.mark.parametrize("later", range(1, 7))
@pytest.mark.parametrize("nth", range(1, SLEEP_CALLS + 1))
def test_second_fault_while_undoing_a_wake_loses_nothing(device, nth, later):
    """A segment may stay mapped then; its host copy still is its contents."""
    device.sleep()
    device.fail(nth)
    device.fail(nth + later)
    with pytest.raises(RuntimeError, match="failed"):
        device.wake()
    device.faults.clear()
    # Either call may come next.
    if nth % 2:
        device.sleep()
    device.wake()
    assert device.state() == ALL_AWAKE
    assert device.kept_contents() == KEPT
    assert not device.mover.host_copies


@pytest.mark.parametrize("later", range(1, 7))
@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("nth", range(1, SLEEP_CALLS + 1))
def test_second_fault_while_undoing_a_sleep_loses_nothing(device, nth, how, later):
    device.fail(nth, how)
    device.fail(nth + later)
    with pytest.raises(RuntimeError, match="failed"):
        device.sleep()
    device.faults.clear()
    if nth % 2:
        device.sleep()
    device.wake()
    assert device.state() == ALL_AWAKE
    assert device.kept_contents() == KEPT


def test_no_room_to_put_a_failed_sleep_back(device):
    """Another process took the memory: the contents stay on the host."""
    device.fail(SLEEP_CALLS)
    full = device.mapped()
    device.capacity = full - 1
    with pytest.raises(RuntimeError, match="unmap_and_release failed"):
        device.sleep()
    assert sum(device.state().values()) >= len(KEPT)
    device.capacity = full
    device.wake()
    assert device.kept_contents() == KEPT


def test_interruption_is_undone_as_well(device, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(device.mover, "_put_to_sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        device.sleep()
    assert device.state() == ALL_AWAKE
    assert not device.mover.host_copies


def test_batches_join_small_segments():
    sizes = [BATCH_BYTES // 2, BATCH_BYTES // 2, 3 * BATCH_BYTES, 1, 1]
    segments = [Segment(0, s, i, 1, "t", False, i, 0) for i, s in enumerate(sizes)]
    assert [[s.address for s in batch] for batch in batches(segments)] == [
        [0, 1],
        [2],
        [3, 4],
    ]


def test_long_sleep_says_how_far_it_is(device, monkeypatch):
    times = iter(range(0, 100, 3))
    clock = SimpleNamespace(monotonic=lambda: next(times))
    lines: list[str] = []
    monkeypatch.setattr(segment_mover, "time", clock)
    monkeypatch.setattr(
        segment_mover.logger, "info", lambda text, *values: lines.append(text % values)
    )
    device.sleep()
    assert len(lines) >= 2
    assert "on their way" in lines[0]
