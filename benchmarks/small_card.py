# SPDX-License-Identifier: Apache-2.0
"""A smaller card than the real one, by occupying the rest; and a simulated one."""

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

GIB = 1 << 30


class Ballast:
    """Device memory that only the driver knows of."""

    def __init__(self, runtime: ctypes.CDLL, address: int | None) -> None:
        self._runtime = runtime
        self._address = address

    def free(self) -> None:
        self._runtime.cudaFree(ctypes.c_void_p(self._address))


def leave_free(card: float) -> Ballast:
    """Take all but ``card`` GiB of what is free, past PyTorch's own counts.

    Raises:
        RuntimeError: less than that is free, or the device refuses.
    """
    import torch

    size = int(torch.cuda.mem_get_info()[0] - card * GIB)
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
    address = ctypes.c_void_p()
    code = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size))
    if size <= 0 or code:
        raise RuntimeError(f"cannot leave {card} GiB of the card: error {code}")
    return Ballast(runtime, address.value)


@functools.cache
def simulated_card() -> Any:
    """The module that asks the simulated card of this process; None on a real card."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tools.rehearsal import card

    return card if card.is_simulated() else None
