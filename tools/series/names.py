# SPDX-License-Identifier: Apache-2.0
"""Look for imports of upstream's names that a base does not have."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator


def missing(
    after: str, before: str | None, read: Callable[[str], bytes | None]
) -> list[str]:
    """Names of vllm that ``after`` imports, ``before`` did not, and nothing defines.

    ``read`` gives the bytes of a file of the base by its path, or None. A module that
    makes its names as it runs (a star import, ``__getattr__``) is taken to have all.
    """
    new = set(_imported(after)) - set(_imported(before or ""))
    return sorted(f"{m}.{n}" for m, n in new if not _has(m, n, read))


def _imported(text: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module.split(".")[0] == "vllm":
                yield from ((node.module, alias.name) for alias in node.names)


def _has(module: str, name: str, read: Callable[[str], bytes | None]) -> bool:
    path = module.replace(".", "/")
    for submodule in (f"{path}/{name}.py", f"{path}/{name}/__init__.py"):
        if read(submodule) is not None:
            return True
    text = read(f"{path}.py") or read(f"{path}/__init__.py")
    bound = set(_bound(ast.parse(text or b"")))
    return bool(bound & {name, "*", "__getattr__"})


def _bound(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((a.asname or a.name).split(".")[0] for a in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
