# SPDX-License-Identifier: Apache-2.0
"""A small vLLM and a small series in a temporary folder, and upstream's real files."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.series import fetch
from tools.series.checkout import apply_to_checkout
from tools.series.cli import ROOT
from tools.series.errors import Refusal
from tools.series.manifest import load
from tools.series.series import apply_series, final

VERSION = "0.33.0"
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
POOL = SPDX + (
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
    "import gc\n"
    "\n"
    "from vllm.logger import init_logger\n"
    "\n"
    "logger = init_logger(__name__)\n"
    "\n"
    "\n"
    "# What a pool holds.\n"
    "class Pool:\n"
    "    size = 1\n"
    "\n"
    "    def trim(self):\n"
    "        gc.collect()\n"
    "\n"
    "    def used(self):\n"
    "        return self.size  # bytes\n"
    "\n"
    "\n"
    "def load(model):\n"
    "    for layer in model.layers():\n"
    "        convert(layer)\n"
    "    finish(model)\n"
)
VERSION_FILE = (
    f"__version__ = version = '{VERSION}'\n"
    "__version_tuple__ = version_tuple = (0, 33, 0)\n"
)


class World:
    """One base and one repository with a series, both small enough to read."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "base"
        self.repo = folder / "repo"
        self.count = 0
        self.upstream("PKG-INFO", f"Name: vllm\nVersion: {VERSION}\n\nwords\n")
        self.upstream("vllm/__init__.py", SPDX)
        self.upstream("vllm/_version.py", VERSION_FILE)
        self.upstream("vllm/pool.py", POOL)
        self.upstream("CMakeLists.txt", "project(x)\nset(SRC\n  csrc/pool.cpp)\n")
        self.upstream("csrc/pool.cpp", "// upstream\n")
        self.ours(
            "pyproject.toml",
            f'[tool.series]\nlocal = "ours.1"\nbases = ["{VERSION}"]\n'
            'not_grafted = ["tests/series"]\n',
        )
        (self.repo / "series").mkdir()

    def upstream(self, path: str, text: str) -> None:
        self._write(self.base / path, text)

    def ours(self, path: str, text: str) -> None:
        self._write(self.repo / path, text)

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())

    def patch(self, tables: str, name: str = "part", requires: str = "[]") -> str:
        """Add the next manifest of the series; returns its id."""
        self.count += 1
        name = f"{self.count:04}-{name}"
        self.ours(
            f"series/{name}.toml",
            f'title = "[Core] {name}"\nwhy = "because"\nhow = "so"\n'
            f'tested = "here"\ngoes_when = "never"\nrequires = {requires}\n{tables}',
        )
        return name

    def edit(self, rest: str, path: str = "vllm/pool.py") -> str:
        return self.patch(f'[[edits]]\npath = "{path}"\n{rest}')

    def fragment(self, code: str, names: list[str], rest: str = "") -> str:
        """A patch that owns ``names`` of our vllm/pool.py."""
        self.ours("vllm/pool.py", f"{SPDX}\n{code}")
        return self.patch(
            f'[[definitions]]\npath = "vllm/pool.py"\nnames = {names}\n{rest}'
        )

    def result(self, path: str = "vllm/pool.py") -> str:
        """The text of one file of the base after the whole series."""
        from tools.series.base import open_base

        series = load(self.repo)
        applied = apply_series(series, open_base(self.base, series.bases))
        return final(applied)[path].after.decode()

    def refusal(self) -> str:
        """The message with which the series is refused; nothing may change."""
        before = self.digest()
        with pytest.raises(Refusal) as caught:
            self.result()
        assert self.digest() == before
        return str(caught.value)

    def digest(self, folder: Path | None = None) -> str:
        """A digest of every path and byte below the base, or another folder."""
        folder = folder or self.base
        digest = hashlib.sha256()
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            if ".git" not in path.relative_to(folder).parts:
                digest.update(str(path.relative_to(folder)).encode() + b"\0")
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def wheel(self) -> Path:
        """The package of the base as a released wheel."""
        info = f"vllm-{VERSION}.dist-info"
        files = {
            path.relative_to(self.base).as_posix(): path.read_bytes()
            for path in sorted((self.base / "vllm").rglob("*"))
            if path.is_file()
        }
        files["vllm/cumem_allocator.abi3.so"] = b"\x7fELF upstream's" * 100
        files[f"{info}/METADATA"] = (
            f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}\n"
            "Requires-Dist: torch\n\nVersion: of the readme\n"
        ).encode()
        files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nTag: cp38-abi3-linux_x86_64\n"
        record = "".join(f"{n},sha256=x,{len(d)}\n" for n, d in files.items())
        files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
        path = self.base.parent / f"vllm-{VERSION}-cp38-abi3-manylinux1_x86_64.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
            for name, data in files.items():
                target.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        return path


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.com"]
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "A Tester")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "tester@example.com")
    return World(tmp_path)


@pytest.fixture(scope="session")
def run_git() -> Callable[..., str]:
    return git


@pytest.fixture(scope="session")
def released_wheel() -> Path:
    return fetch.wheel(VERSION)


@pytest.fixture(scope="session")
def source_archive() -> Path:
    return fetch.source_archive(VERSION)


@pytest.fixture(scope="session")
def checkout(
    source_archive: Path,
    tmp_path_factory: pytest.TempPathFactory,
    run_git: Callable[..., str],
) -> Path:
    """A git tree of the source archive with the series on it."""
    parent = tmp_path_factory.mktemp("checkout")
    with tarfile.open(source_archive) as source:
        source.extractall(parent, filter="data")
    (folder,) = parent.iterdir()
    run_git(folder, "init", "-q")
    run_git(folder, "config", "user.name", "A Tester")
    run_git(folder, "config", "user.email", "tester@example.com")
    run_git(folder, "add", "-A", "-f")
    run_git(folder, "commit", "-qm", "base")
    apply_to_checkout(load(ROOT, allow_unowned=True), folder)
    return folder
