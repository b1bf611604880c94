# SPDX-License-Identifier: Apache-2.0
"""Verdicts, the smallest card, histories and reports: no card, no torch."""

import json

import pytest

from tools.rehearsal import plot, report
from tools.rehearsal.calibration import (
    Calibration,
    CalibrationError,
    calibrate,
    read_calibrations,
)
from tools.rehearsal.cards import Card, CardError, find_card, known_cards, parse_size
from tools.rehearsal.jobs import Failure, Job, Outcome, Point
from tools.rehearsal.models import ModelError, built_in_models, model_folder
from tools.rehearsal.packages import Variant, is_fork
from tools.rehearsal.rehearse import (
    LARGEST_CARD,
    RESOLUTION,
    Answer,
    Verdict,
    find_smallest,
    judge,
)
from tools.rehearsal.timeline import read_history, thin

GIB = 1 << 30


@pytest.mark.parametrize(
    ("loads", "within_margin", "verdict"),
    [
        (True, True, Verdict.LOADS),
        (True, False, Verdict.CLOSE_LOADS),
        (False, False, Verdict.FAILS),
        (False, True, Verdict.CLOSE_FAILS),
        (None, None, Verdict.UNKNOWN),
        (True, None, Verdict.UNKNOWN),
    ],
)
def test_a_verdict_within_the_margin_is_too_close(loads, within_margin, verdict):
    assert judge(Outcome(loads=loads), within_margin) is verdict


@pytest.mark.parametrize("needed", [int(2.5 * GIB), 17 * GIB, 90 * GIB + 12345])
@pytest.mark.parametrize("known", [True, False])
def test_the_smallest_card_is_found(needed, known):
    runs = []

    def loads(size):
        runs.append(size)
        return size >= needed

    good = 2 * needed if known else None
    found = find_smallest(loads, good, int(needed * 0.9))
    assert needed <= found <= needed + RESOLUTION
    assert len(runs) < 16


def test_no_card_is_large_enough():
    assert find_smallest(lambda size: False, None, 16 * GIB) is None
    assert find_smallest(lambda size: None, 16 * GIB, 16 * GIB) is None
    sizes = []
    find_smallest(lambda size: sizes.append(size) or False, None, 16 * GIB)
    assert max(sizes) <= LARGEST_CARD


def entry(action, addr, size, phase, time=0):
    return {
        "action": action,
        "addr": addr,
        "size": size,
        "user_metadata": phase,
        "time_us": time,
    }


def test_history_attributes_live_bytes_to_phases():
    history = read_history(
        [
            entry("segment_alloc", 0, 100, "create", 10),
            entry("alloc", 0, 60, "create", 11),
            entry("free_requested", 0, 60, "convert a", 12),
            entry("segment_alloc", 100, 80, "convert a", 13),
            entry("alloc", 100, 80, "convert a", 14),
            entry("free_completed", 0, 60, "convert a", 15),
            entry("segment_free", 0, 100, "convert a", 1_000_016),
        ]
    )
    assert (history.live, history.mapped) == (140, 180)
    assert history.phase_at_peak == "convert a"
    assert history.live_at_peak == {"create": 60, "convert a": 80}
    last = history.points[-1]
    assert (last.live, last.mapped, round(last.seconds)) == (80, 80, 1)


def test_history_ignores_what_was_there_before():
    history = read_history([entry("free_completed", 5, 50, "x")])
    assert (history.points[0].live, history.live) == (0, 0)


def test_thinning_keeps_the_extremes():
    points = [Point(i, 1, 2, "") for i in range(10_000)]
    points[4567] = Point(4567, 1, 999, "")
    points[7001] = Point(7001, 500, 600, "")
    kept = thin(points, 600)
    assert len(kept) < 1200
    assert points[4567] in kept
    assert points[7001] in kept
    assert kept[0] is points[0]
    assert kept[-1] is points[-1]
    assert thin(points[:50], 600) == points[:50]


def test_jobs_and_outcomes_cross_processes():
    job = Job("folder", 5, True, ("--a=1", "-b"), rank=1, trace=True)
    assert Job.from_json(job.to_json()) == job
    failure = Failure("OutOfMemoryError", "m", "f", True)
    outcome = Outcome(loads=False, failure=failure, timeline=[Point(0.5, 1, 2, "p")])
    assert Outcome.from_json(outcome.to_json()) == outcome


def test_sizes():
    assert parse_size("15.47GiB") == int(15.47 * GIB)
    assert parse_size("16 GB") == 16 * 10**9
    assert parse_size("123") == 123
    for text in ("", "16 apples", "-3GiB"):
        with pytest.raises(CardError, match="not a size"):
            parse_size(text)


def test_cards():
    cards = known_cards()
    assert cards["rtx-5070-ti"].memory == pytest.approx(15.47 * GIB, rel=1e-3)
    assert find_card("h200", 20 * GIB, None).memory == 20 * GIB
    assert find_card(None, 20 * GIB, "8.6").capability == "8.6"
    with pytest.raises(CardError, match="rtx-5070-ti"):
        find_card("rtx-1", None, None)
    with pytest.raises(CardError, match="which card"):
        find_card(None, 20 * GIB, None)
    with pytest.raises(CardError, match="capability"):
        Card("c", "nine", 20 * GIB)


def test_models(tmp_path):
    for name in built_in_models():
        config = json.loads((model_folder(name, tmp_path) / "config.json").read_text())
        assert config["architectures"]
    own = tmp_path / "mine"
    own.mkdir()
    with pytest.raises(ModelError, match="gpt-oss-20b"):
        model_folder(str(own), tmp_path)
    (own / "config.json").write_text("{}")
    assert model_folder(str(own), tmp_path) == own


def test_calibrations(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        '["A card"]\ndriver = "1"\nreserved_mib = 1\ncontext_mib = 400\n'
        "first_launch_mib = 90\ncommunicator_mib = 0\nmargin_mib = 32\n"
    )
    card = Card("A card", "9.0", 8 * GIB)
    constants = calibrate(card, file).calibration
    assert constants.context_bytes == 400 << 20
    assert constants.margin_bytes == 32 << 20
    assert constants.source == "measured, driver 1"
    with pytest.raises(CalibrationError, match="Other"):
        calibrate(Card("Other", "9.0", 8 * GIB), file)
    file.write_text('["A card"]\ncontext_mib = "much"\n')
    with pytest.raises(CalibrationError, match="reserved_mib"):
        read_calibrations(file)
    assert calibrate(Card("Other", "9.0", 8 * GIB)).calibration == Calibration()


def test_versions():
    assert is_fork("0.33.0+sleepload.1")
    assert not is_fork("0.33.0")


@pytest.fixture
def answers():
    points = [
        Point(0, 1 * GIB, 2 * GIB, "create the model"),
        Point(1, 2 * GIB, 8 * GIB, "convert layers.0"),
    ]
    common = dict(
        base=GIB // 2,
        peak=9 * GIB,
        live=2 * GIB,
        mapped=8 * GIB,
        timeline=points,
        phase_at_peak="convert layers.0",
        live_at_peak={"create the model": GIB, "convert layers.0": GIB},
        world_size=2,
    )
    failure = Failure(
        "OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 168.00 MiB. If reserved but "
        "unallocated memory is large try setting this and that",
        "a.py:1 in f",
        True,
    )
    bad = Outcome(loads=False, failure=failure, rank=1, **common)
    good = Outcome(loads=True, after_load=3 * GIB, kv_cache=4 * GIB, **common)
    stock = Answer(Variant("stock", True, None, "0.33.0"), Verdict.FAILS, [good, bad])
    fork = Answer(Variant("fork", True, None, "0.33.0+x"), Verdict.LOADS, [good])
    fork.smallest_card = 10 * GIB
    return [stock, fork]


def test_the_worst_rank_decides(answers):
    assert answers[0].worst.rank == 1
    assert report.exit_status(answers[0]) == 1
    assert report.exit_status(answers[1]) == 0
    unknown = Answer(answers[0].variant, Verdict.UNKNOWN, [Outcome()])
    assert report.exit_status(unknown) == 3


def test_text(answers):
    card = Card("A card", "12.0", 10 * GIB)
    text = report.to_text("m", card, answers)
    assert "does not load" in text
    assert "Tried to allocate 168.00 MiB." in text
    assert "this and that" not in text
    assert "at a.py:1 in f" in text
    peak = next(line for line in text.splitlines() if line.startswith("peak"))
    assert peak.split() == ["peak", "8.50", "GiB", "8.50", "GiB"]
    assert "not measured on this card" in text


def test_json(answers):
    card = Card("A card", "12.0", 10 * GIB)
    document = json.loads(json.dumps(report.to_json("m", card, answers)))
    assert document["card"]["memory"] == 10 * GIB
    assert document["model"] == "m"
    assert document["calibration"]["margin_bytes"] == 300 << 20
    run = document["runs"]["fork"]
    assert run["loads"] is True
    assert run["peak_bytes"] == 9 * GIB - GIB // 2
    assert run["after_load_bytes"] == 3 * GIB - GIB // 2
    assert run["stranded_bytes"] == 6 * GIB
    assert run["kv_cache_bytes"] == 4 * GIB
    assert run["smallest_card_bytes"] == 10 * GIB
    assert run["error"] is None
    assert document["runs"]["stock"]["error"]["kind"] == "OutOfMemoryError"


def test_plot(answers, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    plot.draw("m", Card("A card", "12.0", 10 * GIB), answers, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
