# SPDX-License-Identifier: Apache-2.0
"""Programs on simulated cards, for the tests of this folder."""

import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.rehearsal.build import BuildError, front_libraries
from tools.rehearsal.testing import Outcome, on_card

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


@pytest.fixture
def run_torch(fronts: Path) -> Callable[..., Outcome]:
    """Run text that has torch, `card` and `answer`."""

    def run(text: str, **options: Any) -> Outcome:
        return on_card(TORCH_PROLOGUE + textwrap.dedent(text), **options)

    return run
