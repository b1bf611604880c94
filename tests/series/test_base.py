# SPDX-License-Identifier: Apache-2.0
"""Bases are told apart by text alone; what is not upstream's release is refused."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.series.base import open_base
from tools.series.errors import Refusal

KNOWN = ("0.33.0",)


def refused(path: Path) -> str:
    with pytest.raises(Refusal) as caught:
        open_base(path, KNOWN)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value)


def test_reads_every_kind(world: Any, tmp_path: Path) -> None:
    archive = tmp_path / "vllm-0.33.0.tar.gz"
    with tarfile.open(archive, "w:gz") as target:
        target.add(world.base, "vllm-0.33.0")
    expected = (world.base / "vllm/pool.py").read_bytes()
    for path, sources in (
        (world.base, True),
        (world.base / "vllm", True),
        (archive, True),
        (world.wheel(), False),
    ):
        base = open_base(path, KNOWN)
        assert (base.version, base.has_sources) == ("0.33.0", sources)
        assert base.read("vllm/pool.py") == expected
        assert not base.exists("vllm/gone.py")
        assert "vllm/pool.py" in set(base.paths())


def test_nothing_of_the_base_is_run(world: Any, tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'trap')!r}, 'w')\n"
    for name in ("__init__.py", "_version.py", "pool.py"):
        path = world.base / "vllm" / name
        path.write_text(path.read_text() + trap)
    world.upstream("setup.py", trap)
    world.edit('within = "load"\nop = "append"\ncode = "done()"')
    assert "done()" in world.result()
    assert not (tmp_path / "trap").exists()


def test_the_version_file_tells_the_version(world: Any) -> None:
    (world.base / "PKG-INFO").unlink()
    assert open_base(world.base, KNOWN).version == "0.33.0"


def test_the_tag_tells_the_version(world: Any, run_git: Callable[..., str]) -> None:
    (world.base / "PKG-INFO").unlink()
    (world.base / "vllm/_version.py").unlink()
    run_git(world.base, "init", "-q")
    run_git(world.base, "add", "-A")
    run_git(world.base, "commit", "-qm", "base")
    assert "its version is not told" in refused(world.base)
    run_git(world.base, "tag", "v0.33.0")
    assert open_base(world.base, KNOWN).version == "0.33.0"


def test_refuses_unknown_and_grafted_versions(world: Any) -> None:
    for version, message in (
        ("0.32.0", "its version is 0.32.0; the series knows 0.33.0"),
        ("0.33.0+ours.1", "the series is already applied"),
        ("0.33.1.dev4+g123", "it is not upstream's release"),
    ):
        world.upstream("PKG-INFO", f"Name: vllm\nVersion: {version}\n")
        assert message in refused(world.base)


def test_refuses_an_editable_install(world: Any, tmp_path: Path) -> None:
    info = tmp_path / "base/vllm-0.33.0.dist-info"
    info.mkdir()
    told = {"url": "file:///src", "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(told))
    assert "it is an editable install (vllm-0.33.0.dist-info)" in refused(world.base)
    shutil.rmtree(world.base / "vllm")
    assert "it is an editable install" in refused(world.base)


def test_refuses_what_is_no_vllm(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "gone")
    assert "holds no vllm/__init__.py" in refused(tmp_path)
    (tmp_path / "x.whl").write_text("x")
    assert "is not a wheel" in refused(tmp_path / "x.whl")
    (tmp_path / "x.tar.gz").write_text("x")
    assert "is not a wheel or source archive" in refused(tmp_path / "x.tar.gz")
