# SPDX-License-Identifier: Apache-2.0
"""Fetching with pinned hashes, compiling the extension, and pip's way in."""

from __future__ import annotations

import hashlib
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools.series import backend, extension, fetch
from tools.series.cli import ROOT
from tools.series.errors import Refusal
from tools.series.manifest import load

NAME = "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lock = tmp_path / "bases.toml"
    digest = hashlib.sha256(b"released").hexdigest()
    lock.write_text(
        f'["0.33.0".wheel]\nname = "{NAME}"\nsha256 = "{digest}"\n'
        f'["0.33.0".source]\nname = "vllm-0.33.0.tar.gz"\nsha256 = "{digest}"\n'
    )
    monkeypatch.setattr(fetch, "LOCK", lock)
    monkeypatch.setattr(fetch, "cache", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def pip_that_saves(content: bytes, name: str = NAME) -> Any:
    calls = []

    def pip(folder: Path, wanted: str, options: list[str]) -> str:
        calls.append(wanted)
        (folder / name).write_bytes(content)
        return ""

    pip.calls = calls  # type: ignore[attr-defined]
    return pip


def test_fetches_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = pip_that_saves(b"released")
    monkeypatch.setattr(fetch, "_pip", pip)
    assert fetch.wheel("0.33.0") == fetch.wheel("0.33.0") == cache / NAME
    assert pip.calls == ["vllm==0.33.0"]


def test_pip_saves_an_archive_without_running_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its setup.py would need torch, and says another version without a device."""
    top, index = tmp_path / "vllm-0.33.0", tmp_path / "index"
    files = {
        "PKG-INFO": "Metadata-Version: 2.4\nName: vllm\nVersion: 0.33.0\n",
        "setup.py": f"open({str(tmp_path / 'ran')!r}, 'w')",
        "pyproject.toml": '[build-system]\nrequires = ["torch==0"]\n'
        'build-backend = "setuptools.build_meta"\n',
    }
    top.mkdir()
    index.mkdir()
    for name, text in files.items():
        (top / name).write_text(text)
    archive = index / "vllm-0.33.0.tar.gz"
    with tarfile.open(archive, "w:gz") as target:
        target.add(top, top.name)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    fetch.LOCK.write_text(
        f'["0.33.0".source]\nname = "{archive.name}"\nsha256 = "{digest}"\n'
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert fetch.source_archive("0.33.0") == cache / archive.name
    assert not (tmp_path / "ran").exists()


def test_refuses_another_hash(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_pip", pip_that_saves(b"changed"))
    with pytest.raises(Refusal, match=r"its SHA-256 is .* pins"):
        fetch.wheel("0.33.0")
    assert list(cache.iterdir()) == []
    (cache / NAME).write_bytes(b"damaged")
    with pytest.raises(Refusal, match="delete the file"):
        fetch.wheel("0.33.0")


def test_refuses_what_is_not_pinned_or_not_there(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refusal, match=r"pins no wheel of vllm 0\.1\.0"):
        fetch.wheel("0.1.0")
    monkeypatch.setattr(fetch, "_pip", lambda *_: "No matching distribution")
    with pytest.raises(Refusal, match="No matching distribution"):
        fetch.wheel("0.33.0")
    with pytest.raises(Refusal, match="No matching distribution"):
        fetch.source_archive("0.33.0")


def test_compiles_the_extension() -> None:
    compiled = extension.compile_extension(load(ROOT, allow_unowned=True))
    assert compiled is not None
    assert compiled.startswith(b"\x7fELF")
    for symbol in (b"PyInit_cumem_allocator", b"my_malloc", b"my_free"):
        assert symbol in compiled


def test_compiles_nothing_where_no_patch_brings_the_source(world: Any) -> None:
    world.patch("")
    assert extension.compile_extension(load(world.repo)) is None


def test_says_what_the_compiler_lacks(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world.ours("csrc/cumem/extension.cpp", "// ours\n")
    world.ours("CMakeLists.txt", "project(x LANGUAGES NONE)\nfind_it()\n")
    world.patch("[[new_files]]\npaths = ['csrc/cumem/extension.cpp']")
    series = load(world.repo)
    monkeypatch.setattr(extension, "_cuda_include", lambda: tmp_path)
    with pytest.raises(Refusal, match="find_it"):
        extension.compile_extension(series)
    monkeypatch.undo()
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with pytest.raises(Refusal, match="pip install 'nvidia-cuda-runtime"):
        extension.compile_extension(series)


def test_pip_needs_what_the_requirements_say() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    lines = (ROOT / "requirements/build.txt").read_text().splitlines()
    assert sorted(told["requires"]) == sorted(x for x in lines if x[:1] != "#")
    assert backend.get_requires_for_build_wheel() == []


def test_source_distribution_holds_the_series(tmp_path: Path) -> None:
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        files = set(archive.getnames())
        top = name.removesuffix(".tar.gz")
        told = archive.extractfile(f"{top}/PKG-INFO")
        assert told is not None
        assert f"Version: {top[5:]}\n" in told.read().decode()
    assert {f"{top}/pyproject.toml", f"{top}/tools/series/backend.py"} <= files
