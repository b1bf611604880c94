# SPDX-License-Identifier: Apache-2.0
"""Build the fork's wheel from the released one.

Files that the series leaves alone are copied as they are compressed, so a wheel of
hundreds of megabytes takes seconds. The same inputs give the same bytes.
"""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import io
import json
import os
import re
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from tools.series.errors import Refusal
from tools.series.manifest import Patch, Series
from tools.series.series import Applied, final

EXTENSION = "vllm/cumem_allocator.abi3.so"
#: In the dist-info folder of the wheel: the patches that it carries.
PATCH_LIST = "series.json"
_DATE = (2026, 1, 1, 0, 0, 0)


def build_wheel(
    series: Series,
    base: Path,
    applied: list[Applied],
    extension: bytes | None,
    out: Path,
) -> Path:
    """Write ``vllm-<version>+<local>-...whl`` into ``out`` and return its path.

    ``extension`` is the compiled ``cumem_allocator``; None keeps upstream's. Version
    number, folder of metadata, RECORD and ``vllm/_version.py`` agree. An unfinished
    wheel never stands under the final name.
    """
    with zipfile.ZipFile(base) as source:
        info = _dist_info(source)
        old = info.removesuffix(".dist-info").partition("-")[2]
        new = f"{old}+{series.local}"
        new_info = f"vllm-{new}.dist-info"
        contents = {path: c.after for path, c in final(applied).items()}
        contents["vllm/_version.py"] = _version_file(
            source.read("vllm/_version.py").decode(), old, new
        )
        contents[f"{new_info}/METADATA"] = _metadata(
            source.read(f"{info}/METADATA").decode(), old, new
        )
        patches = [done.patch for done in applied]
        contents[f"{new_info}/{PATCH_LIST}"] = _patch_list(patches)
        if extension is not None:
            contents[EXTENSION] = extension
        name = f"vllm-{new}-{_tag(source.read(f'{info}/WHEEL').decode())}.whl"
        out.mkdir(parents=True, exist_ok=True)
        unfinished = out / f".{name}.part"
        try:
            _write(source, info, new_info, contents, unfinished)
            os.replace(unfinished, out / name)
        finally:
            unfinished.unlink(missing_ok=True)
    return out / name


def _dist_info(source: zipfile.ZipFile) -> str:
    found = {n.split("/")[0] for n in source.namelist() if ".dist-info/" in n}
    if len(found) != 1:
        raise Refusal(f"the wheel has {len(found)} folders of metadata, not one")
    return found.pop()


def _version_file(text: str, old: str, new: str) -> bytes:
    numbers = ", ".join(old.split("."))
    local = new.partition("+")[2]
    for before, after in (
        (f"version = '{old}'", f"version = '{new}'"),
        (f"version_tuple = ({numbers})", f"version_tuple = ({numbers}, '{local}')"),
    ):
        if text.count(before) != 1:
            raise Refusal(
                f"{before!r} is found {text.count(before)} times",
                file="vllm/_version.py",
            )
        text = text.replace(before, after)
    return text.encode()


def _metadata(text: str, old: str, new: str) -> bytes:
    head, gap, body = text.partition("\n\n")
    head, count = re.subn(
        rf"^Version: {re.escape(old)}$", f"Version: {new}", head, flags=re.MULTILINE
    )
    if count != 1:
        raise Refusal(f"Version: {old} is found {count} times", file="METADATA")
    return (head + gap + body).encode()


def _patch_list(patches: Iterable[Patch]) -> bytes:
    rows = [{"id": patch.id, "title": patch.title} for patch in patches]
    return (json.dumps(rows, indent=1) + "\n").encode()


def _tag(text: str) -> str:
    """The tag that the base's WHEEL file states.

    Its file name may promise more (a manylinux policy), which holds for the libraries
    that upstream compiled and not for the one that this machine compiles.
    """
    tags = re.findall(r"^Tag: (\S+)$", text.replace("\r", ""), re.MULTILINE)
    if len(tags) != 1:
        raise Refusal(f"the wheel states {len(tags)} tags, not one", file="WHEEL")
    return str(tags[0])


def _write(
    source: zipfile.ZipFile,
    info: str,
    new_info: str,
    contents: dict[str, bytes],
    path: Path,
) -> None:
    record = f"{new_info}/RECORD"
    known = {
        row[0]: row[1:]
        for row in csv.reader(io.StringIO(source.read(f"{info}/RECORD").decode()))
    }
    rows: list[tuple[str, str, str]] = []
    entries: dict[str, zipfile.ZipInfo | None] = {}
    for entry in source.infolist():
        name = entry.filename
        if name.startswith(info + "/"):
            name = new_info + name.removeprefix(info)
        entries[name] = entry
    entries.update((name, None) for name in sorted(contents) if name not in entries)
    # The format asks for the metadata, RECORD as its end, behind everything else.
    in_order = sorted(entries, key=lambda name: name.startswith(new_info + "/"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in in_order:
            old = entries[name]
            if name == record:
                continue
            if name in contents:
                data = contents[name]
                target.writestr(_member(name, old), data)
                rows.append((name, _digest(data), str(len(data))))
            elif old is not None and not old.is_dir():
                _copy(source, old, target, name)
                digest, size = known[old.filename]
                rows.append((name, digest, size))
        rows.append((record, "", ""))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        target.writestr(_member(record, None), text.getvalue())


def _digest(data: bytes) -> str:
    raw = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + raw.decode().rstrip("=")


def _member(name: str, like: zipfile.ZipInfo | None) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, like.date_time if like else _DATE)
    member.external_attr = like.external_attr if like else 0o100644 << 16
    member.compress_type = zipfile.ZIP_DEFLATED
    member.create_system = 3
    return member


_LOCAL_HEADER = struct.Struct("<4s5H3L2H")


def _copy(
    source: zipfile.ZipFile, entry: zipfile.ZipInfo, target: zipfile.ZipFile, name: str
) -> None:
    """Copy one member's compressed bytes under a name, without unpacking them."""
    stream = source.fp
    sink: IO[bytes] | None = target.fp
    assert stream is not None
    assert sink is not None
    stream.seek(entry.header_offset)
    fields = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
    if fields[0] != b"PK\x03\x04":
        raise Refusal("the wheel's directory does not fit its contents", file=name)
    stream.seek(fields[9] + fields[10], os.SEEK_CUR)
    member = copy.copy(entry)
    member.filename = name
    member.extra = b""
    # Bit 3 says that sizes follow the data; here they stand in the header.
    member.flag_bits &= ~0x08
    member.header_offset = sink.tell()
    sink.write(member.FileHeader(zip64=False))
    left = entry.compress_size
    while left:
        chunk = stream.read(min(left, 1 << 20))
        if not chunk:
            raise Refusal("the wheel is cut short", file=name)
        sink.write(chunk)
        left -= len(chunk)
    target.filelist.append(member)
    target.NameToInfo[name] = member
    # ZipFile writes its next member, and the directory, from here.
    target.start_dir = sink.tell()
