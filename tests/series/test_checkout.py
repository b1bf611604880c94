# SPDX-License-Identifier: Apache-2.0
"""One commit per patch on a checkout, or nothing at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.series import base
from tools.series.checkout import apply_to_checkout
from tools.series.errors import Refusal
from tools.series.manifest import load


@pytest.fixture
def checkout(world: Any, run_git: Callable[..., str]) -> Path:
    world.upstream("tests/test_pool.py", "def test_it():\n    pass\n")
    run_git(world.base, "init", "-q", "-b", "main")
    run_git(world.base, "add", "-A")
    run_git(world.base, "commit", "-qm", "base")
    world.edit('within = "load"\nop = "append"\ncode = "one()"')
    world.ours("vllm/new.py", "x = 1\n")
    world.ours("csrc/pool_cuda.cpp", "// ours\n")
    world.patch(
        "[[new_files]]\npaths = ['csrc/pool_cuda.cpp', 'vllm/new.py']\n"
        "[[edits]]\npath = 'CMakeLists.txt'\nop = 'after'\n"
        "anchor = {command = 'set', argument = 'SRC'}\ncode = 'foo()'"
    )
    folder: Path = world.base
    return folder


def state(world: Any, run_git: Callable[..., str], folder: Path) -> tuple[str, ...]:
    told = ("rev-parse", "HEAD"), ("status", "--porcelain"), ("branch", "--list")
    return (world.digest(folder), *(run_git(folder, *command) for command in told))


def test_one_commit_per_patch(
    world: Any, checkout: Path, run_git: Callable[..., str]
) -> None:
    apply_to_checkout(load(world.repo), checkout)
    titles = run_git(checkout, "log", "--format=%s").splitlines()
    assert titles == ["[Core] 0002-part", "[Core] 0001-part", "base"]
    body = run_git(checkout, "log", "-1", "--format=%b")
    for words in ("because", "so", "Tested: here", "Series-Patch: 0002-part"):
        assert words in body
    assert run_git(checkout, "status", "--porcelain") == ""
    assert run_git(checkout, "branch", "--show-current") == "main\n"
    files = run_git(checkout, "show", "--name-only", "--format=", "HEAD").split()
    assert files == [
        "CMakeLists.txt",
        "csrc/pool_cuda.cpp",
        "vllm/new.py",
    ]
    assert (checkout / "csrc/pool_cuda.cpp").read_text() == "// ours\n"
    assert (checkout / "CMakeLists.txt").read_text().endswith("csrc/pool.cpp)\nfoo()\n")


def test_hooks_of_the_checkout_do_not_run(
    world: Any, checkout: Path, tmp_path: Path
) -> None:
    for name in ("pre-commit", "post-checkout", "reference-transaction", "post-commit"):
        hook = checkout / ".git/hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/trap\nexit 1\n")
        hook.chmod(0o755)
    apply_to_checkout(load(world.repo), checkout)
    assert not (tmp_path / "trap").exists()


def refused(world: Any, checkout: Path, run_git: Callable[..., str]) -> str:
    before = state(world, run_git, checkout)
    with pytest.raises(Refusal) as caught:
        apply_to_checkout(load(world.repo), checkout)
    assert state(world, run_git, checkout) == before
    return str(caught.value)


def test_refuses_a_second_time(
    world: Any, checkout: Path, run_git: Callable[..., str]
) -> None:
    apply_to_checkout(load(world.repo), checkout)
    said = refused(world, checkout, run_git)
    assert said == "0001-part: vllm/pool.py: the series is already applied here"


def test_refuses_changes_that_are_not_committed(
    world: Any, checkout: Path, run_git: Callable[..., str]
) -> None:
    world.upstream("vllm/pool.py", "x = 1\n")
    assert "uncommitted changes (M vllm/pool.py)" in refused(world, checkout, run_git)
    run_git(checkout, "add", "-A")
    assert "uncommitted changes" in refused(world, checkout, run_git)


def test_refuses_an_untracked_file_in_the_way(
    world: Any, checkout: Path, run_git: Callable[..., str]
) -> None:
    world.upstream("vllm/new.py", "y = 2\n")
    said = refused(world, checkout, run_git)
    assert said == "0002-part: vllm/new.py: the base has a file of this name"


def test_refuses_a_folder_inside_a_checkout(
    world: Any, checkout: Path, run_git: Callable[..., str]
) -> None:
    with pytest.raises(Refusal, match="is not the top folder of a git checkout"):
        apply_to_checkout(load(world.repo), checkout / "vllm")


def test_a_patch_that_does_not_fit_stops_all(
    world: Any, checkout: Path, run_git: Callable[..., str]
) -> None:
    world.edit('within = "load"\nop = "after"\nanchor = {call = "x"}\ncode = "y()"')
    said = refused(world, checkout, run_git)
    assert said.startswith("0003-part: vllm/pool.py: within load, anchor {call")


def test_a_branch_that_cannot_move_leaves_the_tree(
    world: Any,
    checkout: Path,
    run_git: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = base.git

    def failing(folder: Path, *arguments: str, **options: Any) -> str:
        if arguments[0] == "update-ref":
            raise Refusal("git update-ref: locked")
        return real(folder, *arguments, **options)

    monkeypatch.setattr("tools.series.checkout.git", failing)
    assert "locked" in refused(world, checkout, run_git)
