# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How much memory the host can still give, and which of its processors are near."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch


def _number(path: Path) -> int | None:
    """The number in the file; None if there is no file or no limit in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """A file of lines ``name value ...``; empty if there is none."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups (version 2), innermost first."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            group = top / line[3:].strip("/")
            # A container may see its own folder as the top, and a path that is not.
            yield from (group, *group.parents[: len(group.parents) - len(top.parents)])


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still touch before something is killed.

    The least that the host and each control group say, files in memory counted as
    available; None if nothing is known.
    """
    found = []
    host = _fields(root / "proc/meminfo").get("MemAvailable")
    if host is not None:
        found.append(host << 10)
    for group in _groups(root):
        limit = _number(group / "memory.max")
        current = _number(group / "memory.current")
        if limit is not None and current is not None:
            memory = _fields(group / "memory.stat")
            cached = memory.get("active_file", 0) + memory.get("inactive_file", 0)
            found.append(max(0, limit - current + cached))
    return min(found, default=None)


def processors_near(device: int, root: Path = Path("/")) -> set[int]:
    """The processors on the NUMA node of a GPU that this process may run on.

    All that it may run on when the system does not tell.

    Args:
        device: index of the GPU.
        root: where the system's files are.

    """
    allowed = os.sched_getaffinity(0)
    try:
        gpu = torch.cuda.get_device_properties(device)
        slot = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        text = (root / "sys/bus/pci/devices" / slot / "local_cpulist").read_text()
    except (OSError, RuntimeError, AssertionError, AttributeError):
        return allowed
    near: set[int] = set()
    for span in filter(None, text.strip().split(",")):
        first, _, last = span.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    return near & allowed or allowed
