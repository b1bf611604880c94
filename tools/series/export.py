# SPDX-License-Identifier: Apache-2.0
"""Write the series as mails for upstream, with a cover and a machine-readable index."""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables
from tools.series import mail
from tools.series.base import Base, git
from tools.series.commits import LIMIT, Commits, Identity, Size, committed
from tools.series.errors import Refusal
from tools.series.manifest import Patch, Series
from tools.series.series import Applied, apply_series

INDEX, COVER = "index.json", "cover.md"
TEMPLATE = Path(__file__).with_name("cover.md")


def identity(folder: Path) -> Identity:
    """Who git says that commits in this folder are by. Raises ``Refusal`` if nobody."""
    found = {}
    for key in ("user.name", "user.email"):
        found[key] = git(folder, "config", "--get", key, check=False).strip()
        if not found[key]:
            raise Refusal(
                f"git knows no {key} to sign the mails off with: set yours with "
                f"`git config --global {key} ...`"
            )
    return Identity(found["user.name"], found["user.email"])


def export(
    series: Series, base: Base, who: Identity, out: Path
) -> list[dict[str, Any]]:
    """One mail per patch, ``cover.md`` and ``index.json`` in the new folder ``out``.

    Returns the rows of the index. Raises ``Refusal``, with nothing written, for a base
    without sources, a folder that is not empty, a patch that does not fit and one that
    changes more than ``LIMIT`` lines of upstream's files.
    """
    if not base.has_sources:
        raise Refusal(
            "it has no csrc/ and tests/: mails are made from a checkout or a source "
            "archive",
            file=base.name,
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refusal("is there already: give a new or an empty folder", file=str(out))
    series = series.on(base.version)
    applied = apply_series(series, base, notices=False)
    sizes = measured(base, applied)
    messages = [
        mail.message(done.patch, size, who)
        for done, size in zip(applied, sizes, strict=True)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=out.parent) as scratch,
        committed(base, applied, messages, who) as commits,
    ):
        folder = Path(scratch) / "mails"
        mails = commits.mails(folder)
        after = _textual_predecessors(series, commits, mails)
        rows = [
            _row(done, size, path.name, after[done.patch.id])
            for done, size, path in zip(applied, sizes, mails, strict=True)
        ]
        index = {"base": base.version, "limit": LIMIT, "patches": rows}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        (folder / COVER).write_text(cover(base.version, rows))
        if out.exists():
            out.rmdir()
        os.replace(folder, out)
    return rows


def measured(base: Base, applied: Sequence[Applied]) -> list[Size]:
    """The size of each patch. Raises ``Refusal`` for those above ``LIMIT``."""
    with committed(base, applied) as commits:
        sizes = [commits.size(done) for done in applied]
    over = [
        f"{done.patch.id} changes {size.changed_lines} lines of upstream's files"
        for done, size in zip(applied, sizes, strict=True)
        if size.changed_lines > LIMIT
    ]
    if over:
        raise Refusal("; ".join(over) + f": split it, {LIMIT} are the most")
    return sizes


def _textual_predecessors(
    series: Series, commits: Commits, mails: Sequence[Path]
) -> dict[str, list[str]]:
    """For each patch the mails that must be applied before its own.

    These are its stated predecessors, and where its mail does not apply after them
    alone, because a neighbour's lines stand around its own, the earlier patches of the
    same files.
    """
    by_id = dict(zip((p.id for p in series.patches), mails, strict=True))
    found: dict[str, list[str]] = {}
    for patch in series.patches:
        needed = {p.id for p in series.closure(patch).patches} - {patch.id}
        for source in tuple(needed):
            needed.update(found[source])
        if not _fits(commits, by_id, needed, patch):
            for other in series.patches[: series.patches.index(patch)]:
                if set(other.paths()) & set(patch.paths()):
                    needed.update([other.id, *found[other.id]])
            if not _fits(commits, by_id, needed, patch):
                raise Refusal("its mail does not apply to the base", patch=patch.id)
        found[patch.id] = sorted(needed)
    return found


def _fits(
    commits: Commits, mails: dict[str, Path], needed: set[str], patch: Patch
) -> bool:
    return commits.applies([mails[i] for i in mails if i in needed or i == patch.id])


def _row(done: Applied, size: Size, name: str, after: list[str]) -> dict[str, Any]:
    patch = done.patch
    return {
        "id": patch.id,
        "title": patch.title,
        "file": name,
        "changed_files": size.changed,
        "new_files": size.new,
        "test_files": size.tests,
        "changed_lines": size.changed_lines,
        "new_lines": size.new_lines,
        "test_lines": size.test_lines,
        "requires": list(patch.requires),
        "applies_after": after,
        "tests": mail.tests(patch),
        "why": patch.why.strip(),
        "how": patch.how.strip(),
        "tested": patch.tested.strip(),
        "trade_offs": patch.trade_offs.strip(),
        "related": patch.related.strip(),
        "goes_when": patch.goes_when.strip(),
    }


def cover(version: str, rows: Sequence[dict[str, Any]]) -> str:
    """The covering letter: the patches, what was measured, and how to apply them."""
    head = ("mail", "subject", "changed", "new", "tests", "apply after")
    patches = tables.table(
        head,
        (
            (
                row["file"][:4],
                row["title"],
                row["changed_lines"],
                row["new_lines"],
                row["test_lines"],
                ", ".join(name[:4] for name in row["applies_after"]) or "-",
            )
            for row in _numbered(rows)
        ),
    )
    parts: list[str] = []
    ran_on: dict[str, None] = {}
    for make in tables.FILES:
        # Tables of which nothing was run yet have no rows.
        if lines := tables.provenance(make):
            parts += [inspect.getdoc(make) or "", make()]
            ran_on |= dict.fromkeys(lines)
    measurements = "\n\n".join([*parts, "What ran, and on what:", *ran_on])
    return TEMPLATE.read_text().format(
        version=version,
        patches=patches,
        limit=LIMIT,
        measurements=measurements,
        assistance=mail.ASSISTANCE,
    )


def _numbered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with predecessors named by their mails' numbers."""
    number = {row["id"]: row["file"][:4] for row in rows}
    return [
        row | {"applies_after": [number[name] for name in row["applies_after"]]}
        for row in rows
    ]
