# SPDX-License-Identifier: Apache-2.0
"""Manifests: every key is known, every definition has exactly one owner."""

from __future__ import annotations

from typing import Any

import pytest

from tools.series.errors import Refusal
from tools.series.manifest import load


def refused(world: Any) -> str:
    with pytest.raises(Refusal) as caught:
        load(world.repo)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("extra = 1", "unknown key 'extra'"),
        ("[new_files]\npaths = []", "write it as [[new_files]]"),
        ("[[new_files]]\npath = 'x'", "unknown key 'path'"),
        ("[[new_files]]\npaths = ['vllm/gone.py']", "vllm/gone.py: there is no such"),
        ("[[edits]]\npath = 'a'\nop = 'mend'\ncode = 'x'", "a: op 'mend' is none of"),
        ("[[edits]]\npath = 'a'\nop = 'after'\ncode = 'x'", "needs an anchor"),
        (
            "[[edits]]\npath = 'a'\nop = 'remove'\ncode = 'x'\nanchor = {call = 'f'}",
            "remove has none",
        ),
        (
            "[[edits]]\npath = 'a'\nop = 'after'\ncode = 'x'\n"
            "anchor = {call = 'f', assign = 'x'}",
            "names exactly one of",
        ),
        (
            "[[edits]]\npath = 'a'\nop = 'after'\ncode = 'x'\n"
            "anchor = {call = 'f', nth = 2}",
            "unknown key 'nth'",
        ),
        (
            "[[edits]]\npath = 'a'\nop = 'after'\ncode = 'x'\n"
            "anchor = {call = 'f', inside = 'loop'}",
            "inside is an anchor or one of",
        ),
        ("[[definitions]]\npath = 'a'", "a: give names or remove"),
        ("[[", "the manifest is not TOML"),
    ],
)
def test_refuses_a_manifest(world: Any, tables: str, message: str) -> None:
    patch = world.patch(tables)
    said = refused(world)
    assert said.startswith(f"{patch}: ")
    assert message in said


def test_refuses_a_patch_that_does_not_say_why(world: Any) -> None:
    world.patch("")
    path = world.repo / "series/0001-part.toml"
    path.write_text(path.read_text().replace('why = "because"', 'why = " "'))
    assert refused(world) == "0001-part: 'why' must be a text that is not empty"


def test_refuses_a_predecessor_that_comes_later(world: Any) -> None:
    world.patch("", requires="['0002-part']")
    world.patch("")
    assert "0001-part: requires '0002-part'" in refused(world)


def test_refuses_a_definition_without_an_owner(world: Any) -> None:
    world.fragment("class Pool:\n    a = 1\n    b = 2\n\n\nc = 3\n", ["Pool.a"])
    assert refused(world) == "vllm/pool.py: no patch owns Pool.b, c"
    assert load(world.repo, allow_unowned=True).patches


def test_refuses_a_definition_with_two_owners(world: Any) -> None:
    world.fragment("c = 3\n", ["c"])
    world.fragment("c = 3\n", ["c"])
    assert refused(world) == "0002-part: vllm/pool.py: 0001-part owns c too"


def test_refuses_a_name_that_the_fragment_lacks(world: Any) -> None:
    world.fragment("c = 3\n", ["c", "d"])
    assert refused(world) == "0001-part: vllm/pool.py: the fragment has no d"


def test_refuses_a_file_without_an_owner(world: Any) -> None:
    world.ours("vllm/new.py", "x = 1\n")
    world.ours("tests/test_new.py", "x = 1\n")
    world.ours("tests/series/test_ours.py", "x = 1\n")
    assert refused(world) == "no patch owns tests/test_new.py, vllm/new.py"


def test_refuses_loose_statements_in_a_fragment(world: Any) -> None:
    world.fragment("c = 3\nprint(c)\n", ["c"])
    assert "a fragment holds imports, definitions" in refused(world)


def test_closure_has_the_stated_predecessors(world: Any) -> None:
    world.patch("")
    world.patch("")
    world.patch("", requires="['0001-part']")
    series = load(world.repo)
    alone = series.closure(series.patches[2])
    assert [patch.id for patch in alone.patches] == ["0001-part", "0003-part"]
