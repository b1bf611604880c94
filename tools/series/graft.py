# SPDX-License-Identifier: Apache-2.0
"""Replace, add and remove whole definitions of a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import libcst as cst

from tools.series import syntax
from tools.series.errors import Refusal
from tools.series.manifest import Definitions, is_import_part
from tools.series.syntax import Statement

AFTER_IMPORTS = "imports"


def graft(base: cst.Module, fragment: cst.Module, part: Definitions) -> cst.Module:
    """``base`` with the named definitions of ``fragment`` in it.

    A definition that ``base`` has is replaced where it stands, with the comment that
    touches it. A new one goes behind ``part.after``; without that, a method goes to
    the end of its class, a class attribute behind the last one, and anything else to
    the end of the module. Raises ``Refusal`` when a name is missing or doubled.
    """
    after = part.after
    for name in part.names:
        nodes = _named(fragment, name)

        def put(
            container: cst.CSTNode,
            last: str,
            nodes: list[Statement] = nodes,
            after: str | None = after,
            name: str = name,
        ) -> list[Statement]:
            body = list(syntax.body_of(container))
            found = _find(body, last)
            if found:
                return _replace(body, found, nodes, name)
            place = after.rpartition(".")[2] if after else None
            return _insert(container, body, nodes, place)

        is_new = not _has(base, name)
        base = _update(base, name, put)
        after = name if part.after and is_new else after
    for name in part.remove:
        base = _update(base, name, _remove)
    return base


def owned_text(fragment: cst.Module, names: Sequence[str]) -> str:
    """The source of the named definitions alone, for asking which names they use."""
    found = [node for name in names for node in _named(fragment, name)]
    return cst.Module(body=found).code


def _update(
    base: cst.Module,
    name: str,
    change: Callable[[cst.CSTNode, str], list[Statement]],
) -> cst.Module:
    """``base`` with the body of the class (or module) that holds ``name`` changed."""

    def descend(container: cst.CSTNode, path: list[str]) -> cst.CSTNode:
        try:
            if len(path) == 1:
                return syntax.with_body(container, change(container, path[0]))
            body = list(syntax.body_of(container))
            found = [i for i in _find(body, path[0]) if _is_class(body[i])]
            if len(found) != 1:
                raise Refusal(_count(f"class {path[0]}", len(found)))
            at = found[0]
            body[at] = cst.ensure_type(descend(body[at], path[1:]), cst.ClassDef)
        except Refusal as refusal:
            if refusal.anchor is None:
                refusal.anchor = f"definition {name}"
            raise
        return syntax.with_body(container, body)

    return cst.ensure_type(descend(base, name.split(".")), cst.Module)


def _named(module: cst.Module, name: str) -> list[Statement]:
    container: cst.CSTNode = module
    *classes, last = name.split(".")
    for part in classes:
        body = syntax.body_of(container)
        container = body[_find(body, part)[0]]
    body = syntax.body_of(container)
    return [body[i] for i in _find(body, last)]


def _has(module: cst.Module, name: str) -> bool:
    try:
        return bool(_named(module, name))
    except (IndexError, Refusal):
        return False


def _find(body: Sequence[Statement], name: str) -> list[int]:
    return [i for i, statement in enumerate(body) if name in syntax.binds(statement)]


def _is_class(statement: Statement) -> bool:
    return isinstance(statement, cst.ClassDef)


def _count(what: str, found: int) -> str:
    return f"{what} is missing" if found == 0 else f"{what} is found {found} times"


def _replace(
    body: list[Statement], found: list[int], nodes: list[Statement], name: str
) -> list[Statement]:
    old = [body[i] for i in found]
    if len(found) > 1 and not all(map(_is_one_of_many, old)):
        raise Refusal(_count("it", len(found)))
    bound = {n for statement in old for n in syntax.binds(statement)}
    if bound != {n for statement in nodes for n in syntax.binds(statement)}:
        raise Refusal(f"the base binds {', '.join(sorted(bound))} in one statement")
    first, *rest = nodes
    lines = syntax.leading(first)
    above = syntax.detached(syntax.leading(old[0]))
    new = [syntax.with_leading(first, [*above, *syntax.attached(lines)]), *rest]
    kept: list[Statement] = []
    for i, statement in enumerate(body):
        if i == found[0]:
            kept.extend(new)
        elif i not in found:
            kept.append(statement)
    return kept


def _is_one_of_many(statement: Statement) -> bool:
    """Whether a name may be defined again: overloads, and a property's parts."""
    if not isinstance(statement, cst.FunctionDef):
        return False
    decorators = [syntax.tail(d.decorator).split(".")[-1] for d in statement.decorators]
    parts = {"overload", "property", "cached_property", "setter", "getter", "deleter"}
    return bool(parts & set(decorators)) or not decorators


def _insert(
    container: cst.CSTNode,
    body: list[Statement],
    nodes: list[Statement],
    after: str | None,
) -> list[Statement]:
    in_class = isinstance(container, cst.ClassDef)
    at = _place(body, nodes[0], in_class, after)
    is_block = isinstance(nodes[0], cst.FunctionDef | cst.ClassDef)
    gap = (1 if in_class else 2) if is_block else None
    first, *rest = nodes
    lines = syntax.leading(first)
    above = (
        syntax.detached(lines)
        if gap is None
        else [syntax.blank()] * (gap if at > 0 else 0)
    )
    new = [syntax.with_leading(first, [*above, *syntax.attached(lines)]), *rest]
    if gap is not None and at < len(body):
        below = list(syntax.leading(body[at]))
        missing = gap - sum(line.comment is None for line in below)
        body[at] = syntax.with_leading(body[at], [syntax.blank()] * missing + below)
    return [*body[:at], *new, *body[at:]]


def _place(
    body: list[Statement], new: Statement, in_class: bool, after: str | None
) -> int:
    if after == AFTER_IMPORTS and not in_class:
        return 1 + max((i for i, s in enumerate(body) if is_import_part(s)), default=-1)
    if after is not None:
        found = _find(body, after)
        if not found:
            raise Refusal(f"after = {after!r} is missing")
        return found[-1] + 1
    if in_class and isinstance(new, cst.SimpleStatementLine):
        at = 0
        while at < len(body) and isinstance(body[at], cst.SimpleStatementLine):
            at += 1
        return at
    last = body[-1] if body else None
    if (
        not in_class
        and isinstance(last, cst.If)
        and "__name__" in syntax.code_of(last.test)
    ):
        return len(body) - 1
    return len(body)


def _remove(container: cst.CSTNode, name: str) -> list[Statement]:
    body = list(syntax.body_of(container))
    found = _find(body, name)
    old = [body[i] for i in found]
    if not found or (len(found) > 1 and not all(map(_is_one_of_many, old))):
        raise Refusal(_count("it", len(found)))
    if any(len(syntax.binds(statement)) > 1 for statement in old):
        raise Refusal("the base binds more names in the same statement")
    left = [statement for i, statement in enumerate(body) if i not in found]
    if not left:
        raise Refusal("its class or module would be empty")
    return left
