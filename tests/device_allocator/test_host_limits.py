# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import os
from types import SimpleNamespace

import pytest
import torch

from vllm.device_allocator.host_limits import available_bytes, processors_near


def write(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMORY = {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:   1000 kB\n"}


def test_the_host_alone(tmp_path):
    write(tmp_path, MEMORY)
    assert available_bytes(tmp_path) == 1000 << 10


def test_nothing_is_known(tmp_path):
    assert available_bytes(tmp_path) is None


@pytest.mark.parametrize("limited", ["a/b", "a", ""])
def test_the_tightest_control_group_counts(tmp_path, limited):
    group = f"sys/fs/cgroup/{limited}".rstrip("/")
    write(
        tmp_path,
        MEMORY
        | {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            f"{group}/memory.max": "9000\n",
            f"{group}/memory.current": "8000\n",
            f"{group}/memory.stat": "anon 5\nactive_file 20\ninactive_file 300\n",
        },
    )
    assert available_bytes(tmp_path) == 9000 - 8000 + 320


def test_a_container_that_sees_its_own_group_as_the_top(tmp_path):
    write(
        tmp_path,
        MEMORY
        | {
            "proc/self/cgroup": "0::/outside/of/it\n",
            "sys/fs/cgroup/memory.max": "9000\n",
            "sys/fs/cgroup/memory.current": "9500\n",
        },
    )
    assert available_bytes(tmp_path) == 0


@pytest.fixture
def gpu(monkeypatch):
    slot = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xB3, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: slot)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


CPULIST = "sys/bus/pci/devices/0000:b3:00.0/local_cpulist"


@pytest.mark.parametrize(
    ("cpulist", "near"),
    [
        ("2-4,9\n", {2, 3, 4, 9}),
        ("12-99\n", {12, 13, 14, 15}),
        ("64-71\n", set(range(16))),
        ("\n", set(range(16))),
    ],
)
def test_processors_of_the_same_node(gpu, tmp_path, cpulist, near):
    write(tmp_path, {CPULIST: cpulist})
    assert processors_near(0, tmp_path) == near


def test_system_that_does_not_tell(gpu, tmp_path):
    assert processors_near(0, tmp_path) == set(range(16))
