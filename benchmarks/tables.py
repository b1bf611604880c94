# SPDX-License-Identifier: Apache-2.0
"""Write the tables of the documents from the rows in benchmarks/results.

python benchmarks/tables.py
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def load_peak() -> str:
    """Layer sets: peak and end on the whole card, and the smallest card."""
    head = ("set", "allocator", "limit", "peak", "at the end", "live", "smallest card")
    return table(
        head,
        (
            (
                row["set"],
                row["allocator"],
                row["split"],
                row.get("peak", "-"),
                row.get("end", "-"),
                row.get("live", "-"),
                row.get("smallest_card", "-"),
            )
            for row in read("load_peak.jsonl")
        ),
    )


def model(row: Row) -> str:
    parts = [row["shape"]]
    if row["layers"]:
        parts.append(f"{row['layers']} layers")
    if row["quantization"]:
        parts.append(row["quantization"])
    return ", ".join(parts)


def whole_card() -> str:
    """vLLM's own loader on the whole card. Rows of the fork with an asterisk have the
    in-place conversions; the others have the pool patches alone."""
    head = ("model", "mode", "load peak", "after load", "KV cache", "digest", "cycles")
    rows = []
    for row in read("engine.jsonl"):
        if row["card"]:
            continue
        cycles = row.get("cycles") if row["sleep"] and not row["load_only"] else None
        same = "-"
        if cycles:
            kept = sum(cycle["same_digest"] for cycle in cycles)
            same = f"{kept} of {len(cycles)} equal"
        mode = row["mode"] + (" *" if row.get("patches") else "")
        figures = (row["load_peak"], row["after_load"], row.get("kv_cache", "-"))
        rows.append((model(row), mode, *figures, row.get("digest", "-"), same))
    return table(head, sorted(rows, key=lambda row: row[0]))


def small_cards() -> str:
    """The smallest card without sleep mode, and what loads 0.1 GiB above it."""
    rows = [row for row in read("engine.jsonl") if row["card"]]
    without = [row for row in rows if not row["sleep"]]
    lines = []
    for name in dict.fromkeys(map(model, rows)):
        loads = min(r["card"] for r in without if model(r) == name and r["ok"])
        fails = max(r["card"] for r in without if model(r) == name and not r["ok"])
        lines.append((name, "no-sleep", loads, f"loads (fails at {fails})"))
        for row in rows:
            if model(row) == name and row["sleep"]:
                verdict = "loads" if row["ok"] else row["error"].split(". GPU")[0]
                lines.append((name, row["mode"], row["card"], verdict))
    return table(("model", "mode", "card", "result"), lines)


def conversions() -> str:
    """Conversions of one layer: live bytes at most and at rest in multiples of the
    layer, and the time also as a multiple of copying the layer once."""
    head = (
        "conversion",
        "MiB",
        "live",
        "release",
        "ms",
        "release",
        "copies",
        "release",
    )
    return table(
        head,
        (
            (
                row["format"],
                row["layer_mib"],
                row["live"],
                row["stock_live"],
                row["ms"],
                row["stock_ms"],
                row["copy_ratio"],
                row["stock_copy_ratio"],
            )
            for row in read("conversions.jsonl")
        ),
    )


def fidelity() -> str:
    """Loads that were both measured and rehearsed; the last measurement counts."""
    measured = {(model(r), r["mode"]): r for r in read("engine.jsonl") if not r["card"]}
    head = ("model", "mode", "peak, measured", "rehearsed", "after load", "rehearsed")
    rows = []
    for row in read("rehearsed.jsonl"):
        real = measured.get((model(row), row["mode"]))
        if real is not None:
            peaks = (real["load_peak"], row["load_peak"])
            after = (real["after_load"], row["after_load"])
            rows.append((model(row), row["mode"], *peaks, *after))
    return table(head, sorted(rows))


PAGES = {
    "measurements.md": (load_peak, whole_card, small_cards),
    "conversions.md": (conversions,),
    "rehearsal.md": (fidelity,),
}
DOCS = RESULTS.parents[1] / "docs"
FILES = {
    load_peak: ("load_peak.jsonl",),
    whole_card: ("engine.jsonl",),
    small_cards: ("engine.jsonl",),
    conversions: ("conversions.jsonl",),
    fidelity: ("engine.jsonl", "rehearsed.jsonl"),
}


def provenance(make: Callable[[], str]) -> list[str]:
    """On what the rows of a table ran, one line each: measured or rehearsed, the card
    (or that it was simulated), torch, and the commands."""
    lines = []
    for name in FILES[make]:
        rows = read(name)
        for gpu, torch in sorted({(row["gpu"], row["torch"]) for row in rows}):
            same = [r for r in rows if (r["gpu"], r["torch"]) == (gpu, torch)]
            how = "Rehearsed" if gpu.startswith("simulated") else "Measured"
            commands = dict.fromkeys(f"`{row['command']}`" for row in same)
            lines.append(f"{how} on one {gpu}, torch {torch}: {', '.join(commands)}")
    return lines


def fill(page: str) -> str:
    """The page with each of its tables below its mark, in place of what stood there."""
    text = (DOCS / page).read_text()
    for make in PAGES[page]:
        mark = f"<!-- {make.__name__} -->\n"
        before, found, after = text.partition(mark)
        if not found:
            raise SystemExit(f"{page} has no mark {mark.strip()}")
        rest = after.lstrip("\n").split("\n")
        while rest and rest[0].startswith("|"):
            rest.pop(0)
        text = f"{before}{mark}\n{make()}\n\n" + "\n".join(rest).lstrip("\n")
    return text


def main() -> None:
    for page in PAGES:
        (DOCS / page).write_text(fill(page))


if __name__ == "__main__":
    main()
