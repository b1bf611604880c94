# SPDX-License-Identifier: Apache-2.0
"""The series as commits of a small git repository of its own, to be mailed and counted.

It holds only the files that the series changes, so it is quick to make. git names a
file's contents by its bytes, so a mail made here names what a full checkout holds.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.series.base import Base, git
from tools.series.errors import Refusal
from tools.series.series import Applied, final

#: Changed lines of existing files that a reviewer can be asked to read in one patch.
LIMIT = 250


@dataclass(frozen=True)
class Identity:
    """Who signs a mail off."""

    name: str
    email: str

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>"


NOBODY = Identity("nobody", "nobody@localhost")


@dataclass(frozen=True)
class Size:
    """Lines of a patch as git counts them, added and removed; tests apart."""

    #: Of existing files, by path.
    changed: dict[str, int]
    #: Of new files, by path.
    new: dict[str, int]
    #: Of files below ``tests/``, existing or new, by path.
    tests: dict[str, int]

    @property
    def changed_lines(self) -> int:
        return sum(self.changed.values())

    @property
    def new_lines(self) -> int:
        return sum(self.new.values())

    @property
    def test_lines(self) -> int:
        return sum(self.tests.values())


class Commits:
    """One commit per patch, on top of the base's version of the files."""

    def __init__(self, folder: Path, base: Base, applied: Sequence[Applied]) -> None:
        self.folder = folder
        self.base = base
        self.applied = list(applied)
        self._names: dict[str, str] = {}

    def make(self, messages: Sequence[str], who: Identity) -> None:
        """Commit the base and each patch with its message, authored by ``who``."""
        self._git("init", "-q", "-b", "series")
        for change in final(self.applied).values():
            if change.before is not None:
                self._write(change.path, change.before)
                if self.base.is_executable(change.path):
                    (self.folder / change.path).chmod(0o755)
        self._commit("base", who)
        for done, message in zip(self.applied, messages, strict=True):
            for change in done.changes:
                self._write(change.path, change.after)
            self._commit(message, who)
            self._names[done.patch.id] = self._git("rev-parse", "HEAD").strip()

    def size(self, done: Applied) -> Size:
        """What the patch adds and removes, by kind of file."""
        found: dict[str, dict[str, int]] = {"changed": {}, "new": {}, "tests": {}}
        new = {change.path for change in done.changes if change.before is None}
        name = self._names[done.patch.id]
        told = self._git("show", "--no-renames", "--format=", "--numstat", name)
        for row in filter(None, told.splitlines()):
            added, removed, path = row.split("\t")
            kind = "tests" if path.startswith("tests/") else "changed"
            kind = "new" if kind == "changed" and path in new else kind
            found[kind][path] = int(added) + int(removed)
        return Size(**found)

    def mails(self, out: Path) -> list[Path]:
        """``git format-patch`` of all commits but the base's into ``out``."""
        first = self._git("rev-list", "--max-parents=0", "HEAD").strip()
        options = ("--no-signature", "--no-renames", "--full-index")
        # git runs in this repository's own folder.
        into = str(out.absolute())
        told = self._git("format-patch", *options, "-o", into, f"{first}..HEAD")
        return [Path(line) for line in told.splitlines()]

    def applies(self, mails: Sequence[Path]) -> bool:
        """Whether these mails apply to the base one after the other, as text."""
        first = self._git("rev-list", "--max-parents=0", "HEAD").strip()
        with tempfile.TemporaryDirectory() as scratch:
            index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
            self._git("read-tree", first, env=index)
            try:
                self._git("apply", "--cached", *map(str, mails), env=index)
            except Refusal:
                return False
        return True

    def _write(self, path: str, content: bytes) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def _commit(self, message: str, who: Identity) -> None:
        env = {
            f"GIT_{role}_{key}": value
            for role in ("AUTHOR", "COMMITTER")
            for key, value in (("NAME", who.name), ("EMAIL", who.email))
        }
        self._git("add", "-A", "-f")
        commit = ("commit", "-q", "--allow-empty", "--cleanup=verbatim", "-F", "-")
        self._git(*commit, env=env, text=message)

    def _git(
        self, *arguments: str, env: dict[str, str] | None = None, text: str = ""
    ) -> str:
        """git as it comes, whatever the user's own settings are."""
        plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        own = os.environ | plain | (env or {})
        return git(self.folder, *arguments, env=own, input=text)


@contextmanager
def committed(
    base: Base,
    applied: Sequence[Applied],
    messages: Sequence[str] | None = None,
    who: Identity = NOBODY,
) -> Iterator[Commits]:
    """The series as commits, until the context ends."""
    with tempfile.TemporaryDirectory() as scratch:
        commits = Commits(Path(scratch), base, applied)
        commits.make(messages or [done.patch.title for done in applied], who)
        yield commits
