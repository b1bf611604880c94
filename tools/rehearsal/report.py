# SPDX-License-Identifier: Apache-2.0
"""The answers as text and as JSON."""

import dataclasses
from typing import Any

from tools.rehearsal.cards import Card
from tools.rehearsal.jobs import Failure, Outcome
from tools.rehearsal.rehearse import Answer, Verdict

GIB = 1 << 30
SHOWN_PHASES = 5
SHOWN_LINES = 6  # of an error that is not about memory

# Exit statuses; 2 is for wrong arguments.
LOADS, FAILS, COULD_NOT_TELL = 0, 1, 3


def exit_status(answer: Answer) -> int:
    """0 loads, 1 does not, 3 could not tell."""
    if answer.verdict in (Verdict.LOADS, Verdict.CLOSE_LOADS):
        return LOADS
    if answer.verdict in (Verdict.FAILS, Verdict.CLOSE_FAILS):
        return FAILS
    return COULD_NOT_TELL


def _above_base(outcome: Outcome, value: int | None) -> int | None:
    if value is None or outcome.base is None:
        return None
    return value - outcome.base


def _error(outcome: Outcome) -> dict[str, Any] | None:
    return dataclasses.asdict(outcome.failure) if outcome.failure else None


def run_json(answer: Answer) -> dict[str, Any]:
    """One entry of "runs". Bytes; peak and after_load above a bare context."""
    worst = answer.worst
    return {
        "loads": worst.loads,
        "verdict": answer.verdict.value,
        "version": answer.variant.version,
        "rank": worst.rank,
        "world_size": worst.world_size,
        "peak_bytes": _above_base(worst, worst.peak),
        "after_load_bytes": _above_base(worst, worst.after_load),
        "live_bytes": worst.live,
        "mapped_bytes": worst.mapped,
        "stranded_bytes": worst.stranded,
        "kv_cache_bytes": worst.kv_cache,
        "kv_cache_note": worst.kv_cache_note,
        "smallest_card_bytes": answer.smallest_card,
        "margin_bytes": answer.margin,
        "error": _error(worst),
        "unsupported_calls": worst.unsupported,
        "misuse": worst.misuse,
        "leaks": worst.leaks,
        "allocator_retries": worst.retries,
        "phase_at_peak": worst.phase_at_peak,
        "live_at_peak_bytes": worst.live_at_peak,
        "timeline": [dataclasses.astuple(point) for point in worst.timeline],
    }


def to_json(model: str, card: Card, answers: list[Answer]) -> dict[str, Any]:
    """The document that --json writes."""
    described = dataclasses.asdict(card)
    calibration = described.pop("calibration")
    return {
        "card": described,
        "model": model,
        "calibration": calibration,
        "runs": {answer.variant.name: run_json(answer) for answer in answers},
    }


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f} GiB"


def _rows(answers: list[Answer]) -> list[tuple[str, list[str]]]:
    worst = [answer.worst for answer in answers]
    rows = [
        ("verdict", [answer.verdict.value for answer in answers]),
        ("peak", [_gib(_above_base(o, o.peak)) for o in worst]),
        ("  mapped by PyTorch", [_gib(o.mapped) for o in worst]),
        ("  live", [_gib(o.live) for o in worst]),
        ("  stranded", [_gib(o.stranded) for o in worst]),
        ("after load", [_gib(_above_base(o, o.after_load)) for o in worst]),
        ("KV cache", [_gib(o.kv_cache) for o in worst]),
        ("smallest card", [_gib(answer.smallest_card) for answer in answers]),
    ]
    return [row for row in rows if any(cell != "-" for cell in row[1])]


def table(answers: list[Answer]) -> str:
    """The figures side by side, one column for each variant."""
    header = ("", [answer.variant.name for answer in answers])
    rows = [header, *_rows(answers)]
    label_width = max(len(label) for label, _ in rows)
    widths = [
        max(len(cells[column]) for _, cells in rows) for column in range(len(answers))
    ]
    lines = []
    for label, cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append(f"{label.ljust(label_width)}   {'   '.join(padded)}".rstrip())
    return "\n".join(lines)


def _first_line(message: str) -> str:
    # PyTorch's advice after the figures is about fragmentation, not about this.
    return message.split(" If reserved but unallocated")[0].splitlines()[0]


def _reason(failure: Failure) -> list[str]:
    if failure.out_of_memory:
        return [_first_line(failure.message)]
    return failure.message.splitlines()[:SHOWN_LINES]


def _notes(answer: Answer) -> list[str]:
    worst, name = answer.worst, answer.variant.name
    notes = []
    if worst.failure is not None:
        failure = worst.failure
        notes.append(f"{name} stops in {worst.phase_at_peak or 'its start'}:")
        first, *others = _reason(failure) or [""]
        notes.append(f"  {failure.kind}: {first}")
        notes += [f"    {line.strip()}" for line in others]
        if failure.frame:
            notes.append(f"  at {failure.frame}")
    if worst.live_at_peak:
        notes.append(f"{name} at the peak, in {worst.phase_at_peak}; live then:")
        largest = sorted(worst.live_at_peak.items(), key=lambda item: -item[1])
        for phase, size in largest[:SHOWN_PHASES]:
            notes.append(f"  {_gib(size).rjust(10)}  {phase}")
        rest = largest[SHOWN_PHASES:]
        if rest:
            total = sum(size for _, size in rest)
            notes.append(f"  {_gib(total).rjust(10)}  {len(rest)} others")
    if worst.unsupported:
        calls = ", ".join(sorted(worst.unsupported))
        notes.append(f"{name} called what the simulated card does not do: {calls}")
    if worst.misuse:
        notes.append(f"{name} broke rules of the driver: {worst.misuse}")
    if worst.leaks:
        notes.append(f"{name} leaked: {worst.leaks}")
    if worst.kv_cache_note:
        notes.append(f"{name}: KV cache unknown: {_first_line(worst.kv_cache_note)}")
    return notes


def to_text(model: str, card: Card, answers: list[Answer]) -> str:
    """The whole answer for a terminal."""
    world = answers[0].worst.world_size
    ranks = f", each of {world} ranks" if world > 1 else ""
    parts = [
        f"{model}{ranks} on {card.name} "
        f"({card.memory / GIB:.2f} GiB, SM {card.capability}), rehearsed",
        table(answers),
    ]
    parts += ["\n".join(notes) for answer in answers if (notes := _notes(answer))]
    constants = card.calibration
    parts.append(
        "Peak and after load are above what a bare context takes.\n"
        f"Card constants: {constants.source}; "
        f"doubt about them {_gib(constants.margin_bytes)}."
    )
    return "\n\n".join(parts)
