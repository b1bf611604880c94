# SPDX-License-Identifier: Apache-2.0
"""Questions about Python source that every part of the engine asks."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence
from typing import cast

import libcst as cst

from tools.series.errors import Refusal

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Body = Sequence[Statement]


def parse(text: str) -> cst.Module:
    """Parse a file, and make sure that it comes back with the same bytes."""
    try:
        module = cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        message = str(error).splitlines()[0]
        raise Refusal(f"is not Python that LibCST reads: {message}") from error
    if module.code != text:
        raise Refusal("LibCST does not give this file back byte for byte")
    return module


def parse_fragment(text: str) -> cst.Module:
    """Parse a file of ours; a comment that touches its first definition belongs to it.

    LibCST counts it to the file's header.
    """
    module = parse(text)
    above = attached(module.header)
    if not module.body or not detached(module.header) or not above:
        return module
    first = with_leading(body_of(module)[0], [*above, *leading(body_of(module)[0])])
    return module.with_changes(
        header=detached(module.header), body=[first, *module.body[1:]]
    )


class _WithoutMargins(cst.CSTTransformer):
    """Blank lines without white space, also when the code is indented later."""

    def leave_EmptyLine(
        self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine
    ) -> cst.EmptyLine:
        if updated_node.comment is None and not updated_node.whitespace.value:
            return updated_node.with_changes(indent=False)
        return updated_node


def parse_statements(code: str, like: cst.Module) -> list[Statement]:
    """Statements of ours, in the newline and indentation style of ``like``.

    Comments above the first statement stay with it.
    """
    config = like.config_for_parsing
    text = textwrap.dedent(code).strip("\n") + "\n"
    try:
        module = cst.parse_module(text, config)
    except cst.ParserSyntaxError as error:
        message = str(error).splitlines()[0]
        raise Refusal(f"the patch's code is not Python: {message}") from error
    if not module.body:
        raise Refusal("the patch's code holds no statement")
    if any(line.comment for line in module.footer):
        raise Refusal("a comment after the last statement would be lost: move it up")
    module = module.visit(_WithoutMargins())
    body = list(body_of(module))
    body[0] = with_leading(body[0], [*module.header, *leading(body[0])])
    return body


def parse_expression(code: str, like: cst.Module) -> cst.BaseExpression:
    try:
        parsed = cst.parse_expression(code.strip(), like.config_for_parsing)
    except cst.ParserSyntaxError as error:
        raise Refusal(f"the patch's code is not an expression: {code!r}") from error
    return cast(cst.BaseExpression, parsed.visit(_WithoutMargins()))


def code_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def canonical(expression: str) -> str:
    """An expression without its layout, so that two spellings compare equal."""
    try:
        return ast.unparse(ast.parse(f"(\n{expression}\n)", mode="eval"))
    except SyntaxError:
        return expression.strip()


def tail(node: cst.CSTNode) -> str:
    """The dotted name at the end of an expression: ``x().a.b`` gives ``a.b``."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = tail(node.value)
        return f"{before}.{node.attr.value}" if before else node.attr.value
    return ""


def leading(statement: Statement) -> Sequence[cst.EmptyLine]:
    lines: Sequence[cst.EmptyLine] = getattr(statement, "leading_lines", ())
    return lines


def with_leading(statement: Statement, lines: Sequence[cst.EmptyLine]) -> Statement:
    return statement.with_changes(leading_lines=list(lines))


def attached(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """The comment lines that touch a statement, without the blank lines above."""
    comments: list[cst.EmptyLine] = []
    for line in reversed(lines):
        if line.comment is None:
            break
        comments.insert(0, line)
    return comments


def detached(lines: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """The lines above a statement that are not its own comment."""
    return list(lines[: len(lines) - len(attached(lines))])


def blank() -> cst.EmptyLine:
    return cst.EmptyLine(indent=False)


def body_of(node: cst.CSTNode) -> Body:
    """The statements inside a module, class, function or other block."""
    if isinstance(node, cst.Module):
        return node.body
    block = getattr(node, "body", None)
    if isinstance(block, cst.IndentedBlock):
        return cast(Body, block.body)
    raise Refusal("its body stands on the same line, so nothing can be put into it")


def with_body(node: cst.CSTNode, body: Body) -> cst.CSTNode:
    """The same module, class, function or block with other statements."""
    if isinstance(node, cst.Module):
        return node.with_changes(body=list(body))
    block = cst.ensure_type(getattr(node, "body"), cst.IndentedBlock)  # noqa: B009
    return node.with_changes(body=block.with_changes(body=list(body)))


def binds(statement: cst.CSTNode) -> tuple[str, ...]:
    """Names that a definition or an assignment binds; imports bind none here."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return (statement.name.value,)
    if not isinstance(statement, cst.SimpleStatementLine):
        return ()
    names: list[str] = []
    for small in statement.body:
        if isinstance(small, cst.Assign):
            for target in small.targets:
                names.extend(_target_names(target.target))
        elif isinstance(small, cst.AnnAssign):
            names.extend(_target_names(small.target))
    return tuple(names)


def _target_names(target: cst.CSTNode) -> Iterator[str]:
    if isinstance(target, cst.Name):
        yield target.value
    elif isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from _target_names(element.value)


def is_docstring(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and len(statement.body) == 1
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(
            statement.body[0].value, cst.SimpleString | cst.ConcatenatedString
        )
    )


def is_type_checking(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.If) and tail(statement.test).split(".")[-1] == (
        "TYPE_CHECKING"
    )


def used_names(text: str) -> set[str]:
    """Names that a module reads, also in quoted annotations and ``__all__``."""
    names: set[str] = set()
    quoted: list[ast.AST] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load | ast.Del):
            names.add(node.id)
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            quoted.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            quoted.append(node.returns)
        elif isinstance(node, ast.Call) and _ends_with(node.func, "cast"):
            quoted.extend(node.args[:1])
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
                names.update(_strings(node.value))
    for annotation in quoted:
        for string in _strings(annotation):
            try:
                inner = ast.parse(string, mode="eval")
            except SyntaxError:
                continue
            names.update(n.id for n in ast.walk(inner) if isinstance(n, ast.Name))
    return names


def _ends_with(function: ast.expr, name: str) -> bool:
    return getattr(function, "attr", getattr(function, "id", None)) == name


def _strings(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value
