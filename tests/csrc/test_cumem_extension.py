# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the extension offers to Python and to PyTorch, without faults."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

import pytest
from cumem_harness import GRANULARITY, MIB, OUT_OF_MEMORY


def test_exports_and_libraries(build):
    symbols = subprocess.check_output(
        ["nm", "-D", "--defined-only", build.extension], text=True
    )
    assert {line.split()[-1] for line in symbols.splitlines()} == {
        "PyInit_cumem_allocator",
        "my_malloc",
        "my_free",
    }
    needed = subprocess.check_output(["readelf", "-d", build.extension], text=True)
    assert "libstdc++" in needed
    assert "libcuda" not in needed


@pytest.mark.parametrize("driver", ["none", "without functions"])
def test_imports_without_a_usable_driver(build, driver):
    # With a folder that holds an empty libcuda.so.1, or without any, unless the
    # machine has a real one.
    environment = {"LD_LIBRARY_PATH": ""}
    expected = "False"
    if driver == "without functions":
        environment["LD_LIBRARY_PATH"] = str(build.empty_driver.parent)
    else:
        expected = subprocess.check_output(
            [
                sys.executable,
                "-c",
                (
                    "import ctypes\n"
                    "try: ctypes.CDLL('libcuda.so.1'); print(True)\n"
                    "except OSError: print(False)"
                ),
            ],
            env=environment,
            text=True,
        ).strip()
    script = (
        "import ctypes, cumem_allocator as cumem\n"
        "print(cumem.driver_available(), cumem.segments())\n"
        "library = ctypes.CDLL(cumem.__file__)\n"
        "library.my_malloc.restype = ctypes.c_void_p\n"
        "if not cumem.driver_available():\n"
        "    assert library.my_malloc(ctypes.c_ssize_t(1), 0, None) is None\n"
        "    (error,) = cumem.take_errors()\n"
        "    assert 'no CUDA driver' in error and 'libcuda.so.1' in error, error\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=build.extension.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{expected} []\n"


def test_driver_is_available_without_being_started(fresh):
    script = "print(cumem.driver_available(), fake.calls('cuMemCreate'))"
    assert fresh(script) == "True 0\n"


def test_allocate_and_free(card):
    before = card.cumem.counters()
    card.cumem.set_scope("weights", 7)
    address = card.malloc(3 * MIB, device=1)
    device, size, found, handle, tag, asleep, serial, generation = card.segment(address)
    assert (device, size, found) == (1, 4 * MIB, address)
    assert (tag, asleep, generation) == ("weights", False, 7)
    assert isinstance(handle, int)
    assert handle != 0
    assert serial > 0
    assert card.fake.is_usable(address)
    during = card.cumem.counters()
    assert during["mapped_bytes"] == during["reserved_bytes"] == 4 * MIB
    assert during["segments"] == 1
    assert during["mallocs"] == before["mallocs"] + 1
    card.free(address)
    after = card.cumem.counters()
    assert after["frees"] == before["frees"] + 1
    assert after["segments"] == 0
    assert after["returned_bytes"] == before["returned_bytes"] + 4 * MIB
    assert after["peak_mapped_bytes"] == 4 * MIB
    card.cumem.reset_peak()
    assert card.cumem.counters()["peak_mapped_bytes"] == 0


def test_counters_names(card):
    assert set(card.cumem.counters()) == {
        "mapped_bytes",
        "peak_mapped_bytes",
        "reserved_bytes",
        "returned_bytes",
        "segments",
        "mallocs",
        "frees",
        "failed_mallocs",
        "errors",
        "leftovers",
    }


def test_segments_are_ordered_and_serials_are_never_reused(card):
    addresses = [card.malloc() for _ in range(4)]
    listed = card.cumem.segments()
    assert [segment[2] for segment in listed] == sorted(addresses)
    old = {segment[6] for segment in listed}
    card.free(addresses[1])
    again = card.malloc()
    assert again == addresses[1], "the fake driver hands out the lowest gap"
    assert card.segment(again)[6] not in old
    for address in [addresses[0], again, *addresses[2:]]:
        card.free(address)


def test_scope_is_per_thread(card):
    card.cumem.set_scope("weights", 2)
    seen = []

    def other():
        seen.append(card.cumem.get_scope())
        card.cumem.set_scope("kv_cache", -1)
        address = card.malloc()
        seen.append(card.segment(address)[4:8:3])
        card.free(address)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [("default", 0), ("kv_cache", -1)]
    assert card.cumem.get_scope() == ("weights", 2)


@pytest.mark.parametrize("size", [0, -1, -(1 << 63)])
def test_sizes_that_are_refused(card, size):
    assert card.allocator.malloc(size) is None
    (error,) = card.errors(1)
    assert "positive" in error
    assert str(size) in error


def test_huge_size_is_out_of_memory(card):
    card.fake.fail("cuMemAddressReserve", code=OUT_OF_MEMORY)
    assert card.allocator.malloc((1 << 63) - 1) is None
    assert "CUDA_ERROR_OUT_OF_MEMORY" in card.errors(1)[0]


@pytest.mark.parametrize("device", [2, -1, 4096])
def test_devices_that_do_not_exist(card, device):
    assert card.allocator.malloc(MIB, device) is None
    assert f"device {device}" in card.errors(1)[0]


def test_out_of_memory_is_quiet_and_a_retry_succeeds(card, capfd):
    addresses = [card.malloc(16 * MIB) for _ in range(4)]
    before = card.cumem.counters()
    for _ in range(3):
        assert card.allocator.malloc(16 * MIB) is None
    errors = card.errors(3)
    assert all("CUDA_ERROR_OUT_OF_MEMORY" in error for error in errors)
    assert all("16777216 bytes on device 0" in error for error in errors)
    after = card.cumem.counters()
    assert after["failed_mallocs"] == before["failed_mallocs"] + 3
    assert after["errors"] == before["errors"] + 3
    assert after["segments"] == 4
    assert after["mapped_bytes"] == 64 * MIB
    card.free(addresses.pop())
    addresses.append(card.malloc(16 * MIB))
    for address in addresses:
        card.free(address)
    assert capfd.readouterr() == ("", "")


def test_errors_are_bounded(card):
    for index in range(300):
        assert card.allocator.malloc(-1 - index) is None
    errors = card.errors(256)
    assert "of -300 bytes" in errors[-1]
    assert "of -45 bytes" in errors[0]
    assert card.cumem.take_errors() == []


def test_free_of_an_unknown_pointer_and_free_twice(card):
    card.free(0x1234)
    assert "0x1234" in card.errors(1)[0]
    address = card.malloc()
    card.free(address + GRANULARITY)
    assert hex(address + GRANULARITY) in card.errors(1)[0]
    card.free(address)
    card.free(address)
    assert "freed before" in card.errors(1)[0]


def test_sleep_and_wake(card):
    address = card.malloc(6 * MIB)
    handle = card.segment(address)[3]
    card.cumem.reset_peak()
    returned = card.cumem.counters()["returned_bytes"]
    card.sleep(address)
    assert card.segment(address)[3:6:2] == (0, True)
    assert card.fake.left() == {"reservations": 1}
    counters = card.cumem.counters()
    assert (counters["mapped_bytes"], counters["reserved_bytes"]) == (0, 6 * MIB)
    assert counters["returned_bytes"] == returned
    card.wake(address)
    assert card.fake.is_usable(address)
    assert not card.asleep(address)
    assert card.segment(address)[3] not in (0, handle)
    assert card.cumem.counters()["mapped_bytes"] == 6 * MIB
    card.free(address)


def test_the_handle_argument_may_be_stale(card):
    address = card.malloc()
    before = card.segment(address)[:4]
    card.cumem.python_unmap_and_release(*before)
    card.cumem.python_create_and_map(*before)
    card.cumem.python_unmap_and_release(*before)
    card.free(address)


def test_free_while_asleep_frees_the_addresses_only(card):
    address = card.malloc()
    card.sleep(address)
    calls = {name: card.fake.calls(name) for name in ("cuMemUnmap", "cuMemRelease")}
    waits = card.fake.calls("cuStreamSynchronize")
    card.free(address)
    assert calls == {name: card.fake.calls(name) for name in calls}
    assert card.fake.calls("cuStreamSynchronize") == waits
    assert card.fake.left() == {}


def test_changes_that_are_refused(card):
    address = card.malloc()
    device, size, _, handle = card.segment(address)[:4]
    create, unmap = (
        card.cumem.python_create_and_map,
        card.cumem.python_unmap_and_release,
    )
    with pytest.raises(RuntimeError, match="mapped already"):
        create(device, size, address, handle)
    for wrong in [(1, size), (device, size + GRANULARITY)]:
        with pytest.raises(RuntimeError, match=f"not {wrong[1]} on device {wrong[0]}"):
            unmap(*wrong, address, handle)
    with pytest.raises(RuntimeError, match="no segment starts at 0x10"):
        unmap(device, size, 0x10, handle)
    with pytest.raises(TypeError):
        unmap(device, size, address)
    with pytest.raises(TypeError):
        unmap(device, size, "0x10", handle)
    unmap(device, size, address, handle)
    with pytest.raises(RuntimeError, match="asleep already"):
        unmap(device, size, address, handle)
    card.free(address)
    with pytest.raises(RuntimeError, match="no segment"):
        create(device, size, address, handle)
    assert card.cumem.take_errors() == [], "Python was told already"


def test_hold_postpones_a_free(card):
    address = card.malloc()
    serial = card.segment(address)[6]
    assert card.cumem.hold(address, serial)
    assert card.cumem.hold(address, serial)
    card.free(address)
    assert card.cumem.segments() == []
    assert card.cumem.counters()["segments"] == 0
    assert card.fake.is_usable(address)
    assert card.cumem.counters()["mapped_bytes"] == GRANULARITY
    assert not card.cumem.hold(address, serial), "it is gone for everyone else"
    card.free(address)
    assert "freed before" in card.errors(1)[0]
    card.cumem.unhold(address)
    assert card.fake.is_usable(address)
    card.cumem.unhold(address)
    assert card.fake.left() == {}
    with pytest.raises(RuntimeError, match="nobody holds"):
        card.cumem.unhold(address)


def test_hold_is_for_one_segment_not_for_its_address(card):
    address = card.malloc()
    serial = card.segment(address)[6]
    card.free(address)
    assert card.malloc() == address
    assert not card.cumem.hold(address, serial)
    with pytest.raises(RuntimeError, match="nobody holds"):
        card.cumem.unhold(address)
    card.free(address)
    assert not card.cumem.hold(0x10, serial)


def test_unhold_without_a_free_changes_nothing(card):
    address = card.malloc()
    assert card.cumem.hold(address, card.segment(address)[6])
    card.cumem.unhold(address)
    assert card.fake.is_usable(address)
    card.free(address)


def test_a_holder_may_sleep_and_wake_a_freed_segment(card):
    address = card.malloc()
    arguments = card.segment(address)[:4]
    assert card.cumem.hold(address, card.segment(address)[6])
    card.free(address)
    card.cumem.python_unmap_and_release(*arguments)
    assert card.fake.left() == {"reservations": 1}
    card.cumem.python_create_and_map(*arguments)
    assert card.fake.is_usable(address)
    card.cumem.python_unmap_and_release(*arguments)
    card.cumem.unhold(address)


def test_the_current_context_is_left_alone(card):
    for current in (0, 1, -1):
        card.fake.set_current(current)
        address = card.malloc(device=0)
        assert card.fake.current() == current
        card.sleep(address)
        assert card.fake.current() == current
        card.wake(address)
        assert card.fake.current() == current
        card.free(address)
        assert card.fake.current() == current


STREAM = 0x50


@pytest.mark.parametrize("stream", [STREAM, 0])
def test_free_waits_for_kernels(card, stream):
    address = card.malloc(stream=STREAM)
    card.fake.launch(stream, address)
    card.free(address, stream=STREAM)
    assert card.fake.violations() == ""


def test_the_fake_driver_notices_an_unmap_under_a_kernel(fresh):
    script = (
        "address = allocator.malloc(1)\n"
        "fake.launch(0x50, address)\n"
        "cumem.python_unmap_and_release(*cumem.segments()[0][:4])\n"
        "print(fake.violations(), end='')"
    )
    assert "kernel still uses" in fresh(script)


def test_free_on_a_capturing_stream_does_not_wait(card):
    address = card.malloc(stream=STREAM)
    card.fake.begin_capture(STREAM)
    waits = card.fake.calls("cuStreamSynchronize")
    card.free(address, stream=STREAM)
    assert card.fake.calls("cuStreamSynchronize") == waits
    assert card.fake.end_capture(STREAM)


@pytest.mark.parametrize("blocking", [False, True])
def test_another_capture_survives(card, blocking):
    first = card.malloc(stream=STREAM)
    card.fake.begin_capture(0x60, blocking=blocking)
    second = card.malloc(stream=0x60)
    card.sleep(second)
    card.wake(second)
    card.fake.launch(STREAM, first)
    card.free(first, stream=STREAM)
    card.free(second, stream=0x60)
    assert card.fake.end_capture(0x60)


def test_the_fake_driver_notices_a_broken_capture(card):
    card.fake.begin_capture(0x60)
    card.fake.fail("cuThreadExchangeStreamCaptureMode")
    card.free(card.malloc())
    assert not card.fake.end_capture(0x60)


@pytest.mark.parametrize(
    ("options", "handle_types", "rdma"),
    [
        ([], 0, 0),
        (["rdma"], 0, 1),
        (["fabric"], 8, 0),
        (["fabric", "fabric_denied", "rdma"], 1, 1),
    ],
)
def test_memory_properties(fresh, options, handle_types, rdma):
    script = "".join(f"fake.set({option!r})\n" for option in options) + (
        "addresses = [allocator.malloc(1) for _ in range(2)]\n"
        "assert all(addresses), cumem.take_errors()\n"
        "print(fake.last_handle_types(), fake.last_rdma())\n"
        "for address in addresses: allocator.free(address)\n"
        "assert fake.left() == {} and cumem.take_errors() == []\n"
    )
    assert fresh(script) == f"{handle_types} {rdma}\n"


def test_device_properties_are_asked_once(fresh):
    script = (
        "for _ in range(3): allocator.free(allocator.malloc(1))\n"
        "print(fake.calls('cuMemGetAllocationGranularity'), "
        "fake.calls('cuDeviceGetAttribute'))"
    )
    assert fresh(script) == "1 2\n"


def test_observers(card):
    seen = []
    card.cumem.init_module(
        lambda segment: seen.append(segment), lambda address: seen.append(address)
    )
    address = card.malloc(3 * MIB, device=1)
    device, size, _, handle = card.segment(address)[:4]
    card.free(address)
    assert seen == [(device, size, address, handle), address]
    assert card.allocator.malloc(-1) is None
    card.errors(1)
    assert len(seen) == 2, "a failed allocation is not announced"
    card.cumem.init_module(None, None)
    card.free(card.malloc())
    assert len(seen) == 2


def test_observers_that_raise(card):
    def refuse(_):
        raise KeyError("no thanks")

    card.cumem.init_module(refuse, refuse)
    address = card.malloc()
    assert card.fake.is_usable(address)
    card.free(address)
    for error, which in zip(card.errors(2), ("malloc", "free"), strict=True):
        assert f"the {which} observer raised KeyError('no thanks')" in error


def test_observers_are_kept_alive_and_let_go(card):
    class Observer:
        def __call__(self, _):
            pass

    observer = Observer()
    alive = weakref.ref(observer)
    card.cumem.init_module(observer, observer)
    del observer
    assert alive() is not None
    card.free(card.malloc())
    card.cumem.init_module(None, None)
    assert alive() is None


@pytest.mark.parametrize("arguments", [(1, 2), (print, None), (None, print)])
def test_observers_that_are_refused(card, arguments):
    with pytest.raises(TypeError, match="two callables"):
        card.cumem.init_module(*arguments)
