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
from tools.rehearsal.packages import find_variant, installed_version, is_fork
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


@pytest.fixture(scope="module")
def checked(fronts: Path, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run the selected tests' checks, each in a child of one process on a card.

    POOL_CHECKS_REPEAT=20 runs each check 20 times, POOL_STRESS_SECONDS=60 makes each
    stress of threads so long.
    """
    repeat = int(os.environ.get("POOL_CHECKS_REPEAT", "1"))
    stress = float(os.environ.get("POOL_STRESS_SECONDS", "2"))
    if not is_fork(installed_version()):
        pytest.skip("the installed vLLM is not the fork")

    def run(module: str) -> dict[str, dict[str, Any]]:
        items = [i for i in request.session.items if i.path == request.path]
        names = [item.callspec.params["name"] for item in items]  # type: ignore[attr-defined]
        result = on_card(
            f"""
            from forked import run_checks
            answer(outcomes=run_checks({module!r}, {names!r}, {repeat}))
            """,
            env={"PYTHONPATH": str(HERE)},
            timeout=300 + repeat * (180 + 2 * stress),
        )
        assert "outcomes" in result.answer, result.stderr[-4000:]
        return result.answer["outcomes"]

    return run
