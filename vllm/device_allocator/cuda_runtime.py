# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The functions of the CUDA runtime that move memory, from the library in use.

ctypes releases the GIL for the time of each call.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

_SIGNATURES: dict[str, list[Any]] = {
    "HostRegister": [c_void_p, c_size_t, c_uint],
    "HostUnregister": [c_void_p],
    "StreamCreateWithFlags": [POINTER(c_void_p), c_uint],
    "MemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
    "EventCreateWithFlags": [POINTER(c_void_p), c_uint],
    "EventRecord": [c_void_p, c_void_p],
    "EventSynchronize": [c_void_p],
    "EventDestroy": [c_void_p],
    "ThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "GetLastError": [],
}

_PORTABLE = 1
_BLOCKING_WITHOUT_TIMING = 3
_DIRECTION_FROM_ADDRESSES = 4
_RELAXED_CAPTURE = 2
# Ordered with the legacy stream, unlike the streams that PyTorch makes: a memset on
# that stream just before a copy comes first.
_ORDERED_STREAM = 0


class CudaRuntime:
    """One runtime library.

    Every method raises RuntimeError with the call and the error's name.

    Args:
        library: libcudart or libamdhip64.
        prefix: what the names of its functions start with, "cuda" or "hip".

    """

    def __init__(self, library: ctypes.CDLL, prefix: str = "cuda") -> None:
        self._prefix = prefix
        self._functions = {}
        for name, arguments in _SIGNATURES.items():
            function = library[prefix + name]
            function.argtypes, function.restype = arguments, c_int
            self._functions[name] = function
        self._error_name = library[f"{prefix}GetErrorName"]
        self._error_name.argtypes, self._error_name.restype = [c_int], c_char_p

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code == 0:
            return
        # Or PyTorch would find the error after its next kernel launch.
        self._functions["GetLastError"]()
        error = (self._error_name(code) or b"an error without a name").decode()
        raise RuntimeError(f"{self._prefix}{name} failed with {error} ({code})")

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Let this thread make calls that would invalidate another thread's capture.

        Registering is harmless to a capture, but the runtime counts it among the calls
        that it forbids to every thread while a graph is captured in the usual mode.
        """
        exchange = self._functions["ThreadExchangeStreamCaptureMode"]
        mode = c_int(_RELAXED_CAPTURE)
        relaxed = exchange(ctypes.byref(mode)) == 0
        try:
            yield
        finally:
            if relaxed:
                exchange(ctypes.byref(mode))

    def register(self, address: int, size: int) -> None:
        """Lock host memory, so that the device copies from and to it by itself.

        Another thread may be capturing a graph.
        """
        with self._beside_captures():
            self._call("HostRegister", address, size, _PORTABLE)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        with self._beside_captures():
            self._call("HostUnregister", address)

    def create_stream(self) -> int:
        """A stream of the current device, ordered with its legacy stream."""
        stream = c_void_p()
        self._call("StreamCreateWithFlags", ctypes.byref(stream), _ORDERED_STREAM)
        assert stream.value is not None
        return stream.value

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Start to copy bytes between host and device."""
        self._call(
            "MemcpyAsync", target, source, size, _DIRECTION_FROM_ADDRESSES, stream
        )

    def record(self, stream: int) -> int:
        """A new event that is done when the stream's work so far is."""
        event = c_void_p()
        self._call(
            "EventCreateWithFlags", ctypes.byref(event), _BLOCKING_WITHOUT_TIMING
        )
        assert event.value is not None
        try:
            self._call("EventRecord", event, stream)
        except RuntimeError:
            self._functions["EventDestroy"](event)
            raise
        return event.value

    def wait(self, event: int) -> None:
        """Block until the event is done."""
        self._call("EventSynchronize", event)

    def destroy_event(self, event: int) -> None:
        """Destroy an event, done or not."""
        self._call("EventDestroy", event)


def loaded_runtime(rocm: bool = False) -> CudaRuntime | None:
    """The runtime library that this process has loaded; None if it has none."""
    start, prefix = ("libamdhip64.so", "hip") if rocm else ("libcudart.so", "cuda")
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if path.rpartition("/")[2].startswith(start):
            return CudaRuntime(ctypes.CDLL(path), prefix)
    return None
