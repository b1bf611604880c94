# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Builds the CuMem extension with its fake driver, and loads both.

Nothing here needs a device, torch or an installed vLLM: only CMake, a C++ compiler
and cuda.h.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import types
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MIB = 1 << 20
GRANULARITY = 2 * MIB
OUT_OF_MEMORY = 2
UNKNOWN_ERROR = 999


class Unavailable(Exception):
    """Something that the build needs is not on this machine."""


def cuda_include() -> pathlib.Path:
    """The folder of cuda.h: $CUDA_INCLUDE, the pip package's, or the toolkit's."""
    candidates = []
    if os.environ.get("CUDA_INCLUDE"):
        candidates.append(pathlib.Path(os.environ["CUDA_INCLUDE"]))
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidates.append(pathlib.Path(folder, "cu13", "include"))
        candidates.append(pathlib.Path(folder, "cuda_runtime", "include"))
    candidates.append(pathlib.Path("/usr/local/cuda/include"))
    for candidate in candidates:
        if (candidate / "cuda.h").is_file():
            return candidate
    raise Unavailable(
        "cuda.h not found: install the pip package nvidia-cuda-runtime, or set "
        "CUDA_INCLUDE"
    )


class Build:
    """The built files. `folder` is kept between runs, so that only changes cost."""

    def __init__(self, cache: pathlib.Path) -> None:
        for tool in ("cmake", "c++"):
            if shutil.which(tool) is None:
                raise Unavailable(f"{tool} not found: install CMake and a C++ compiler")
        include = cuda_include()
        key = f"{HERE}\n{sys.executable}\n{include}".encode()
        self.folder = cache / hashlib.sha256(key).hexdigest()[:12]
        configure = [
            "cmake",
            f"-S{HERE}",
            f"-B{self.folder}",
            f"-DCUDA_INCLUDE={include}",
            f"-DPython3_EXECUTABLE={sys.executable}",
        ]
        for command in (configure, ["cmake", "--build", str(self.folder), "-j2"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"{command} failed:\n{done.stdout}\n{done.stderr}")
        self.extension = self.folder / "cumem" / "cumem_allocator.abi3.so"
        self.fake_driver = self.folder / "fake_driver" / "libcuda.so.1"
        self.empty_driver = self.folder / "empty_driver" / "libcuda.so.1"
        self.stress = {
            name: self.folder / f"stress_{name}" for name in ("address", "thread")
        }


class FakeDriver:
    """Steers the fake driver; tests/csrc/fake_driver.h says what each call does."""

    def __init__(self, path: pathlib.Path) -> None:
        self.library: Any = ctypes.CDLL(str(path))
        self.library.fake_count.restype = ctypes.c_uint64
        self.library.fake_violations.restype = ctypes.c_char_p

    def reset(self, mib: int = 64) -> None:
        self.library.fake_reset(ctypes.c_uint64(mib))

    def fail(
        self, function: str, nth: int = 1, times: int = 1, code: int = UNKNOWN_ERROR
    ) -> None:
        self.library.fake_fail(function.encode(), nth, times, code)

    def heal(self, function: str) -> None:
        """Takes back what `fail` said of that function."""
        self.library.fake_fail(function.encode(), 0, 0, 0)

    def calls(self, function: str) -> int:
        return int(self.library.fake_calls(function.encode()))

    def count(self, what: str) -> int:
        return int(self.library.fake_count(what.encode()))

    def violations(self) -> str:
        return str(self.library.fake_violations().decode())

    def set(self, option: str, value: int = 1) -> None:
        self.library.fake_set(option.encode(), value)

    def last_handle_types(self) -> int:
        return int(self.library.fake_last_handle_types())

    def last_rdma(self) -> int:
        return int(self.library.fake_last_rdma())

    def set_current(self, device: int) -> None:
        self.library.fake_set_current(device)

    def current(self) -> int:
        return int(self.library.fake_current())

    def launch(self, stream: int, address: int) -> None:
        self.library.fake_launch(ctypes.c_void_p(stream), ctypes.c_uint64(address))

    def begin_capture(self, stream: int, blocking: bool = False) -> None:
        self.library.fake_begin_capture(ctypes.c_void_p(stream), int(blocking))

    def end_capture(self, stream: int) -> bool:
        return bool(self.library.fake_end_capture(ctypes.c_void_p(stream)))

    def close_gate(self, function: str) -> None:
        self.library.fake_close_gate(function.encode())

    def waiting(self) -> int:
        return int(self.library.fake_waiting())

    def open_gate(self) -> None:
        self.library.fake_open_gate()

    def is_reserved(self, address: int) -> bool:
        return bool(self.library.fake_is_reserved(ctypes.c_uint64(address)))

    def is_usable(self, address: int) -> bool:
        return bool(self.library.fake_is_usable(ctypes.c_uint64(address)))

    def left(self) -> dict[str, int]:
        """What the driver still holds; empty when nothing leaked."""
        kinds = ("handles", "mappings", "reservations", "used")
        return {kind: self.count(kind) for kind in kinds if self.count(kind)}


class Allocator:
    """The two C functions as PyTorch calls them, without the GIL."""

    def __init__(self, path: pathlib.Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.my_malloc.restype = ctypes.c_void_p
        self.library.my_malloc.argtypes = [
            ctypes.c_ssize_t,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self.library.my_free.restype = None
        self.library.my_free.argtypes = [
            ctypes.c_void_p,
            ctypes.c_ssize_t,
            ctypes.c_int,
            ctypes.c_void_p,
        ]

    def malloc(self, size: int = MIB, device: int = 0, stream: int = 0) -> int | None:
        address = self.library.my_malloc(size, device, stream)
        return None if address is None else int(address)

    def free(
        self, address: int, size: int = MIB, device: int = 0, stream: int = 0
    ) -> None:
        self.library.my_free(address, size, device, stream)


def load_extension(path: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("cumem_allocator", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(
    extension: pathlib.Path | str, fake_driver: pathlib.Path | str
) -> tuple[types.ModuleType, Allocator, FakeDriver]:
    """The extension over the fake driver.

    The extension opens "libcuda.so.1"; the loader then gives it the library of that
    name that is in the process already, which therefore must not be a real one.
    """
    maps = pathlib.Path("/proc/self/maps").read_text()
    others = {
        line.split()[-1]
        for line in maps.splitlines()
        if "libcuda.so" in line and str(fake_driver) not in line
    }
    if others:
        raise RuntimeError(
            f"{others} is in this process: run tests/csrc in a process of its own"
        )
    fake = FakeDriver(pathlib.Path(fake_driver))
    fake.reset()
    return (
        load_extension(pathlib.Path(extension)),
        Allocator(pathlib.Path(extension)),
        fake,
    )
