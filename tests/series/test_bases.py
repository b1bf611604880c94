# SPDX-License-Identifier: Apache-2.0
"""Older bases: the table of the page, and the package with the series on it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.series import bases, extension, fetch
from tools.series.base import Base, open_base
from tools.series.cli import ROOT
from tools.series.manifest import Series, load
from tools.series.series import apply_series, final

OLDER = ("0.31.0", "0.32.0")


@pytest.fixture(scope="module")
def series() -> Series:
    return load(ROOT)


@pytest.fixture(scope="module")
def archives(series: Series) -> dict[str, Base]:
    paths = {version: fetch.source_archive(version) for version in series.bases}
    return {v: open_base(path, series.bases) for v, path in paths.items()}


def test_the_page_holds_the_table(series: Series, archives: dict[str, Base]) -> None:
    """With all patches on the newest base, and the pools on every base."""
    told = {v: bases.states(series, base) for v, base in archives.items()}
    text = bases.PAGE.read_text()
    assert bases.filled(text, bases.page(series, told)) == text
    assert set(told[series.bases[0]].values()) == {"applies"}
    for patch in series.patches:
        if patch.id < "0010" or "0040" <= patch.id < "0046":
            assert {column[patch.id] for column in told.values()} == {"applies"}


def write_tree(series: Series, base: Base, root: Path) -> list[str]:
    """The grafted package and the series' tests. Returns what the graft changed."""
    changed = final(apply_series(series, base))
    files = {path: base.read(path) for path in base.paths() if path.startswith("vllm/")}
    files["tests/__init__.py"] = base.read("tests/__init__.py")
    files |= {path: change.after for path, change in changed.items()}
    compiled = extension.compile_extension(series)
    assert compiled is not None
    files["vllm/cumem_allocator.abi3.so"] = compiled
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return sorted(changed)


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vllm's dependencies"
)
@pytest.mark.parametrize("version", OLDER)
def test_the_package_imports_and_passes(
    series: Series, archives: dict[str, Base], version: str, tmp_path: Path
) -> None:
    """In the environment of the newest base. MoE conversions have their own tests."""
    changed = write_tree(series, archives[version], tmp_path)
    modules = [
        path.removesuffix(".py").replace("/", ".")
        for path in changed
        if path.startswith("vllm/") and path.endswith(".py") and "triton" not in path
    ]
    run(tmp_path, "-c", IMPORT, *modules)
    run(tmp_path, "-m", "pytest", "-q", "tests/device_allocator")


IMPORT = """
import importlib, pathlib, sys
# As in a serving process: the layers before what they use.
import vllm.model_executor.layers.fused_moe
for name in sys.argv[1:]:
    module = importlib.import_module(name.removesuffix(".__init__"))
    assert pathlib.Path(module.__file__).is_relative_to(pathlib.Path.cwd()), module
"""


def run(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": ""},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_a_part_for_other_bases_is_left_out(world: Any) -> None:
    world.patch(
        "[[edits]]\npath = 'vllm/pool.py'\nop = 'append'\ncode = 'a = 1'\n"
        "[[edits]]\npath = 'vllm/pool.py'\nop = 'append'\ncode = 'b = 1'\n"
        "bases = '<0.33'\n"
    )
    assert world.result().endswith("\na = 1\n")


def test_a_patch_goes_with_what_it_requires(world: Any) -> None:
    on = "[[bases]]\nbases = '==0.33.0'\nreason = 'so'\nstate = "
    edit = "[[edits]]\npath = 'vllm/pool.py'\nop = 'append'\ncode = '{} = 1'\n"
    moved = world.patch(edit.format("a") + on + "'anchor moved'")
    world.patch(edit.format("b"), requires=f"['{moved}']")
    unneeded = world.patch(edit.format("c") + on + "'not needed'")
    world.patch(edit.format("d"), requires=f"['{unneeded}']")
    base = open_base(world.base, ["0.33.0"])
    series = load(world.repo)
    told = bases.states(series, base)
    assert list(told.values()) == [
        "anchor moved",
        "anchor moved",
        "not needed",
        "applies",
    ]
    made = bases.page(series, {base.version: told})
    assert "- `0001-part` on ==0.33.0: so" in made
    assert "- `0002-part`: goes with `0001-part`" in made


def test_an_import_that_the_base_lacks_is_refused(world: Any) -> None:
    world.edit(
        'within = "load"\nop = "append"\ncode = "dump()"\n'
        'imports = ["from vllm.logger import dump"]'
    )
    world.upstream("vllm/logger.py", "def init_logger(name):\n    pass\n")
    assert world.refusal() == (
        "0001-part: vllm/pool.py: the base has no vllm.logger.dump"
    )


@pytest.mark.parametrize(
    "table, words",
    [
        ("bases = 'x'\nstate = 'applies'\nreason = 'so'", "bases = 'x': "),
        ("state = 'perhaps'\nreason = 'so'", "'perhaps' is none of applies"),
        ("state = 'applies'", "'reason' must be a text"),
    ],
)
def test_refuses_what_is_said_wrongly(world: Any, table: str, words: str) -> None:
    world.patch(f"[[bases]]\n{table}")
    assert words in world.refusal()
