# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The core of the extension, without Python, under sanitizers.

CUMEM_STRESS_SECONDS says how long each program runs (default 4); a program prints the
seed that it used, and takes one as its second argument.
"""

from __future__ import annotations

import os
import subprocess

import pytest

OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=1:exitcode=66"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66"},
}


def without_address_randomization() -> list[str]:
    """A prefix for ThreadSanitizer, whose fixed shadow memory some kernels overlay."""
    prefix = ["setarch", "--addr-no-randomize"]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    return prefix if allowed else []


@pytest.mark.parametrize("sanitizer", sorted(OPTIONS))
def test_stress(build, sanitizer):
    seconds = float(os.environ.get("CUMEM_STRESS_SECONDS", "4"))
    command = [*without_address_randomization(), build.stress[sanitizer], str(seconds)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds * 5 + 60,
        env={**os.environ, **OPTIONS[sanitizer]},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("allocated") == 4, done.stdout
