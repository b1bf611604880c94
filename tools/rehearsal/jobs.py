# SPDX-License-Identifier: Apache-2.0
"""What is rehearsed, and what comes out: plain data that crosses processes."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class Job:
    """One load of one rank on one card."""

    model: str  # folder with a config.json
    memory: int  # bytes of the card
    sleep: bool  # enable_sleep_mode
    options: tuple[str, ...] = ()  # vLLM engine options as on its command line
    rank: int = 0
    kv_cache: bool = False  # also profile, to learn the KV cache
    cycles: int = 0  # of sleep and wake after the load
    trace: bool = False  # record the allocator's history
    snapshot: str | None = None  # file for PyTorch's memory viewer

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        values = json.loads(text)
        values["options"] = tuple(values["options"])
        return cls(**values)


class OptionError(ValueError):
    """vLLM refuses an option; the message says which."""


@dataclass(frozen=True)
class Failure:
    """Why a load did not end well."""

    kind: str  # class of the exception, or "crash"
    message: str
    frame: str  # innermost frame inside vLLM: path:line in function
    out_of_memory: bool


@dataclass(frozen=True)
class Point:
    """The allocator's state at one moment of a load, in bytes."""

    seconds: float
    live: int
    mapped: int
    phase: str


@dataclass
class Outcome:
    """How a load went. Bytes; None where it did not get that far.

    `peak`, `after_load` and `base` are what the card had in use, `base` with
    nothing but a context. `live` and `mapped` are PyTorch's figures at the
    moment when it had most memory mapped.
    """

    loads: bool | None = None  # None: could not tell
    world_size: int = 1
    rank: int = 0
    base: int | None = None
    peak: int | None = None
    after_load: int | None = None
    live: int | None = None
    mapped: int | None = None
    kv_cache: int | None = None
    kv_cache_note: str = ""
    asleep: int | None = None
    retries: int = 0  # times that the card refused memory
    seconds: float = 0.0
    failure: Failure | None = None
    unsupported: dict[str, int] = field(default_factory=dict)
    misuse: dict[str, int] = field(default_factory=dict)
    leaks: dict[str, int] = field(default_factory=dict)
    uncompiled: list[str] = field(default_factory=list)  # FlashInfer's modules
    phase_at_peak: str = ""
    live_at_peak: dict[str, int] = field(default_factory=dict)  # by phase
    timeline: list[Point] = field(default_factory=list)
    log: str = ""  # end of what the load printed

    @property
    def stranded(self) -> int | None:
        """Mapped but not live, at the allocator's peak."""
        if self.mapped is None or self.live is None:
            return None
        # A block may lie in a segment from before the recording.
        return max(0, self.mapped - self.live)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        values: dict[str, Any] = json.loads(text)
        if values["failure"] is not None:
            values["failure"] = Failure(**values["failure"])
        values["timeline"] = [Point(**point) for point in values["timeline"]]
        return cls(**values)
