# SPDX-License-Identifier: Apache-2.0
"""Every failing driver call in load, sleep and wake: a clean error or a retry.

Whatever fails once, the second attempt must work, the bytes must be the same,
and in the end no handle, mapping or reservation may be left.
"""

import sys
from pathlib import Path

import pytest

from tools.rehearsal.cards import find_card
from tools.rehearsal.packages import installed_version, is_fork
from tools.rehearsal.testing import run_on_card

SCENARIO = Path(__file__).with_name("fault_scenario.py")
NOTHING_LEFT = {
    "handles": 0,
    "unreachable_handles": 0,
    "mappings": 0,
    "reservations": 0,
}
SAMPLE = (
    "cuMemCreate:1",
    "cuMemCreate:6",
    "cuMemAddressReserve:2",
    "cuMemMap:3",
    "cuMemSetAccess:4",
    "cudaMemcpyAsync:2",
)
# What the driver refuses to take back once: still there, and ours to offer again.
REFUSED_FREES = (
    "cuMemUnmap:2",
    "cuMemRelease:3",
    "cuMemRelease:6",
    "cuMemAddressFree:1",
)
REFUSED = "the extension does not offer again what the driver refused to take back"


def run(faults: tuple[str, ...] = ()) -> dict[str, dict]:
    """What became of each fault, and under "" of a run without any."""
    if not is_fork(installed_version()):
        pytest.skip("the installed vLLM is not the fork")
    card = find_card(None, 4 << 30, "9.0")
    result = run_on_card([sys.executable, SCENARIO, *faults], card, timeout=900)
    assert result.status == 0, result.stderr
    return result.answer


@pytest.fixture(scope="module")
def sample(fronts) -> dict[str, dict]:
    return run(SAMPLE + REFUSED_FREES)


def verdict(result: dict) -> str:
    """Empty when a fault ended well."""
    if "broke" in result:
        return str(result["broke"])
    if result["misuse"]:
        return f"misuse {result['misuse']}"
    if result["left"] != NOTHING_LEFT:
        return f"left {result['left']} after {result['errors']}"
    return ""


def check(results: dict[str, dict]) -> None:
    bad = {name: text for name, r in results.items() if (text := verdict(r))}
    assert not bad, "\n".join(f"{name}: {text}" for name, text in bad.items())


def test_a_sample_of_faults(sample):
    check({name: r for name, r in sample.items() if name not in REFUSED_FREES})
    clean = sample[""]
    assert clean["errors"] == []
    assert clean["asleep"] == 0
    for name in SAMPLE:
        assert sample[name]["fired"] == 1, name


@pytest.mark.xfail(strict=True, reason=REFUSED)
@pytest.mark.parametrize("fault", REFUSED_FREES)
def test_a_refused_free(sample, fault):
    check({fault: sample[fault]})


@pytest.fixture(scope="module")
def every(fronts) -> dict[str, dict]:
    return run()


def is_free(fault: str) -> bool:
    return fault.split(":")[0] in {free.split(":")[0] for free in REFUSED_FREES}


@pytest.mark.exhaustive
def test_every_fault(every):
    assert len(every) > 50
    check({fault: r for fault, r in every.items() if not is_free(fault)})


@pytest.mark.exhaustive
@pytest.mark.xfail(strict=True, reason=REFUSED)
def test_every_refused_free(every):
    check({fault: r for fault, r in every.items() if is_free(fault)})
