# SPDX-License-Identifier: Apache-2.0
"""docs/loaders.md names every load format, and says of each what its code says."""

import re
from pathlib import Path

from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "loaders.md"


def rows() -> list[tuple[set[str], str, str]]:
    """Formats, what they get, and what covers them, of each row of the first table."""
    table = PAGE.read_text().split("## Load formats")[1].split("## ")[0]
    cells = [line.split("|")[1:-1] for line in table.splitlines() if line[:1] == "|"]
    return [
        (set(re.findall(r"`(\w+)`", formats)), gets.strip(), covered)
        for formats, gets, _, covered in cells[2:]
    ]


def test_every_format_is_there():
    named = set().union(*(formats for formats, _, _ in rows()))
    assert named == set(model_loader._LOAD_FORMAT_TO_MODEL_LOADER)


def test_mid_load_is_what_runs_the_base_load():
    for formats, gets, _ in rows():
        for name in formats:
            loader = model_loader._LOAD_FORMAT_TO_MODEL_LOADER[name]
            if loader.load_model is BaseModelLoader.load_model:
                assert gets == "mid-load", name
            elif name != "ipc_cache":
                assert gets.startswith("at the end"), name


def test_tests_that_cover_a_format_exist():
    folder = PAGE.parents[1] / "tests" / "rehearsal"
    for file in set(re.findall(r"`(test_\w+\.py)`", PAGE.read_text())):
        assert (folder / file).exists()
    checks = (folder / "pool_checks.py").read_text()
    gpu = PAGE.parents[1] / "tests/basic_correctness/memory/cumem"
    checks += (gpu / "test_cumem_generations.py").read_text()
    for name in set(re.findall(r"`(an?_\w+|workspace_\w+)`", PAGE.read_text())):
        assert f"def {name}(" in checks, name
