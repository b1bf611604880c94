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
OF_A_LOAD = ("load peak", "after load", "KV cache", "digest", "cycles", "asleep")


def read(name: str) -> list[Row]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def load_peak() -> str:
    """Layer sets, plain tensors converted as 0.33.0 does: peak and end on the whole
    card, and the smallest card that loads them."""
    head = ("set", "allocator", "peak", "at the end", "live", "smallest card")
    return table(
        head,
        (
            (
                row["set"],
                row["allocator"],
                row["peak"],
                row["end"],
                row["live"],
                row["smallest_card"],
            )
            for row in read("load_peak.jsonl")
            if "smallest_card" in row
        ),
    )


def split_policies() -> str:
    """Layer sets on the whole card, by the user's max_split_size_mb: peak, and what is
    taken at the end. In fork-off, generations are switched off."""
    names = ("default", "fork", "fork-off")
    found = {(r["set"], r["split"], r["allocator"]): r for r in read("load_peak.jsonl")}
    lines = []
    for layer_set, limit in dict.fromkeys((key[0], key[1]) for key in found):
        rows = [found[layer_set, limit, name] for name in names]
        figures = (f"{row['peak']} / {row['end']}" for row in rows)
        lines.append((layer_set, limit, *figures))
    return table(("set", "limit", *names), sorted(lines))


def sleep_speed() -> str:
    """The allocator's calls, in GB/s; later ones also as a share of pinned copies."""
    head = (
        "GiB",
        "build",
        "host",
        "first sleep",
        "later sleeps",
        "wakes",
        "of pinned copies",
    )
    return table(
        head,
        (
            (
                f"{row['gib']:g}",
                row["build"],
                row["host"],
                row["first_sleep_gb_s"],
                row["sleep_gb_s"],
                row["wake_gb_s"],
                f"{row['sleep_of_pinned']:.0%}, {row['wake_of_pinned']:.0%}",
            )
            for row in sorted(read("sleep_wake.jsonl"), key=lambda row: row["gib"])
        ),
    )


def ranks() -> str:
    """One line per rank of a tensor-parallel load."""
    head = (
        "model",
        "mode",
        "rank",
        *OF_A_LOAD,
        "wake without memory",
    )
    lines = []
    for row in sorted(read("ranks.jsonl"), key=model):
        for rank in range(row["tensor_parallel_size"]):
            figures = [row[k][rank] for k in ("load_peak", "after_load", "kv_cache")]
            cycles = row.get("cycles") if row["sleep"] else None
            same = asleep = failed = "-"
            if cycles:
                same = (
                    f"{len(cycles)}, {'equal' if same_contents(row) else 'DIFFERENT'}"
                )
                asleep = second_and_last([cycle["asleep"][rank] for cycle in cycles])
            for wake in row.get("failed_wakes", ()):
                if wake["rank"] == rank:
                    told = "reported" if wake["error"] else "NOT REPORTED"
                    mended = same_contents(wake) and "both ranks woke at the repeat"
                    failed = f"{told}; {mended or 'NOT MENDED'}"
            mode = row["mode"]
            kept = digest(
                *(row[k][rank] if k in row else None for k in ("contents", "digests"))
            )
            sleeps = (kept, same, asleep, failed)
            lines.append((model(row), mode, rank, *figures, *sleeps))
    return table(head, lines)


def model(row: Row) -> str:
    parts = [row["shape"]]
    if row.get("layers"):
        parts.append(f"{row['layers']} layers")
    if row.get("quantization"):
        parts.append(row["quantization"])
    return ", ".join(parts)


def whole_card() -> str:
    """vLLM's own loader on the whole card. Rows of the fork with an asterisk have the
    in-place conversions; the others have the pool patches alone."""
    head = (
        "model",
        "mode",
        *OF_A_LOAD,
    )
    rows = []
    for row in read("engine.jsonl"):
        if row["card"]:
            continue
        cycles = row.get("cycles") if row["sleep"] and not row["load_only"] else None
        same = asleep = "-"
        if cycles:
            kept = sum(map(same_contents, cycles)) if same_contents(row) else "NONE"
            same = f"{kept} of {len(cycles)} equal"
            asleep = second_and_last([cycle["asleep"] for cycle in cycles])
        mode = row["mode"] + (" *" if row.get("patches") else "")
        figures = (row["load_peak"], row["after_load"], row.get("kv_cache", "-"))
        kept = digest(row.get("contents"), row.get("digest"))
        rows.append((model(row), mode, *figures, kept, same, asleep))
    return table(head, sorted(rows, key=lambda row: row[0]))


def digest(contents: str | None, parameters: str | None) -> str:
    """Of everything that a model holds, or with a dagger of its parameters."""
    return contents or (f"{parameters} †" if parameters else "-")


def same_contents(row: Row) -> bool:
    """Whether nothing had changed: what the model holds, or in earlier rows what vLLM's
    checksums cover."""
    names = ("same_contents", "same_digest", "same_digests")
    return all(row[name] for name in names if name in row)


def second_and_last(asleep: Sequence[float]) -> str:
    """What a card still holds in the second and in the last sleep."""
    return f"{asleep[min(1, len(asleep) - 1)]}, {asleep[-1]}"


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
    """Conversions of one layer, each figure beside the release's: live bytes at most in
    multiples of the layer, and the time, also as a multiple of copying the layer once;
    of the fork's time also what the GPU was at work. Of the release the fastest
    run."""
    head = (
        "conversion",
        "MiB",
        "live",
        "release",
        "ms",
        "at work",
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
                row["kernels_ms"],
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
    three = ("measured", "rehearsed", "uncalibrated")
    head = ("model", "mode", *(f"peak, {n}" for n in three), "after load", *three[1:])
    rehearsed: dict[tuple[str, str], dict[bool, Row]] = {}
    for row in read("rehearsed.jsonl"):
        by_kind = rehearsed.setdefault((model(row), row["mode"]), {})
        by_kind["uncalibrated" in row] = row
    rows = []
    for key, by_kind in rehearsed.items():
        if key in measured and len(by_kind) == 2:
            found = measured[key], by_kind[False], by_kind[True]
            figures = (r[name] for name in ("load_peak", "after_load") for r in found)
            rows.append((*key, *figures))
    return table(head, sorted(rows))


def layer_fidelity() -> str:
    """Loads of layers on a real and on the simulated card; sizes in GiB."""
    head = (
        "free",
        "pool",
        "split 20",
        "build",
        "loads",
        "peak",
        "segments made, freed",
        "rehearsed: loads",
        "peak",
        "segments",
    )
    rows = []
    for row in read("layer_loads.jsonl"):
        cells: list[Any] = [
            row["free"],
            "yes" if row["pool"] else "no",
            "yes" if row["split"] else "no",
            row["build"],
        ]
        for found in (row["real"], row["rehearsed"]):
            verdict = "yes" if found["loads"] else "no"
            segments = f"{found['num_device_alloc']}, {found['num_device_free']}"
            cells += [verdict, f"{found['peak'] / 2**30:.3f}", segments]
        rows.append(cells)
    return table(head, rows)


PAGES = {
    "measurements.md": (
        load_peak,
        split_policies,
        whole_card,
        small_cards,
        sleep_speed,
        ranks,
    ),
    "conversions.md": (conversions,),
    "rehearsal.md": (fidelity, layer_fidelity),
}
DOCS = RESULTS.parents[1] / "docs"
FILES = {
    load_peak: ("load_peak.jsonl",),
    split_policies: ("load_peak.jsonl",),
    sleep_speed: ("sleep_wake.jsonl",),
    ranks: ("ranks.jsonl",),
    whole_card: ("engine.jsonl",),
    small_cards: ("engine.jsonl",),
    conversions: ("conversions.jsonl",),
    fidelity: ("engine.jsonl", "rehearsed.jsonl"),
    layer_fidelity: ("layer_loads.jsonl",),
}


def _gpus(row: Row) -> str:
    many = row.get("tensor_parallel_size", 1)
    return f"one {row['gpu']}" if many == 1 else f"{many} of {row['gpu']}"


def provenance(make: Callable[[], str]) -> list[str]:
    """On what the rows of a table ran, one paragraph each: measured or rehearsed, the
    card (or that it was simulated), torch, and the commands, one a line."""
    lines = []
    for name in FILES[make]:
        rows = read(name)
        for gpu, torch in sorted({(_gpus(row), row["torch"]) for row in rows}):
            same = [r for r in rows if (_gpus(r), r["torch"]) == (gpu, torch)]
            how = "Rehearsed" if "simulated" in gpu else "Measured"
            commands = dict.fromkeys(
                f"    {command}"
                for row in same
                for command in (row["command"], *row.get("also", ()))
            )
            said = f"{how} on {gpu}, torch {torch}:"
            lines.append("\n\n".join([said, "\n".join(commands)]))
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
