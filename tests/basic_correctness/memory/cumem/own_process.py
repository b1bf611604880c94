# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Checks that each run in a process of their own: the allocator lives as long as one.

    python -m tests.basic_correctness.memory.cumem.test_cumem_sleep NAME

runs one by hand, from the folder that holds ``tests``.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[4]


class Checks:
    """The checks of one test file; decorate each with `add`.

    Args:
        file: the file's ``__file__``.

    """

    def __init__(self, file: str) -> None:
        self._module = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts)
        self._functions: dict[str, Callable[[], None]] = {}

    def add(self, function: Callable[[], None]) -> Callable[[], None]:
        self._functions[function.__name__] = function
        return function

    @property
    def names(self) -> list[str]:
        return list(self._functions)

    def run(self, name: str) -> None:
        """Run one check in a new process; AssertionError if it does not pass."""
        done = subprocess.run(
            [sys.executable, "-m", self._module, name],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    def main(self) -> None:
        """Run the check that the command line names, here."""
        self._functions[sys.argv[1]]()
        print("passed")
