# SPDX-License-Identifier: Apache-2.0
"""The n-th call of a kind fails as asked; and what is unsupported is named."""

import pytest


def test_faults_from_the_environment(run_driver):
    result = run_driver(
        """
        start()
        out = ctypes.byref(ctypes.c_uint64())
        answer(codes=[code("cuMemCreate", out, GRANULE, properties(), 0)
                      for _ in range(4)])
        """,
        faults=["cuMemCreate:3"],
    ).check()
    assert result.answer["codes"] == [0, 0, 2, 0]
    assert result.report["faults_fired"] == 1
    assert result.report["calls"]["cuMemCreate"] == 4


def test_faults_from_the_program(run_driver):
    result = run_driver("""
        start()
        address, handle = mapped(GRANULE)
        card.fail("cuMemUnmap", code=719)
        first = code("cuMemUnmap", address, GRANULE)
        second = code("cuMemUnmap", address, GRANULE)
        card.fail("cuCtxSynchronize", 2, and_later=True)
        third = [code("cuCtxSynchronize") for _ in range(4)]
        card.clear_faults()
        answer(first=first, second=second, third=third, last=code("cuCtxSynchronize"))
    """).check()
    assert result.answer == {
        "first": 719,
        "second": 0,
        "third": [0, 999, 999, 999],
        "last": 0,
    }


def test_a_fault_changes_nothing(run_driver):
    result = run_driver(
        """
        start()
        out = ctypes.byref(ctypes.c_uint64())
        code("cuMemCreate", out, GRANULE, properties(), 0)
        code("cuMemAddressReserve", out, GRANULE, 0, 0, 0)
        """,
        faults=["cuMemCreate:1", "cuMemAddressReserve:1"],
    ).check()
    assert result.report["memory"]["handles"] == 0
    assert result.report["memory"]["reservations"] == 0


@pytest.mark.parametrize("faults", ["cuMemCreate:0", ":3", "cuMemCreate:x"])
def test_a_fault_that_makes_no_sense_stops_the_program(run_driver, faults):
    result = run_driver("start()", faults=[faults])
    assert result.status == 2
    assert "REHEARSAL_FAULTS" in result.stderr


def test_an_unsupported_call_fails_and_is_named(run_driver):
    result = run_driver("""
        start()
        answer(code=code("cuMemAllocManaged", ctypes.byref(ctypes.c_uint64()), 4096, 1))
    """)
    assert result.answer == {"code": 801}
    assert result.report["unsupported"] == {"cuMemAllocManaged": 1}
    assert not result.clean


def test_a_harmless_call_succeeds_and_is_counted(run_driver):
    result = run_driver("""
        start()
        answer(code=code("cuFuncSetCacheConfig", 0, 1))
    """).check()
    assert result.answer == {"code": 0}
    assert result.report["harmless"] == {"cuFuncSetCacheConfig": 1}


def test_private_tables_are_refused(run_driver):
    """A statically linked runtime asks for them; it must not get a wild pointer."""
    result = run_driver("""
        start()
        table = ctypes.c_void_p(1)
        refused = code("cuGetExportTable", ctypes.byref(table), bytes(16))
        answer(refused=refused, table=table.value)
    """).check()
    assert result.answer == {"refused": 500, "table": None}


def test_entry_points_by_version(run_driver):
    """An old caller gets the old ABI of a function that has several."""
    result = run_driver("""
        start()

        def entry(name, version):
            found = ctypes.c_void_p()
            status = code("cuGetProcAddress", name, ctypes.byref(found), version, 0,
                          None)
            return status, found.value

        old = entry(b"cuStreamGetCaptureInfo", 11030)[1]
        new = entry(b"cuStreamGetCaptureInfo", 13000)[1]

        def address(name):
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value

        answer(old=old == address("cuStreamGetCaptureInfo_v2"),
               new=new == address("cuStreamGetCaptureInfo_v3"),
               alloc=entry(b"cuMemAlloc", 13000)[1] == address("cuMemAlloc_v2"),
               missing=entry(b"cuNoSuchFunction", 13000))
    """).check()
    assert result.answer == {
        "old": True,
        "new": True,
        "alloc": True,
        "missing": [500, None],
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("REHEARSAL_MEMORY", "16GiB"), ("REHEARSAL_CARDS", "99")],
)
def test_a_card_that_cannot_be_read_stops_the_program(fronts, name, value):
    import os
    import subprocess
    import sys

    from tools.rehearsal.cards import find_card
    from tools.rehearsal.run import environment

    env = environment(find_card("h200", None, None), base=os.environ)
    env[name] = value
    program = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0); \
        ctypes.CDLL('librehearsal_card.so').rehearsal_used(0)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"{name}={value}" in done.stderr
