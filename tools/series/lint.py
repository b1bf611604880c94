# SPDX-License-Identifier: Apache-2.0
"""Run ruff and mypy on the files that the graft changes.

A fragment alone has names that only upstream defines, so it is the grafted file that is
checked. Both tools also run on upstream's file, and only what is new is reported.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tools.series.errors import Refusal
from tools.series.series import Change

# Errors in names, imports and their order; the layout of the files is upstream's.
RUFF_RULES = "E9,F,I"
_MYPY = (
    "--explicit-package-bases",
    "--namespace-packages",
    "--ignore-missing-imports",
    "--follow-imports=skip",
    "--check-untyped-defs",
    "--no-error-summary",
    "--no-incremental",
    "--show-error-codes",
)


def findings(changes: Iterable[Change]) -> list[str]:
    """What ruff and mypy say of the Python files after the changes and not before."""
    touched = [c for c in changes if c.path.endswith(".py")]
    before = {c.path: c.before for c in touched if c.before is not None}
    after = {c.path: c.after for c in touched}
    new = _all_findings(after)
    old = Counter(_without_line(line) for line in _all_findings(before))
    reported = []
    for line in new:
        if old[_without_line(line)]:
            old[_without_line(line)] -= 1
        else:
            reported.append(line)
    return reported


def _all_findings(files: dict[str, bytes]) -> list[str]:
    if not files:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        return _ruff(root) + _mypy(root, sorted(files))


def _ruff(root: Path) -> list[str]:
    config = 'lint.isort.known-first-party=["vllm", "tests"]'
    command = ["ruff", "check", "--isolated", "--no-cache", "--output-format=json"]
    options = ["--select", RUFF_RULES, "--target-version=py311", "--config", config]
    told = _run(root, [*command, *options, "."], (0, 1))
    return [
        f"{Path(row['filename']).relative_to(root.resolve())}:"
        f"{row['location']['row']}: {row['code']} {row['message']}"
        for row in json.loads(told)
    ]


def _mypy(root: Path, files: list[str]) -> list[str]:
    told = _run(root, ["mypy", *_MYPY, "--config-file=", *files], (0, 1))
    return [line for line in told.splitlines() if ": error:" in line]


def _run(root: Path, command: list[str], fine: tuple[int, ...]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in fine:
        raise Refusal(f"{command[0]} failed: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def _without_line(finding: str) -> str:
    return re.sub(r":\d+:", ":", finding, count=1)
