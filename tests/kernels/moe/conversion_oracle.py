# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The released vllm as an oracle, in a process of its own."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch

from tests.kernels.moe.conversion_cases import Case, convert

VERSION = "0.33.0"
SERVER = Path(__file__).with_name("conversion_cases.py")


def unpacked_release() -> Path:
    """A folder with the released vllm: $VLLM_RELEASE, else what the fork's tools fetch.

    They unpack the wheel once beside it: the whole wheel where vllm finds a GPU, which
    makes it import its compiled modules, else its Python files.
    """
    if folder := os.environ.get("VLLM_RELEASE"):
        return Path(folder).resolve()
    fetch = pytest.importorskip(
        "tools.series.fetch",
        reason="set VLLM_RELEASE to a folder that holds the released vllm, as "
        f"`pip install --no-deps --target FOLDER vllm=={VERSION}` makes one",
    )
    wheel = fetch.wheel(VERSION)
    whole = torch.cuda.is_available()
    folder = wheel.parent / f"vllm-{VERSION}-{'whole' if whole else 'python'}"
    if not folder.is_dir():
        with (
            tempfile.TemporaryDirectory(dir=wheel.parent) as scratch,
            zipfile.ZipFile(wheel) as archive,
        ):
            names = [
                name
                for name in archive.namelist()
                if whole or name.endswith((".py", "METADATA"))
            ]
            archive.extractall(Path(scratch) / "release", names)
            (Path(scratch) / "release").rename(folder)
    return folder


class Oracle:
    """Asks a process that imports the released vllm to convert; see
    `conversion_cases`."""

    def __init__(self) -> None:
        release = unpacked_release()
        path = [str(release), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tempfile.gettempdir(),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )

        found = self._answer()
        # Never compare the fork with itself.
        assert Path(found).is_relative_to(release), f"{found} is not the released vllm"

    def _answer(self):
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the released vllm ended with {self._process.wait()}"
        return json.loads(line)

    def convert(self, case: Case) -> dict:
        assert self._process.stdin is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@functools.cache
def oracle() -> Oracle:
    """The one oracle of this process."""
    process = Oracle()
    atexit.register(process.close)
    return process


def check_case(case: Case, error: bool = False) -> dict:
    """Assert that fork and release give the same bytes, shapes, strides, dtypes,
    parameter attributes and configuration; with `error`, that both refuse."""
    expected = oracle().convert(case)
    answer = convert(case)
    if error:
        assert "error" in expected and "error" in answer, (case, expected, answer)
        return answer
    assert "error" not in expected, (case, expected)
    assert answer == expected, case
    return answer
