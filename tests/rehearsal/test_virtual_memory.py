# SPDX-License-Identifier: Apache-2.0
"""The virtual-memory calls follow the driver's documentation."""

import pytest


def test_a_segment_lives_and_dies(run_driver):
    result = run_driver("""
        start()
        before = used()
        address, handle = mapped(8 * MIB)
        after = used()
        call("cuMemUnmap", address, 8 * MIB)
        unmapped = used()
        call("cuMemRelease", handle)
        released = used()
        call("cuMemAddressFree", address, 8 * MIB)
        answer(taken=after - before, kept=unmapped - before, left=released - before)
    """).check()
    assert result.answer == {"taken": 8 << 20, "kept": 8 << 20, "left": 0}
    census = result.report["memory"]
    assert census["handles"] == census["mappings"] == census["reservations"] == 0


def test_memory_stays_until_the_last_of_handle_and_mapping(run_driver):
    result = run_driver("""
        start()
        before = used()
        address, handle = mapped(4 * MIB)
        call("cuMemRelease", handle)
        released_first = used() - before
        kept = output("cuMemRetainAllocationHandle", address)
        call("cuMemUnmap", address, 4 * MIB)
        retained = used() - before
        call("cuMemRelease", kept)
        answer(released_first=released_first, retained=retained, end=used() - before)
    """).check()
    assert result.answer == {"released_first": 4 << 20, "retained": 4 << 20, "end": 0}


def test_contents_belong_to_the_handle(run_driver):
    """Bytes follow the physical memory to another address, and to an alias."""
    result = run_driver("""
        start()
        address, handle = mapped(2 * MIB)
        write(address, b"weights")
        alias = reserve(2 * MIB)
        call("cuMemMap", alias, 2 * MIB, 0, handle, 0)
        grant(alias, 2 * MIB)
        both = read(alias, 7).decode()
        call("cuMemUnmap", address, 2 * MIB)
        call("cuMemUnmap", alias, 2 * MIB)
        call("cuMemMap", address, 2 * MIB, 0, handle, 0)
        grant(address, 2 * MIB)
        again = read(address, 7).decode()
        answer(both=both, again=again)
    """).check()
    assert result.answer == {"both": "weights", "again": "weights"}


def test_new_memory_is_scrubbed(run_driver):
    result = run_driver("""
        start()
        for _ in range(3):
            address, handle = mapped(2 * MIB)
            clean = read(address, 4096) == bytes(4096)
            write(address, b"x" * 4096)
            call("cuMemUnmap", address, 2 * MIB)
            call("cuMemRelease", handle)
            call("cuMemAddressFree", address, 2 * MIB)
            assert clean
        answer(committed=card.report()["memory"]["committed"])
    """).check()
    assert result.answer["committed"] == 0


def test_a_full_card_refuses_and_recovers(run_driver):
    result = run_driver(
        """
        start()
        big = create(1024 * MIB)
        refused = code("cuMemCreate", ctypes.byref(ctypes.c_uint64()), 1024 * MIB,
                       properties(), 0)
        call("cuMemRelease", big)
        call("cuMemRelease", create(1024 * MIB))
        answer(refused=refused, refusals=card.refusals(), peak=card.peak())
        """,
        memory="2GiB",
    ).check()
    assert result.answer["refused"] == 2
    assert result.answer["refusals"] == 1
    assert result.answer["peak"] == (1024 + 512) << 20  # with the context


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        ('code("cuMemUnmap", reserve(GRANULE), GRANULE)', "unmap_of_unmapped_range", 1),
        (
            'a, h = mapped(GRANULE); call("cuMemUnmap", a, GRANULE); '
            'code("cuMemUnmap", a, GRANULE)',
            "unmap_of_unmapped_range",
            1,
        ),
        (
            'h = create(GRANULE); call("cuMemRelease", h); code("cuMemRelease", h)',
            "double_release",
            1,
        ),
        (
            'p = output("cuMemAlloc", 5); call("cuMemFree", p); code("cuMemFree", p)',
            "double_free",
            1,
        ),
        (
            'p = output("cuMemAlloc", 5); call("cuMemFree", p); '
            'code("cuMemcpyHtoD", p, b"x", 1)',
            "use_of_unmapped_memory",
            700,
        ),
        (
            "h = create(GRANULE); a = reserve(GRANULE); "
            'call("cuMemMap", a, GRANULE, 0, h, 0); '
            'code("cuMemcpyHtoD", a, b"x", 1)',
            "use_before_access",
            700,
        ),
        (
            'a, h = mapped(GRANULE); code("cuMemAddressFree", a, GRANULE)',
            "free_of_mapped_addresses",
            1,
        ),
        (
            'a = reserve(GRANULE); code("cuMemAddressFree", a, 2 * GRANULE)',
            "free_of_unknown_addresses",
            1,
        ),
        (
            'a, h = mapped(GRANULE); code("cuMemMap", a, GRANULE, 0, h, 0)',
            "map_of_mapped_range",
            1,
        ),
        (
            'h = create(GRANULE); call("cuMemRelease", h); '
            'code("cuMemMap", reserve(GRANULE), GRANULE, 0, h, 0)',
            "map_of_released_handle",
            1,
        ),
    ],
)
def test_misuse_is_refused_counted_and_named(run_driver, text, kind, code):
    *setup, last = text.split("; ")
    result = run_driver("\n".join(["start()", *setup, f"answer(code={last})"]))
    assert result.status == 0, result.stderr
    assert result.answer["code"] == code
    assert result.report["misuse"] == {kind: 1}
    assert result.report["misuse_examples"][0].startswith(kind)
    assert not result.clean


def test_a_handle_that_nothing_maps_is_reported(run_driver):
    result = run_driver("""
        start()
        create(2 * MIB)
        mapped(2 * MIB)
    """)
    assert result.report["memory"]["unreachable_handles"] == 1
    assert result.report["memory"]["handles"] == 2


@pytest.mark.parametrize("size", [0, 1 << 20, (2 << 20) + 1])
def test_sizes_must_be_whole_granules(run_driver, size):
    result = run_driver(f"""
        start()
        out = ctypes.byref(ctypes.c_uint64())
        answer(create=code("cuMemCreate", out, {size}, properties(), 0),
               reserve=code("cuMemAddressReserve", out, {size}, 0, 0, 0))
    """).check()
    assert result.answer == {"create": 1, "reserve": 1}


def test_a_partial_unmap_changes_nothing(run_driver):
    result = run_driver("""
        start()
        address, handle = mapped(4 * MIB)
        write(address, b"kept")
        refused = code("cuMemUnmap", address, 2 * MIB)
        answer(refused=refused, kept=read(address, 4).decode())
    """)
    assert result.answer == {"refused": 1, "kept": "kept"}


def test_calls_need_initialization_and_a_context(run_driver):
    result = run_driver("""
        out = ctypes.byref(ctypes.c_uint64())
        early = code("cuDeviceGetCount", out)
        call("cuInit", 0)
        answer(early=early, no_context=code("cuMemAlloc", out, 4096))
    """).check()
    assert result.answer == {"early": 3, "no_context": 201}


def test_cards_are_counted_apart(run_driver):
    result = run_driver(
        """
        start()
        create(64 * MIB, device=1)
        answer(used=[card.used(0), card.used(1)],
               missing=code("cuMemCreate", ctypes.byref(ctypes.c_uint64()), 2 * MIB,
                            properties(2), 0))
        """,
        cards=2,
    ).check()
    assert result.answer == {"used": [512 << 20, 64 << 20], "missing": 101}


def test_many_threads_leave_nothing_behind(run_driver):
    result = run_driver("""
        import threading
        start()
        before = used()
        errors = []

        def work():
            try:
                call("cuCtxSetCurrent", output("cuDevicePrimaryCtxRetain", 0))
                for step in range(100):
                    size = GRANULE * (1 + step % 5)
                    address, handle = mapped(size)
                    text = threading.current_thread().name.encode() * 1000
                    write(address + size - len(text), text)
                    assert read(address + size - len(text), len(text)) == text
                    call("cuMemUnmap", address, size)
                    call("cuMemRelease", handle)
                    call("cuMemAddressFree", address, size)
            except Exception as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        answer(errors=errors, left=used() - before)
    """).check()
    assert result.answer == {"errors": [], "left": 0}
    assert result.report["memory"]["committed"] == 0
