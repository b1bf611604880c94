# SPDX-License-Identifier: Apache-2.0
"""The cards of cards.toml, and cards that a user describes."""

import argparse
import dataclasses
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.rehearsal.calibration import Calibration

CARDS = Path(__file__).with_name("cards.toml")
UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


class CardError(ValueError):
    """A card is not described well enough."""


def parse_size(text: str) -> int:
    """Bytes of "15.47GiB", "16 GB", "2048MiB" or "1000"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else None
    if match is None or unit not in UNITS:
        raise CardError(f"{text!r} is not a size such as 15.47GiB or 16GB")
    return int(float(match[1]) * UNITS[unit])


def size(text: str) -> int:
    """`parse_size` for argparse, which shows only errors of its own kind."""
    try:
        return parse_size(text)
    except CardError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class Card:
    """A card to rehearse on. `memory` is in bytes, as cudaMemGetInfo's total."""

    name: str
    capability: str
    memory: int
    multiprocessors: int = 100
    calibration: Calibration = Calibration()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+\.\d", self.capability):
            raise CardError(f"{self.capability!r} is not a capability such as 12.0")
        if self.memory < 1 << 30:
            raise CardError(f"a card of {self.memory} bytes: less than 1 GiB")

    def with_memory(self, memory: int) -> "Card":
        """The same card with another amount of memory."""
        return dataclasses.replace(self, memory=memory)

    def environment(self) -> dict[str, str]:
        """Variables that the front libraries read."""
        constants = self.calibration
        return {
            "REHEARSAL_CARD_NAME": self.name,
            "REHEARSAL_CAPABILITY": self.capability,
            "REHEARSAL_MEMORY": str(self.memory),
            "REHEARSAL_MULTIPROCESSORS": str(self.multiprocessors),
            "REHEARSAL_RESERVED": str(constants.reserved_bytes),
            "REHEARSAL_CONTEXT": str(constants.context_bytes),
            "REHEARSAL_FIRST_LAUNCH": str(constants.first_launch_bytes),
            "REHEARSAL_COMMUNICATOR": str(constants.communicator_bytes),
        }


def known_cards() -> dict[str, Card]:
    """The cards of cards.toml by name, without calibration."""
    return {
        key: Card(
            name=row["name"],
            capability=row["capability"],
            memory=row["memory_mib"] << 20,
            multiprocessors=row["multiprocessors"],
        )
        for key, row in tomllib.loads(CARDS.read_text()).items()
    }


def find_card(name: str | None, memory: int | None, capability: str | None) -> Card:
    """A card by name, by memory and capability, or by name with changes.

    Raises CardError when neither says which card is meant.
    """
    cards = known_cards()
    if name is not None:
        if name not in cards:
            raise CardError(f"no card {name!r}; cards.toml has {', '.join(cards)}")
        card = cards[name]
        memory = card.memory if memory is None else memory
        capability = card.capability if capability is None else capability
        return dataclasses.replace(card, memory=memory, capability=capability)
    if memory is None or capability is None:
        raise CardError(
            "which card? Give --card NAME, or --gpu-memory and --capability"
        )
    return Card(f"Simulated card, SM {capability}", capability, memory)
