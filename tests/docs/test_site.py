# SPDX-License-Identifier: Apache-2.0
"""The documentation builds as a site, and each patch has a page with its diff."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from tools.series import fetch
from tools.series.base import open_base
from tools.series.cli import ROOT
from tools.series.manifest import load
from tools.series.series import Applied, Change, apply_series
from tools.site.patch_pages import changed_lines, escape, overview, page

SERIES = load(ROOT)
PATCHES = SERIES.on(SERIES.bases[0]).patches


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def changes() -> dict[str, tuple[Change, ...]]:
    """What each patch changes on the release, by its id."""
    series = load(ROOT)
    base = open_base(fetch.source_archive(series.bases[0]), series.bases)
    return {done.patch.id: done.changes for done in apply_series(series, base)}


def words(path: Path) -> str:
    """The text of a page, without its tags."""
    return unescape(re.sub(r"<[^>]+>", "", path.read_text()))


def test_the_home_page_is_the_readme(site):
    assert "Will it load? Ask without a GPU" in words(site / "index.html")
    assert 'href="operating.html"' in (site / "index.html").read_text()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_a_patch_has_a_page(site, changes, patch):
    text = words(site / f"patches/{patch.id}.html")
    for part in (patch.title, patch.goes_when):
        assert " ".join(part.split()) in " ".join(text.split())
    for change in changes[patch.id]:
        if change.before is None:
            assert f"{change.path} (" in text
        else:
            assert f"+++ b/{change.path}" in text


def test_every_page_is_reachable(site):
    home = (site / "index.html").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert f"{path.stem}.html" in home
    for patch in PATCHES:
        assert f"patches/{patch.id}.html" in home


def test_a_diff_is_shown_as_one(site):
    # Pygments' class of an added line.
    assert (
        '<span class="gi">+'
        in (site / "patches/0003-pool-generations.html").read_text()
    )


def applied(*changes: Change) -> Applied:
    return Applied(PATCHES[0], changes)


def test_lines_are_counted_in_changed_files_only():
    change = Change("a.py", b"one\ntwo\n", b"one\n2\n3\n")
    assert changed_lines([change]) == 3
    new = Change("b.py", None, b"x\ny\n")
    table = overview([applied(change, new)], "1.0")
    assert "| 3 | 1 |" in table
    assert "b.py (2 lines)" in page(applied(change, new), "1.0")


def test_a_file_with_fences_does_not_end_its_own():
    text = "```\ninside\n```\n"
    shown = page(applied(Change("a.md", None, text.encode())), "1.0")
    assert shown.count("~" * 8) == 2


def test_manifest_text_is_no_markdown():
    assert escape("a_b *c* <d> [e]") == "a\\_b \\*c\\* \\<d\\> \\[e\\]"
