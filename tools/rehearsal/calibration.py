# SPDX-License-Identifier: Apache-2.0
"""What a card takes for itself: constants that only a real card can tell."""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Calibration:
    """Bytes of device memory that no allocation of the program accounts for.

    The defaults are typical of recent drivers and carry `margin_bytes` of
    doubt: a verdict that would change within it is too close to call.
    """

    reserved_bytes: int = 0  # in use before the program starts
    context_bytes: int = 512 * MIB  # by the program's context
    first_launch_bytes: int = 0  # at the first kernel
    communicator_bytes: int = 0  # by each NCCL communicator
    margin_bytes: int = 300 * MIB
    source: str = "none: typical figures, not measured on this card"
