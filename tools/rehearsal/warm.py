# SPDX-License-Identifier: Apache-2.0
"""Run pieces of Python in forked children of a process that has imported much.

Lines of JSON come on standard input, exit statuses go out. See `WarmProcess`
in testing.py, whose other end this is.
"""

import gc
import json
import os
import signal
import sys
import traceback
from typing import Any

from tools.rehearsal import card

LONGEST_SECONDS = 300


def _child(order: dict[str, Any], names: dict[str, Any]) -> None:
    status = 1
    signal.alarm(LONGEST_SECONDS)
    try:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
        os.environ["REHEARSAL_TEST_ANSWER"] = order["answer"]
        card.resize(order["memory"])
        exec(compile(order["text"], "<rehearsal>", "exec"), names)
        with open(order["report"], "w") as out:
            json.dump(card.report(), out)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """The first line is the text of the imports."""
    names: dict[str, Any] = {"__name__": "__main__"}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    exec(compile(json.loads(sys.stdin.readline()), "<imports>", "exec"), names)
    # Else every child walks and copies all that the imports made.
    gc.collect()
    gc.freeze()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(order, names)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(status, file=answers, flush=True)


if __name__ == "__main__":
    main()
