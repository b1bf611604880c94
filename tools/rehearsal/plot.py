# SPDX-License-Identifier: Apache-2.0
"""A picture of a load: live, stranded, and what the card has."""

import importlib.util
from pathlib import Path
from typing import Any

from tools.rehearsal import phases
from tools.rehearsal.cards import Card
from tools.rehearsal.jobs import Point
from tools.rehearsal.rehearse import Answer

GIB = 1 << 30
LIVE, STRANDED, LIMIT, FAILED = "#0072b2", "#e69f00", "#444444", "#d55e00"


class PlotError(Exception):
    """The picture cannot be made."""


def _step(phase: str) -> str:
    """The step of a load that a phase is part of."""
    for step in (phases.CREATE, phases.LOAD, phases.CONVERT, phases.AFTER):
        if phase.startswith(step):
            return step
    return ""


def _steps(points: list[Point]) -> list[tuple[str, int, int]]:
    """Consecutive stretches of points: step, first and last index."""
    found: list[tuple[str, int, int]] = []
    for index, point in enumerate(points):
        step = _step(point.phase)
        if found and found[-1][0] == step:
            found[-1] = (step, found[-1][1], index)
        else:
            found.append((step, index, index))
    return found


def _draw(axes: Any, answer: Answer, limit: float) -> None:
    worst = answer.worst
    points = worst.timeline
    order = range(len(points))
    live = [point.live / GIB for point in points]
    mapped = [point.mapped / GIB for point in points]
    axes.fill_between(order, live, color=LIVE, lw=0, label="live")
    axes.fill_between(order, live, mapped, color=STRANDED, lw=0, label="stranded")
    axes.axhline(limit, color=LIMIT, ls="--", lw=1, label="left by the context")
    for step, first, last in _steps(points):
        axes.axvline(first, color="white", lw=0.8)
        if step and last - first > len(points) / 12:
            middle = (first + last) / 2
            axes.text(middle, limit * 1.03, step, ha="center", va="bottom", size=8)
    if worst.failure is not None and points:
        at, height = len(points) - 1, mapped[-1]
        axes.plot(at, height, "x", color=FAILED, ms=12, mew=3, clip_on=False)
    title = f"{answer.variant.name}: {answer.verdict.value}"
    color = "black" if worst.loads else FAILED
    axes.set_title(title, loc="left", size=11, weight="bold", color=color, pad=16)
    axes.set_xlim(0, max(len(points) - 1, 1))
    axes.set_ylabel("GiB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks([])


def require() -> None:
    """PlotError when a picture could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install matplotlib")


def draw(model: str, card: Card, answers: list[Answer], path: Path) -> None:
    """Write a picture with one row for each variant."""
    from matplotlib.figure import Figure

    constants = card.calibration
    taken = constants.reserved_bytes + constants.context_bytes
    limit = (card.memory - taken) / GIB
    figure = Figure(figsize=(9, 2.4 * len(answers) + 1.1), layout="constrained")
    rows = figure.subplots(len(answers), 1, squeeze=False, sharey=True)[:, 0]
    for axes, answer in zip(rows, answers, strict=True):
        _draw(axes, answer, limit)
    highest = max((p.mapped for a in answers for p in a.worst.timeline), default=0)
    rows[0].set_ylim(0, max(limit, highest / GIB) * 1.12)
    rows[-1].set_xlabel("the load, in order of the allocator's events")
    rows[0].legend(loc="lower right", ncols=3, frameon=True, fontsize=8)
    figure.suptitle(
        f"{model} on {card.name}, {card.memory / GIB:.2f} GiB (rehearsed)", size=12
    )
    figure.savefig(path, dpi=140)
