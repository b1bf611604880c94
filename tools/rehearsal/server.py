# SPDX-License-Identifier: Apache-2.0
"""A process on a simulated card that has vLLM imported and forks for each job.

Importing vLLM takes most of a rehearsal's time, and needs no card: a child
forked after it starts at once, with a card of its own that has no context yet.
What a child had to import on top, the server imports before the next job.
Jobs come as lines on standard input; for each, the name of a file with the
outcome goes out as a line. Everything else that is printed goes to the job's
log.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tools.rehearsal import card
from tools.rehearsal.jobs import Failure, Job, Outcome
from tools.rehearsal.load import Rehearsal, warm_up

LOG_LINES = 60
# A load that waits for something which never comes ends as a crash.
LONGEST_SECONDS = 1200


def settle() -> None:
    """Take what lives now out of the garbage collector's sight.

    vLLM collects garbage several times in a load; without this each walks all
    that the imports made, and copies it page by page into the child.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def known_capability() -> Iterator[None]:
    """Let modules learn the card's capability without initializing CUDA.

    FlashInfer asks for it when it is imported; torch would initialize, and
    refuse to do so again in a child.
    """
    import torch

    major, minor = map(int, os.environ["REHEARSAL_CAPABILITY"].split("."))
    real = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = real


def can_fork() -> bool:
    """Whether a child could still initialize CUDA."""
    import torch

    pid = os.fork()
    if pid == 0:
        os._exit(1 if torch.cuda._is_in_bad_fork() else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def import_all(names: list[str]) -> bool:
    """Import modules that a child needed. False: forks do not work any more."""
    with known_capability():
        for name in names:
            # Whatever a module wants that is not here, its user will hear of.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    return can_fork()


def _child(job: Job, result: Path, modules: Path, log: Path) -> None:
    signal.alarm(LONGEST_SECONDS)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = 1
    before = set(sys.modules)
    try:
        outcome = Rehearsal(job).run()
        result.write_text(outcome.to_json())
        modules.write_text(json.dumps([m for m in sys.modules if m not in before]))
        card.write_report()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the parent's exit handlers are not the child's to run.
        os._exit(status)


def _crashed(job: Job, status: int) -> Outcome:
    code = os.waitstatus_to_exitcode(status)
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    if -code == signal.SIGALRM:
        how = f"no end after {LONGEST_SECONDS} s"
    failure = Failure("crash", f"the process ended with {how}", "", False)
    return Outcome(loads=None, rank=job.rank, failure=failure)


def _serve_one(job: Job, folder: Path) -> Path:
    result, log = folder / "outcome.json", folder / "log.txt"
    modules = folder / "modules.json"
    for path in (result, modules):
        path.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _child(job, result, modules, log)
    _, status = os.waitpid(pid, 0)
    if result.exists():
        outcome = Outcome.from_json(result.read_text())
    else:
        outcome = _crashed(job, status)
    text = log.read_text(errors="replace")
    outcome.log = "\n".join(text.splitlines()[-LOG_LINES:])
    result.write_text(outcome.to_json())
    return result


def serve(jobs: TextIO, answers: TextIO, *, restarted: bool = False) -> None:
    """Warm up, say "ready", then answer jobs until the input ends.

    `restarted`: an earlier process has said "ready", and spoiled itself by
    importing more than the warm-up does.
    """
    warm_up()
    settle()
    if not restarted:
        print("ready", file=answers, flush=True)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        modules = Path(folder) / "modules.json"
        for line in jobs:
            result = _serve_one(Job.from_json(line), Path(folder))
            print(result, file=answers, flush=True)
            if restarted or not modules.exists():
                continue
            if not import_all(json.loads(modules.read_text())):
                os.set_inheritable(answers.fileno(), True)
                command = [sys.executable, "-m", "tools.rehearsal.server"]
                os.execv(sys.executable, [*command, str(answers.fileno())])
            settle()


def main() -> None:
    """Serve on standard input and output; other output goes to stderr.

    After a restart the one argument is the descriptor for the answers.
    """
    if len(sys.argv) > 1:
        serve(sys.stdin, os.fdopen(int(sys.argv[1]), "w"), restarted=True)
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
