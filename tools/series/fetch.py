# SPDX-License-Identifier: Apache-2.0
"""Fetch upstream's releases with pip, once, into ``~/.cache/vllm-series/``.

``bases.toml`` pins each file's SHA-256; a file with another one is never used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tools.series.errors import Refusal

LOCK = Path(__file__).with_name("bases.toml")
STAND_IN = Path(__file__).with_name("stand_in")


def cache() -> Path:
    return Path.home() / ".cache/vllm-series"


def known_versions() -> list[str]:
    return sorted(_lock())


def wheel(version: str) -> Path:
    """The released wheel, from the cache or from pip."""
    name, digest = _pinned(version, "wheel")
    return _cached(name, digest, f"vllm=={version}", ["--only-binary=vllm"])


def source_archive(version: str) -> Path:
    """The source archive, with csrc/, tests/ and CMakeLists.txt."""
    name, digest = _pinned(version, "source")
    options = ["--no-binary=vllm", "--no-build-isolation"]
    return _cached(name, digest, f"vllm=={version}", options)


def _lock() -> dict[str, dict[str, dict[str, str]]]:
    with LOCK.open("rb") as stream:
        return tomllib.load(stream)


def _pinned(version: str, kind: str) -> tuple[str, str]:
    try:
        row = _lock()[version][kind]
    except KeyError:
        raise Refusal(f"{LOCK.name} pins no {kind} of vllm {version}") from None
    return row["name"], row["sha256"]


def _cached(name: str, digest: str, wanted: str, options: list[str]) -> Path:
    path = cache() / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            said = _pip(Path(scratch), wanted, options)
            got = Path(scratch) / name
            if not got.exists():
                raise Refusal(f"pip did not download {name}:\n{said[-2000:]}")
            _check(got, digest)
            os.replace(got, path)
    else:
        _check(path, digest)
    return path


def _check(path: Path, digest: str) -> None:
    with path.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != digest:
        raise Refusal(
            f"its SHA-256 is {got}, and {LOCK.name} pins {digest}: delete the file "
            "if it is damaged",
            file=str(path),
        )


def _pip(folder: Path, wanted: str, options: list[str]) -> str:
    arguments = ["download", "--no-deps", "-d", str(folder), *options, wanted]
    path = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [*_pip_command(), *arguments],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    return done.stdout + done.stderr


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip")
    if found is None:
        raise Refusal("pip is not installed: it fetches upstream's release")
    return [found]
