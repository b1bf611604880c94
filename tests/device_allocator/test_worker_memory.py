# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from types import SimpleNamespace

import pytest

from vllm.device_allocator import worker_memory
from vllm.device_allocator.cumem import CuMemAllocator


@pytest.fixture
def allocator(monkeypatch):
    fake = SimpleNamespace(mapped_bytes=100, prepared=0)

    def prepare_sleep():
        fake.prepared += 1

    fake.prepare_sleep = prepare_sleep
    monkeypatch.setattr(CuMemAllocator, "instance", fake)
    return fake


def test_a_neighbour_does_not_change_what_the_process_freed(allocator):
    before = worker_memory.mapped_bytes()
    allocator.mapped_bytes = 30
    assert worker_memory.freed_bytes(-5000, before) == 70


def test_growth_of_the_process_itself_is_seen(allocator):
    before = worker_memory.mapped_bytes()
    allocator.mapped_bytes = 130
    assert worker_memory.freed_bytes(5000, before) == -30


def test_other_allocators_are_measured_on_the_device(monkeypatch):
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    before = worker_memory.mapped_bytes()
    assert before is None
    assert worker_memory.freed_bytes(40, before) == 40
    worker_memory.prepare_sleep()


def test_a_load_prepares(allocator):
    worker_memory.prepare_sleep()
    assert allocator.prepared == 1


def test_the_end_of_a_worker_gives_host_memory_back(allocator):
    released = []
    allocator.release_host_memory = lambda: released.append(True)
    worker_memory.release_host_memory()
    assert released == [True]
