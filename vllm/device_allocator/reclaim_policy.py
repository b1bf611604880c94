# SPDX-License-Identifier: Apache-2.0
"""When a load should give stranded memory back to the device.

Draining returns what is free in pools that nothing is allocated from any more. It waits
for the device, so a load does it only when there is something to return. What is free
in the open generation stays there: from torch 2.13 on, PyTorch returns its free
segments by itself when an allocation would fail otherwise. To retire it instead would
leave the half-used segments of each layer behind, 30 to 40 MiB a layer of gpt-oss-120b.
"""

MIB = 1 << 20

DRAIN_BYTES = 256 * MIB
"""Free bytes in PyTorch's pools, beyond those that the last drain could not return,
that are worth another drain."""


class DrainPolicy:
    """Remembers what the last drain of a load could not return."""

    def __init__(self) -> None:
        self._kept = 0

    def worth_draining(self, cached: int) -> bool:
        """Whether many of the ``cached`` free bytes in PyTorch's pools may return."""
        return cached - self._kept >= DRAIN_BYTES

    def drained(self, cached: int) -> None:
        """Note that a drain left ``cached`` free bytes in PyTorch's pools."""
        self._kept = cached
