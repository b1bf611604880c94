# SPDX-License-Identifier: Apache-2.0
"""CMake files: commands are anchors, everything around them stays."""

from __future__ import annotations

import pytest

from tools.series.cmake import apply_edit, commands
from tools.series.errors import Refusal
from tools.series.manifest import Anchor, Edit

SOURCE = """\
#[[ set(A not this) ]]
SET(A
  "a file.cpp") # upstream's
if(X AND (Y))
  # link the driver
  # library
  list(APPEND LIBS driver)
  list(APPEND LIBS other)
endif()
set(T [[set(A b)]])
"""


def edit(op: str, code: str, command: str, *arguments: str) -> str:
    anchor = Anchor("command", command, arguments)
    return apply_edit(SOURCE, Edit("CMakeLists.txt", op, code, anchor=anchor))


def test_reads_commands() -> None:
    assert [(c.name, c.arguments) for c in commands(SOURCE)] == [
        ("set", ("A", "a file.cpp")),
        ("if", ("X", "AND", "(", "Y", ")")),
        ("list", ("APPEND", "LIBS", "driver")),
        ("list", ("APPEND", "LIBS", "other")),
        ("endif", ()),
        ("set", ("T", "[[set(A b)]]")),
    ]


def test_replaces_a_command_with_its_comment() -> None:
    text = edit(
        "replace",
        "# open it late\nlist(APPEND LIBS dl)",
        "list",
        *("APPEND", "LIBS", "driver"),
    )
    old = "  # link the driver\n  # library\n  list(APPEND LIBS driver)\n"
    assert text == SOURCE.replace(old, "  # open it late\n  list(APPEND LIBS dl)\n")


def test_puts_commands_beside() -> None:
    last = "  list(APPEND LIBS other)\n"
    where = ("list", "APPEND", "LIBS", "other")
    assert edit("after", "foo()", *where) == SOURCE.replace(last, last + "  foo()\n")
    assert edit("before", "foo()", *where) == SOURCE.replace(last, "  foo()\n" + last)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("list", ("APPEND", "LIBS"), "the anchor is found 2 times"),
        ("list", ("REMOVE",), "the anchor is missing"),
        ("set", ("A",), "shares its line"),
    ],
)
def test_refuses(command: str, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        edit("after", "foo()", command, *arguments)
    assert f'command = "{command}"' in str(caught.value)


def test_refuses_code_that_is_not_closed() -> None:
    with pytest.raises(Refusal, match="not closed"):
        edit("after", "foo(", "set", "T")
