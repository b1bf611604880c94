# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Each call to the driver fails in turn: what is undone, said, and still works.

Every test ends with the check of the `card` fixture that nothing leaked. What the
driver refuses to take back is the subject of test_cumem_leftovers.py.
"""

from __future__ import annotations

import pytest
import regex as re
from cumem_harness import GRANULARITY, MIB, ROOT, UNKNOWN_ERROR

# What one allocation calls, once the device is known, and what may fail in it.
MALLOC_CALLS = [
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
]
MAP_CALLS = [name for name in MALLOC_CALLS if name != "cuMemAddressReserve"]
# Calls whose failure is no reason to keep anything.
WAIT_CALLS = [
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
]


def works(card) -> None:
    """One life of a segment, to show that nothing of a failure is left."""
    address = card.malloc()
    card.sleep(address)
    card.wake(address)
    card.free(address)


def test_the_lists_above_are_complete(card):
    # A call that this file does not know would never be made to fail.
    address = card.malloc()
    every = set(MALLOC_CALLS + MAP_CALLS + WAIT_CALLS)
    every |= {"cuMemUnmap", "cuMemRelease", "cuMemAddressFree"}
    every |= {"cuThreadExchangeStreamCaptureMode", "cuCtxSetCurrent"}
    card.fake.set_current(1)
    card.sleep(address)
    card.wake(address)
    card.free(address)
    header = re.findall(
        r"F\((\w+)\)",
        (ROOT / "csrc/cumem/driver.h").read_text(),
    )
    first_use = {
        "cuGetErrorName",
        "cuDevicePrimaryCtxRetain",
        "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity",
    }
    assert set(header) == every | first_use


@pytest.mark.parametrize("function", MALLOC_CALLS)
def test_malloc(card, function, capfd):
    before = card.cumem.counters()
    card.fake.fail(function)
    assert card.allocator.malloc(3 * MIB) is None
    (error,) = card.errors(1)
    assert f"{function} failed with CUDA_ERROR_UNKNOWN (999)" in error
    assert "3145728 bytes on device 0" in error
    assert card.fake.left() == {}
    assert card.cumem.segments() == []
    after = card.cumem.counters()
    assert after["failed_mallocs"] == before["failed_mallocs"] + 1
    assert after["mallocs"] == before["mallocs"]
    works(card)
    assert capfd.readouterr() == ("", "")


def test_malloc_in_the_context_of_another_device(card):
    card.fake.set_current(1)
    card.fake.fail("cuCtxSetCurrent")
    assert card.allocator.malloc(MIB, 0) is None
    assert "cuCtxSetCurrent failed" in card.errors(1)[0]
    assert card.fake.current() == 1
    works(card)


@pytest.mark.parametrize(
    ("undo", "left"),
    [
        ("cuMemUnmap", {"mappings": 1, "reservations": 1, "used": GRANULARITY}),
        ("cuMemRelease", {"handles": 1, "used": GRANULARITY}),
        ("cuMemAddressFree", {"reservations": 1}),
    ],
)
def test_malloc_when_undoing_fails_too(card, undo, left):
    card.fake.fail("cuMemSetAccess")
    card.fake.fail(undo)
    assert card.allocator.malloc(MIB) is None
    (error,) = card.errors(1)
    assert error.index("cuMemSetAccess failed") < error.index(f"then {undo} failed")
    assert card.fake.left() == left
    works(card)
    assert card.fake.left() == {}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("cuDevicePrimaryCtxRetain", "CUDA_ERROR_UNKNOWN"),
        ("cuMemGetAllocationGranularity", "CUDA_ERROR_UNKNOWN"),
    ],
)
def test_first_use_of_a_device(fresh, function, name):
    script = (
        "fake.set_current(-1)\n"
        f"fake.fail({function!r})\n"
        "assert allocator.malloc(1) is None\n"
        "print(*cumem.take_errors(), fake.current(), sep='\\n')\n"
        "assert fake.left() == {}\n"
        "address = allocator.malloc(1)\n"
        "assert address\n"
        "allocator.free(address)\n"
        "assert fake.left() == {} and fake.current() == -1\n"
    )
    error, current = fresh(script).splitlines()
    assert f"{function} failed with {name}" in error
    assert current == "-1"


def test_a_property_that_cannot_be_asked_for_is_not_used(fresh):
    script = (
        "fake.set('rdma')\n"
        "fake.set('fabric')\n"
        "fake.fail('cuDeviceGetAttribute', times=2)\n"
        "address = allocator.malloc(1)\n"
        "print(fake.last_rdma(), fake.last_handle_types())\n"
        "allocator.free(address)\n"
    )
    assert fresh(script) == "0 0\n"


def test_fabric_denied_and_out_of_memory(fresh):
    # Both kinds of handle are refused, for different reasons: one message.
    script = (
        "fake.set('fabric')\n"
        "fake.set('fabric_denied')\n"
        "fake.fail('cuMemCreate', nth=2, code=OUT_OF_MEMORY)\n"
        "assert allocator.malloc(1) is None\n"
        "print(*cumem.take_errors())\n"
        "assert fake.left() == {}\n"
        "allocator.free(allocator.malloc(1))\n"
        "assert fake.left() == {} and cumem.take_errors() == []\n"
    )
    assert "cuMemCreate failed with CUDA_ERROR_OUT_OF_MEMORY (2)" in fresh(script)


def test_fabric_denied_is_asked_for_once(fresh):
    script = (
        "fake.set('fabric')\n"
        "fake.set('fabric_denied')\n"
        "for _ in range(3): allocator.free(allocator.malloc(1))\n"
        "print(fake.calls('cuMemCreate'), fake.last_handle_types())\n"
    )
    assert fresh(script) == "4 1\n"


@pytest.mark.parametrize("function", WAIT_CALLS)
def test_free_goes_on_when_it_cannot_wait(card, function):
    address = card.malloc()
    card.fake.fail(function)
    card.free(address)
    (error,) = card.errors(1)
    assert f"{function} failed" in error
    assert hex(address) in error
    assert f"{GRANULARITY} bytes on device 0" in error
    assert card.fake.left() == {}
    assert card.cumem.segments() == []
    works(card)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        # Still mapped, so the addresses stay reserved; its handle is let go.
        ("cuMemUnmap", {"mappings": 1, "reservations": 1, "used": GRANULARITY}),
        ("cuMemRelease", {"handles": 1, "used": GRANULARITY}),
        ("cuMemAddressFree", {"reservations": 1}),
    ],
)
def test_free_releases_what_it_can(card, function, left):
    address = card.malloc()
    card.fake.fail(function)
    card.free(address)
    assert f"{function} failed" in card.errors(1)[0]
    assert card.fake.left() == left
    counters = card.cumem.counters()
    assert counters["segments"] == counters["mapped_bytes"] == 0
    works(card)
    assert card.fake.left() == {}


def test_free_of_a_sleeping_segment(card):
    address = card.malloc()
    card.sleep(address)
    card.fake.fail("cuMemAddressFree")
    card.free(address)
    assert "cuMemAddressFree failed" in card.errors(1)[0]
    assert card.fake.left() == {"reservations": 1}
    works(card)
    assert card.fake.left() == {}


def test_several_failures_make_one_message(card):
    address = card.malloc()
    for function in ("cuStreamSynchronize", "cuMemUnmap", "cuMemRelease"):
        card.fake.fail(function)
    card.free(address)
    (error,) = card.errors(1)
    assert re.search(
        "cuStreamSynchronize failed.*then cuMemUnmap failed.*then cuMemRelease failed",
        error,
    )
    works(card)


@pytest.mark.parametrize("function", MAP_CALLS)
def test_wake(card, function):
    address = card.malloc(3 * MIB)
    card.sleep(address)
    card.fake.fail(function)
    with pytest.raises(
        RuntimeError,
        match=rf"{function} failed with CUDA_ERROR_UNKNOWN \({UNKNOWN_ERROR}\).*"
        r"wanted 4194304 bytes on device 0",
    ):
        card.wake(address)
    assert card.asleep(address)
    assert card.fake.left() == {"reservations": 1}
    card.wake(address)
    assert card.fake.is_usable(address)
    card.free(address)


def test_wake_without_enough_memory(card):
    address = card.malloc(32 * MIB)
    card.sleep(address)
    other = card.malloc(48 * MIB)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        card.wake(address)
    card.free(other)
    card.wake(address)
    card.free(address)


def test_sleep_when_the_driver_refuses_the_unmap(card):
    address = card.malloc()
    handle = card.segment(address)[3]
    card.fake.fail("cuMemUnmap")
    with pytest.raises(RuntimeError, match="cuMemUnmap failed with CUDA_ERROR_UNKNOWN"):
        card.sleep(address)
    assert not card.asleep(address)
    assert card.segment(address)[3] == handle
    assert card.fake.is_usable(address)
    assert card.cumem.counters()["mapped_bytes"] == GRANULARITY
    card.sleep(address)
    card.free(address)


def test_sleep_when_the_driver_refuses_the_release(card):
    address = card.malloc()
    card.fake.fail("cuMemRelease")
    with pytest.raises(RuntimeError, match="cuMemRelease failed"):
        card.sleep(address)
    assert card.fake.left() == {"handles": 1, "reservations": 1, "used": GRANULARITY}
    assert card.asleep(address)
    assert card.fake.left() == {"reservations": 1}
    card.wake(address)
    card.free(address)


@pytest.mark.parametrize("function", ["cuCtxGetCurrent", "cuCtxGetDevice"])
def test_sleep_without_a_context(card, function):
    address = card.malloc()
    card.fake.fail(function)
    with pytest.raises(RuntimeError, match=f"{function} failed"):
        card.sleep(address)
    assert card.fake.is_usable(address)
    card.free(address)


@pytest.mark.parametrize("function", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
def test_a_postponed_free_that_fails(card, function):
    address = card.malloc()
    assert card.cumem.hold(address, card.segment(address)[6])
    card.free(address)
    card.fake.fail(function)
    card.cumem.unhold(address)
    assert f"{function} failed" in card.errors(1)[0]
    works(card)


def test_a_driver_that_has_shut_down(card):
    # At the end of a process the driver goes first; that is no error to report.
    card.may_leak = True
    address = card.malloc()
    card.fake.set("gone")
    card.free(address)
    assert card.cumem.take_errors() == []
    assert card.cumem.counters()["reserved_bytes"] == 0
    card.fake.set("gone", 0)
    works(card)
