# SPDX-License-Identifier: Apache-2.0
"""MkDocs hooks: the README is the home page, and each patch has a page.

``python -m mkdocs build --strict``, from the root of the repository.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from tools.series import fetch
from tools.series.base import open_base
from tools.series.errors import Refusal
from tools.series.manifest import load
from tools.series.series import apply_series
from tools.site import patch_pages

ROOT = Path(__file__).resolve().parents[2]
SECTION = "Patches"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put into the section of the patches what the navigation does not name."""
    section = next(item[SECTION] for item in config.nav or () if SECTION in item)
    named = set(_paths(config.nav))
    docs = Path(config.docs_dir)
    written = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    section += sorted(set(written) - named)
    section += [f"{patch_pages.FOLDER}/{p.id}.md" for p in load(ROOT).patches]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    try:
        made = _patch_pages()
    except Refusal as refusal:
        raise PluginError(f"series: {refusal}") from None
    made["index.md"] = home((ROOT / "README.md").read_text())
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def _patch_pages() -> dict[str, str]:
    series = load(ROOT)
    version = series.bases[0]
    base = open_base(fetch.source_archive(version), series.bases)
    return patch_pages.pages(apply_series(series, base), version)


def home(readme: str) -> str:
    """The README with the links that hold within docs/."""
    return re.sub(r"\]\(docs/", "](", readme)


def _paths(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    return [path for item in items for path in _paths(item)]
