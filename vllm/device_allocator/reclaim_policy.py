# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""When a load should give stranded memory back to the device.

Two things give memory back. Draining returns what is free in pools that nothing is
allocated from any more; it costs a moment. Retiring the open generation as well costs
memory: what is left free in its half-used segments is lost until the tensors beside it
die. So a load drains when there is something to return, and retires only when the
device runs short of what the next step may take, and when more is to be gained than
lost.
"""

from dataclasses import dataclass

MIB = 1 << 20

RESERVE_BYTES = 512 * MIB
"""Kept free beyond the estimate of the next step: other streams, libraries, other
processes on the card."""

DRAIN_BYTES = 256 * MIB
"""Free bytes in PyTorch's pools, beyond those that the last drain could not return,
that are worth another drain."""

RETIREMENT_COST_BYTES = 22 * MIB
"""The most that a retired generation leaves behind per stream: the unused rest of one
2 MiB segment (blocks up to 1 MiB) and of one 20 MiB segment (blocks under 10 MiB)."""


@dataclass
class LoadPressure:
    """Estimates, from the steps seen so far, what the next step of a load may take.

    A step is what happens between two safe points, usually the conversion of one
    layer. All figures are bytes of device memory.
    """

    largest_step: int = 0
    _free_at_last_step: int | None = None
    _cached_after_drain: int = 0

    def next_step(self, layer_bytes: int) -> int:
        """Bytes that must be free before the next step.

        Args:
            layer_bytes: size of the parameters of a layer like the next one. It
                matters until a first step was seen to take memory: a conversion holds
                up to about four times its layer (sources, copies, results).

        """
        if self.largest_step == 0:
            return 4 * layer_bytes + RESERVE_BYTES
        return self.largest_step * 5 // 4 + RESERVE_BYTES

    def finish_step(self, free: int) -> None:
        """Note that a step ended with ``free`` bytes of device memory free.

        A live pool returns nothing during a step, so the fall of free memory is what
        the step had to ask the device for: its results, its transients, and what it
        replaced without being able to reuse.
        """
        if self._free_at_last_step is not None:
            self.largest_step = max(self.largest_step, self._free_at_last_step - free)
        self._free_at_last_step = free

    def restart(self, free: int, cached: int) -> None:
        """Measure from here, after memory was given back.

        Args:
            free: free bytes of device memory.
            cached: free bytes that PyTorch's pools still hold.

        """
        self._free_at_last_step = free
        self._cached_after_drain = cached

    def worth_draining(self, cached: int) -> bool:
        """Whether many of the ``cached`` free bytes in PyTorch's pools may return."""
        return cached - self._cached_after_drain >= DRAIN_BYTES


def worth_retiring(returnable: int) -> bool:
    """Whether returning ``returnable`` bytes outweighs the cost of a retirement."""
    return returnable > RETIREMENT_COST_BYTES
