# SPDX-License-Identifier: Apache-2.0
"""The table of patches and bases: what goes where, and why not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from packaging.version import Version

from benchmarks.tables import table
from tools.series.base import Base
from tools.series.errors import Refusal
from tools.series.manifest import APPLIES, MOVED, Patch, Series
from tools.series.series import apply_series

PAGE = Path(__file__).resolve().parents[2] / "docs/bases.md"
MARK = "<!-- bases -->\n"


def states(series: Series, base: Base) -> dict[str, str]:
    """For each patch one of ``manifest.STATES``, after the series was put on the base.

    Raises ``Refusal`` where a patch that the manifests want there does not fit.
    """
    applied = {done.patch.id for done in apply_series(series, base)}
    found = {}
    for patch in series.patches:
        said = patch.on(base.version)
        left_out = said.state if said and said.state != APPLIES else MOVED
        found[patch.id] = APPLIES if patch.id in applied else left_out
    return found


def page(series: Series, told: dict[str, dict[str, str]]) -> str:
    """The table as Markdown, the oldest base first, and the reasons below it.

    ``told`` are the ``states`` on each base, by its version.
    """
    versions = sorted(told, key=Version)
    head = ["patch", *versions]
    rows = [[p.id, *(told[v][p.id] for v in versions)] for p in series.patches]
    reasons = [
        f"- `{patch.id}` on {row.bases}: {' '.join(row.reason.split())}"
        for patch in series.patches
        for row in patch.on_bases
    ]
    reasons += [
        f"- `{patch.id}`: goes with {', '.join(f'`{name}`' for name in lacks)}"
        for patch in series.patches
        if (lacks := _left_out_with(patch, told.values()))
    ]
    return "\n".join([table(head, rows), "", *reasons]) + "\n"


def _left_out_with(patch: Patch, told: Iterable[dict[str, str]]) -> list[str]:
    """The required patches for whose sake alone this one is left out somewhere."""
    if patch.on_bases:
        return []
    return [
        need
        for need in patch.requires
        if any(column[patch.id] == column[need] == MOVED for column in told)
    ]


def filled(text: str, made: str) -> str:
    """A page with the table behind its mark."""
    before, found, _ = text.partition(MARK)
    if not found:
        raise Refusal(f"it has no mark {MARK.strip()}", file=str(PAGE))
    return f"{before}{MARK}\n{made}"
