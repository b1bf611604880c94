# SPDX-License-Identifier: Apache-2.0
"""Run the ordered patches over a base, in memory."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from tools.series import cmake, edits, graft, imports, names, notice, syntax
from tools.series.base import Base
from tools.series.errors import Refusal
from tools.series.manifest import Definitions, Edit, Patch, Series

ALREADY = "the series is already applied here"


@dataclass(frozen=True)
class Change:
    """One file before and after a patch; ``before`` is None for a new file."""

    path: str
    before: bytes | None
    after: bytes


@dataclass(frozen=True)
class Applied:
    """A patch and what it changed on this base, in the patch's own order."""

    patch: Patch
    changes: tuple[Change, ...]


def apply_series(series: Series, base: Base, *, notices: bool = True) -> list[Applied]:
    """Apply every patch for this base in order and return what each one changed.

    The base is only read. On a base without sources, changes outside ``vllm/`` are
    left out. ``notices=False`` leaves out the licence's notice of change, for patches
    that are sent to upstream itself. Raises ``Refusal`` at the first patch that does
    not fit, naming patch, file and anchor.
    """
    tree = _Tree(series, base, notices)
    return [tree.apply(patch) for patch in series.on(base.version).patches]


def final(applied: list[Applied]) -> dict[str, Change]:
    """The whole series as one change per file, from the base to the end."""
    merged: dict[str, Change] = {}
    for done in applied:
        for change in done.changes:
            first = merged.get(change.path, change)
            merged[change.path] = Change(change.path, first.before, change.after)
    return merged


class _Tree:
    """The base with the changes so far on top."""

    def __init__(self, series: Series, base: Base, notices: bool) -> None:
        self.series = series
        self.base = base
        self.notices = notices
        self.changed: dict[str, bytes] = {}

    def apply(self, patch: Patch) -> Applied:
        changes: list[Change] = []
        for path, make in (
            *((path, self._new) for path in patch.new_files),
            *((path, self._grafted) for path in patch.grafted_paths()),
        ):
            if not self.base.has_sources and not path.startswith("vllm/"):
                continue
            try:
                made = make(patch, path)
            except Refusal as refusal:
                raise refusal.at(patch=patch.id, file=path) from None
            for change in made:
                self.changed[change.path] = change.after
                changes.append(change)
        for change in changes:
            self._check_imports(patch, change)
        return Applied(patch, tuple(changes))

    def _check_imports(self, patch: Patch, change: Change) -> None:
        if not change.path.startswith("vllm/") or not change.path.endswith(".py"):
            return
        before = change.before.decode() if change.before is not None else None
        lacks = names.missing(change.after.decode(), before, self._read_if_there)
        if lacks:
            raise Refusal(
                f"the base has no {', '.join(lacks)}", patch=patch.id, file=change.path
            )

    def _read_if_there(self, path: str) -> bytes | None:
        return self._read(path) if self._exists(path) else None

    def _exists(self, path: str) -> bool:
        return path in self.changed or self.base.exists(path)

    def _read(self, path: str) -> bytes:
        if path in self.changed:
            return self.changed[path]
        if not self.base.exists(path):
            raise Refusal("the base has no such file", file=path)
        return self.base.read(path)

    def _new(self, patch: Patch, path: str) -> list[Change]:
        ours = self.series.ours(path)
        if self._exists(path):
            same = self._read(path) == ours
            raise Refusal(ALREADY if same else "the base has a file of this name")
        return [Change(path, None, ours)]

    def _grafted(self, patch: Patch, path: str) -> list[Change]:
        before = self._read(path)
        text = before.decode()
        if path not in self.changed and notice.has_notice(text):
            raise Refusal(ALREADY)
        parts = [part for part in patch.definitions if part.path == path]
        changes = [edit for edit in patch.edits if edit.path == path]
        if path.endswith((".txt", ".cmake")):
            after = text
            for edit in changes:
                after = cmake.apply_edit(after, edit)
        else:
            fragment = (
                self.series.ours(path).decode()
                if any(part.names for part in parts)
                else ""
            )
            after = change_python(text, fragment, parts, changes)
        if after == text:
            raise Refusal("the patch changes nothing in this file")
        if self.notices and not notice.has_notice(after):
            after = notice.with_notice(after, path)
        return [Change(path, before, after.encode())]


def change_python(
    text: str, fragment: str, parts: list[Definitions], changes: list[Edit]
) -> str:
    """One Python file after edits, definitions and the imports that both need.

    The edits come first, so that their anchors are looked for in the text that the
    earlier patches left and not in what this patch brings.
    """
    module = syntax.parse(text)
    ours = syntax.parse_fragment(fragment)
    for edit in changes:
        module = edits.apply_edit(module, edit)
    for part in parts:
        module = graft.graft(module, ours, part)
    needed = [line for edit in changes for line in edit.imports]
    module = imports.merge(module, imports.of_lines(needed, module))
    owned = [name for part in parts for name in part.names]
    used = syntax.used_names(graft.owned_text(ours, owned))
    module = imports.merge(
        module, [item for item in imports.of_module(ours) if item.bound in used]
    )
    return _checked(imports.prune(text, module).code)


def _checked(text: str) -> str:
    """The text, once it is sure that it still is Python."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise Refusal(f"the result is not Python: {error}") from error
    return text
