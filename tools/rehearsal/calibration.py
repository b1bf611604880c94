# SPDX-License-Identifier: Apache-2.0
"""What a card takes for itself: constants that only a real card can tell."""

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.rehearsal.cards import Card

MIB = 1 << 20
BUILT_IN = Path(__file__).with_name("calibration.toml")
KEYS = ("reserved", "context", "first_launch", "communicator", "margin")


class CalibrationError(ValueError):
    """A calibration file does not say what is needed."""


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
    source: str = "typical ones, not measured on this card"


def _from_row(row: dict[str, Any], where: str) -> Calibration:
    values: dict[str, Any] = {}
    for key in KEYS:
        number = row.get(f"{key}_mib")
        if not isinstance(number, int | float) or number < 0:
            raise CalibrationError(f"{where}: {key}_mib is not a number from 0 up")
        values[f"{key}_bytes"] = int(number * MIB)
    return Calibration(source=f"measured, driver {row.get('driver', '?')}", **values)


def read_calibrations(path: Path) -> dict[str, Calibration]:
    """Card name -> constants, from a file as `calibrate` writes it."""
    try:
        rows = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CalibrationError(f"{path}: {error}") from None
    return {name: _from_row(row, f"{path}, {name}") for name, row in rows.items()}


def calibrate(card: "Card", path: Path | None = None) -> "Card":
    """The card with the constants that a file has for its name.

    Without a file, those of calibration.toml, or else the defaults. A file of
    one's own must know the card: CalibrationError.
    """
    known = read_calibrations(path or BUILT_IN)
    if card.name not in known:
        if path is not None:
            raise CalibrationError(f"{path} has no table for {card.name!r}")
        return card
    return dataclasses.replace(card, calibration=known[card.name])
