# SPDX-License-Identifier: Apache-2.0
"""Structural edits: one statement or expression inside a longer definition.

An anchor is code structure (see ``manifest.Anchor``) and must be found exactly once in
its scope, so that a base that has moved is never half patched.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst

from tools.series import imports, syntax
from tools.series.errors import Refusal
from tools.series.manifest import Anchor, Edit
from tools.series.syntax import Body, Statement

PLACEHOLDER = "{original}"
_LITERALS: dict[str, type[cst.BaseExpression]] = {
    "dict": cst.Dict,
    "list": cst.List,
    "set": cst.Set,
}


@dataclass(frozen=True)
class Match:
    """A node, the expression that an op may wrap, and the nodes around it from the
    module inwards."""

    node: cst.CSTNode
    expression: cst.BaseExpression | None
    around: tuple[cst.CSTNode, ...]

    def put(self, new: cst.CSTNode | list[Statement]) -> cst.Module:
        """The module with this node replaced by a node or by statements."""
        old = self.node
        for parent in reversed(self.around):
            new = _with_child(parent, old, new)
            old = parent
        assert isinstance(new, cst.Module)
        return new


def _with_child(
    parent: cst.CSTNode, old: cst.CSTNode, new: cst.CSTNode | list[Statement]
) -> cst.CSTNode:
    for field in dataclasses.fields(parent):
        value = getattr(parent, field.name)
        if value is old:
            return parent.with_changes(**{field.name: new})
        if isinstance(value, list | tuple) and any(item is old for item in value):
            put = new if isinstance(new, list) else [new]
            at = next(i for i, item in enumerate(value) if item is old)
            return parent.with_changes(
                **{field.name: [*value[:at], *put, *value[at + 1 :]]}
            )
    raise AssertionError("a node's parent does not hold it")


def apply_edit(module: cst.Module, edit: Edit) -> cst.Module:
    """``module`` after one edit. Raises ``Refusal`` and changes nothing otherwise."""
    try:
        scope = _scope(module, edit.within)
        match = scope if edit.anchor is None else _find(scope, edit.anchor)
        return _OPS[edit.op](module, match, edit)
    except Refusal as refusal:
        refusal.anchor = refusal.anchor or str(edit)
        raise


def _scope(module: cst.Module, within: str | None) -> Match:
    scope = Match(module, None, ())
    for name in within.split(".") if within else ():
        found = [
            statement
            for statement in syntax.body_of(scope.node)
            if isinstance(statement, cst.FunctionDef | cst.ClassDef)
            and statement.name.value == name
        ]
        if len(found) != 1:
            raise Refusal(f"{name} is {_times(len(found))}")
        around = [*scope.around, scope.node]
        if not isinstance(scope.node, cst.Module):
            around.append(getattr(scope.node, "body"))  # noqa: B009
        scope = Match(found[0], None, tuple(around))
    return scope


def _times(count: int) -> str:
    return "missing" if count == 0 else f"found {count} times"


def _search(
    node: cst.CSTNode,
    around: tuple[cst.CSTNode, ...],
    test: Callable[[cst.CSTNode], cst.CSTNode | None],
) -> Iterator[Match]:
    """Every node at or below ``node`` for which ``test`` gives something."""
    given = test(node)
    if given is not None:
        value = given if isinstance(given, cst.BaseExpression) else None
        yield Match(node, value, around)
    inner = (*around, node)
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        for child in value if isinstance(value, list | tuple) else (value,):
            # White space and comments are nodes too, and most of them.
            if isinstance(child, cst.CSTNode) and not isinstance(child, _LAYOUT):
                yield from _search(child, inner, test)


_LAYOUT = (
    cst.BaseParenthesizableWhitespace,
    cst.Comma,
    cst.EmptyLine,
    cst.TrailingWhitespace,
)


def _find(scope: Match, anchor: Anchor) -> Match:
    matches = _search(scope.node, scope.around, lambda node: _matches(node, anchor))
    found = [match for match in matches if _is_inside(match, anchor.inside)]
    if len(found) != 1:
        raise Refusal(f"the anchor is {_times(len(found))}")
    return found[0]


def _matches(node: cst.CSTNode, anchor: Anchor) -> cst.CSTNode | None:
    """The expression that belongs to the anchor if ``node`` is one, else None.

    A ``try`` has no expression of its own, so it stands for itself.
    """
    kind, _, by_call = anchor.kind.partition("_")
    if anchor.kind == "call":
        return node if _is_call(node, anchor) else None
    if kind == "try":
        if not isinstance(node, cst.Try | cst.TryStar):
            return None
        modules = [item.module for item in imports.imported(node.body.body)]
        return node if anchor.value in modules else None
    if anchor.kind in ("assign", "dict", "set", "list"):
        return _assigned(node, anchor)
    for header in _headers(node, kind):
        if by_call and _contains_call(header, anchor):
            return header
        if not by_call and syntax.canonical(syntax.code_of(header)) == (
            syntax.canonical(anchor.value)
        ):
            return header
    return None


def _headers(node: cst.CSTNode, kind: str) -> list[cst.BaseExpression]:
    if (kind == "if" and isinstance(node, cst.If)) or (
        kind == "while" and isinstance(node, cst.While)
    ):
        return [node.test]
    if kind == "for" and isinstance(node, cst.For):
        return [node.iter]
    if kind == "with" and isinstance(node, cst.With):
        return [item.item for item in node.items]
    if kind == "return" and isinstance(node, cst.Return) and node.value:
        return [node.value]
    return []


def _is_call(node: cst.CSTNode, anchor: Anchor) -> bool:
    if not isinstance(node, cst.Call):
        return False
    name = syntax.tail(node.func)
    if name != anchor.value and not name.endswith("." + anchor.value):
        return False
    given = {arg.keyword.value for arg in node.args if arg.keyword}
    given |= {
        syntax.canonical(syntax.code_of(arg.value))
        for arg in node.args
        if not arg.keyword
    }
    return given >= {syntax.canonical(argument) for argument in anchor.arguments}


def _contains_call(expression: cst.CSTNode, anchor: Anchor) -> bool:
    calls = _search(expression, (), lambda n: n if _is_call(n, anchor) else None)
    return any(calls)


def _assigned(node: cst.CSTNode, anchor: Anchor) -> cst.CSTNode | None:
    targets: list[cst.CSTNode]
    if isinstance(node, cst.Assign):
        targets = [target.target for target in node.targets]
    elif isinstance(node, cst.AnnAssign | cst.AugAssign):
        targets = [node.target]
    else:
        return None
    wanted = syntax.canonical(anchor.value)
    if wanted not in [syntax.canonical(syntax.code_of(target)) for target in targets]:
        return None
    literal = _LITERALS.get(anchor.kind)
    value = node.value
    return value if literal is None or isinstance(value, literal) else None


_KINDS: dict[str, tuple[type[cst.CSTNode], ...]] = {
    "if": (cst.If,),
    "else": (cst.Else,),
    "for": (cst.For,),
    "while": (cst.While,),
    "with": (cst.With,),
    "try": (cst.Try, cst.TryStar),
    "except": (cst.ExceptHandler, cst.ExceptStarHandler),
    "finally": (cst.Finally,),
    "def": (cst.FunctionDef,),
}


def _is_inside(match: Match, inside: str | Anchor | None) -> bool:
    if inside is None:
        return True
    around = _nearest(match).around
    if isinstance(inside, Anchor):
        return any(
            _matches(node, inside) is not None
            and _is_inside(Match(node, None, around[:i]), inside.inside)
            for i, node in enumerate(around)
        )
    known = tuple(kind for kinds in _KINDS.values() for kind in kinds)
    blocks = [node for node in around if isinstance(node, known)]
    return bool(blocks) and isinstance(blocks[-1], _KINDS[inside])


def _nearest(match: Match) -> Match:
    """The innermost whole statement that the match is, or is a part of."""
    chain = (*match.around, match.node)
    for i in reversed(range(len(chain))):
        node = chain[i]
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            return Match(node, None, chain[:i])
    raise Refusal("the anchor is not inside a statement that stands on its own line")


def _statement(match: Match) -> tuple[Match, Statement]:
    """As ``_nearest``, for ops that put something beside the statement."""
    found = _nearest(match)
    if isinstance(found.node, cst.If) and isinstance(found.around[-1], cst.If):
        raise Refusal("the anchor is an elif, which cannot have a neighbour")
    assert isinstance(found.node, cst.SimpleStatementLine | cst.BaseCompoundStatement)
    return found, found.node


def _alone(statement: Statement) -> Statement:
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) > 1:
        raise Refusal("the anchor shares its line with another statement")
    return statement


def _after(module: cst.Module, match: Match, edit: Edit) -> cst.Module:
    place, statement = _statement(match)
    return place.put([statement, *syntax.parse_statements(edit.code, module)])


def _before(module: cst.Module, match: Match, edit: Edit) -> cst.Module:
    place, statement = _statement(match)
    lines = syntax.leading(statement)
    first, *rest = syntax.parse_statements(edit.code, module)
    first = syntax.with_leading(
        first, [*syntax.detached(lines), *syntax.leading(first)]
    )
    kept = syntax.with_leading(statement, syntax.attached(lines))
    return place.put([first, *rest, kept])


def _replace(module: cst.Module, match: Match, edit: Edit) -> cst.Module:
    place, statement = _statement(match)
    above = syntax.detached(syntax.leading(_alone(statement)))
    first, *rest = syntax.parse_statements(edit.code, module)
    first = syntax.with_leading(first, [*above, *syntax.leading(first)])
    return place.put([first, *rest])


def _remove(module: cst.Module, match: Match, edit: Edit) -> cst.Module:
    place, statement = _statement(match)
    _alone(statement)
    if len(getattr(place.around[-1], "body", ())) == 1:
        raise Refusal("its block would be empty: replace it instead")
    return place.put([])


def _append(module: cst.Module, match: Match, edit: Edit) -> cst.Module:
    body = _block(match, edit)
    new = syntax.parse_statements(edit.code, module)
    return match.put(syntax.with_body(match.node, [*body, *new]))


def _prepend(module: cst.Module, match: Match, edit: Edit) -> cst.Module:
    body = _block(match, edit)
    at = 1 if body and syntax.is_docstring(body[0]) else 0
    new = syntax.parse_statements(edit.code, module)
    return match.put(syntax.with_body(match.node, [*body[:at], *new, *body[at:]]))


def _block(match: Match, edit: Edit) -> Body:
    if not isinstance(match.node, cst.BaseCompoundStatement | cst.Module):
        raise Refusal(f"op {edit.op!r} needs an anchor that has a block")
    return syntax.body_of(match.node)


_ATOMS = (
    cst.Attribute,
    cst.Call,
    cst.Dict,
    cst.Float,
    cst.Integer,
    cst.List,
    cst.Name,
    cst.Set,
    cst.SimpleString,
    cst.Subscript,
)


def _wrap(module: cst.Module, match: Match, edit: Edit) -> cst.Module:
    old = match.expression
    if old is None:
        raise Refusal("the anchor has no expression to wrap")
    if edit.code.count(PLACEHOLDER) > 1:
        raise Refusal(f"the code may hold {PLACEHOLDER} once")
    text = module.code_for_node(old)
    is_atom = isinstance(old, _ATOMS) or bool(getattr(old, "lpar", ()))
    text = text if is_atom else f"({text})"
    code = edit.code.strip().replace(PLACEHOLDER, text)
    return _expression(match).put(syntax.parse_expression(code, module))


def _expression(match: Match) -> Match:
    """Where the expression of a match stands, which may be inside its node."""
    wanted = match.expression
    inside = _search(match.node, match.around, lambda n: n if n is wanted else None)
    return next(inside)


def _argument(module: cst.Module, match: Match, edit: Edit) -> cst.Module:
    call = match.node
    if not isinstance(call, cst.Call):
        raise Refusal("op 'argument' needs a call as its anchor")
    shape = cst.ensure_type(
        syntax.parse_expression(f"f({edit.code.strip()})", module), cst.Call
    )
    if len(shape.args) != 1:
        raise Refusal(f"the code is not one argument: {edit.code!r}")
    new = shape.args[0].with_changes(whitespace_after_arg=cst.SimpleWhitespace(""))
    if not call.args:
        return match.put(call.with_changes(args=[new]))
    *others, last = call.args
    ends_with_comma = isinstance(last.comma, cst.Comma)
    opening = call.whitespace_before_args
    gap = (
        opening
        if isinstance(opening, cst.ParenthesizedWhitespace)
        else cst.SimpleWhitespace(" ")
    )
    new = new.with_changes(
        comma=last.comma, whitespace_after_arg=last.whitespace_after_arg
    )
    last = last.with_changes(
        comma=cst.Comma(whitespace_after=gap),
        whitespace_after_arg=(
            last.whitespace_after_arg if ends_with_comma else cst.SimpleWhitespace("")
        ),
    )
    return match.put(call.with_changes(args=[*others, last, new]))


def _entry(module: cst.Module, match: Match, edit: Edit) -> cst.Module:
    kind = _LITERALS[edit.op.removesuffix("_entry")]
    literal = match.expression
    if not isinstance(literal, cst.Dict | cst.Set | cst.List) or not isinstance(
        literal, kind
    ):
        raise Refusal(f"op {edit.op!r} needs such a literal as its anchor")
    is_list = kind is cst.List
    left, right = ("lbracket", "rbracket") if is_list else ("lbrace", "rbrace")
    brackets = "[]" if is_list else "{}"
    place = _expression(match)
    opening = getattr(literal, left).whitespace_after
    is_long = isinstance(opening, cst.ParenthesizedWhitespace)
    margin = opening.last_line.value if is_long else ""
    code = textwrap.indent(textwrap.dedent(edit.code).strip().rstrip(","), margin)
    given: Any = syntax.parse_expression(
        f"{brackets[0]}\n{code}\n{brackets[1]}", module
    )
    if type(given) is not type(literal) or len(given.elements) != 1:
        raise Refusal(f"the code is not one entry of a {edit.anchor}: {edit.code!r}")
    if not literal.elements:
        raise Refusal("the literal is empty: replace it instead")
    comments = getattr(given, left).whitespace_after.empty_lines
    closing = getattr(literal, right)
    *others, last = literal.elements
    new = given.elements[0]
    if not is_long:
        last = last.with_changes(
            comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        )
        new = new.with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return place.put(literal.with_changes(elements=[*others, last, new]))
    end = closing.whitespace_before
    if not isinstance(end, cst.ParenthesizedWhitespace):
        raise Refusal("the literal's closing bracket shares a line with an entry")
    gap = opening.with_changes(
        first_line=end.first_line, empty_lines=[*end.empty_lines, *comments]
    )
    end = end.with_changes(
        first_line=cst.TrailingWhitespace(newline=end.first_line.newline),
        empty_lines=[],
    )
    changed = literal.with_changes(
        elements=[
            *others,
            last.with_changes(comma=cst.Comma(whitespace_after=gap)),
            new.with_changes(comma=cst.Comma()),
        ],
        **{right: closing.with_changes(whitespace_before=end)},
    )
    return place.put(changed)


_OPS: dict[str, Callable[[cst.Module, Match, Edit], cst.Module]] = {
    "after": _after,
    "append": _append,
    "argument": _argument,
    "before": _before,
    "dict_entry": _entry,
    "list_entry": _entry,
    "prepend": _prepend,
    "remove": _remove,
    "replace": _replace,
    "set_entry": _entry,
    "wrap": _wrap,
}
