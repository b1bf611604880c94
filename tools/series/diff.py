# SPDX-License-Identifier: Apache-2.0
"""Show changes as a unified diff."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tools.series.series import Change


def unified(changes: Iterable[Change]) -> str:
    """A diff that git and patch read; files keep their order."""
    return "".join(_one(change) for change in changes)


def _one(change: Change) -> str:
    before = "" if change.before is None else change.before.decode()
    old = "/dev/null" if change.before is None else f"a/{change.path}"
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        change.after.decode().splitlines(keepends=True),
        old,
        f"b/{change.path}",
    )
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
        for line in lines
    )
