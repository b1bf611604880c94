# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keeps each worker's answers in step with the calls that were sent to it."""

import time
from collections.abc import Sequence
from typing import Any, Protocol


class AnswerQueue(Protocol):
    def dequeue(self, timeout: float | None = None) -> Any: ...


class Answers:
    """Reads one answer per call from queues that hold them in order.

    A call to several workers ends at the first failure or timeout, with the answers of
    the others still to come. Unless they are skipped, the next call takes them for its
    own. They are skipped when that call reads, not when the first one fails, because a
    worker may need long for its answer, or wait for the one that failed.
    """

    def __init__(self) -> None:
        self._owed: dict[AnswerQueue, int] = {}

    def expect(self, queues: Sequence[AnswerQueue]) -> None:
        """Note that each queue is going to hold one more answer."""
        for queue in queues:
            self._owed[queue] = self._owed.get(queue, 0) + 1

    def read(self, queue: AnswerQueue, timeout: float | None) -> Any:
        """The answer to the last call that expected one.

        Args:
            queue: holds the answers of one worker.
            timeout: seconds for this answer and the skipped ones together; None waits.

        Raises:
            TimeoutError: it is not there yet.

        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            answer = queue.dequeue(timeout=timeout)
            owed = self._owed.pop(queue) - 1
            if owed == 0:
                return answer
            self._owed[queue] = owed
            if deadline is not None:
                timeout = max(0.0, deadline - time.monotonic())
