# SPDX-License-Identifier: Apache-2.0
"""What a program that runs on a simulated card can ask of it and do to it.

For use inside such a program; `tools.rehearsal.run` starts one. Needs nothing
but the standard library, and does not import torch.
"""

import ctypes
import functools
import json
import os
from pathlib import Path
from typing import Any


class NoSimulatedCard(RuntimeError):
    """This process does not run on a simulated card."""


@functools.cache
def _library() -> ctypes.CDLL:
    folder = os.environ.get("REHEARSAL_LIBRARIES")
    if not folder:
        raise NoSimulatedCard(
            "this process does not run on a simulated card; start it with "
            "`python -m tools.rehearsal.run -- COMMAND`"
        )
    library = ctypes.CDLL(str(Path(folder) / "librehearsal_card.so"))
    size, counter = ctypes.c_size_t, ctypes.c_uint64
    for name, result in {
        "used": size,
        "peak": size,
        "free": size,
        "report": size,
        "refusals": counter,
        "faults_fired": counter,
        "calls": counter,
        "misuse": counter,
    }.items():
        getattr(library, f"rehearsal_{name}").restype = result
    return library


def is_simulated() -> bool:
    """Whether this process runs on a simulated card."""
    return bool(os.environ.get("REHEARSAL_LIBRARIES"))


def used(device: int = 0) -> int:
    """Bytes that this process takes of a card, its context included."""
    return int(_library().rehearsal_used(device))


def free(device: int = 0) -> int:
    """Bytes that are left on a card."""
    return int(_library().rehearsal_free(device))


def peak(device: int = 0, *, reset: bool = False) -> int:
    """Highest `used` since the start or the last reset."""
    return int(_library().rehearsal_peak(device, int(reset)))


def refusals(device: int = 0) -> int:
    """How often a card had no room for what was asked."""
    return int(_library().rehearsal_refusals(device))


def take(size: int, device: int = 0) -> None:
    """Take bytes as another program on the card would. MemoryError: no room."""
    if _library().rehearsal_take(device, ctypes.c_size_t(size)):
        raise MemoryError(f"the simulated card has no {size} bytes left")


def give(size: int, device: int = 0) -> None:
    """Give back what `take` took."""
    _library().rehearsal_give(device, ctypes.c_size_t(size))


def resize(size: int) -> None:
    """Change every card's total memory. RuntimeError once a context exists."""
    if _library().rehearsal_resize(ctypes.c_size_t(size)):
        raise RuntimeError("a card cannot be resized once it has a context")


def fail(call: str, nth: int = 1, *, code: int = 0, and_later: bool = False) -> None:
    """Let the `nth` call from now of a driver or runtime function fail.

    `call` is its name in the header without version suffix ("cuMemCreate").
    `code` 0 is out of memory for what allocates, unknown error otherwise.
    """
    if nth < 1:
        raise ValueError(f"nth counts from 1, not {nth}")
    _library().rehearsal_fail(call.encode(), ctypes.c_uint64(nth), code, int(and_later))


def clear_faults() -> None:
    """Forget the faults that have not fired."""
    _library().rehearsal_clear_faults()


def faults_fired() -> int:
    """How many injected faults have fired."""
    return int(_library().rehearsal_faults_fired())


def calls(call: str) -> int:
    """How often a function was called in this process."""
    return int(_library().rehearsal_calls(call.encode()))


def misuse() -> int:
    """How often the driver's rules were broken; `report` says how."""
    return int(_library().rehearsal_misuse())


def report() -> dict[str, Any]:
    """Everything the card knows, as docs/rehearsal.md describes it."""
    library = _library()
    length = library.rehearsal_report(None, ctypes.c_size_t(0)) + 4096
    buffer = ctypes.create_string_buffer(length)
    library.rehearsal_report(buffer, ctypes.c_size_t(length))
    found: dict[str, Any] = json.loads(buffer.value)
    return found


def write_report() -> None:
    """Write the report that is due at exit now, for a program that uses _exit."""
    _library().rehearsal_write_report()
