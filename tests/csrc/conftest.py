# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One build and one loaded extension for all tests of this folder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator

import pytest
from cumem_harness import Allocator, Build, FakeDriver, Unavailable, load


@pytest.fixture(scope="session")
def build(pytestconfig: pytest.Config) -> Build:
    assert pytestconfig.cache is not None
    try:
        return Build(pytestconfig.cache.mkdir("csrc"))
    except Unavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@dataclasses.dataclass
class Card:
    """The extension over the fake driver, two devices with 64 MiB each."""

    cumem: types.ModuleType
    allocator: Allocator
    fake: FakeDriver
    # Set by a test that ends with things which the fake driver keeps.
    may_leak: bool = False

    def malloc(self, size: int = 1 << 20, device: int = 0, stream: int = 0) -> int:
        address = self.allocator.malloc(size, device, stream)
        assert address, self.cumem.take_errors()
        return address

    def free(self, address: int, stream: int = 0) -> None:
        self.allocator.free(address, stream=stream)

    def segment(self, address: int) -> tuple:
        (found,) = [s for s in self.cumem.segments() if s[2] == address]
        return found

    def sleep(self, address: int) -> None:
        self.cumem.python_unmap_and_release(*self.segment(address)[:4])

    def wake(self, address: int) -> None:
        self.cumem.python_create_and_map(*self.segment(address)[:4])

    def asleep(self, address: int) -> bool:
        return self.segment(address)[5]

    def settle(self) -> None:
        """Until the driver has taken back what it refused; it must, in the end."""
        for _ in range(200):
            if self.cumem.counters()["leftovers"] == 0:
                return
        raise AssertionError("the driver still refuses to take something back")

    def errors(self, count: int) -> list[str]:
        """The errors latched since the last call, of which there must be `count`."""
        errors = self.cumem.take_errors()
        assert len(errors) == count, errors
        return errors


@pytest.fixture(scope="session")
def loaded(build: Build) -> tuple[types.ModuleType, Allocator, FakeDriver]:
    return load(build.extension, build.fake_driver)


@pytest.fixture
def card(loaded) -> Iterator[Card]:
    card = Card(*loaded)
    card.fake.reset()
    card.cumem.reset_peak()
    yield card
    card.fake.open_gate()
    for function in ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree"):
        card.fake.heal(function)
    card.cumem.init_module(None, None)
    card.cumem.set_scope("default", 0)
    left = card.cumem.segments()
    for segment in left:
        card.free(segment[2])
    card.settle()
    assert not left, "the test left segments behind"
    assert card.cumem.take_errors() == []
    assert card.fake.violations() == ""
    counters = card.cumem.counters()
    assert counters["mapped_bytes"] == counters["reserved_bytes"] == 0
    if not card.may_leak:
        assert card.fake.left() == {}


@pytest.fixture
def fresh(build: Build) -> Callable[[str], str]:
    """Runs a script in a new process, where nothing is cached yet.

    It finds `cumem`, `allocator` and `fake`; what it prints is returned.
    """

    def run(script: str) -> str:
        preamble = (
            "import sys\n"
            f"sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\n"
            "from cumem_harness import *\n"
            f"cumem, allocator, fake = load({str(build.extension)!r}, "
            f"{str(build.fake_driver)!r})\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", preamble + script],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run
