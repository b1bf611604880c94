# SPDX-License-Identifier: Apache-2.0
"""Which vLLM a run uses: the installed fork, or the release it is made from."""

import importlib.metadata
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tools.rehearsal.build import cache_root
from tools.series import fetch


class PackageError(Exception):
    """The vLLM that a run needs is not to be had."""


@dataclass(frozen=True)
class Variant:
    """One way to load: `package` None is the installed vLLM."""

    name: str
    sleep: bool
    package: Path | None
    version: str


def installed_version() -> str:
    """Version of the installed vLLM; PackageError without one."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise PackageError("no vLLM is installed here; run `make demo` first") from None


def is_fork(version: str) -> bool:
    """Whether a version is one of ours: upstream's releases have no local part."""
    return "+" in version


def stock_package(version: str) -> Path:
    """A folder with the released wheel of `version`, unpacked once."""
    folder = cache_root() / f"vllm-{version}-released"
    if not folder.is_dir():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with zipfile.ZipFile(fetch.wheel(version)) as wheel:
            wheel.extractall(partial)
        partial.rename(folder)
    return folder


def find_variant(name: str) -> Variant:
    """The variant called "fork", "stock" or "no-sleep"."""
    version = installed_version()
    base = version.partition("+")[0]
    if name == "fork":
        if not is_fork(version):
            raise PackageError(f"the installed vLLM is {version}, not the fork")
        return Variant(name, True, None, version)
    if name in ("stock", "no-sleep"):
        package = stock_package(base) if is_fork(version) else None
        return Variant(name, name == "stock", package, base)
    raise PackageError(f"{name!r} is none of fork, stock, no-sleep")


def default_variant() -> str:
    """What a run without --compare rehearses."""
    return "fork" if is_fork(installed_version()) else "stock"
