# SPDX-License-Identifier: Apache-2.0
"""Merge the imports that our code needs, and drop those that it made unused."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from tools.series import syntax
from tools.series.errors import Refusal
from tools.series.syntax import Statement

LINE_LENGTH = 88
FIRST_PARTY = ("vllm", "tests")


@dataclass(frozen=True)
class Imported:
    """One imported name: ``from module import name as alias`` or ``import module``."""

    module: str
    name: str | None = None
    alias: str | None = None
    type_checking: bool = False

    @property
    def bound(self) -> str:
        return self.alias or self.name or self.module.split(".")[0]

    @property
    def origin(self) -> tuple[str, str | None, str | None]:
        return (self.module, self.name, self.alias)

    def __str__(self) -> str:
        alias = f" as {self.alias}" if self.alias else ""
        if self.name is None:
            return f"import {self.module}{alias}"
        return f"from {self.module} import {self.name}{alias}"


def of_module(module: cst.Module) -> list[Imported]:
    """Imports at the top of a module, also those in its ``try`` and ``if`` blocks."""
    return list(imported(module.body))


def of_lines(lines: Iterable[str], like: cst.Module) -> list[Imported]:
    """Imports written as text, one statement each."""
    found: list[Imported] = []
    for line in lines:
        inner = list(imported(syntax.parse_statements(line, like)))
        if not inner:
            raise Refusal(f"is not an import: {line!r}")
        found.extend(inner)
    return found


def imported(body: Sequence[cst.CSTNode], checking: bool = False) -> Iterator[Imported]:
    """Imports of a run of statements, also those in its ``try`` and ``if`` blocks."""
    for statement in body:
        if isinstance(statement, cst.SimpleStatementLine):
            for small in statement.body:
                yield from _of_small(small, checking)
        elif isinstance(statement, cst.If | cst.Try | cst.TryStar | cst.With):
            inside = checking or syntax.is_type_checking(statement)
            yield from imported(statement.body.body, inside)
            for handler in getattr(statement, "handlers", ()):
                yield from imported(handler.body.body, inside)
            other = getattr(statement, "orelse", None)
            if isinstance(other, cst.If):
                yield from imported([other], checking)
            elif other is not None:
                yield from imported(other.body.body, checking)


def _of_small(small: cst.CSTNode, checking: bool) -> Iterator[Imported]:
    if isinstance(small, cst.Import):
        for alias in small.names:
            yield Imported(syntax.tail(alias.name), None, _alias(alias), checking)
    elif isinstance(small, cst.ImportFrom):
        if isinstance(small.names, cst.ImportStar):
            return
        module = _module_of(small)
        for alias in small.names:
            yield Imported(module, syntax.tail(alias.name), _alias(alias), checking)


def _module_of(small: cst.ImportFrom) -> str:
    return "." * len(small.relative) + (
        syntax.tail(small.module) if small.module else ""
    )


def _alias(alias: cst.ImportAlias) -> str | None:
    return syntax.tail(alias.asname.name) if alias.asname else None


def merge(base: cst.Module, needed: Iterable[Imported]) -> cst.Module:
    """``base`` with each import of ``needed`` that it does not have yet."""
    for item in needed:
        base = _merge_one(base, item)
    return base


def _merge_one(base: cst.Module, item: Imported) -> cst.Module:
    have = of_module(base)
    same = [other for other in have if other.origin == item.origin]
    if any(item.type_checking or not other.type_checking for other in same):
        return base
    if same:
        # It was for type checkers only; from now on it is needed at run time.
        base = _drop(base, item.origin)
    elif not _is_dotted(item):
        clash = next((str(o) for o in have if o.bound == item.bound), None)
        if clash is None and any(
            item.bound in syntax.binds(statement) for statement in base.body
        ):
            clash = f"a definition of {item.bound}"
        if clash is not None:
            raise Refusal(f"the file has {clash}", anchor=f"import {item.bound!r}")
    if not item.type_checking:
        return base.with_changes(body=_add(list(base.body), item, 0, base))
    blocks = [i for i, s in enumerate(base.body) if syntax.is_type_checking(s)]
    body = list(base.body)
    if blocks:
        block = cst.ensure_type(body[blocks[0]], cst.If)
        inner = _add(list(syntax.body_of(block)), item, 4, base)
        body[blocks[0]] = cst.ensure_type(syntax.with_body(block, inner), cst.If)
        return base.with_changes(body=body)
    base = _merge_one(base, Imported("typing", "TYPE_CHECKING"))
    body = list(base.body)
    block_text = f"if TYPE_CHECKING:\n    {item}\n"
    new = syntax.parse_statements(block_text, base)[0]
    end = _run(body)[1]
    body.insert(end, syntax.with_leading(new, [syntax.blank()]))
    return base.with_changes(body=body)


def _is_dotted(item: Imported) -> bool:
    return item.name is None and item.alias is None


def _run(body: Sequence[Statement]) -> tuple[int, int]:
    """Where the first unbroken run of import statements begins and ends."""
    start = 0
    while start < len(body) and syntax.is_docstring(body[start]):
        start += 1
    end = start
    while end < len(body) and _single(body[end]) is not None:
        end += 1
    return start, end


def _single(statement: Statement) -> cst.Import | cst.ImportFrom | None:
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        small = statement.body[0]
        if isinstance(small, cst.Import | cst.ImportFrom):
            return small
    return None


def _section(module: str) -> int:
    top = module.split(".")[0]
    if module.startswith("."):
        return 4
    if top == "__future__":
        return 0
    if top in sys.stdlib_module_names:
        return 1
    return 3 if top in FIRST_PARTY else 2


def _key(statement: Statement) -> tuple[int, bool, str]:
    small = _single(statement)
    if isinstance(small, cst.ImportFrom):
        module = _module_of(small)
        return (_section(module), True, module.lower())
    assert isinstance(small, cst.Import)
    module = syntax.tail(small.names[0].name)
    return (_section(module), False, module.lower())


def _add(
    body: list[Statement], item: Imported, indent: int, like: cst.Module
) -> list[Statement]:
    start, end = _run(body)
    for i in range(start, end):
        small = _single(body[i])
        if isinstance(small, cst.ImportFrom) and _module_of(small) == item.module:
            if item.name is None or _has_comment(small):
                continue
            names = _with_name(small, item)
            body[i] = _rewritten(body[i], item.module, names, indent, like)
            return body
    new = _statement(item, indent, like)
    at = start
    while at < end and _key(body[at]) <= _key(new):
        at += 1
    section = _key(new)[0]
    before = _key(body[at - 1])[0] if at > start else None
    following = _key(body[at])[0] if at < end else None
    if following == section and before != section:
        lines = syntax.leading(body[at])
        new = syntax.with_leading(new, syntax.detached(lines))
        body[at] = syntax.with_leading(body[at], syntax.attached(lines))
    elif (before is not None and before != section) or (before is None and start > 0):
        new = syntax.with_leading(new, [syntax.blank()])
    if at < end and following != section and not syntax.leading(body[at]):
        body[at] = syntax.with_leading(body[at], [syntax.blank()])
    body.insert(at, new)
    return body


def _statement(item: Imported, indent: int, like: cst.Module) -> Statement:
    """A new import, over several lines where one would be too long."""
    text = str(item)
    if len(text) + indent > LINE_LENGTH and item.name is not None:
        head, _, name = text.partition(" import ")
        text = f"{head} import (\n    {name},\n)"
    return syntax.parse_statements(text, like)[0]


def _has_comment(small: cst.CSTNode) -> bool:
    return "#" in syntax.code_of(small)


def _with_name(small: cst.ImportFrom, item: Imported) -> list[str]:
    assert item.name is not None
    assert not isinstance(small.names, cst.ImportStar)
    names = [_alias_text(alias) for alias in small.names]
    new = item.name + (f" as {item.alias}" if item.alias else "")
    at = next((i for i, n in enumerate(names) if _rank(n) > _rank(new)), len(names))
    return [*names[:at], new, *names[at:]]


def _alias_text(alias: cst.ImportAlias) -> str:
    name = _alias(alias)
    return syntax.tail(alias.name) + (f" as {name}" if name else "")


def _rank(name: str) -> tuple[int, str]:
    """Upstream sorts constants before classes before everything else."""
    word = name.split()[0]
    if len(word) > 1 and word.isupper():
        return (0, word)
    return (1 if word[:1].isupper() else 2, word)


def _rewritten(
    statement: Statement,
    module: str,
    names: Sequence[str],
    indent: int,
    like: cst.Module,
) -> Statement:
    """The statement with other names: on one line where that fits, but a list that
    grows stays long if it was."""
    old = cst.ensure_type(statement, cst.SimpleStatementLine)
    before = cst.ensure_type(old.body[0], cst.ImportFrom)
    text = f"from {module} import {', '.join(names)}"
    grows = len(names) > len(list(_of_small(before, False)))
    was_long = "\n" in syntax.code_of(before)
    if (grows and was_long) or len(text) + indent > LINE_LENGTH:
        inner = "".join(f"    {name},\n" for name in names)
        text = f"from {module} import (\n{inner})"
    new = cst.ensure_type(
        syntax.parse_statements(text, like)[0], cst.SimpleStatementLine
    )
    return old.with_changes(body=new.body)


def prune(before: str, after: cst.Module) -> cst.Module:
    """``after`` without the imports that ``before`` used and ``after`` does not."""
    was_used = syntax.used_names(before)
    while True:
        now_used = syntax.used_names(after.code)
        gone = [
            item
            for item in of_module(after)
            if item.bound in was_used - now_used
            and item.module != "__future__"
            and item.alias not in (item.module, item.name or item.module)
        ]
        pruned = after
        for item in gone:
            pruned = _drop(pruned, item.origin)
        if pruned is after:
            return after
        after = pruned


def _drop(module: cst.Module, origin: tuple[str, str | None, str | None]) -> cst.Module:
    """``module`` without one imported name; imports in ``try`` blocks stay."""
    body = _without(list(module.body), origin, 0, module)
    for i, statement in enumerate(body):
        if not syntax.is_type_checking(statement):
            continue
        block = cst.ensure_type(statement, cst.If)
        old = list(syntax.body_of(block))
        inner = _without(list(old), origin, 4, module)
        if inner == old:
            continue
        if inner:
            body[i] = cst.ensure_type(syntax.with_body(block, inner), cst.If)
        elif block.orelse is None:
            del body[i]
        break
    if all(a is b for a, b in zip(body, module.body, strict=False)) and len(
        body
    ) == len(module.body):
        return module
    return module.with_changes(body=body)


def _without(
    body: list[Statement],
    origin: tuple[str, str | None, str | None],
    indent: int,
    like: cst.Module,
) -> list[Statement]:
    for i, statement in enumerate(body):
        small = _single(statement)
        if small is None or _has_comment(statement_code(statement)):
            continue
        items = list(_of_small(small, False))
        if origin not in [item.origin for item in items]:
            continue
        left = [item for item in items if item.origin != origin]
        if not left:
            return _deleted(body, i)
        if isinstance(small, cst.ImportFrom):
            assert not isinstance(small.names, cst.ImportStar)
            names = [
                _alias_text(alias)
                for alias, item in zip(small.names, items, strict=True)
                if item.origin != origin
            ]
            body[i] = _rewritten(statement, items[0].module, names, indent, like)
        else:
            text = "import " + ", ".join(str(item)[7:] for item in left)
            new = cst.ensure_type(
                syntax.parse_statements(text, like)[0], cst.SimpleStatementLine
            )
            body[i] = statement.with_changes(body=new.body)
        return body
    return body


def statement_code(statement: Statement) -> cst.CSTNode:
    """The statement without the comments above it."""
    return syntax.with_leading(statement, [])


def _deleted(body: list[Statement], at: int) -> list[Statement]:
    """Delete an import; the blank line above a section stays above what is left."""
    blanks = syntax.detached(syntax.leading(body[at]))
    if at + 1 < len(body) and _single(body[at + 1]) is not None:
        lines = syntax.leading(body[at + 1])
        is_first = at == 0 or _single(body[at - 1]) is None
        if is_first or not syntax.detached(lines):
            lines = [*blanks, *syntax.attached(lines)]
        body[at + 1] = syntax.with_leading(body[at + 1], lines)
    return [*body[:at], *body[at + 1 :]]
