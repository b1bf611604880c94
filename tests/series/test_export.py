# SPDX-License-Identifier: Apache-2.0
"""Mails for upstream: what they say, what they carry, and that they apply."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.series import cli, export, mail
from tools.series.base import open_base
from tools.series.cli import ROOT
from tools.series.commits import Identity, Size
from tools.series.errors import Refusal
from tools.series.manifest import Patch, Result, Series, load
from tools.series.series import apply_series, final

WHO = Identity("A Tester", "tester@example.com")


@pytest.fixture
def two(world: Any) -> Any:
    """A patch that changes a file, and one beside it with a new file and a test."""
    world.edit('within = "load"\nop = "append"\ncode = "one()"')
    (world.base / "vllm/pool.py").chmod(0o755)
    world.ours("vllm/new.py", "x = 1\ny = 2\n")
    world.ours("tests/test_new.py", "def test_new():\n    pass\n")
    world.patch(
        "[[new_files]]\npaths = ['vllm/new.py', 'tests/test_new.py']\n"
        "[[edits]]\npath = 'vllm/pool.py'\nwithin = 'load'\nop = 'append'\n"
        "code = 'two()'",
        name="other",
    )
    return world


def run(world: Any, out: Path, *options: str) -> int:
    arguments = ["export", "--base", str(world.base), "--out", str(out), *options]
    return cli.main(["--root", str(world.repo), *arguments])


@pytest.fixture
def signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "gitconfig"
    config.write_text(
        "[user]\nname = Wrtr Ünïcode\nemail = w@example.com\n"
        "[format]\nsubjectPrefix = MINE\nsignOff = true\n[commit]\ngpgSign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))


def test_mails_apply_with_git_am(
    two: Any,
    signed: None,
    tmp_path: Path,
    run_git: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(two, tmp_path / "out") == 0
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    mails = sorted((tmp_path / "out").glob("*.patch"))
    assert [path.name for path in mails] == [
        "0001-Core-0001-part.patch",
        "0002-Core-0002-other.patch",
    ]
    run_git(two.base, "init", "-q")
    run_git(two.base, "add", "-A")
    run_git(two.base, "commit", "-qm", "base")
    run_git(two.base, "am", "-q", "--keep-non-patch", *map(str, mails))
    assert "100755" in run_git(two.base, "ls-tree", "HEAD", "vllm/pool.py")
    assert "index" in mails[0].read_text() and " 100755\n" in mails[0].read_text()
    titles = run_git(two.base, "log", "--reverse", "--format=%s").splitlines()
    assert titles == ["base", "[Core] 0001-part", "[Core] 0002-other"]
    assert (two.base / "vllm/pool.py").read_text().endswith("    one()\n    two()\n")
    body = run_git(two.base, "log", "-1", "--format=%an <%ae>%n%b")
    assert body.startswith("Wrtr Ünïcode <w@example.com>\n")
    assert body.rstrip().endswith("\nSigned-off-by: Wrtr Ünïcode <w@example.com>")
    assert body.count("Signed-off-by") == 1
    for words in ("## Root cause\n\nbecause", "so\n\n1 changed line", "here", "never"):
        assert words in body
    assert "    python -m pytest \\\n        tests/test_new.py" in body
    assert "AI assistance was used" in body
    assert "Modified from upstream" not in mails[0].read_text()


def test_index_says_what_each_mail_holds(
    two: Any, signed: None, tmp_path: Path
) -> None:
    assert run(two, tmp_path / "out") == 0
    index = json.loads((tmp_path / "out/index.json").read_text())
    assert index["base"] == "0.33.0"
    first, second = index["patches"]
    assert first["file"] == "0001-Core-0001-part.patch"
    assert first["changed_files"] == {"vllm/pool.py": 1}
    assert second["new_files"] == {"vllm/new.py": 2}
    assert second["test_files"] == {"tests/test_new.py": 2}
    assert (second["changed_lines"], second["new_lines"], second["test_lines"]) == (
        (1, 2, 2)
    )
    assert second["tests"] == ["tests/test_new.py"]
    # The second says that it needs nothing, but its lines stand beside the first's.
    assert second["requires"] == []
    assert second["applies_after"] == ["0001-part"]
    cover = (tmp_path / "out/cover.md").read_text()
    assert "| 0002 | [Core] 0002-other | 1 | 2 | 2 | 0001 |" in cover


def test_one_patch_alone_applies_to_the_base(
    two: Any, signed: None, tmp_path: Path
) -> None:
    assert run(two, tmp_path / "out", "--patch", "0002-other") == 0
    (row,) = json.loads((tmp_path / "out/index.json").read_text())["patches"]
    assert row["applies_after"] == []
    assert "one()" not in (tmp_path / "out" / row["file"]).read_text()


def test_a_relative_folder_is_below_the_current_one(
    two: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(two, Path("build/mails")) == 0
    written = {path.name for path in (tmp_path / "build/mails").iterdir()}
    assert {"index.json", "cover.md"} < written
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["mails"]


def refused(world: Any, out: Path, capsys: Any) -> str:
    before = sorted(out.parent.rglob("*"))
    assert run(world, out) == 1
    assert sorted(out.parent.rglob("*")) == before
    return str(capsys.readouterr().err)


def test_nobody_signs_for_you(
    two: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    said = refused(two, tmp_path / "out", capsys)
    assert "git knows no user.name" in said
    assert "git config --global user.name" in said


def test_a_folder_in_use_is_left_alone(
    two: Any, signed: None, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("keep")
    assert "give a new or an empty folder" in refused(two, tmp_path / "out", capsys)


def test_a_patch_of_more_than_250_lines_is_refused(
    two: Any, signed: None, tmp_path: Path, capsys: Any
) -> None:
    lines = "\\n".join(f"x{i} = {i}" for i in range(251))
    two.edit(f'op = "append"\ncode = "{lines}"')
    said = refused(two, tmp_path / "out", capsys)
    assert "0003-part changes 251 lines of upstream's files" in said


def test_a_wheel_is_not_enough(two: Any) -> None:
    base = open_base(two.wheel(), ["0.33.0"])
    with pytest.raises(Refusal, match="mails are made from a checkout"):
        export.export(load(two.repo), base, WHO, two.repo / "out")


def test_results_are_rows_of_the_tables(two: Any) -> None:
    patch = load(two.repo).patches[0]
    told = mail.results(replaced(patch, Result("conversions", ("FP8 block",))))
    assert "Measured on one NVIDIA H200" in told
    assert [line[:11] for line in told.splitlines() if line.startswith("| FP8")] == [
        "| FP8 block"
    ]
    for result, words in (
        (Result("conversions", ("nothing",)), "conversions has no row 'nothing'"),
        (Result("guesses"), "no table 'guesses'"),
    ):
        with pytest.raises(Refusal, match=re.escape(words)):
            mail.results(replaced(patch, result))
    assert "there is no measurement" in mail.results(patch)


def replaced(patch: Patch, result: Result) -> Patch:
    import dataclasses

    return dataclasses.replace(patch, results=(result,))


# The real series


@pytest.fixture(scope="module")
def series() -> Series:
    return load(ROOT)


def test_subjects_are_in_upstreams_style(series: Series) -> None:
    """A type tag and an area, and short enough for one line of a log."""
    style = r"\[(Bugfix|Feature|Perf|Refactor)\]\[(Core|Kernel)\] \S.*[^.]"
    for patch in series.patches:
        assert re.fullmatch(style, patch.title) and len(patch.title) <= 72, patch.id


def test_every_mail_says_its_price_and_what_was_measured(series: Series) -> None:
    size = Size({}, {}, {})
    for patch in series.patches:
        assert patch.trade_offs, f"{patch.id} has no trade_offs"
        told = mail.message(patch, size, WHO)
        assert "## Test result" in told
        prose = [line for line in told.splitlines() if line[:1] not in ("|", " ")]
        assert max(map(len, prose)) <= 100, patch.id
        assert ("of the fork" in told) == ("benchmarks/" in told or "docs/" in told)


def imported(text: str) -> Iterator[str]:
    """What a module imports as it is imported; more may be tried in functions."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_patch_brings_what_its_files_import(series: Series) -> None:
    """Modules of ours that a patch's new files import come with it or before it."""
    ours = {path for patch in series.patches for path in patch.new_files}
    missing = []
    for patch in series.patches:
        there = {p for one in series.closure(patch).patches for p in one.new_files}
        for path in patch.new_files:
            if not path.endswith(".py"):
                continue
            for name in imported(series.ours(path).decode()):
                needed = name.replace(".", "/") + ".py"
                beside = f"{Path(path).parent}/{needed}"
                missing += [
                    f"{patch.id}: {path} imports {module}"
                    for module in {needed, beside} & ours - there
                ]
    assert not missing


def test_the_mails_give_what_the_graft_gives(
    series: Series, checkout: Path, tmp_path: Path, run_git: Callable[..., str]
) -> None:
    """On the source archive of the release, under git."""
    tree = tmp_path / "tree"
    root = run_git(checkout, "rev-list", "--max-parents=0", "HEAD").strip()
    run_git(checkout, "worktree", "add", "-q", "--detach", str(tree), root)
    base = open_base(tree, series.bases)
    export.export(series, base, WHO, tmp_path / "mails")
    grafted = final(apply_series(series, base, notices=False))
    mails = sorted((tmp_path / "mails").glob("*.patch"))
    run_git(tree, "am", "-q", "--keep-non-patch", *map(str, mails))
    touched = run_git(tree, "diff", "--no-renames", "--name-only", root, "HEAD")
    assert set(touched.split()) == set(grafted)
    for path, change in grafted.items():
        assert (tree / path).read_bytes() == change.after
    assert run_git(tree, "status", "--porcelain") == ""
