# SPDX-License-Identifier: Apache-2.0
"""The error texts in the sources, with ``...`` for what is filled in."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

GAP = "..."
LOG_LEVELS = {"warning", "error"}


def template(node: ast.AST) -> str | None:
    """The text of a literal or an f-string; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.\d)?[sdf]", GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) or GAP for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or GAP) + (template(node.right) or GAP)
    return None


def python_texts(path: Path) -> Iterator[str]:
    """What a file raises, and what it logs as a warning or an error."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            arguments = node.exc.args[:1]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LOG_LEVELS
        ):
            arguments = node.args[:1]
        else:
            continue
        for argument in arguments:
            text = template(argument)
            if text and text.strip(". "):
                yield text


def string_literals(path: Path) -> set[str]:
    """Every string of a file: Python's with gaps, C++'s joined as written."""
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(path.read_text()))
        return {text for node in nodes if (text := template(node))}
    joined = re.sub(r'"\s*\n\s*"', "", path.read_text())
    return set(re.findall(r'"((?:[^"\\\n]|\\.)+)"', joined))


def pieces(text: str) -> list[str]:
    """The parts between the gaps."""
    return [part.strip() for part in text.split(GAP) if part.strip()]


def matches(quoted: str, text: str) -> bool:
    """Whether what a document quotes, gaps aside, stands in the text in its order."""
    at = 0
    for piece in pieces(quoted):
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True
