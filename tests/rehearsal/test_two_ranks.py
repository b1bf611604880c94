# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel size 2 on two simulated cards: real workers, real sleep and wake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (
    *("-m", "tools.rehearsal.run", "--gpu-memory", "8GiB", "--capability", "9.0"),
    *("--cards", "2", "--", sys.executable, "benchmarks/ranks.py", "qwen2.5-0.5b"),
    *("--layers", "2", "--sleep", "--cycles", "3", "--fail-wake"),
)
NEARLY = 4 / 1024
"""GiB: two segments' worth of granularity."""


@pytest.fixture(scope="module")
def row():
    done = subprocess.run(
        [sys.executable, *COMMAND],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows, done.stdout[-3000:] + done.stderr[-3000:]
    row = json.loads(rows[-1])
    assert row["ok"], done.stderr[-3000:]
    return row


def test_cycles_keep_the_weights_and_leave_nothing_behind(row):
    assert len(set(row["contents"])) == 2, "two ranks hold different shards"
    assert row["same_contents"]
    asleep = [cycle["asleep"] for cycle in row["cycles"]]
    assert asleep[1] == asleep[2]
    assert all(a < b for a, b in zip(asleep[1], row["after_load"], strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_fails_its_wake_and_the_same_call_recovers_both(row, rank):
    wake = row["failed_wakes"][rank]
    assert wake["rank"] == rank
    assert "are missing" in wake["error"]
    awake = row["cycles"][-1]["awake"]
    assert wake["used_after_failure"][1 - rank] == pytest.approx(
        awake[1 - rank], abs=NEARLY
    ), "the answer of the rank that woke"
    assert wake["used_after_repeat"] == pytest.approx(awake, abs=NEARLY)
    assert wake["same_contents"]
