# SPDX-License-Identifier: Apache-2.0
"""Put the series on a git checkout of upstream, one commit per patch."""

from __future__ import annotations

import os
import tempfile
import textwrap
from pathlib import Path

from tools.series.base import git, open_base
from tools.series.errors import Refusal
from tools.series.manifest import Patch, Series
from tools.series.series import Applied, apply_series, final


def apply_to_checkout(series: Series, checkout: Path) -> list[Applied]:
    """Commit every patch on top of HEAD and update the working tree.

    All commits are made beside the branch first; the working tree and the branch move
    at the end, together. Raises ``Refusal``, with nothing changed, for a folder that
    is not the top of a git checkout, uncommitted changes, a base that is not known or
    already carries the series, and a patch that does not fit.
    """
    checkout = checkout.resolve()
    top = git(checkout, "rev-parse", "--show-toplevel", check=False).strip()
    if not top or Path(top).resolve() != checkout:
        raise Refusal("is not the top folder of a git checkout", file=str(checkout))
    dirty = git(checkout, "status", "--porcelain", "--untracked-files=no").splitlines()
    if dirty:
        raise Refusal(
            f"the checkout has uncommitted changes ({dirty[0].strip()}): commit or "
            "stash them first",
            file=str(checkout),
        )
    base = open_base(checkout, series.bases)
    applied = apply_series(series, base)
    tracked = set(git(checkout, "ls-files", "-z").split("\0"))
    for change in final(applied).values():
        if change.before is not None and change.path not in tracked:
            raise Refusal("git does not track it", file=change.path)
    old = git(checkout, "rev-parse", "HEAD").strip()
    new = _commits(checkout, old, applied)
    git(checkout, "read-tree", "-m", "-u", old, new)
    try:
        git(checkout, "update-ref", "-m", "series: apply", "HEAD", new, old)
    except Refusal:
        git(checkout, "read-tree", "-m", "-u", new, old)
        raise
    return applied


def _commits(checkout: Path, parent: str, applied: list[Applied]) -> str:
    """Commits for all patches on top of ``parent``, reachable from no branch yet."""
    modes = _modes(checkout, parent)
    with tempfile.TemporaryDirectory() as scratch:
        env = os.environ | {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        git(checkout, "read-tree", parent, env=env)
        for done in applied:
            names = _store(checkout, Path(scratch), done)
            rows = [
                f"{modes.get(change.path, '100644')} {name}\t{change.path}\n"
                for change, name in zip(done.changes, names, strict=True)
            ]
            index = ("update-index", "--add", "--index-info")
            git(checkout, *index, env=env, input="".join(rows))
            tree = git(checkout, "write-tree", env=env).strip()
            commit = ("commit-tree", tree, "-p", parent, "-F", "-")
            parent = git(checkout, *commit, input=commit_message(done.patch)).strip()
    return parent


def _store(checkout: Path, scratch: Path, done: Applied) -> list[str]:
    """The names of git's objects with what the patch wrote, byte for byte."""
    blobs = [scratch / f"blob{i}" for i in range(len(done.changes))]
    for blob, change in zip(blobs, done.changes, strict=True):
        blob.write_bytes(change.after)
    store = ("hash-object", "-w", "--no-filters", "--stdin-paths")
    return git(checkout, *store, input="".join(f"{b}\n" for b in blobs)).split()


def _modes(checkout: Path, commit: str) -> dict[str, str]:
    rows = git(checkout, "ls-tree", "-r", "-z", commit).split("\0")
    return {row.partition("\t")[2]: row.split()[0] for row in rows if row}


def commit_message(patch: Patch) -> str:
    """Title, why, how and test plan, as a reviewer of one commit needs them."""
    parts = [
        patch.title,
        patch.why.strip(),
        patch.how.strip(),
        f"Tested: {patch.tested.strip()}",
        _fill(f"Can go when: {patch.goes_when.strip()}"),
        f"Series-Patch: {patch.id}",
    ]
    return "\n\n".join(parts) + "\n"


def _fill(text: str) -> str:
    return text if "\n" in text else textwrap.fill(text, 72)
