# SPDX-License-Identifier: Apache-2.0
"""Run upstream's own checks on the files that the graft changes.

A fragment alone has names that only upstream defines, so it is the grafted tree that is
checked: with the base's settings of ruff, mypy and clang-format, and with the scripts
that its pre-commit hooks run. They also run on upstream's files, and only what is new
is reported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tools.series.base import Base
from tools.series.errors import Refusal
from tools.series.series import Change

#: Scripts below tools/pre_commit, which take files as arguments.
HOOKS = (
    "check_boolean_context_manager",
    "check_forbidden_imports",
    "check_init_lazy_imports",
    "check_torch_cuda",
    "check_trust_remote_code",
    "validate_config",
    "check_spdx_header",  # the last, because it writes the headers
)
_SETTINGS = ("pyproject.toml", ".clang-format", "tools/pre_commit/")
_ALONE = "no_site_packages = true"
_COLOUR = re.compile(r"\x1b?\[\d+m")


def findings(base: Base, changes: Iterable[Change]) -> list[str]:
    """What upstream's checks say of the changed files after the changes and not before.

    ``base`` must have sources. Raises ``Refusal`` where a check cannot run.
    """
    touched = list(changes)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for path in base.paths():
            if path.startswith(_SETTINGS) or path.endswith((".py", ".pyi")):
                _write(root / path, base.read(path))
        # As in upstream's hook, which has no torch: what is installed does not matter.
        settings = (root / "pyproject.toml").read_text()
        settings = settings.replace("[tool.mypy]", f"[tool.mypy]\n{_ALONE}")
        (root / "pyproject.toml").write_text(settings)
        existing = [c.path for c in touched if c.before is not None]
        old = _Checks(root, existing).run()
        for change in touched:
            _write(root / change.path, change.after)
        return _new(_Checks(root, [c.path for c in touched]).run(), old)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _new(after: list[str], before: list[str]) -> list[str]:
    known = Counter(_without_line(line) for line in before)
    reported = []
    for line in after:
        if known[_without_line(line)]:
            known[_without_line(line)] -= 1
        else:
            reported.append(line)
    return reported


def _without_line(finding: str) -> str:
    return re.sub(r":\d+(:\d+)?:", ":", finding, count=1)


class _Checks:
    """All checks of one tree on some of its files; each gives lines of findings."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        self.root = root.resolve()
        paths = sorted(paths)
        self.python = [p for p in paths if p.endswith(".py")]
        self.cpp = [p for p in paths if p.endswith((".cpp", ".h"))]

    def run(self) -> list[str]:
        python: list[Callable[[], list[str]]] = [self._ruff, self._format, self._mypy]
        found = [line for check in python if self.python for line in check()]
        if self.cpp:
            found += self._clang_format()
        for hook in HOOKS if self.python else ():
            found += self._hook(hook)
        return found

    def _ruff(self) -> list[str]:
        options = ("--no-cache", "--output-format=json", "--target-version=py311")
        told = self._run("ruff", "check", *options, *self.python)
        return [
            f"{Path(row['filename']).relative_to(self.root)}:"
            f"{row['location']['row']}: {row['code']} {row['message']}"
            for row in json.loads(told)
        ]

    def _format(self) -> list[str]:
        told = self._run("ruff", "format", "--no-cache", "--check", *self.python)
        places = re.findall(r"--> (\S+?):\d+:\d+$|^Would reformat: (.+)$", told, re.M)
        found = dict.fromkeys(a or b for a, b in places)
        return [f"{path}: ruff format would change it" for path in found]

    def _mypy(self) -> list[str]:
        script = "tools/pre_commit/mypy.py"
        told = self._run(script, "3.11", *self.python, fine=(0, 1))
        return [line for line in told.splitlines() if ": error:" in line]

    def _clang_format(self) -> list[str]:
        program = shutil.which("clang-format", path=_path())
        if program is None:
            raise Refusal("clang-format is not installed: pip install clang-format")
        done = subprocess.run(
            [program, "--style=file", "--dry-run", *self.cpp],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = done.stderr.splitlines()
        return [line for line in lines if re.search(r": (warning|error):", line)]

    def _hook(self, name: str) -> list[str]:
        script = f"tools/pre_commit/{name}.py"
        if not (self.root / script).is_file():
            return []
        # The one for trust_remote_code is for the package only.
        paths = [p for p in self.python if p.startswith("vllm/") or "trust" not in name]
        told = _COLOUR.sub("", self._run(script, *paths)) if paths else ""
        lines = [line.strip() for line in told.splitlines()]
        return [f"{line} ({name})" for line in lines if ".py" in line]

    def _run(self, what: str, *arguments: str, fine: tuple[int, ...] = (0, 1)) -> str:
        """The output of a module, or of a script of the tree."""
        run = [what] if what.endswith(".py") else ["-m", what]
        done = subprocess.run(
            [sys.executable, *run, *arguments],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PATH": _path(), "NO_COLOR": "1"},
        )
        if done.returncode not in fine or "Traceback" in done.stderr:
            said = (done.stdout + done.stderr)[-2000:]
            raise Refusal(f"{what} failed: {said}")
        return done.stdout


def _path() -> str:
    """Where programs are looked for: first where pip puts them."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
