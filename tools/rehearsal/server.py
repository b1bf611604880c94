# SPDX-License-Identifier: Apache-2.0
"""A process on a simulated card that has vLLM imported and forks for each job.

Importing vLLM takes most of a rehearsal's time, and needs no card: a child
forked after it starts at once, with a card of its own that has no context yet.
Jobs come as lines on standard input; for each, the name of a file with the
outcome goes out as a line. Everything else that is printed goes to the job's
log.
"""

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TextIO

from tools.rehearsal import card
from tools.rehearsal.jobs import Failure, Job, Outcome
from tools.rehearsal.load import Rehearsal, warm_up

LOG_LINES = 60


def _child(job: Job, result: Path, log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = 1
    try:
        outcome = Rehearsal(job).run()
        result.write_text(outcome.to_json())
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
    signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    how = f"signal {signal}" if signal else f"exit status {os.waitstatus_to_exitcode(status)}"
    failure = Failure("crash", f"the process ended with {how}", "", False)
    return Outcome(loads=None, rank=job.rank, failure=failure)


def _serve_one(job: Job, folder: Path) -> Path:
    result, log = folder / "outcome.json", folder / "log.txt"
    result.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _child(job, result, log)
    _, status = os.waitpid(pid, 0)
    if result.exists():
        outcome = Outcome.from_json(result.read_text())
    else:
        outcome = _crashed(job, status)
    text = log.read_text(errors="replace")
    outcome.log = "\n".join(text.splitlines()[-LOG_LINES:])
    result.write_text(outcome.to_json())
    return result


def serve(jobs: TextIO, answers: TextIO) -> None:
    """Warm up, say "ready", then answer jobs until the input ends."""
    warm_up()
    print("ready", file=answers, flush=True)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        for line in jobs:
            result = _serve_one(Job.from_json(line), Path(folder))
            print(result, file=answers, flush=True)


def main() -> None:
    """Serve on standard input and output; other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
