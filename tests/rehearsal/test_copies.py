# SPDX-License-Identifier: Apache-2.0
"""Contents are real up to the limit on host memory, and cost nothing when zero."""


def test_copies_across_mappings_and_chunks(run_driver):
    """A pattern survives device to device, over mappings that lie end to end."""
    result = run_driver("""
        start()
        import os
        address = reserve(4 * MIB)
        for part in range(2):
            call("cuMemMap", address + part * GRANULE, GRANULE, 0, create(GRANULE), 0)
        grant(address, 4 * MIB)
        pattern = os.urandom(3 * MIB + 123)
        write(address + 77, pattern)
        other = output("cuMemAlloc", 4 * MIB)
        call("cuMemcpyDtoD", other + 1001, address + 77, len(pattern))
        answer(same=read(other + 1001, len(pattern)) == pattern,
               around=read(other, 1001) == bytes(1001))
    """).check()
    assert result.answer == {"same": True, "around": True}
    assert result.report["skipped_copy_bytes"] == 0


def test_zeros_overwrite_and_take_no_host_memory(run_driver):
    result = run_driver("""
        start()
        address = output("cuMemAlloc", 64 * MIB)
        call("cuMemsetD8", address, ctypes.c_ubyte(7), 64 * MIB)
        full = card.report()["memory"]["committed"]
        write(address + 5, bytes(64 * MIB - 5))
        rest = card.report()["memory"]["committed"]
        answer(full=full, rest=rest, head=list(read(address, 6)),
               tail=read(address + 5, 64 * MIB - 5) == bytes(64 * MIB - 5))
    """).check()
    assert result.answer["full"] == 64 << 20
    assert result.answer["rest"] <= 64 << 10
    assert result.answer["head"] == [7, 7, 7, 7, 7, 0]
    assert result.answer["tail"]


def test_the_limit_skips_and_says_so(run_driver):
    result = run_driver(
        """
        start()
        address = output("cuMemAlloc", 32 * MIB)
        write(address, b"x" * (32 * MIB))
        answer(first=read(address, 1).decode(), last=read(address + 32 * MIB - 1, 1)[0])
        """,
        commit_limit=8 << 20,
    ).check()
    assert result.answer == {"first": "x", "last": 0}
    assert result.report["skipped_copy_bytes"] == 24 << 20
    assert result.report["memory"]["committed"] == 8 << 20


def test_an_empty_card_is_backed_up_for_nothing(run_driver):
    """Sleeping copies the whole model to the host: zeros must stay free."""
    result = run_driver(
        """
        start()
        size = 40960 * MIB
        address = output("cuMemAlloc", size)
        write(address + size - 4, b"tail")
        host = output("cuMemHostAlloc", size, 0)
        call("cuMemcpyDtoH", host, address, size)
        tail = ctypes.string_at(host + size - 4, 4).decode()
        call("cuMemcpyHtoD", address, ctypes.c_void_p(host + size - MIB), MIB)
        status = open("/proc/self/status").read()  # getrusage has the parent's peak
        peak = int(status.partition("VmHWM:")[2].split()[0])
        answer(tail=tail, peak_mib=peak >> 10)
        """,
        memory="48GiB",
    ).check()
    assert result.answer["tail"] == "tail"
    assert result.answer["peak_mib"] < 500


def test_an_empty_card_is_backed_up_to_pageable_memory_for_nothing(run_driver):
    result = run_driver("""
        start()
        import mmap
        size = 2048 * MIB
        address = output("cuMemAlloc", size)
        write(address + size - 4, b"tail")
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[5000] = 7
        host = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        call("cuMemcpyDtoH", ctypes.c_void_p(host), address, size)
        status = open("/proc/self/status").read()  # getrusage has the parent's peak
        peak = int(status.partition("VmHWM:")[2].split()[0])
        answer(tail=memory[-4:].decode(), cleared=memory[5000], peak_mib=peak >> 10)
    """).check()
    assert result.answer["tail"] == "tail"
    assert result.answer["cleared"] == 0
    assert result.answer["peak_mib"] < 500


def test_pinned_memory_errors(run_driver):
    result = run_driver("""
        start()
        buffer = ctypes.create_string_buffer(8192)
        at = ctypes.addressof(buffer)
        call("cuMemHostRegister", at, 8192, 0)
        again = code("cuMemHostRegister", at + 100, 10, 0)
        call("cuMemHostUnregister", at)
        answer(again=again, gone=code("cuMemHostUnregister", at))
    """)
    assert result.answer == {"again": 712, "gone": 713}
    assert result.report["misuse"] == {"unregister_of_unregistered": 1}
