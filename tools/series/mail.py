# SPDX-License-Identifier: Apache-2.0
"""What a mail says of its patch: the text that a reviewer upstream reads first."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import PurePosixPath

from benchmarks import tables
from tools.series.commits import Identity, Size
from tools.series.errors import Refusal
from tools.series.manifest import Patch, Result

ASSISTANCE = """\
AI assistance was used for the code, the tests and this text. Upstream asks whoever
submits such a change to have reviewed every line and run the tests; signing it off says
that you have."""
#: Below it, tests need a GPU.
ON_A_GPU = "tests/basic_correctness/"
#: Below it, tests compare with the released functions.
AGAINST_RELEASE = "tests/kernels/moe/"
_OF_THE_FORK = ("benchmarks/", "docs/", "tests/rehearsal")
_FORK = """\
Paths under benchmarks/, docs/ and tests/rehearsal/ are of the fork that this series
comes from; FORK and STOCK are folders that hold a `vllm` package."""
_MAKERS = {make.__name__: make for make in tables.FILES}


def message(patch: Patch, size: Size, who: Identity) -> str:
    """The commit message, signed off by ``who``.

    Raises ``Refusal`` where the patch names results that are not there.
    """
    parts = [
        patch.title,
        _section("Root cause", patch.why),
        _section("What changes", f"{patch.how.strip()}\n\n{count(size)}"),
        _section("Test plan", "\n\n".join([patch.tested.strip(), *_commands(patch)])),
        _section("Test result", results(patch)),
    ]
    if any(path in text for text in parts for path in _OF_THE_FORK):
        parts[-1] += f"\n\n{_FORK}"
    if patch.trade_offs:
        parts.append(_section("Trade-offs", patch.trade_offs))
    if patch.related:
        parts.append(_section("Related work", patch.related))
    parts += [
        _section("Obsolete when", patch.goes_when),
        _section("AI assistance", ASSISTANCE),
        f"Signed-off-by: {who}",
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text.strip()}"


def count(size: Size) -> str:
    """One line: how much there is to read, tests apart."""
    return (
        f"{size.changed_lines} changed lines in {_files(size.changed)} of upstream; "
        f"{size.new_lines} lines in {_files(size.new, 'new ')}; "
        f"{size.test_lines} lines in {_files(size.tests, 'test ')}."
    )


def _files(lines: dict[str, int], kind: str = "") -> str:
    return f"{len(lines)} {kind}file{'s' * (len(lines) != 1)}"


def tests(patch: Patch) -> list[str]:
    """The test files that the patch brings or changes."""
    names = [path for path in patch.paths() if path.startswith("tests/")]
    return [path for path in names if PurePosixPath(path).name.startswith("test_")]


def _commands(patch: Patch) -> list[str]:
    """Command lines for the patch's tests, those that need a GPU apart."""
    anywhere = [path for path in tests(patch) if not path.startswith(ON_A_GPU)]
    on_a_gpu = [path for path in tests(patch) if path.startswith(ON_A_GPU)]
    return [
        f"{where}:\n\n{_command(paths)}"
        for where, paths in (("No GPU needed", anywhere), ("On a GPU", on_a_gpu))
        if paths
    ]


def _command(paths: list[str]) -> str:
    lines = ["python -m pytest", *paths]
    if any(path.startswith(AGAINST_RELEASE) for path in paths):
        # A folder that `pip install --no-deps --target` has filled.
        lines.insert(0, "VLLM_RELEASE=FOLDER_WITH_THE_RELEASED_VLLM")
    return "    " + " \\\n        ".join(lines)


def results(patch: Patch) -> str:
    """The rows that speak of the patch, below what they ran on."""
    if not patch.results:
        return "The tests above; there is no measurement of this patch by itself."
    lines = dict.fromkeys(
        line for one in patch.results for line in tables.provenance(_maker(patch, one))
    )
    return "\n\n".join([*(_rows(patch, one) for one in patch.results), *lines])


def _maker(patch: Patch, result: Result) -> Callable[[], str]:
    if result.table not in _MAKERS:
        known = ", ".join(sorted(_MAKERS))
        raise Refusal(f"no table {result.table!r}; there are {known}", patch=patch.id)
    return _MAKERS[result.table]


def _rows(patch: Patch, result: Result) -> str:
    make = _maker(patch, result)
    head, rule, *rows = make().splitlines()
    for start in result.rows:
        if not any(row.startswith(f"| {start}") for row in rows):
            raise Refusal(f"{result.table} has no row {start!r}", patch=patch.id)
    if result.rows:
        rows = [r for r in rows if r.startswith(tuple(f"| {s}" for s in result.rows))]
    text = "\n".join([head, rule, *rows])
    return "\n\n".join([inspect.getdoc(make) or "", text])
