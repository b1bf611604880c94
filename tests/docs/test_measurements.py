# SPDX-License-Identifier: Apache-2.0
"""The documents say what was measured."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))


@pytest.mark.parametrize("page", ["measurements.md", "conversions.md", "rehearsal.md"])
def test_tables_come_from_the_committed_rows(page):
    from tables import DOCS, fill

    assert fill(page) == (DOCS / page).read_text()


def test_every_row_says_how_it_was_measured():
    from tables import RESULTS, read

    for path in RESULTS.glob("*.jsonl"):
        for row in read(path.name):
            assert {"gpu", "date", "command", "torch"} <= row.keys()
