# SPDX-License-Identifier: Apache-2.0
"""The driver through ctypes, for programs on a simulated card. No torch.

Functions are called by the names of cuda.h and raise DriverError for any
result but success; `code(...)` gives the result instead.
"""

import ctypes
from typing import Any

MIB = 1 << 20
GRANULE = 2 * MIB
SUFFIX = {
    "cuMemAlloc": "_v2",
    "cuMemFree": "_v2",
    "cuMemGetInfo": "_v2",
    "cuMemcpyDtoH": "_v2",
    "cuMemcpyHtoD": "_v2",
    "cuMemcpyDtoD": "_v2",
    "cuMemsetD8": "_v2",
    "cuMemHostRegister": "_v2",
    "cuCtxPushCurrent": "_v2",
    "cuEventDestroy": "_v2",
    "cuStreamDestroy": "_v2",
    "cuStreamBeginCapture": "_v2",
    "cuGetProcAddress": "_v2",
}
library = ctypes.CDLL("libcuda.so.1")


class DriverError(Exception):
    """A call that did not succeed."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}")
        self.code = code


def code(name: str, *args: Any) -> int:
    """Call a function; integers are passed as 64-bit values."""
    wide = [ctypes.c_uint64(a) if isinstance(a, int) else a for a in args]
    return getattr(library, name + SUFFIX.get(name, ""))(*wide)


def call(name: str, *args: Any) -> None:
    result = code(name, *args)
    if result:
        raise DriverError(name, result)


def output(name: str, *args: Any) -> int:
    """Call a function whose first parameter is a 64-bit result."""
    out = ctypes.c_uint64()
    call(name, ctypes.byref(out), *args)
    return out.value


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 16),
    )


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def start() -> None:
    """Initialize and make card 0's context current."""
    call("cuInit", 0)
    call("cuCtxSetCurrent", output("cuDevicePrimaryCtxRetain", 0))


def properties(device: int = 0) -> Any:
    return ctypes.byref(Properties(1, 0, Location(1, device)))


def create(size: int, device: int = 0) -> int:
    return output("cuMemCreate", size, properties(device), 0)


def reserve(size: int) -> int:
    return output("cuMemAddressReserve", size, 0, 0, 0)


def grant(address: int, size: int) -> None:
    access = Access(Location(1, 0), 3)
    call("cuMemSetAccess", address, size, ctypes.byref(access), 1)


def mapped(size: int) -> tuple[int, int]:
    """(address, handle) of new memory with access."""
    handle, address = create(size), reserve(size)
    call("cuMemMap", address, size, 0, handle, 0)
    grant(address, size)
    return address, handle


def write(address: int, data: bytes) -> None:
    call("cuMemcpyHtoD", address, data, len(data))


def read(address: int, size: int) -> bytes:
    buffer = ctypes.create_string_buffer(size)
    call("cuMemcpyDtoH", buffer, address, size)
    return buffer.raw


def used() -> int:
    """Bytes in use on the current card, as cuMemGetInfo sees them."""
    total = ctypes.c_uint64()
    free = output("cuMemGetInfo", ctypes.byref(total))
    return total.value - free
