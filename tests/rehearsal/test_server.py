# SPDX-License-Identifier: Apache-2.0
"""Sessions: jobs in forked children, failures that stay in them, ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.rehearsal.cards import find_card
from tools.rehearsal.jobs import Job
from tools.rehearsal.models import model_folder
from tools.rehearsal.rehearse import LOW_UTILIZATION
from tools.rehearsal.session import Session, SessionError

GIB = 1 << 30
SMALL = '--hf-overrides={"num_hidden_layers": 2}'


@pytest.fixture(scope="module")
def card():
    return find_card("h200", None, None)


@pytest.fixture(scope="module")
def session(sessions):
    return sessions("9.0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(model_folder("qwen3-30b-a3b", tmp_path_factory.mktemp("models")))


def test_a_load_with_kv_cache_sleep_and_wake(session, card, folder, tmp_path):
    snapshot = tmp_path / "snapshot.pickle"
    job = Job(
        folder,
        card.memory,
        True,
        (SMALL,),
        kv_cache=True,
        cycles=2,
        trace=True,
        snapshot=str(snapshot),
    )
    outcome = session.run(job)
    assert outcome.loads, outcome.log
    assert not outcome.misuse
    assert not outcome.unsupported
    assert not outcome.leaks
    # Two layers of 128 experts in BF16, embeddings and head.
    weights = 2 * 128 * 3 * 2048 * 768 * 2 + 2 * 151936 * 2048 * 2
    assert weights < outcome.live < 1.2 * weights
    assert outcome.live <= outcome.mapped <= outcome.peak - outcome.base
    assert outcome.kv_cache > 100 * GIB
    assert outcome.asleep < outcome.after_load - weights * 0.9
    assert {p.phase for p in outcome.timeline} >= {"create the model"}
    assert snapshot.stat().st_size > 1000


def test_the_next_load_starts_on_an_empty_card(session, card, folder):
    first, second = (
        session.run(Job(folder, card.memory, True, (SMALL,), trace=True))
        for _ in range(2)
    )
    assert (first.peak, first.base, first.live) == (
        second.peak,
        second.base,
        second.live,
    )
    assert second.seconds < 10


def test_a_card_too_full_to_start_is_about_memory_too(session, folder):
    """vLLM's own check before the load."""
    outcome = session.run(Job(folder, 2 * GIB, True, (SMALL,)))
    assert outcome.loads is False
    assert outcome.failure.kind == "ValueError"
    assert outcome.failure.message.startswith("Free memory on device")


def test_ranks_have_their_own_shards(session, card, folder):
    whole = session.run(Job(folder, card.memory, True, (SMALL,), trace=True))
    options = (SMALL, "--tensor-parallel-size=4")
    for rank in (0, 3):
        job = Job(folder, card.memory, True, options, rank=rank, trace=True)
        outcome = session.run(job)
        assert outcome.loads, outcome.log
        assert (outcome.world_size, outcome.rank) == (4, rank)
        assert outcome.live == pytest.approx(whole.live / 4, rel=0.15)


def test_a_small_card_is_out_of_memory(session, folder):
    options = (SMALL, LOW_UTILIZATION)
    outcome = session.run(Job(folder, 2 * GIB, True, options, trace=True))
    assert outcome.loads is False
    assert outcome.failure.kind == "OutOfMemoryError"
    assert "total capacity of 2.00 GiB" in outcome.failure.message
    assert outcome.phase_at_peak == "create the model"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--no-such-option=1",), "no-such-option"),
        (("--quantization=nonsense",), "nonsense"),
    ],
)
def test_what_vllm_refuses_is_no_verdict(session, card, folder, options, text):
    outcome = session.run(Job(folder, card.memory, True, options))
    assert outcome.loads is None
    assert text in outcome.failure.message


def test_a_crash_is_no_verdict_and_the_server_lives(session, card, folder, tmp_path):
    """An unknown architecture's config, and one that kills the process."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    assert session.run(Job(str(broken), card.memory, True)).loads is None
    assert session.run(Job(folder, card.memory, True, (SMALL,))).loads


def test_a_vllm_that_does_not_start_is_reported(fronts, card, tmp_path):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('a broken vLLM')")
    with (
        Session(card, package=tmp_path) as session,
        pytest.raises(SessionError, match="a broken vLLM"),
    ):
        session.wait_until_ready()


def test_the_command(fronts, tmp_path, folder):
    """A folder of one's own, a described card; figures as JSON and a status."""
    config = json.loads(Path(folder, "config.json").read_text())
    own = tmp_path / "mine"
    own.mkdir()
    (own / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "tools.rehearsal", str(own), "--no-kv-cache"]
    command += ["--gpu-memory", "10GiB", "--capability", "9.0", "--json", str(out)]
    command += ["--gpu-memory-utilization", "0.6", "--max-model-len", "1024"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "loads" in done.stdout
    (run,) = json.loads(out.read_text())["runs"].values()
    assert run["loads"] is True
    assert run["verdict"] == "loads"
    assert run["peak_bytes"] > 2 * GIB


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gpt-oss-20b"], "which card"),
        (["gpt-oss-20b", "--card", "abacus"], "abacus"),
        (["no-such-model", "--card", "h200"], "no-such-model"),
        (["gpt-oss-20b", "--card", "h200", "--compare", "other"], "other"),
    ],
)
def test_wrong_arguments(fronts, arguments, text):
    command = [sys.executable, "-m", "tools.rehearsal", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_calibrating_a_simulated_card_finds_its_constants(fronts):
    """The measurement itself, where the truth is known."""
    import dataclasses
    import tomllib

    from tools.rehearsal.calibration import Calibration
    from tools.rehearsal.testing import run_on_card

    constants = Calibration(
        reserved_bytes=150 << 20, context_bytes=444 << 20, first_launch_bytes=90 << 20
    )
    card = dataclasses.replace(find_card("h200", 20 * GIB, None), calibration=constants)
    result = run_on_card([sys.executable, "-m", "tools.rehearsal.calibrate"], card)
    assert result.status == 0, result.stderr
    found = tomllib.loads(result.stdout)["NVIDIA H200"]
    assert found["reserved_mib"] == 150
    assert found["context_mib"] == 444
    assert found["first_launch_mib"] == 90
