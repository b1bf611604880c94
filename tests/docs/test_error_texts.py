# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md quotes what the sources say, and leaves nothing out."""

import importlib.util
import re
from pathlib import Path

import pytest
from error_texts import matches, pieces, python_texts, string_literals

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
OURS, UPSTREAM = PAGE.split("## Of vLLM itself")
# PyTorch's, quoted to be recognised.
FOREIGN = {"CUDA out of memory"}
# Modules whose errors a user can meet; the others are for those who write patches or
# tests, and name patch, file and anchor.
TOLD = [
    *ROOT.glob("vllm/**/*.py"),
    *(
        ROOT / f"tools/rehearsal/{name}.py"
        for name in ("__main__", "build", "calibration", "cards", "load", "models")
    ),
    *(
        ROOT / f"tools/rehearsal/{name}.py"
        for name in ("packages", "plot", "run", "session")
    ),
    *(
        ROOT / f"tools/series/{name}.py"
        for name in ("__main__", "base", "checkout", "cli", "extension", "fetch")
    ),
]
# Causes that are shown behind another text, and what cannot happen to a wheel of ours.
BEHIND = {"git ...: ...", "CMake installed ... of ..., not one", "...: ..."}


def quoted(page: str) -> list[str]:
    """The texts in the first column of the tables."""
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    return [
        text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]


def sources() -> list[Path]:
    ours = [p for top in ("vllm", "tools") for p in (ROOT / top).rglob("*.py")]
    return [*ours, *ROOT.glob("csrc/**/*.h"), *ROOT.glob("csrc/*.cpp")]


@pytest.fixture(scope="module")
def literals() -> set[str]:
    return set().union(*map(string_literals, sources()))


@pytest.mark.parametrize("text", sorted(set(quoted(OURS)) - FOREIGN))
def test_a_quoted_text_is_in_the_sources(text, literals):
    assert any(matches(text, literal) for literal in literals)


@pytest.mark.parametrize("text", quoted(UPSTREAM))
def test_a_text_of_vllm_is_in_vllm(text):
    package = Path(importlib.util.find_spec("vllm").origin).parent
    files = (package / "v1/worker").glob("*.py")
    assert any(
        matches(text, found) for file in files for found in string_literals(file)
    )


@pytest.mark.parametrize("path", TOLD, ids=lambda path: path.name)
def test_no_text_is_left_out(path):
    told = quoted(OURS)
    for text in set(python_texts(path)) - BEHIND:
        assert any(matches(quote, text) for quote in told), text


def test_texts_are_told_apart():
    assert matches("wanted ... on device", "x: wanted 5 bytes on device 0")
    assert not matches("wanted ... on device", "on device 0, wanted")
    assert not matches("The wake neds", "The wake needs 5 GiB")
    assert pieces("... a ... b") == ["a", "b"]
