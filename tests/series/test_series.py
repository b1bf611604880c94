# SPDX-License-Identifier: Apache-2.0
"""The series as a whole: order, notices, refusals, and the command line."""

from __future__ import annotations

from typing import Any

import pytest

from tools.series import notice
from tools.series.base import open_base
from tools.series.cli import main
from tools.series.manifest import load
from tools.series.series import apply_series


def test_later_patches_see_earlier_ones(world: Any) -> None:
    world.edit('within = "load"\nop = "append"\ncode = "one()"')
    world.edit('within = "load"\nop = "after"\nanchor = {call = "one"}\ncode = "two()"')
    text = world.result()
    assert text.endswith("    one()\n    two()\n")
    assert text.count(notice.WORDS) == 1


def test_the_notice_stands_behind_the_spdx_lines(world: Any) -> None:
    world.edit('within = "load"\nop = "append"\ncode = "one()"')
    lines = world.result().splitlines()
    assert lines[2] == f"# {notice.WORDS}"
    series = load(world.repo)
    (done,) = apply_series(series, open_base(world.base, series.bases), notices=False)
    assert notice.WORDS not in done.changes[0].after.decode()


def test_a_base_with_the_notice_is_refused(world: Any) -> None:
    patch = world.edit('within = "load"\nop = "append"\ncode = "one()"')
    world.upstream("vllm/pool.py", world.result())
    assert world.refusal() == (
        f"{patch}: vllm/pool.py: the series is already applied here"
    )


def test_a_new_file_that_is_there_is_refused(world: Any) -> None:
    world.ours("vllm/new.py", "x = 1\n")
    patch = world.patch("[[new_files]]\npaths = ['vllm/new.py']")
    world.upstream("vllm/new.py", "x = 2\n")
    said = "the base has a file of this name"
    assert world.refusal() == f"{patch}: vllm/new.py: {said}"


def test_a_file_that_is_gone_is_refused(world: Any) -> None:
    patch = world.edit('op = "append"\ncode = "one()"', path="vllm/gone.py")
    assert world.refusal() == f"{patch}: vllm/gone.py: the base has no such file"


def test_a_patch_without_effect_is_refused(world: Any) -> None:
    patch = world.fragment("class Pool:\n    size = 1\n", ["Pool.size"])
    assert world.refusal() == (
        f"{patch}: vllm/pool.py: the patch changes nothing in this file"
    )


def test_a_base_that_is_not_python_is_refused(world: Any) -> None:
    patch = world.edit('op = "append"\ncode = "one()"')
    world.upstream("vllm/pool.py", "def (:\n")
    assert f"{patch}: vllm/pool.py: is not Python" in world.refusal()


def run(world: Any, *arguments: str) -> int:
    return main(["--root", str(world.repo), *arguments])


def test_command_line(world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    world.edit('within = "load"\nop = "append"\ncode = "one()"')
    assert run(world, "list") == 0
    assert capsys.readouterr().out == "0001-part  [Core] 0001-part  (1 file)\n"
    assert run(world, "check", str(world.base), "--alone") == 0
    assert "0001-part  applies  (1 changed, 0 new)" in capsys.readouterr().out
    assert run(world, "diff", str(world.base)) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("--- a/vllm/pool.py\n+++ b/vllm/pool.py\n")
    assert "\n+    one()\n" in shown
    assert run(world, "diff", str(world.base), "--patch", "0001-part") == 0
    assert capsys.readouterr().out == shown


def test_command_line_refuses_in_one_line(
    world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    world.edit('within = "load"\nop = "after"\nanchor = {call = "x"}\ncode = "y()"')
    assert run(world, "check", str(world.base)) == 1
    told = capsys.readouterr()
    assert told.err == (
        'series: 0001-part: vllm/pool.py: within load, anchor {call = "x"}: '
        "the anchor is missing\n"
    )
    with pytest.raises(SystemExit) as stopped:
        run(world, "mend")
    assert stopped.value.code == 2


def test_diff_can_be_applied_by_git(
    world: Any, run_git: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    world.upstream("vllm/pool.py", "x = 1")
    world.fragment("x = 2\n", ["x"])
    expected = world.result()
    run(world, "diff", str(world.base))
    patch = world.base.parent / "p.diff"
    patch.write_text(capsys.readouterr().out)
    run_git(world.base, "init", "-q")
    run_git(world.base, "apply", str(patch))
    assert (world.base / "vllm/pool.py").read_text() == expected
