# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Threads, the GIL, and the end of the interpreter."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable

import pytest
from cumem_harness import GRANULARITY, MIB

STREAM = 0x50


class Background:
    """Runs `work` on a thread; `join` raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: BaseException | None = None

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def join(self) -> None:
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


def wait_for_gate(card) -> None:
    """Until a thread waits inside the driver. Fails if it never gets there."""
    deadline = time.monotonic() + 5
    while card.fake.waiting() == 0:
        assert time.monotonic() < deadline, "no thread reached the driver"
        time.sleep(0.001)


# --- The GIL -------------------------------------------------------------------------


def cycle_while_holding_the_gil(card, milliseconds: int) -> bool:
    """Allocates and frees on another thread while this one keeps the GIL."""
    library = ctypes.PyDLL(card.fake.library._name)
    functions = [
        ctypes.cast(getattr(card.allocator.library, name), ctypes.c_void_p)
        for name in ("my_malloc", "my_free")
    ]
    return bool(library.fake_cycle_in_thread(*functions, milliseconds))


def test_allocating_and_freeing_need_no_gil(card):
    assert cycle_while_holding_the_gil(card, 5000)


def test_with_observers_they_do(card):
    # Shows that the test above can fail.
    frees = card.cumem.counters()["frees"]
    card.cumem.init_module(lambda segment: None, lambda address: None)
    assert not cycle_while_holding_the_gil(card, 300)
    deadline = time.monotonic() + 5
    while card.cumem.counters()["frees"] == frees or card.fake.left():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("operation", ["sleep", "wake", "unhold"])
def test_python_runs_while_the_driver_works(card, operation):
    address = card.malloc()
    if operation == "wake":
        card.sleep(address)
    if operation == "unhold":
        assert card.cumem.hold(address, card.segment(address)[6])
        card.free(address)
    work = {
        "sleep": lambda: card.sleep(address),
        "wake": lambda: card.wake(address),
        "unhold": lambda: card.cumem.unhold(address),
    }[operation]
    card.fake.close_gate("cuMemCreate" if operation == "wake" else "cuMemUnmap")
    thread = Background(work)
    wait_for_gate(card)
    card.cumem.counters()
    card.cumem.segments()
    card.fake.open_gate()
    thread.join()
    if operation != "unhold":
        card.free(address)


# --- Two threads and one segment -----------------------------------------------------


def test_free_while_it_is_put_to_sleep(card):
    address = card.malloc()
    card.fake.close_gate("cuMemUnmap")
    thread = Background(lambda: card.sleep(address))
    wait_for_gate(card)
    card.free(address)
    assert card.cumem.segments() == []
    assert card.fake.is_usable(address)
    card.fake.open_gate()
    thread.join()
    assert card.fake.left() == {}


@pytest.mark.parametrize("failing", [None, "cuMemMap"])
def test_free_while_it_is_woken(card, failing):
    address = card.malloc()
    card.sleep(address)
    card.fake.close_gate("cuMemCreate")
    thread = Background(lambda: card.wake(address))
    wait_for_gate(card)
    card.free(address)
    assert card.fake.is_reserved(address)
    if failing:
        card.fake.fail(failing)
    card.fake.open_gate()
    if failing:
        with pytest.raises(RuntimeError, match=failing):
            thread.join()
    else:
        thread.join()
    assert card.fake.left() == {}


def test_two_threads_change_one_segment(card):
    address = card.malloc()
    arguments = card.segment(address)[:4]
    card.fake.close_gate("cuMemUnmap")
    thread = Background(lambda: card.sleep(address))
    wait_for_gate(card)
    for change in (
        card.cumem.python_unmap_and_release,
        card.cumem.python_create_and_map,
    ):
        with pytest.raises(RuntimeError, match="in use by another thread"):
            change(*arguments)
    with pytest.raises(RuntimeError, match="nobody holds"):
        card.cumem.unhold(address)  # the change's own hold is not ours
    card.fake.open_gate()
    thread.join()
    card.free(address)


def test_free_waits_for_its_stream_outside_the_lock(card):
    address = card.malloc(stream=STREAM)
    _, _, _, _, _, _, serial, _ = segment = card.segment(address)
    card.fake.close_gate("cuStreamSynchronize")
    thread = Background(lambda: card.free(address, stream=STREAM))
    wait_for_gate(card)
    other = card.malloc()
    assert [s[2] for s in card.cumem.segments()] == [other]
    assert not card.cumem.hold(address, serial)
    with pytest.raises(RuntimeError, match="no segment"):
        card.cumem.python_unmap_and_release(*segment[:4])
    card.fake.open_gate()
    thread.join()
    card.free(other)


@pytest.mark.parametrize("unhold_first", [True, False])
def test_unhold_against_a_free_that_waits(card, unhold_first):
    address = card.malloc(stream=STREAM)
    assert card.cumem.hold(address, card.segment(address)[6])
    card.fake.close_gate("cuStreamSynchronize")
    thread = Background(lambda: card.free(address, stream=STREAM))
    wait_for_gate(card)
    if unhold_first:
        card.cumem.unhold(address)
        assert card.fake.is_usable(address), "the free has not got there yet"
    card.fake.open_gate()
    thread.join()
    if not unhold_first:
        assert card.fake.is_usable(address)
        card.cumem.unhold(address)
    assert card.fake.left() == {}


def test_the_address_of_a_free_may_come_back_at_once(card):
    address = card.malloc()
    card.fake.close_gate("cuMemAddressFree")
    thread = Background(lambda: card.free(address))
    wait_for_gate(card)
    assert card.cumem.counters()["reserved_bytes"] == 0
    card.fake.open_gate()
    thread.join()
    assert card.malloc() == address
    card.free(address)


def test_many_threads(card):
    stop = threading.Event()
    tally = {"freed": 0, "slept": 0, "seen": 0}
    refusals: list[str] = []

    def allocate_and_free(number: int) -> None:
        rng = random.Random(number)
        card.cumem.set_scope(f"thread{number}", number)
        mine: list[int] = []
        while not stop.is_set():
            if mine and rng.random() < 0.5:
                card.allocator.free(mine.pop(rng.randrange(len(mine))), stream=STREAM)
                tally["freed"] += 1
            elif address := card.allocator.malloc(rng.randrange(1, 6 * MIB), 0):
                mine.append(address)
        for address in mine:
            card.allocator.free(address)

    def sleep_and_wake() -> None:
        while not stop.is_set():
            for device, size, address, handle, _, _, serial, _ in card.cumem.segments():
                if not card.cumem.hold(address, serial):
                    continue
                try:
                    card.cumem.python_unmap_and_release(device, size, address, handle)
                    card.cumem.python_create_and_map(device, size, address, handle)
                    tally["slept"] += 1
                except RuntimeError as error:
                    refusals.append(str(error))
                finally:
                    card.cumem.unhold(address)

    def look() -> None:
        while not stop.is_set():
            for _, size, _, handle, tag, asleep, _, generation in card.cumem.segments():
                assert size % GRANULARITY == 0
                assert tag == f"thread{generation}"
                assert asleep == (handle == 0)
                tally["seen"] += 1
            counters = card.cumem.counters()
            assert counters["mapped_bytes"] <= counters["reserved_bytes"]
            card.cumem.take_errors()

    work = [lambda n=n: allocate_and_free(n) for n in range(3)]
    threads = [Background(w) for w in [*work, sleep_and_wake, look]]
    time.sleep(2)
    stop.set()
    for thread in threads:
        thread.join()
    assert all(tally.values()), tally
    errors = card.cumem.take_errors()
    assert all("OUT_OF_MEMORY" in error for error in errors), errors
    # A wake that found the card full leaves its segment asleep for the next round.
    expected = ("OUT_OF_MEMORY", "asleep already")
    assert all(any(e in r for e in expected) for r in refusals), refusals


# --- The end of the interpreter ------------------------------------------------------

EXIT = """
import ctypes
{setup}
address = allocator.malloc(1)
kept = allocator.malloc(1)
free = ctypes.cast(allocator.library.my_free, ctypes.c_void_p)
fake.library.fake_free_at_exit(free, ctypes.c_void_p(address))
{then}
"""
OBSERVERS = "cumem.init_module(lambda segment: None, lambda address: print(address))"


@pytest.mark.parametrize("setup", ["", OBSERVERS])
@pytest.mark.parametrize(
    ("then", "left"),
    [
        ("", 1),
        ("cumem.python_unmap_and_release(*cumem.segments()[0][:4])", 1),
        ("fake.set('gone')", 2),
    ],
    ids=["mapped", "asleep", "driver gone"],
)
def test_free_after_the_interpreter_has_ended(fresh, setup, then, left):
    printed = fresh(EXIT.format(setup=setup, then=then))
    assert printed == f"at exit: {left} reserved, 0 violations\n"


@pytest.mark.parametrize("setup", ["", OBSERVERS])
def test_exit_while_a_thread_allocates(fresh, setup):
    script = (
        "import os, threading, time\n"
        f"{setup.replace('print(address)', 'None')}\n"
        "def work():\n"
        "    while True: allocator.free(allocator.malloc(1))\n"
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        "while cumem.counters()['frees'] < 100: time.sleep(0.001)\n"
        "print('end')\n"
    )
    for _ in range(5):
        assert fresh(script) == "end\n"
