# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import gc
import logging
import mmap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm.device_allocator import host_store
from vllm.device_allocator.host_store import HUGE_PAGE_BYTES, HostStore, map_piece

MIB = 1 << 20


class Driver:
    """Remembers what is registered, and checks that its pages are there."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.registered = 0
        self.refuse = False
        self.refuse_unlock = False
        self.threads: set[int] = set()

    def register(self, address: int, size: int) -> None:
        if self.refuse:
            raise RuntimeError("cudaHostRegister failed with cudaErrorMemoryAllocation")
        assert address not in self.locked
        self.locked[address] = size
        self.registered += 1
        self.threads.add(threading.get_ident())

    def unregister(self, address: int) -> None:
        if self.refuse_unlock:
            raise RuntimeError("cudaHostUnregister failed")
        del self.locked[address]


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(host_store, "available_bytes", lambda: 1 << 40)
    return Driver()


@pytest.fixture
def warnings(monkeypatch):
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    monkeypatch.setattr(
        handler, "emit", lambda record: messages.append(record.getMessage())
    )
    host_store.logger.addHandler(handler)
    yield messages
    host_store.logger.removeHandler(handler)


def cycle(store: HostStore, sizes: list[int]) -> list[int]:
    """A sleep and a wake; the addresses used."""
    with store.reserve(sizes) as memory:
        pieces = [memory.take(size) for size in sizes]
    assert [piece.size for piece in pieces] == sizes
    addresses = [piece.address for piece in pieces]
    assert len(set(addresses)) == len(sizes)
    for piece in pieces:
        store.give(piece)
    return addresses


def resident(piece) -> int:
    """Bytes of the piece's mapping that have pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(part, 16) for part in words[0].split("-"))
            inside = first <= piece.address < last
        elif inside and words[0] == "Rss:":
            return int(words[1]) << 10
    raise AssertionError("not mapped")


@pytest.mark.parametrize("size", [1, 13, 4096, 2 * MIB, 5 * MIB + 4096])
def test_pieces_are_aligned_and_of_the_exact_size(size):
    piece = map_piece(size)
    alignment = HUGE_PAGE_BYTES if size >= HUGE_PAGE_BYTES else mmap.PAGESIZE
    assert piece.address % alignment == 0
    assert piece.contents.data_ptr() == piece.address
    assert piece.contents.nbytes == size
    piece.contents.fill_(7)
    assert int(piece.contents[-1]) == 7


def test_contents_outlive_the_piece():
    piece = map_piece(3 * MIB)
    contents = piece.contents
    contents.fill_(5)
    del piece.memory, piece
    gc.collect()
    assert int(contents.sum()) == 5 * 3 * MIB


def test_every_page_is_there_before_it_is_registered(driver, monkeypatch):
    monkeypatch.setattr(host_store, "SLICE_BYTES", MIB)
    store = HostStore(driver)
    with store.reserve([9 * MIB + 4096]) as memory:
        piece = memory.take(9 * MIB + 4096)
        assert resident(piece) >= piece.size
        assert driver.locked == {piece.address: piece.size}


def test_memory_is_kept_and_used_again(driver):
    store = HostStore(driver)
    sizes = [MIB, 2 * MIB, MIB, 5 * MIB]
    first = cycle(store, sizes)
    assert store.free_bytes == store.registered_bytes == sum(sizes)
    for _ in range(5):
        assert sorted(cycle(store, sizes)) == sorted(first)
    assert driver.registered == len(sizes)


def test_other_sizes_replace_what_does_not_fit(driver):
    """The process never holds more than the largest sleep."""
    store = HostStore(driver)
    cycle(store, [4 * MIB, 4 * MIB, MIB])
    cycle(store, [3 * MIB, MIB])
    assert store.free_bytes == sum(driver.locked.values()) == 4 * MIB


def test_a_smaller_sleep_keeps_memory_for_a_larger_one(driver):
    store = HostStore(driver)
    cycle(store, [4 * MIB, MIB])
    cycle(store, [MIB])
    assert store.free_bytes == 5 * MIB


def test_what_is_reserved_and_not_taken_comes_back(driver):
    store = HostStore(driver)
    cycle(store, [MIB, MIB])
    with pytest.raises(KeyError), store.reserve([MIB, MIB, 2 * MIB]) as memory:
        store.give(memory.take(MIB))
        raise KeyError
    assert store.free_bytes == sum(driver.locked.values()) == 2 * MIB


def test_release_policy_keeps_nothing(driver):
    store = HostStore(driver, "release")
    cycle(store, [MIB, MIB])
    assert driver.registered == 2
    assert not driver.locked and not store.registered_bytes and not store.free_bytes


def test_release_free(driver):
    store = HostStore(driver)
    cycle(store, [MIB, 3 * MIB])
    store.release_free()
    assert not driver.locked and not store.free_bytes


def test_pageable_policy_registers_and_touches_nothing(driver):
    store = HostStore(driver, "pageable")
    with store.reserve([8 * MIB]) as memory:
        assert resident(memory.take(8 * MIB)) == 0
    assert not driver.registered


def test_refused_registration_works_and_warns_once(driver, warnings):
    driver.refuse = True
    store = HostStore(driver)
    for _ in range(3):
        cycle(store, [MIB, MIB])
    assert not store.registered_bytes and not store.free_bytes
    assert len(warnings) == 1
    assert "cudaErrorMemoryAllocation" in warnings[0]
    driver.refuse = False
    cycle(store, [MIB, MIB])
    assert store.registered_bytes == 2 * MIB


def test_budget(driver, warnings):
    store = HostStore(driver, budget=5 * MIB)
    for _ in range(2):
        cycle(store, [4 * MIB, 2 * MIB, MIB])
        assert store.registered_bytes == 5 * MIB
    assert any("the budget is" in text for text in warnings)


def test_host_short_of_memory_registers_less(driver, warnings, monkeypatch):
    room = host_store.SPARE_BYTES + 3 * MIB
    monkeypatch.setattr(host_store, "available_bytes", lambda: room)
    store = HostStore(driver)
    cycle(store, [2 * MIB, 2 * MIB])
    assert store.registered_bytes == 2 * MIB
    assert any("short of memory" in text for text in warnings)


def test_host_without_memory_changes_nothing(driver, monkeypatch):
    store = HostStore(driver)
    cycle(store, [MIB])
    with (
        pytest.raises(RuntimeError, match="the host has no"),
        store.reserve([MIB, 1 << 62]),
    ):
        raise AssertionError("not reached")
    assert store.free_bytes == MIB


def test_memory_that_stays_locked_stays_in_use(driver, warnings):
    store = HostStore(driver, "release")
    driver.refuse_unlock = True
    first = cycle(store, [MIB])
    assert any("stays locked" in text for text in warnings)
    assert cycle(store, [MIB]) == first


def test_prepared_memory_is_what_the_sleep_takes(driver):
    store = HostStore(driver, "prepare")
    sizes = [2 * MIB, MIB, MIB]
    store.prepare(sizes)
    store.wait_until_prepared()
    assert driver.registered == 3
    assert driver.threads != {threading.get_ident()}
    cycle(store, sizes)
    assert driver.registered == 3


def test_sleep_does_not_wait_for_all_of_the_preparation(driver):
    store = HostStore(driver, "prepare")
    started, go_on = threading.Event(), threading.Event()
    register = driver.register

    def slow(address: int, size: int) -> None:
        started.set()
        go_on.wait(10)
        register(address, size)

    driver.register = slow
    store.prepare([MIB] * 50)
    assert started.wait(10)
    threading.Timer(0.2, go_on.set).start()
    before = driver.registered
    cycle(store, [MIB])
    assert before == 0 and driver.registered < 50


def test_preparation_ends_with_the_interpreter(driver, monkeypatch):
    """Its thread is waited for there."""
    ended = SimpleNamespace(is_alive=lambda: False)
    monkeypatch.setattr(host_store.threading, "main_thread", lambda: ended)
    store = HostStore(driver, "prepare")
    store.prepare([MIB] * 5)
    store.wait_until_prepared()
    assert not driver.registered


@pytest.mark.parametrize("policy", ["keep", "release", "pageable"])
def test_other_policies_prepare_nothing(driver, policy):
    store = HostStore(driver, policy)
    store.prepare([MIB])
    store.wait_until_prepared()
    assert not driver.registered


def test_failed_preparation_is_only_logged(driver, warnings):
    store = HostStore(driver, "prepare")
    store.prepare([1 << 62])
    store.wait_until_prepared()
    assert any("Could not prepare" in text for text in warnings)
    cycle(store, [MIB])


def test_a_thread_that_does_not_start_loses_no_locked_memory(driver, monkeypatch):
    """What is locked and unmapped could never be locked again."""
    store = HostStore(driver)
    with store.reserve([MIB]) as memory:
        store.give(memory.take(MIB))

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(host_store.ThreadPoolExecutor, "submit", refuse)
    with pytest.raises(RuntimeError, match="thread"), store.reserve([MIB, 2 * MIB]):
        pass
    assert store.free_bytes == MIB == sum(driver.locked.values())
