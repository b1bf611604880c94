# SPDX-License-Identifier: Apache-2.0
"""Programs on simulated cards, for the tests of this folder."""

import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.rehearsal.build import BuildError, front_libraries
from tools.rehearsal.cards import find_card
from tools.rehearsal.packages import find_variant
from tools.rehearsal.session import Session
from tools.rehearsal.testing import Outcome, WarmProcess, on_card

HERE = Path(__file__).parent
DRIVER_PROLOGUE = "from driver import *\nfrom tools.rehearsal import card\n"
TORCH_PROLOGUE = "import torch\nfrom tools.rehearsal import card\n"


@pytest.fixture(scope="session")
def fronts() -> Path:
    """The folder of the front libraries for this interpreter's packages."""
    try:
        return front_libraries()
    except BuildError as error:
        pytest.skip(f"no simulated card here: {error}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "exhaustive: takes minutes, left out unless asked for with -m"
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if "exhaustive" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="takes minutes; run with -m exhaustive")
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def sessions(fronts: Path) -> Iterator[Callable[..., Session]]:
    """vLLM on a simulated card by capability, the fork or stock; jobs say how big."""
    found: dict[tuple[str, bool], Session] = {}

    def get(capability: str, *, stock: bool = False) -> Session:
        key = (capability, stock)
        if key not in found:
            card = find_card(None, 64 << 30, capability)
            package = find_variant("stock").package if stock else None
            found[key] = Session(card, package=package)
            found[key].wait_until_ready()
        return found[key]

    yield get
    for session in found.values():
        session.close()


@pytest.fixture
def run_driver(fronts: Path) -> Callable[..., Outcome]:
    """Run text that has `driver`'s functions, `card`, `answer`, and no torch."""

    def run(text: str, **options: Any) -> Outcome:
        environment = options.pop("env", {})
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        return on_card(
            "from driver import *\nfrom tools.rehearsal import card\n"
            + textwrap.dedent(text),
            env={"PYTHONPATH": path, **environment},
            **options,
        )

    return run


@pytest.fixture(scope="session")
def torch_process(fronts: Path) -> Iterator[WarmProcess]:
    process = WarmProcess(TORCH_PROLOGUE, capability="12.0", cards=2)
    yield process
    process.close()


@pytest.fixture
def run_torch(torch_process: WarmProcess) -> Callable[..., Outcome]:
    """Run text that has torch, `card` and `answer`, on two cards of SM 12.0."""
    return torch_process.run
