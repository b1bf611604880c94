# SPDX-License-Identifier: Apache-2.0
"""For tests: run a program, or a piece of one, on a simulated card.

    from tools.rehearsal.testing import on_card

    def test_something():
        result = on_card('''
            import torch
            from tools.rehearsal import card
            x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
            answer(used=card.used())
        ''', memory="16GiB", capability="12.0")
        assert result.answer["used"] > 1 << 30
        assert result.clean

The text runs in an interpreter of its own, in which `answer(**values)` hands
values back, and in which torch, vLLM and this package can be imported. Many
texts with the same imports run faster in a `WarmProcess`.
"""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.rehearsal.build import site_packages
from tools.rehearsal.cards import Card, parse_size
from tools.rehearsal.run import environment

ROOT = Path(__file__).parents[2]

_PROLOGUE = """\
import json as _json, os as _os
def answer(**values):
    with open(_os.environ["REHEARSAL_TEST_ANSWER"], "w") as file:
        _json.dump(values, file)
"""

# Settings under which vLLM stays in one process and asks no network.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Outcome:
    """How a program on a simulated card ended."""

    status: int
    stdout: str
    stderr: str
    answer: dict[str, Any] = field(default_factory=dict)
    # The card's report; empty when the program died before it could write one.
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Ended well, broke no rule of the driver, called nothing unsupported."""
        return (
            self.status == 0
            and bool(self.report)
            and not self.report["misuse"]
            and not self.report["unsupported"]
        )

    def check(self) -> "Outcome":
        """Itself, or AssertionError with the end of what the program said."""
        if not self.clean:
            raise AssertionError(
                f"exit status {self.status}\n"
                f"misuse: {self.report.get('misuse_examples')}\n"
                f"unsupported: {self.report.get('unsupported')}\n"
                f"{self.stdout[-2000:]}\n{self.stderr[-4000:]}"
            )
        return self


def run_on_card(
    command: Sequence[str | Path],
    card: Card,
    *,
    python: str | Path = sys.executable,
    cards: int = 1,
    faults: Sequence[str] = (),
    commit_limit: int = 2 << 30,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> Outcome:
    """Run `command`, a program of the environment of `python`, on `card`."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        report = Path(folder) / "report.json"
        answer = Path(folder) / "answer.json"
        variables = environment(
            card,
            site=site_packages(python),
            cards=cards,
            faults=faults,
            report=report,
            commit_limit=commit_limit,
            base={**os.environ, **VLLM_ENVIRONMENT, **(env or {})},
        )
        variables["REHEARSAL_TEST_ANSWER"] = str(answer)
        path = variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = f"{ROOT}:{path}" if path else str(ROOT)
        done = subprocess.run(
            [str(part) for part in command],
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            cwd=folder,
        )
        return Outcome(
            done.returncode,
            done.stdout,
            done.stderr,
            json.loads(answer.read_text()) if answer.exists() else {},
            json.loads(report.read_text()) if report.exists() else {},
        )


def on_card(
    text: str,
    *,
    memory: str | int = "16GiB",
    capability: str = "9.0",
    python: str | Path = sys.executable,
    **options: Any,
) -> Outcome:
    """Run Python text on a card; see the module's docstring and `run_on_card`."""
    size = parse_size(memory) if isinstance(memory, str) else memory
    program = _PROLOGUE + textwrap.dedent(text)
    card = Card(f"Simulated card, SM {capability}", capability, size)
    return run_on_card([python, "-c", program], card, python=python, **options)


class WarmProcess:
    """A process that has done its imports and forks for each text.

    A child starts at once on an empty card. The imports must not initialize
    CUDA. `run` takes and gives what `on_card` does, but for the options.
    """

    def __init__(
        self,
        imports: str,
        *,
        capability: str = "9.0",
        python: str | Path = sys.executable,
        cards: int = 1,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rehearsal-")
        card = Card(f"Simulated card, SM {capability}", capability, 16 << 30)
        base = {**os.environ, **VLLM_ENVIRONMENT}
        site = site_packages(python)
        env = environment(card, site=site, cards=cards, base=base)
        env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}".rstrip(":")
        self._process = subprocess.Popen(
            [str(python), "-m", "tools.rehearsal.warm"],
            env=env,
            cwd=self._folder.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._ask(_PROLOGUE + textwrap.dedent(imports)) != "ready":
            raise RuntimeError("the imports failed; see standard error")

    def _ask(self, order: Any) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def run(self, text: str, *, memory: str | int = "16GiB") -> Outcome:
        """Run a text in a child, on a card of `memory`."""
        size = parse_size(memory) if isinstance(memory, str) else memory
        folder = Path(self._folder.name)
        names = ("stdout", "stderr", "answer", "report")
        files = {name: folder / name for name in names}
        for path in files.values():
            path.unlink(missing_ok=True)
        order = {"text": textwrap.dedent(text), "memory": size}
        status = self._ask(order | {name: str(path) for name, path in files.items()})
        found = {
            name: path.read_text(errors="replace") if path.exists() else ""
            for name, path in files.items()
        }
        return Outcome(
            int(status),
            found["stdout"],
            found["stderr"],
            json.loads(found["answer"] or "{}"),
            json.loads(found["report"] or "{}"),
        )

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()
