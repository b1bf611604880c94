# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the driver refuses to take back is kept and offered again.

Every test ends with the check of the `card` fixture that nothing is left, in the driver
or on the extension's books.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from cumem_harness import GRANULARITY, MIB
from test_cumem_threads import Background, wait_for_gate

STREAM = 0x50
RELEASE_CALLS = ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
CALLS = [
    "cuThreadExchangeStreamCaptureMode",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    *RELEASE_CALLS,
]
MANY = 1 << 20


def until_it_works(step: Callable[[], object]) -> object:
    """What `step` returns, once it neither raises nor returns None."""
    for _ in range(60):
        try:
            result = step()
        except RuntimeError:
            continue
        if result is not None:
            return result
    raise AssertionError("it never worked")


def life(card) -> None:
    """Every way in which memory comes and goes, each tried until it works."""

    def change(address: int, asleep: bool) -> bool | None:
        if card.asleep(address) != asleep:
            (card.sleep if asleep else card.wake)(address)
        return card.asleep(address) == asleep or None

    first = until_it_works(lambda: card.allocator.malloc(3 * MIB))
    second = until_it_works(lambda: card.allocator.malloc(MIB, stream=STREAM))
    for asleep in (True, False, True):
        until_it_works(functools.partial(change, first, asleep))
    assert card.cumem.hold(second, card.segment(second)[6])
    card.free(second, stream=STREAM)
    card.cumem.unhold(second)
    card.free(first)
    assert card.allocator.malloc(128 * MIB) is None


def refuse(card, function: str) -> None:
    """One leftover, of 2 MiB, which `function` goes on to refuse."""
    address = card.malloc()
    card.fake.fail(function, times=MANY)
    card.free(address)
    assert f"{function} failed" in card.errors(1)[0]


def lose_a_wake(card, times: int = MANY) -> int:
    """A segment asleep whose failed wake could not be undone: it is mapped still."""
    address = card.malloc()
    card.sleep(address)
    card.cumem.reset_peak()
    card.fake.fail("cuMemSetAccess")
    card.fake.fail("cuMemUnmap", times=times)
    with pytest.raises(RuntimeError, match="cuMemSetAccess failed.*then cuMemUnmap"):
        card.wake(address)
    return address


# --- Every call fails, once and for a while ------------------------------------------


@pytest.mark.parametrize("times", [1, 2, 7])
@pytest.mark.parametrize("function", CALLS)
def test_every_call_of_a_life(card, function, times):
    before = card.fake.calls(function)
    life(card)
    calls = card.fake.calls(function) - before
    assert calls
    for nth in range(1, calls + 1):
        card.fake.fail(function, nth=nth, times=times)
        life(card)
        card.fake.heal(function)
        card.settle()
        assert card.fake.left() == {}, nth
        counters = card.cumem.counters()
        assert counters["mapped_bytes"] == counters["reserved_bytes"] == 0, nth
    assert card.fake.count("injected") >= calls
    card.cumem.take_errors()


@pytest.mark.parametrize("times", [1, 2, 7])
@pytest.mark.parametrize("release", RELEASE_CALLS)
@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_every_undo_of_a_life(card, function, release, times):
    before = card.fake.calls(function)
    life(card)
    for nth in range(1, card.fake.calls(function) - before + 1):
        for release_nth in range(1, 6):
            card.fake.fail(function, nth=nth)
            card.fake.fail(release, nth=release_nth, times=times)
            life(card)
            card.fake.heal(function)
            card.fake.heal(release)
            card.settle()
            assert card.fake.left() == {}, (nth, release_nth)
    card.cumem.take_errors()


# --- When it is offered again --------------------------------------------------------


@pytest.mark.parametrize("operation", ["malloc", "free", "sleep", "wake", "segments"])
@pytest.mark.parametrize("function", RELEASE_CALLS)
def test_each_operation_offers_it_again(card, function, operation):
    address = card.malloc()
    segment = card.segment(address)[:4]
    if operation == "wake":
        card.sleep(address)
    alone = card.fake.left()
    refuse(card, function)
    assert card.fake.left() != alone
    card.fake.heal(function)
    if operation == "malloc":
        other = card.malloc()
        card.fake.fail(function)  # so that only the allocation can have done it
        alone = {kind: 2 * count for kind, count in alone.items()}
    if operation == "free":
        card.free(address)
        alone = {}
    if operation == "sleep":
        card.cumem.python_unmap_and_release(*segment)
        alone = {"reservations": 1}
    if operation == "wake":
        card.cumem.python_create_and_map(*segment)
        alone = {"handles": 1, "mappings": 1, "reservations": 1, "used": GRANULARITY}
    if operation == "segments":
        card.cumem.segments()
    assert card.fake.left() == alone
    card.fake.heal(function)
    if operation == "malloc":
        card.free(other)
    if operation != "free":
        card.free(address)


def test_memory_is_offered_before_new_memory_is_asked_for(card):
    address = card.malloc(48 * MIB)
    card.fake.fail("cuMemUnmap")
    card.free(address)
    card.errors(1)
    assert card.fake.left()["used"] == 48 * MIB
    card.free(card.malloc(48 * MIB))


@pytest.mark.parametrize("function", RELEASE_CALLS)
def test_once_per_call_and_one_message(card, function):
    refuse(card, function)
    for operation in (card.cumem.counters, card.cumem.segments):
        calls = card.fake.calls(function)
        operation()
        assert card.fake.calls(function) == calls + 1
    calls = card.fake.calls(function)
    assert card.allocator.malloc(128 * MIB) is None
    # Refusing to free addresses makes one more, of this allocation.
    new = function == "cuMemAddressFree"
    assert card.fake.calls(function) == calls + 1 + new
    assert "OUT_OF_MEMORY" in card.errors(1)[0], "the old refusal is no news"
    assert card.cumem.counters()["leftovers"] == 1 + new
    card.fake.heal(function)


def test_what_the_counters_say(card):
    refuse(card, "cuMemUnmap")
    counters = card.cumem.counters()
    assert counters["leftovers"] == 1
    assert counters["segments"] == 0
    assert counters["mapped_bytes"] == counters["reserved_bytes"] == GRANULARITY
    assert card.cumem.segments() == []
    card.cumem.reset_peak()
    assert card.cumem.counters()["peak_mapped_bytes"] == GRANULARITY
    # Now unmapped, but the addresses are refused.
    card.fake.heal("cuMemUnmap")
    card.fake.fail("cuMemAddressFree")
    counters = card.cumem.counters()
    assert (counters["leftovers"], counters["mapped_bytes"]) == (1, 0)
    assert counters["reserved_bytes"] == GRANULARITY
    counters = card.cumem.counters()
    assert (counters["leftovers"], counters["reserved_bytes"]) == (0, 0)
    assert card.cumem.take_errors() == []


def test_a_driver_that_refuses_everything_costs_little(card):
    addresses = [card.malloc() for _ in range(20)]
    card.fake.fail("cuMemUnmap", times=MANY)
    for address in addresses:
        card.free(address)
    card.errors(20)
    assert card.cumem.counters()["leftovers"] == 20
    calls = card.fake.calls("cuMemUnmap")
    card.cumem.counters()
    assert card.fake.calls("cuMemUnmap") == calls + 8
    # Each has its turn: three more passes go past the rest and leave these out.
    for number in range(3):
        assert card.cumem.counters()["leftovers"] == 20, number
    card.fake.heal("cuMemUnmap")
    assert card.cumem.counters()["leftovers"] == 0


def test_what_is_refused_for_ever_does_not_hold_up_the_rest(card):
    addresses = [card.malloc() for _ in range(11)]
    last = addresses.pop()
    card.sleep(last)
    card.fake.fail("cuMemUnmap", times=MANY)
    for address in addresses:
        card.free(address)
    card.fake.fail("cuMemAddressFree")
    card.free(last)
    card.errors(11)
    assert card.fake.is_reserved(last)
    assert card.cumem.counters()["leftovers"] == 11, "8 others came first"
    assert card.cumem.counters()["leftovers"] == 10
    assert not card.fake.is_reserved(last)


def test_without_a_context_it_waits(card):
    refuse(card, "cuMemUnmap")
    card.fake.heal("cuMemUnmap")
    card.fake.fail("cuCtxGetCurrent")
    calls = card.fake.calls("cuMemUnmap")
    assert card.cumem.counters()["leftovers"] == 1
    assert card.fake.calls("cuMemUnmap") == calls
    assert card.cumem.counters()["leftovers"] == 0


def test_in_the_context_of_its_own_device(card):
    address = card.malloc(device=1)
    card.fake.fail("cuMemUnmap")
    card.free(address)
    card.errors(1)
    assert card.cumem.counters()["leftovers"] == 0
    assert card.fake.current() == 0


@pytest.mark.parametrize("blocking", [False, True])
def test_not_while_its_stream_is_captured(card, blocking):
    address = card.malloc(stream=STREAM)
    refuse(card, "cuMemUnmap")
    card.fake.heal("cuMemUnmap")
    card.fake.begin_capture(STREAM, blocking=blocking)
    before = card.fake.calls("cuMemUnmap")
    other = card.malloc(stream=STREAM)
    assert card.fake.calls("cuMemUnmap") == before
    card.free(other, stream=STREAM)
    assert card.fake.calls("cuMemUnmap") == before + 1, "its own, not the leftover's"
    # Nor does another stream's call, or Python's, break the capture.
    assert card.cumem.counters()["leftovers"] == 0
    assert card.fake.end_capture(STREAM)
    card.free(address, stream=STREAM)


def test_not_when_the_stream_cannot_be_asked(card):
    refuse(card, "cuMemUnmap")
    card.fake.heal("cuMemUnmap")
    card.fake.fail("cuStreamIsCapturing")
    before = card.fake.calls("cuMemUnmap")
    address = card.malloc()
    assert card.fake.calls("cuMemUnmap") == before
    card.free(address)
    assert card.cumem.take_errors() == []


# --- A segment whose addresses are still mapped --------------------------------------


def test_it_can_be_woken_once_the_mapping_is_gone(card):
    address = lose_a_wake(card)
    assert card.asleep(address)
    counters = card.cumem.counters()
    assert counters["mapped_bytes"] == counters["reserved_bytes"] == GRANULARITY
    assert counters["peak_mapped_bytes"] == GRANULARITY
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be woken yet"):
            card.wake(address)
        assert card.asleep(address)
    card.fake.heal("cuMemUnmap")
    card.wake(address)
    assert card.fake.is_usable(address)
    assert card.cumem.counters()["mapped_bytes"] == GRANULARITY
    card.free(address)
    assert card.cumem.take_errors() == []


@pytest.mark.parametrize("held", [False, True])
def test_it_can_be_freed_before_the_mapping_is_gone(card, held):
    address = lose_a_wake(card)
    if held:
        assert card.cumem.hold(address, card.segment(address)[6])
    card.free(address)
    if held:
        card.cumem.unhold(address)
    assert card.cumem.segments() == []
    assert card.fake.is_reserved(address), "addresses must outlive their mapping"
    counters = card.cumem.counters()
    assert counters["mapped_bytes"] == counters["reserved_bytes"] == GRANULARITY
    assert counters["leftovers"] == 1
    other = card.malloc()
    assert other != address
    card.fake.heal("cuMemUnmap")
    card.free(other)
    assert card.cumem.counters()["reserved_bytes"] == 0
    assert card.fake.left() == {}
    assert card.cumem.take_errors() == []


def test_the_free_itself_may_get_rid_of_the_mapping(card):
    address = lose_a_wake(card, times=1)
    card.free(address)
    assert card.fake.left() == {}


# --- Threads -------------------------------------------------------------------------


def test_two_threads_never_offer_the_same(card):
    refuse(card, "cuMemUnmap")
    card.fake.heal("cuMemUnmap")
    calls = card.fake.calls("cuMemUnmap")
    card.fake.close_gate("cuMemUnmap")
    thread = Background(card.cumem.segments)
    wait_for_gate(card)
    address = card.malloc()
    assert card.cumem.counters()["leftovers"] == 1
    assert card.fake.waiting() == 1
    card.fake.open_gate()
    thread.join()
    assert card.fake.calls("cuMemUnmap") == calls + 1
    assert card.cumem.counters()["leftovers"] == 0
    card.free(address)


def test_wake_waits_for_the_thread_that_gets_rid_of_the_mapping(card):
    address = lose_a_wake(card, times=1)
    segment = (0, GRANULARITY, address, 0)
    card.fake.close_gate("cuMemUnmap")
    offering = Background(card.cumem.segments)
    wait_for_gate(card)
    creates = card.fake.calls("cuMemCreate")
    waking = Background(lambda: card.cumem.python_create_and_map(*segment))
    waking.thread.join(timeout=0.2)
    assert waking.thread.is_alive()
    assert card.fake.calls("cuMemCreate") == creates
    card.fake.open_gate()
    offering.join()
    waking.join()
    assert card.fake.is_usable(address)
    card.free(address)


@pytest.mark.parametrize("refused", [False, True])
def test_free_while_another_thread_gets_rid_of_the_mapping(card, refused):
    address = lose_a_wake(card, times=1)
    card.fake.close_gate("cuMemUnmap")
    thread = Background(card.cumem.segments)
    wait_for_gate(card)
    card.free(address)
    assert card.fake.is_reserved(address)
    if refused:
        card.fake.fail("cuMemUnmap")
    card.fake.open_gate()
    thread.join()
    assert card.fake.is_reserved(address) == refused
    assert card.cumem.counters()["leftovers"] == 0
    assert card.fake.left() == {}


def test_python_runs_while_it_is_offered(card):
    refuse(card, "cuMemUnmap")
    card.fake.heal("cuMemUnmap")
    card.fake.close_gate("cuMemUnmap")
    thread = Background(card.cumem.counters)
    wait_for_gate(card)
    card.fake.open_gate()
    thread.join()


# --- The end of the process ----------------------------------------------------------


def test_a_driver_that_has_shut_down_holds_nothing(card):
    card.may_leak = True
    refuse(card, "cuMemUnmap")
    address = card.malloc()
    card.fake.set("gone")
    card.free(address)
    counters = card.cumem.counters()
    assert counters["leftovers"] == 1, "offered no more: there is no context"
    assert card.cumem.take_errors() == []
    card.fake.set("gone", 0)
    card.fake.heal("cuMemUnmap")
    card.settle()
