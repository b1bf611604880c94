# SPDX-License-Identifier: Apache-2.0
"""The fork's wheel: metadata that agrees, a RECORD that is right, same bytes twice."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools.series.base import open_base
from tools.series.errors import Refusal
from tools.series.manifest import load
from tools.series.series import apply_series
from tools.series.wheel import build_wheel

INFO = "vllm-0.33.0+ours.1.dist-info"


def build(world: Any, out: Path, extension: bytes | None = b"\x7fELF ours") -> Path:
    series = load(world.repo)
    wheel = world.wheel()
    applied = apply_series(series, open_base(wheel, series.bases))
    return build_wheel(series, wheel, applied, extension, out)


def check_record(path: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        assert wheel.testzip() is None
        names = wheel.namelist()
        assert len(names) == len(set(names))
        (record,) = (name for name in names if name.endswith("/RECORD"))
        assert names[-1] == record
        rows = list(csv.reader(io.StringIO(wheel.read(record).decode())))
        assert [row[0] for row in rows] == names
        assert rows[-1] == [record, "", ""]
        for name, digest, size in rows[:-1]:
            data = wheel.read(name)
            raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
            if digest != "sha256=x":
                assert digest == "sha256=" + raw.rstrip("=")
            assert int(size) == len(data)


def test_parts_agree(world: Any, tmp_path: Path) -> None:
    world.ours("vllm/new.py", "x = 1\n")
    world.ours("csrc/new.h", "// not in a wheel\n")
    world.patch("[[new_files]]\npaths = ['vllm/new.py', 'csrc/new.h']")
    world.edit('within = "load"\nop = "append"\ncode = "one()"')
    path = build(world, tmp_path / "out")
    assert path.name == "vllm-0.33.0+ours.1-cp38-abi3-linux_x86_64.whl"
    check_record(path)
    with zipfile.ZipFile(path) as wheel, zipfile.ZipFile(world.wheel()) as stock:
        metadata = wheel.read(f"{INFO}/METADATA").decode()
        assert metadata == stock.read(
            "vllm-0.33.0.dist-info/METADATA"
        ).decode().replace("Version: 0.33.0\n", "Version: 0.33.0+ours.1\n")
        version = wheel.read("vllm/_version.py").decode()
        assert "__version__ = version = '0.33.0+ours.1'" in version
        assert "version_tuple = (0, 33, 0, 'ours.1')" in version
        assert wheel.read("vllm/cumem_allocator.abi3.so") == b"\x7fELF ours"
        assert wheel.read("vllm/new.py") == b"x = 1\n"
        assert wheel.read("vllm/pool.py").endswith(b"    one()\n")
        assert wheel.read("vllm/__init__.py") == stock.read("vllm/__init__.py")
        assert "csrc/new.h" not in wheel.namelist()
        listed = json.loads(wheel.read(f"{INFO}/series.json"))
        assert [row["id"] for row in listed] == ["0001-part", "0002-part"]


def test_digests_of_changed_files_are_computed(world: Any, tmp_path: Path) -> None:
    world.edit('within = "load"\nop = "append"\ncode = "one()"')
    with zipfile.ZipFile(build(world, tmp_path / "out")) as wheel:
        record = wheel.read(f"{INFO}/RECORD").decode()
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(record))}
    # The small released wheel has "x" for a digest, so a copied row shows.
    assert rows["vllm/__init__.py"] == "sha256=x"
    for name in ("vllm/pool.py", "vllm/_version.py", f"{INFO}/METADATA"):
        assert rows[name] != "sha256=x"


def test_same_inputs_give_the_same_bytes(world: Any, tmp_path: Path) -> None:
    world.edit('within = "load"\nop = "append"\ncode = "one()"')
    first = build(world, tmp_path / "a").read_bytes()
    assert build(world, tmp_path / "b").read_bytes() == first


def test_without_an_extension_upstreams_stays(world: Any, tmp_path: Path) -> None:
    world.patch("")
    with zipfile.ZipFile(build(world, tmp_path / "out", None)) as wheel:
        assert wheel.read("vllm/cumem_allocator.abi3.so").startswith(
            b"\x7fELF upstream"
        )


def test_a_version_file_of_another_form_is_refused(world: Any, tmp_path: Path) -> None:
    world.upstream("vllm/_version.py", "version = 'x'\n")
    world.patch("")
    with pytest.raises(Refusal, match=r"vllm/_version\.py.*is found 0 times"):
        build(world, tmp_path / "out")
    assert list((tmp_path / "out").glob("*")) == []


def test_a_cut_wheel_leaves_nothing(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Refusal("the wheel is cut short")

    world.patch("")
    monkeypatch.setattr("tools.series.wheel._copy", fail)
    with pytest.raises(Refusal, match="cut short"):
        build(world, tmp_path / "out")
    assert list((tmp_path / "out").glob("*")) == []
