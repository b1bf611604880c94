# SPDX-License-Identifier: Apache-2.0
"""Read a base: a wheel, an unpacked package, a source archive or a git checkout.

A base is only read as text. Its version comes from its metadata, from the text of
``vllm/_version.py`` or from the tag of the commit, never from running anything.
"""

from __future__ import annotations

import json
import re
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tools.series.errors import Refusal


class Base(Protocol):
    """A tree of upstream's files, by their path in the repository."""

    name: str
    version: str
    #: False where only the package is there, without csrc/, tests/ and CMake.
    has_sources: bool

    def exists(self, path: str) -> bool: ...

    def read(self, path: str) -> bytes: ...

    def is_executable(self, path: str) -> bool: ...

    def paths(self) -> Iterable[str]: ...


class FolderBase:
    """Files below a folder: an unpacked package, archive or checkout."""

    def __init__(self, root: Path, version: str, has_sources: bool) -> None:
        self.root = root
        self.name = str(root)
        self.version = version
        self.has_sources = has_sources

    def exists(self, path: str) -> bool:
        return (self.root / path).is_file()

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def is_executable(self, path: str) -> bool:
        return bool((self.root / path).stat().st_mode & stat.S_IXUSR)

    def paths(self) -> Iterable[str]:
        tops = self.root.iterdir() if self.has_sources else [self.root / "vllm"]
        for top in sorted(tops):
            if top.name in (".git", ".venv", "build"):
                continue
            for path in [top] if top.is_file() else sorted(top.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    yield path.relative_to(self.root).as_posix()


class MemberBase:
    """Files of a wheel or of a source archive, read into memory when asked for."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.has_sources = path.suffix != ".whl"
        try:
            if path.suffix == ".whl":
                self._zip: zipfile.ZipFile | None = zipfile.ZipFile(path)
                members = [i for i in self._zip.infolist() if not i.is_dir()]
                self._modes = {i.filename: i.external_attr >> 16 for i in members}
            else:
                self._zip = None
                self._modes, self._bytes = _read_archive(path)
        except (OSError, zipfile.BadZipFile, tarfile.TarError) as error:
            raise Refusal(f"is not a wheel or source archive: {error}") from error
        self.version = _version_of_metadata(self.read(self._metadata()).decode())

    def _metadata(self) -> str:
        pattern = r"vllm-[^/]+\.dist-info/METADATA|PKG-INFO"
        found = [path for path in self._modes if re.fullmatch(pattern, path)]
        if len(found) != 1:
            raise Refusal(f"it has {len(found)} metadata files of vllm, not one")
        return found[0]

    def exists(self, path: str) -> bool:
        return path in self._modes

    def read(self, path: str) -> bytes:
        if self._zip is not None:
            return self._zip.read(path)
        return self._bytes[path]

    def is_executable(self, path: str) -> bool:
        return bool(self._modes[path] & stat.S_IXUSR)

    def paths(self) -> Iterable[str]:
        return iter(self._modes)


def _read_archive(path: Path) -> tuple[dict[str, int], dict[str, bytes]]:
    """Modes and bytes of a source archive's regular files, without its top folder."""
    modes: dict[str, int] = {}
    contents: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            inner = member.name.partition("/")[2]
            stream = archive.extractfile(member) if member.isfile() else None
            if inner and stream is not None:
                contents[inner], modes[inner] = stream.read(), member.mode
    return modes, contents


def open_base(path: Path, known: Iterable[str]) -> Base:
    """The base at ``path``, if it is one of the ``known`` versions.

    Raises ``Refusal`` for anything else: an unknown version, an editable install, a
    base that already carries a series.
    """
    try:
        base = _open(path)
        if "+" in base.version:
            raise Refusal(
                f"its version is {base.version}: it is not upstream's release, or "
                "the series is already applied"
            )
        if base.version not in known:
            raise Refusal(
                f"its version is {base.version}; the series knows "
                f"{', '.join(sorted(known))}"
            )
    except Refusal as refusal:
        raise refusal.at(file=str(path)) from None
    return base


def _open(path: Path) -> Base:
    if path.is_file():
        return MemberBase(path)
    if not path.is_dir():
        raise Refusal("there is no such file or folder")
    if path.name == "vllm" and (path / "__init__.py").is_file():
        path = path.parent
    _refuse_editable(path)
    if not (path / "vllm/__init__.py").is_file():
        raise Refusal("it holds no vllm/__init__.py, so it is not a vLLM")
    return FolderBase(path, _folder_version(path), (path / "CMakeLists.txt").is_file())


def _refuse_editable(folder: Path) -> None:
    marks = [p.name for p in folder.glob("__editable__*vllm*")]
    for direct in folder.glob("vllm-*.dist-info/direct_url.json"):
        told = json.loads(direct.read_text())
        if told.get("dir_info", {}).get("editable"):
            marks.append(direct.parent.name)
    if marks:
        raise Refusal(
            f"it is an editable install ({', '.join(sorted(marks))}): "
            "give the checkout itself to `apply`"
        )


def _folder_version(folder: Path) -> str:
    metadata = [*folder.glob("vllm-*.dist-info/METADATA"), folder / "PKG-INFO"]
    found = [p for p in metadata if p.is_file()]
    if len(found) > 1:
        raise Refusal(f"it has {len(found)} metadata files of vllm, not one")
    if found:
        return _version_of_metadata(found[0].read_text())
    generated = folder / "vllm/_version.py"
    if generated.is_file():
        told = re.findall(r"__version__ = version = '([^']+)'", generated.read_text())
        if len(told) == 1:
            return str(told[0])
    tag = git(folder, "describe", "--tags", "--exact-match", check=False).strip()
    if re.fullmatch(r"v\d+\.\d+\.\d+", tag):
        return tag[1:]
    raise Refusal("its version is not told by metadata, _version.py or a tag of HEAD")


def _version_of_metadata(text: str) -> str:
    head = text.partition("\n\n")[0].replace("\r", "")
    name = re.findall(r"^Name: (.+)$", head, re.MULTILINE)
    version = re.findall(r"^Version: (.+)$", head, re.MULTILINE)
    if name != ["vllm"] or len(version) != 1:
        raise Refusal(f"its metadata names {name or 'nothing'}, not one vllm")
    return str(version[0])


def git(folder: Path, *arguments: str, check: bool = True, **options: object) -> str:
    """Run git without the repository's hooks. Raises ``Refusal`` with git's words."""
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"]
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            [*command, "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=False,
            **options,
        )
    except FileNotFoundError as error:
        raise Refusal("git is not installed") from error
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise Refusal(f"git {arguments[0]}: {said}", file=str(folder))
    return str(done.stdout)
