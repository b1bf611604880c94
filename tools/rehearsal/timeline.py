# SPDX-License-Identifier: Apache-2.0
"""From PyTorch's allocator history to live and mapped bytes over time."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.rehearsal.jobs import Point


@dataclass
class History:
    """A load as the allocator saw it. Bytes.

    The peak is the first moment with most memory mapped; what is live then is
    given by the phase that allocated it.
    """

    points: list[Point] = field(default_factory=list)
    live: int = 0
    mapped: int = 0
    phase_at_peak: str = ""
    live_at_peak: dict[str, int] = field(default_factory=dict)


def read_history(entries: Iterable[Mapping[str, Any]]) -> History:
    """Replay the entries of `device_traces` of a PyTorch memory snapshot."""
    history = History()
    blocks: dict[int, tuple[int, str]] = {}
    by_phase: Counter[str] = Counter()
    live = mapped = 0
    start: int | None = None
    for entry in entries:
        action, size = entry["action"], entry["size"]
        phase = str(entry.get("user_metadata") or "")
        if action in ("alloc", "free_completed"):
            if action == "alloc":
                blocks[entry["addr"]] = (size, phase)
                by_phase[phase] += size
                live += size
            else:
                # What was allocated before recording began is not ours.
                size, owner = blocks.pop(entry["addr"], (0, ""))
                by_phase[owner] -= size
                live -= size
        elif action in ("segment_alloc", "segment_map"):
            mapped += size
        elif action in ("segment_free", "segment_unmap"):
            mapped = max(mapped - size, 0)
        else:
            continue
        if start is None:
            start = entry["time_us"]
        seconds = (entry["time_us"] - start) / 1e6
        history.points.append(Point(seconds, live, mapped, phase))
        if (mapped, live) > (history.mapped, history.live):
            history.live, history.mapped = live, mapped
            history.phase_at_peak = phase
            history.live_at_peak = {p: n for p, n in by_phase.items() if n > 0}
    return history


def thin(points: list[Point], most: int) -> list[Point]:
    """At most about `most` points, keeping every extreme of a stretch.

    A plot of them looks like a plot of all: of each stretch the first and the
    last point stay, and those with least and most mapped and live.
    """
    if len(points) <= most:
        return points
    stretch = max(len(points) * 6 // most, 1)
    kept: list[Point] = []
    for at in range(0, len(points), stretch):
        part = points[at : at + stretch]
        indices = {0, len(part) - 1}
        for pick in (min, max):
            indices.add(pick(range(len(part)), key=lambda i: part[i].live))
            indices.add(pick(range(len(part)), key=lambda i: part[i].mapped))
        kept.extend(part[i] for i in sorted(indices))
    return kept
