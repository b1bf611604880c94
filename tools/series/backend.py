# SPDX-License-Identifier: Apache-2.0
"""The PEP 517 backend behind ``pip install .``: the wheel is upstream's with our graft.

There is no hook for metadata alone, so installers take it from the built wheel.
"""

from __future__ import annotations

import importlib.util
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tools.series.cli import ROOT, make_wheel
from tools.series.errors import Refusal
from tools.series.manifest import Series, load

_SKIPPED = {"build", "dist", "__pycache__"}


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """pip fetches the released wheel; other front ends may not have it."""
    return [] if importlib.util.find_spec("pip") else ["pip"]


def build_wheel(
    wheel_directory: str,
    config_settings: Any = None,
    metadata_directory: str | None = None,
) -> str:
    return make_wheel(_series(), Path(wheel_directory)).name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    series = _series()
    name = f"vllm-{series.bases[0]}+{series.local}"
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {name[5:]}\n".encode()
    path = Path(sdist_directory) / f"{name}.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo(f"{name}/PKG-INFO")
        member.size = len(metadata)
        archive.addfile(member, io.BytesIO(metadata))
        for file in _tracked():
            archive.add(ROOT / file, f"{name}/{file}", recursive=False)
    return path.name


def _series() -> Series:
    try:
        return load(ROOT)
    except Refusal as refusal:
        raise SystemExit(f"series: {refusal}") from None


def _tracked() -> list[str]:
    """The repository's files: what git tracks, or all of an unpacked sdist."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "ls-files", "-z"]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        return [file for file in told.stdout.split("\0") if (ROOT / file).is_file()]
    files = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*"))]
    return [
        file.as_posix()
        for file in files
        if (ROOT / file).is_file()
        and file.name != "PKG-INFO"
        and not any(p in _SKIPPED or p.startswith(".") for p in file.parts[:-1])
    ]
