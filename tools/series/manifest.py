# SPDX-License-Identifier: Apache-2.0
"""Read ``series/*.toml``: what each patch says of itself and what it owns."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from tools.series import syntax
from tools.series.errors import Refusal

ANCHOR_KINDS = (
    "assign",
    "call",
    "command",
    "dict",
    "for",
    "for_call",
    "if",
    "if_call",
    "list",
    "return",
    "return_call",
    "set",
    "try_import",
    "while",
    "while_call",
    "with",
    "with_call",
)
OPS = (
    "after",
    "append",
    "argument",
    "before",
    "dict_entry",
    "list_entry",
    "prepend",
    "remove",
    "replace",
    "set_entry",
    "wrap",
)
ENCLOSING = (
    "if",
    "else",
    "for",
    "while",
    "with",
    "try",
    "except",
    "finally",
    "def",
)


#: What a patch can be on a base: put on it, of no use there, or not fitting.
APPLIES, NOT_NEEDED, MOVED = STATES = ("applies", "not needed", "anchor moved")
EVERY_BASE = SpecifierSet()


@dataclass(frozen=True)
class Anchor:
    """A place in a file, said by code structure.

    ``kind`` and ``value`` are one of ``ANCHOR_KINDS`` with its name or expression.
    ``arguments`` narrows a call (or gives a CMake command's leading arguments), and
    ``inside`` is a statement kind of ``ENCLOSING`` or an anchor around this one.
    """

    kind: str
    value: str
    arguments: tuple[str, ...] = ()
    inside: str | Anchor | None = None

    def __str__(self) -> str:
        parts = [f'{self.kind} = "{self.value}"']
        if self.arguments:
            parts.append(f"argument = {list(self.arguments)}")
        if isinstance(self.inside, Anchor):
            parts.append(f"inside = {self.inside}")
        elif self.inside:
            parts.append(f'inside = "{self.inside}"')
        return "{" + ", ".join(parts) + "}"


@dataclass(frozen=True)
class Edit:
    """One structural change inside a function, a class, a module or a CMake file."""

    path: str
    op: str
    code: str = ""
    within: str | None = None
    anchor: Anchor | None = None
    imports: tuple[str, ...] = ()
    bases: SpecifierSet = EVERY_BASE

    def __str__(self) -> str:
        where = f"within {self.within}, " if self.within else ""
        return f"{where}anchor {self.anchor or '(the whole body)'}"


@dataclass(frozen=True)
class Definitions:
    """Definitions of a fragment that replace upstream's or are new beside them."""

    path: str
    names: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    after: str | None = None
    bases: SpecifierSet = EVERY_BASE


@dataclass(frozen=True)
class OnBase:
    """What is to say of a patch on some bases. Left out there unless ``applies``.

    ``state`` is one of ``STATES``; ``reason`` says what differs there, and where the
    patch is left out, what a user of that base lacks.
    """

    bases: SpecifierSet
    state: str
    reason: str


@dataclass(frozen=True)
class Result:
    """Rows of one of the tables in ``benchmarks/tables.py`` that speak of a patch.

    ``rows`` are what a row's first cell begins with; empty for the whole table.
    """

    table: str
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Patch:
    """One patch: what a reviewer reads, and what it changes."""

    id: str
    title: str
    why: str
    how: str
    tested: str
    goes_when: str
    requires: tuple[str, ...] = ()
    trade_offs: str = ""
    related: str = ""
    results: tuple[Result, ...] = ()
    on_bases: tuple[OnBase, ...] = ()
    new_files: tuple[str, ...] = ()
    definitions: tuple[Definitions, ...] = ()
    edits: tuple[Edit, ...] = ()

    def grafted_paths(self) -> list[str]:
        """Files of upstream that this patch changes in place, in stated order."""
        paths = [part.path for part in self.definitions]
        paths += [edit.path for edit in self.edits]
        return list(dict.fromkeys(paths))

    def on(self, version: str) -> OnBase | None:
        """What the manifest says of the patch on that base."""
        said = [row for row in self.on_bases if version in row.bases]
        return said[0] if said else None

    def parts(self, version: str) -> Patch:
        """The patch with only those changes that are for that base."""
        return dataclasses.replace(
            self,
            definitions=tuple(d for d in self.definitions if version in d.bases),
            edits=tuple(e for e in self.edits if version in e.bases),
        )

    def paths(self) -> list[str]:
        """Every file that this patch writes."""
        return [*self.new_files, *self.grafted_paths()]


@dataclass(frozen=True)
class Series:
    """The ordered patches, and the folder that holds our files at their paths."""

    root: Path
    patches: tuple[Patch, ...]
    local: str
    bases: tuple[str, ...]
    not_grafted: tuple[str, ...] = field(default=())

    def ours(self, path: str) -> bytes:
        """The bytes of one file of ours."""
        return (self.root / path).read_bytes()

    def closure(self, patch: Patch) -> Series:
        """The series of only this patch and its stated predecessors."""
        wanted = {patch.id}
        for other in reversed(self.patches):
            if other.id in wanted:
                wanted.update(other.requires)
        kept = tuple(p for p in self.patches if p.id in wanted)
        return dataclasses.replace(self, patches=kept)

    def on(self, version: str) -> Series:
        """The patches for that base, each with only the changes for it.

        A patch that requires one whose anchors moved there is left out with it; one
        that requires a patch which is not needed there stays.
        """
        kept: list[Patch] = []
        moved: set[str] = set()
        for patch in self.patches:
            said = patch.on(version)
            if (said and said.state == MOVED) or moved & set(patch.requires):
                moved.add(patch.id)
            elif not said or said.state == APPLIES:
                kept.append(patch.parts(version))
        return dataclasses.replace(self, patches=tuple(kept))


_TEXT = ("title", "why", "how", "tested", "goes_when")
_OPTIONAL_TEXT = ("trade_offs", "related")
_TABLES = ("new_files", "definitions", "edits", "results", "bases")


def load(root: Path, allow_unowned: bool = False) -> Series:
    """Read and check the whole series of the repository at ``root``.

    Raises ``Refusal`` for a manifest that is not understood in every key, a file or
    a definition that no patch or more than one patch owns, and a predecessor that
    does not come before. ``allow_unowned`` leaves out what no patch owns yet.
    """
    settings = _settings(root)
    patches: list[Patch] = []
    for path in sorted((root / "series").glob("*.toml")):
        patch = _read_patch(path)
        known = {earlier.id for earlier in patches}
        for need in patch.requires:
            if need not in known:
                raise Refusal(
                    f"requires {need!r}, which no earlier manifest is named",
                    patch=patch.id,
                )
        patches.append(patch)
    series = Series(
        root=root,
        patches=tuple(patches),
        local=_string(settings, "local", "pyproject.toml"),
        bases=_strings(settings, "bases", "pyproject.toml"),
        not_grafted=_strings(settings, "not_grafted", "pyproject.toml"),
    )
    _check_ownership(series, allow_unowned)
    return series


def _settings(root: Path) -> dict[str, Any]:
    with (root / "pyproject.toml").open("rb") as stream:
        table: dict[str, Any] = tomllib.load(stream)["tool"]["series"]
    return table


def _read_patch(path: Path) -> Patch:
    name = path.stem
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except tomllib.TOMLDecodeError as error:
        raise Refusal(f"the manifest is not TOML: {error}", patch=name) from error
    _only(table, {*_TEXT, *_OPTIONAL_TEXT, *_TABLES, "requires"}, name)
    for table_name in _TABLES:
        rows = table.get(table_name, [])
        if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
            raise Refusal(f"write it as [[{table_name}]]", patch=name)
    new_files: list[str] = []
    for row in table.get("new_files", []):
        _only(row, {"paths"}, name)
        new_files.extend(_strings(row, "paths", name))
    return Patch(
        id=name,
        requires=_strings(table, "requires", name),
        **{key: _string(table, key, name) for key in _TEXT},
        **{key: _string(table, key, name, "") for key in _OPTIONAL_TEXT},
        results=tuple(_result(row, name) for row in table.get("results", [])),
        on_bases=tuple(_on_base(row, name) for row in table.get("bases", [])),
        new_files=tuple(new_files),
        definitions=tuple(_definitions(r, name) for r in table.get("definitions", [])),
        edits=tuple(_edit(row, name) for row in table.get("edits", [])),
    )


def _result(row: dict[str, Any], name: str) -> Result:
    _only(row, {"table", "rows"}, name)
    return Result(_string(row, "table", name), _strings(row, "rows", name))


def _on_base(row: dict[str, Any], name: str) -> OnBase:
    _only(row, {"bases", "state", "reason"}, name)
    state = _string(row, "state", name)
    if state not in STATES:
        raise Refusal(f"state {state!r} is none of {', '.join(STATES)}", patch=name)
    return OnBase(_bases(row, name), state, _string(row, "reason", name))


def _bases(row: dict[str, Any], name: str) -> SpecifierSet:
    """The bases that a table is for, such as ``"<0.32"``; all where it does not say."""
    text = _string(row, "bases", name, "")
    try:
        return SpecifierSet(text)
    except InvalidSpecifier as error:
        raise Refusal(f"bases = {text!r}: {error}", patch=name) from error


def _definitions(row: dict[str, Any], name: str) -> Definitions:
    _only(row, {"path", "names", "remove", "after", "bases"}, name)
    found = Definitions(
        path=_string(row, "path", name),
        names=_strings(row, "names", name),
        remove=_strings(row, "remove", name),
        after=_string(row, "after", name, "") or None,
        bases=_bases(row, name),
    )
    if not found.names and not found.remove:
        raise Refusal("give names or remove", patch=name, file=found.path)
    return found


def _edit(row: dict[str, Any], name: str) -> Edit:
    path = _string(row, "path", name)
    try:
        known = {"path", "within", "anchor", "op", "code", "imports", "bases"}
        _only(row, known, name)
        edit = Edit(
            path=path,
            op=_string(row, "op", name),
            code=_string(row, "code", name, ""),
            within=_string(row, "within", name, "") or None,
            anchor=_anchor(row["anchor"], name) if row.get("anchor") else None,
            imports=_strings(row, "imports", name),
            bases=_bases(row, name),
        )
        if edit.op not in OPS:
            raise Refusal(f"op {edit.op!r} is none of {', '.join(OPS)}")
        if (edit.op == "remove") == bool(edit.code):
            raise Refusal(f"op {edit.op!r} with or without code: remove has none")
        if edit.anchor is None and edit.op not in ("append", "prepend"):
            raise Refusal(f"op {edit.op!r} needs an anchor")
    except Refusal as refusal:
        raise refusal.at(patch=name, file=path) from None
    return edit


def _anchor(table: Any, name: str) -> Anchor:
    if not isinstance(table, dict):
        raise Refusal("an anchor is a table", patch=name)
    kinds = [key for key in table if key in ANCHOR_KINDS]
    _only(table, {*ANCHOR_KINDS, "argument", "inside"}, name)
    if len(kinds) != 1:
        raise Refusal(
            f"an anchor names exactly one of {', '.join(ANCHOR_KINDS)}", patch=name
        )
    inside = table.get("inside")
    if isinstance(inside, dict):
        inside = _anchor(inside, name)
    elif inside is not None and inside not in ENCLOSING:
        raise Refusal(f"inside is an anchor or one of {', '.join(ENCLOSING)}")
    argument = table.get("argument", [])
    arguments = [argument] if isinstance(argument, str) else argument
    return Anchor(
        kind=kinds[0],
        value=_string(table, kinds[0], name),
        arguments=tuple(arguments),
        inside=inside,
    )


def _only(table: dict[str, Any], known: set[str], patch: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise Refusal(
            f"unknown key {', '.join(map(repr, unknown))}; known: "
            f"{', '.join(sorted(known))}",
            patch=patch,
        )


def _string(
    table: dict[str, Any], key: str, patch: str, default: str | None = None
) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or (default is None and not value.strip()):
        raise Refusal(f"{key!r} must be a text that is not empty", patch=patch)
    return value


def _strings(table: dict[str, Any], key: str, patch: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise Refusal(f"{key!r} must be a list of texts", patch=patch)
    return tuple(value)


def _check_ownership(series: Series, allow_unowned: bool) -> None:
    whole: dict[str, str] = {}
    names: dict[str, dict[str, str]] = {}
    for patch in series.patches:
        for path in patch.new_files:
            if path in whole:
                raise Refusal(f"{whole[path]} owns it too", patch=patch.id, file=path)
            if not (series.root / path).is_file():
                raise Refusal("there is no such file", patch=patch.id, file=path)
            whole[path] = patch.id
        for part in patch.definitions:
            owners = names.setdefault(part.path, {})
            for name in (*part.names, *part.remove):
                if name in owners:
                    raise Refusal(
                        f"{owners[name]} owns {name} too",
                        patch=patch.id,
                        file=part.path,
                    )
                owners[name] = patch.id
    for path, owners in names.items():
        if path in whole:
            raise Refusal(
                f"it is a whole file of {whole[path]} and a fragment", file=path
            )
        _check_fragment(series, path, owners, allow_unowned)
    unowned = [
        path
        for path in _our_files(series.root)
        if path not in whole
        and path not in names
        and not any(path == p or path.startswith(p + "/") for p in series.not_grafted)
    ]
    if unowned and not allow_unowned:
        raise Refusal(f"no patch owns {', '.join(unowned)}")


def _our_files(root: Path) -> Iterator[str]:
    for top in ("csrc", "tests", "vllm"):
        for path in sorted((root / top).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(root).as_posix()


def _check_fragment(
    series: Series, path: str, owners: dict[str, str], allow_unowned: bool
) -> None:
    grafted = {
        name
        for patch in series.patches
        for part in patch.definitions
        if part.path == path
        for name in part.names
    }
    if not grafted:
        return
    if not (series.root / path).is_file():
        raise Refusal(
            "there is no such fragment", patch=owners[min(grafted)], file=path
        )
    try:
        fragment = syntax.parse(series.ours(path).decode())
        defined = set(_defined(fragment, grafted))
    except Refusal as refusal:
        raise refusal.at(file=path) from None
    for name in sorted(grafted - defined):
        raise Refusal(f"the fragment has no {name}", patch=owners[name], file=path)
    if defined - grafted and not allow_unowned:
        raise Refusal(
            f"no patch owns {', '.join(sorted(defined - grafted))}", file=path
        )


def _defined(
    container: cst.CSTNode, owned: set[str], prefix: str = ""
) -> Iterator[str]:
    """Names that a fragment defines: a class by its members unless it is owned."""
    for statement in syntax.body_of(container):
        if syntax.is_docstring(statement) or is_import_part(statement):
            continue
        names = syntax.binds(statement)
        if not names and not (prefix and _is_filler(statement)):
            text = syntax.code_of(statement).strip().splitlines()[0]
            raise Refusal(
                f"a fragment holds imports, definitions and assignments, not {text!r}"
            )
        for name in names:
            full = prefix + name
            if isinstance(statement, cst.ClassDef) and full not in owned:
                yield from _defined(statement, owned, full + ".")
            else:
                yield full


def is_import_part(statement: cst.CSTNode) -> bool:
    """Imports, and the ``if TYPE_CHECKING`` block, which is only for tools."""
    if isinstance(statement, cst.SimpleStatementLine):
        return all(isinstance(s, cst.Import | cst.ImportFrom) for s in statement.body)
    return syntax.is_type_checking(statement)


def _is_filler(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(small, cst.Pass)
        or (isinstance(small, cst.Expr) and isinstance(small.value, cst.Ellipsis))
        for small in statement.body
    )
