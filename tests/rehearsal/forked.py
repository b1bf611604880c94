# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of a module on a card, each in a child of one process.

A check is a function of the module that takes no argument, raises if it fails, and
returns. The parent has imported the module but has not started CUDA, so that a child
costs no import, has a card of its own, and ends as any interpreter ends.
"""

import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

TIMEOUT_S = 60 + float(os.environ.get("POOL_STRESS_SECONDS", "2"))


def run_checks(module: str, names: list[str], repeat: int) -> dict[str, dict[str, Any]]:
    """Outcome of each check, or of its first run that was not clean."""
    checks = importlib.import_module(module)
    # The end of a child would otherwise visit every object of the parent, for seconds.
    gc.collect()
    gc.freeze()
    outcomes: dict[str, dict[str, Any]] = {}
    for name in names:
        for run in range(1, repeat + 1):
            outcomes[name] = _run(getattr(checks, name), TIMEOUT_S)
            if not outcomes[name]["clean"]:
                outcomes[name]["text"] = f"run {run}: {outcomes[name]['text']}"
                break
    return outcomes


def _run(check: Any, timeout: float) -> dict[str, Any]:
    report = Path(os.environ["REHEARSAL_REPORT"])
    report.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+") as output:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _become(check, output.fileno())
        status = _wait(child, timeout)
        output.seek(0)
        text = output.read()
    card = json.loads(report.read_text()) if report.exists() else {}
    report.unlink(missing_ok=True)
    clean = status == 0 and bool(card) and "Traceback" not in text
    clean = clean and not card["misuse"] and not card["unsupported"]
    what = f"exit status {status}, misuse {card.get('misuse_examples', 'unknown')}, "
    what += f"unsupported {card.get('unsupported', 'unknown')}"
    return {"clean": clean, "text": f"{what}\n{text[-6000:]}"}


def _become(check: Any, output: int) -> None:
    """Run the check, and end this process as an interpreter ends."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        check()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def _wait(child: int, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGALRM
        time.sleep(0.005)
