# SPDX-License-Identifier: Apache-2.0
"""This repository's own series on upstream's real wheel and source archive."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.series import notice
from tools.series.base import Base, open_base
from tools.series.checkout import apply_to_checkout
from tools.series.cli import ROOT
from tools.series.errors import Refusal
from tools.series.manifest import Series, load
from tools.series.series import Applied, Change, apply_series, final
from tools.series.wheel import EXTENSION, build_wheel


@pytest.fixture(scope="module")
def series() -> Series:
    return load(ROOT, allow_unowned=True)


def test_one_patch_owns_each_of_our_files_and_definitions() -> None:
    assert load(ROOT).patches


@pytest.fixture(scope="module")
def archive(series: Series, source_archive: Path) -> Base:
    return open_base(source_archive, series.bases)


@pytest.fixture(scope="module")
def on_wheel(series: Series, released_wheel: Path) -> list[Applied]:
    return apply_series(series, open_base(released_wheel, series.bases))


@pytest.fixture(scope="module")
def on_archive(series: Series, archive: Base) -> list[Applied]:
    return apply_series(series, archive)


def package(applied: list[Applied]) -> dict[str, Change]:
    return {p: c for p, c in final(applied).items() if p.startswith("vllm/")}


def test_wheel_and_archive_give_the_same_package(
    on_wheel: list[Applied], on_archive: list[Applied]
) -> None:
    assert package(on_wheel)
    assert package(on_wheel) == package(on_archive)
    assert set(final(on_wheel)) == set(package(on_wheel))


def test_every_changed_file_of_upstream_has_a_notice(on_archive: list[Applied]) -> None:
    for path, change in final(on_archive).items():
        if path.endswith(".py"):
            ast.parse(change.after)
        grafted = change.before is not None
        assert (notice.WORDS.encode() in change.after) == grafted


def test_every_patch_fits_with_its_stated_predecessors(
    series: Series, archive: Base
) -> None:
    for patch in series.patches:
        alone = series.closure(patch)
        applied = apply_series(alone, archive)
        assert [done.patch.id for done in applied] == [p.id for p in alone.patches]


def test_the_wheel_keeps_every_other_byte(
    series: Series, released_wheel: Path, on_wheel: list[Applied], tmp_path: Path
) -> None:
    path = build_wheel(series, released_wheel, on_wheel, b"\x7fELF", tmp_path)
    changed = {*final(on_wheel), EXTENSION, "vllm/_version.py"}
    with zipfile.ZipFile(released_wheel) as stock, zipfile.ZipFile(path) as fork:
        ours = {info.filename: info for info in fork.infolist()}
        for info in stock.infolist():
            name = info.filename.replace(".dist-info", f"+{series.local}.dist-info")
            if info.filename in changed or name.endswith(("/METADATA", "/RECORD")):
                continue
            copy = ours[name]
            assert (copy.CRC, copy.file_size, copy.compress_size, copy.date_time) == (
                (info.CRC, info.file_size, info.compress_size, info.date_time)
            )
            assert copy.external_attr == info.external_attr
            if info.file_size < 1 << 16:
                assert fork.read(name) == stock.read(info.filename)
        for name, change in final(on_wheel).items():
            assert fork.read(name) == change.after


def test_a_checkout_gets_one_commit_per_patch(
    series: Series, checkout: Path, run_git: Callable[..., str]
) -> None:
    titles = run_git(checkout, "log", "--reverse", "--format=%s").splitlines()
    assert titles == ["base", *(patch.title for patch in series.patches)]
    assert run_git(checkout, "status", "--porcelain") == ""
    commits = run_git(checkout, "log", "--reverse", "--format=%H").split()[1:]
    for commit, patch in zip(commits, series.on(series.bases[0]).patches, strict=True):
        files = run_git(
            checkout, "show", "--no-renames", "--format=", "--name-only", commit
        ).split()
        assert sorted(files) == sorted(patch.paths())


def test_the_checkouts_package_is_the_wheels(
    checkout: Path,
    on_wheel: list[Applied],
    on_archive: list[Applied],
    run_git: Callable[..., str],
) -> None:
    for path, change in {**final(on_archive), **final(on_wheel)}.items():
        assert (checkout / path).read_bytes() == change.after
    root = run_git(checkout, "rev-list", "--max-parents=0", "HEAD").strip()
    touched = run_git(checkout, "diff", "--no-renames", "--name-only", root, "HEAD")
    assert set(touched.split()) == set(final(on_archive))


def test_a_second_time_is_refused(
    series: Series, checkout: Path, run_git: Callable[..., str]
) -> None:
    head = run_git(checkout, "rev-parse", "HEAD")
    with pytest.raises(Refusal, match="the series is already applied here"):
        apply_to_checkout(series, checkout)
    assert run_git(checkout, "rev-parse", "HEAD") == head
    assert run_git(checkout, "status", "--porcelain") == ""
