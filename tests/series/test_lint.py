# SPDX-License-Identifier: Apache-2.0
"""Upstream's checks find what is wrong with a graft, and only that."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest

from tools.series import lint
from tools.series.base import Base, open_base
from tools.series.series import Change

HEAD = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)
GOOD = HEAD + "def half(number: int) -> float:\n    return number / 2\n"
BAD = """\
import pickle

import torch


def wrong(first, second) -> int:
    with first() and second():
        torch.cuda.empty_cache()
    return 'text'
"""
FOUND = (
    r"bad.py: ruff format would change it",
    r"bad.py:9: error: Incompatible return value type .*\[return-value\]",
    r"bad.py:1: F401 `pickle` imported but unused",
    r"bad.py:7: boolean `and` used .*\(check_boolean_context_manager\)",
    r"bad.py:1: error: Found forbidden import: pickle.*\(check_forbidden_imports\)",
    r"vllm/bad.py \(check_spdx_header\)",
    r"bad.py:8: error: Found torch.cuda API call.*\(check_torch_cuda\)",
    r"bad.cpp:1:\d+: warning: code should be clang-formatted",
)


@pytest.fixture(scope="module")
def archive(source_archive: Path) -> Base:
    return open_base(source_archive, ["0.33.0"])


def test_each_check_reports(archive: Base) -> None:
    changes = [
        Change("csrc/bad.cpp", None, b"int  x;\n"),
        Change("csrc/good.cpp", None, b"int x;\n"),
        Change("vllm/bad.py", None, BAD.encode()),
        Change("vllm/good.py", None, GOOD.encode()),
    ]
    found = lint.findings(archive, changes)
    for pattern in FOUND:
        assert any(re.search(pattern, line) for line in found), (pattern, found)
    assert not any("good" in line for line in found)


def test_what_upstream_has_already_is_not_reported(archive: Base) -> None:
    path = "vllm/device_allocator/cumem.py"
    before = BAD.encode()

    class Worse:
        has_sources = True

        def paths(self) -> list[str]:
            return [*archive.paths()]

        def read(self, wanted: str) -> bytes:
            return before if wanted == path else archive.read(wanted)

    after = before.replace(b"import pickle", b"import json\nimport pickle")
    worse = cast(Base, Worse())
    (found,) = lint.findings(worse, [Change(path, before, after)])
    assert found.startswith(f"{path}:1: F401 `json` imported but unused")
