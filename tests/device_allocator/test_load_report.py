# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The figures of a load, on a device whose segments are one tensor each."""

import logging
from contextlib import nullcontext

import pytest
import torch

from tests.device_allocator.fake_device import FakeDevice
from vllm.device_allocator import load_report
from vllm.device_allocator.generations import PoolGenerations, reclaim
from vllm.device_allocator.load_report import TagMemory, by_tag, load_reported
from vllm.device_allocator.segment_table import Segment

GIB = 1 << 30


class Counts:
    """The extension's counters, of what a FakeDevice holds."""

    def __init__(self, device: "CountingDevice") -> None:
        self.device = device

    def reset_peak(self) -> None:
        self.device.peak = self._mapped()

    def _mapped(self) -> int:
        return self.device.capacity - self.device.free_bytes()

    def counters(self) -> dict[str, int]:
        return {
            "mapped_bytes": self._mapped(),
            "peak_mapped_bytes": self.device.peak,
            "returned_bytes": self.device.returned,
        }

    def segments(self) -> list[tuple]:
        return [
            (0, size, address, 1, "weights", False, address, 0)
            for address, (_, size, _) in self.device.segments.items()
        ]


class CountingDevice(FakeDevice):
    returned = 0

    def empty_cache(self) -> None:
        before = self.free_bytes()
        super().empty_cache()
        self.returned += self.free_bytes() - before


@pytest.fixture
def device(monkeypatch):
    device = CountingDevice(100 * GIB)
    device.install(monkeypatch)
    monkeypatch.setattr(load_report, "extension", Counts(device))
    monkeypatch.setattr(load_report, "_last", None)
    monkeypatch.setattr(
        torch.cuda,
        "memory_snapshot",
        lambda include_traces: [
            {"address": address, "allocated_size": 0 if free else size}
            for address, (_, size, free) in device.segments.items()
        ],
    )
    return device


@pytest.fixture
def logged(monkeypatch):
    messages: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(
        handler, "emit", lambda record: messages.append(record.getMessage())
    )
    level = load_report.logger.level
    load_report.logger.setLevel(logging.INFO)
    load_report.logger.addHandler(handler)
    yield messages
    load_report.logger.removeHandler(handler)
    load_report.logger.setLevel(level)


def pool(device, enabled=True):
    generations = PoolGenerations(device.make_pool, lambda tag: None, enabled=enabled)
    return generations.open("weights", "default")


def test_a_load(device, logged):
    earlier = device.allocate(50 * GIB)
    device.free(earlier)
    device.empty_cache()
    with load_reported(pool(device)):
        old = [device.allocate(GIB) for _ in range(3)]
        reclaim(force=True)
        new = device.allocate(2 * GIB)
        for address in old[:2]:
            device.free(address)
    report = load_report.last_load_report()
    assert report.live == report.mapped == 3 * GIB
    assert report.peak_mapped == 5 * GIB
    assert report.returned == 2 * GIB
    assert report.generations == 2
    assert 0 < report.reclaim_seconds < 60
    assert device.segments.keys() == {old[2], new}
    [line] = logged
    assert line.startswith(
        "CuMem load: 3.00 GiB live in 3.00 GiB mapped, peak 5.00 GiB; 2.00 GiB "
        "returned during the load, 2 generation(s), "
    )


def test_each_load_counts_from_its_own_start(device, logged):
    for _ in range(2):
        with load_reported(pool(device)):
            device.free(device.allocate(GIB))
            reclaim(force=True)
        report = load_report.last_load_report()
        assert (report.peak_mapped, report.returned) == (GIB, GIB)
        assert report.generations == 2
    assert len(logged) == 2


def test_switched_off_there_is_one_generation(device, logged):
    with load_reported(pool(device, enabled=False)):
        device.allocate(GIB)
        reclaim(force=True)
    assert load_report.last_load_report().generations == 1
    assert len(logged) == 1


def test_the_default_allocator_is_not_reported(device, logged):
    with load_reported(nullcontext()):
        device.allocate(GIB)
    assert load_report.last_load_report() is None
    assert not logged


def test_an_extension_that_does_not_count_is_not_reported(device, logged, monkeypatch):
    monkeypatch.setattr(load_report, "extension", object())
    with load_reported(pool(device)):
        device.allocate(GIB)
    assert load_report.last_load_report() is None
    assert not logged


def test_a_failed_load_is_not_reported(device, logged):
    with pytest.raises(RuntimeError, match="broken"), load_reported(pool(device)):
        raise RuntimeError("broken")
    assert load_report.last_load_report() is None
    assert not logged


def test_memory_by_tag():
    def segment(size, tag, asleep):
        return Segment(0, size, size, 1, tag, asleep, size, 0)

    found = by_tag(
        [
            segment(1, "weights", False),
            segment(2, "weights", True),
            segment(4, "weights", True),
            segment(8, "kv_cache", False),
        ]
    )
    assert found == {
        "weights": TagMemory(mapped=1, asleep=6),
        "kv_cache": TagMemory(mapped=8),
    }
