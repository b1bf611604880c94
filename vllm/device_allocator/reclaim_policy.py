# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""When a load should give stranded memory back to the device.

Draining returns what is free in pools that nothing is allocated from any more. It waits
for the device, so a load does it only when there is something to return. What is free
in the open generation stays there: from torch 2.13 on, PyTorch returns its free
segments by itself when an allocation would fail otherwise. Retiring the generation
returns them too, but leaves its half-used segments behind, 30 to 40 MiB for a layer of
gpt-oss-120b. So a load does that only when much is to be gained, for the sake of other
programs on the card.
"""

MIB = 1 << 20

DRAIN_BYTES = 256 * MIB
"""Free bytes in PyTorch's pools, beyond those that the last drain could not return,
that are worth another drain."""

RETIRE_BYTES = 8192 * MIB
"""Free bytes in PyTorch's pools after a drain that are worth a retirement."""


class ReclaimPolicy:
    """Remembers what the last drain of a load could not return."""

    def __init__(self) -> None:
        self._kept = 0

    def worth_draining(self, cached: int) -> bool:
        """Whether many of the ``cached`` free bytes in PyTorch's pools may return."""
        return cached - self._kept >= DRAIN_BYTES

    def worth_retiring(self, cached: int) -> bool:
        """Whether a drain left so many bytes that the open generation should go."""
        return cached >= RETIRE_BYTES

    def reclaimed(self, cached: int) -> None:
        """Note that ``cached`` free bytes in PyTorch's pools could not be returned."""
        self._kept = cached
