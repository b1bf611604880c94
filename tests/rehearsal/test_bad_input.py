# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments: one line that says what to do, before any work."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.rehearsal import __main__ as command
from tools.rehearsal import run
from tools.rehearsal.jobs import Failure, Job, OptionError, Outcome
from tools.rehearsal.models import ModelError, model_folder
from tools.rehearsal.packages import Variant
from tools.rehearsal.rehearse import Answer, Rehearser, Verdict
from tools.rehearsal.report import table, to_text

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no-such-model", "--card", "h200"], "neither a folder with a config.json"),
        (["Qwen/Qwen3-0.6B", "--card", "h200"], "put its config.json"),
        (["llama-3.1-8b", "--card", "rtx-1"], "cards.toml has rtx-4090"),
        (["llama-3.1-8b"], "Give --card NAME, or --gpu-memory and --capability"),
        (["llama-3.1-8b", "--card", "h200", "--gpu-memory", "16x"], "is not a size"),
        (["llama-3.1-8b", "--card", "h200", "--compare", "fok"], "none of fork, stock"),
        (["llama-3.1-8b", "--card", "h200", "--json", "none/x"], "there is no folder"),
        (["llama-3.1-8b", "--card", "h200", "--plot", "none/x"], "there is no folder"),
    ],
)
def test_one_line_says_what_is_wrong(arguments, text, capsys, monkeypatch):
    monkeypatch.setattr(command, "front_libraries", lambda: pytest.fail("too late"))
    try:
        status = command.main(arguments)
    except SystemExit as ended:  # argparse's own
        status = ended.code
    assert status == command.USAGE
    last = capsys.readouterr().err.splitlines()[-1]
    assert text in last


def test_a_config_file_stands_for_its_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path / "config.json"), tmp_path) == tmp_path
    with pytest.raises(ModelError):
        model_folder(str(tmp_path / "other.json"), tmp_path)


class OneOutcome:
    """A session that answers every job the same."""

    def __init__(self, outcome):
        self.outcome = outcome

    def run(self, job):
        return self.outcome


def rehearse(outcome, card):
    variant = Variant("fork", True, None, "1+x")
    session, job = OneOutcome(outcome), Job("folder", card.memory, True)
    rehearser = Rehearser(session, variant, card, job, lambda text: None)
    return rehearser.answer(smallest=False, kv_cache=False)


@pytest.fixture
def card():
    return command.find_card("h200", None, None)


def test_an_option_that_vllm_refuses_is_a_wrong_argument(card):
    failure = Failure("OptionError", "vLLM refuses an option: --x", "", False)
    with pytest.raises(OptionError, match="--x"):
        rehearse(Outcome(failure=failure), card)


def test_the_reason_of_another_error_is_shown(card):
    message = "1 validation error for ModelConfig\n  Value error, unknown method"
    failure = Failure("ValidationError", message, "a.py:1 in f", False)
    answer = rehearse(Outcome(failure=failure), card)
    assert answer.verdict is Verdict.UNKNOWN
    assert "unknown method" in to_text("m", card, [answer])


def test_nothing_stranded_is_not_less_than_nothing(card):
    outcome = Outcome(loads=True, live=(1 << 30) + 1, mapped=1 << 30)
    answer = Answer(Variant("fork", True, None, "1+x"), Verdict.LOADS, [outcome])
    assert "-0.00" not in table([answer])


def test_a_program_that_is_not_there(capfd):
    assert run.main(["--card", "h200", "--", "no-such-program"]) == command.USAGE
    assert "no-such-program does not start" in capfd.readouterr().err


def test_the_series_says_which_package_is_missing(tmp_path):
    (tmp_path / "libcst.py").write_text(
        "raise ModuleNotFoundError('none', name='libcst')"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tools.series", "list"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "pip install -r requirements/build.txt" in done.stderr
