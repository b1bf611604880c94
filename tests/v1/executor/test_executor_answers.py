# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from collections import deque
from types import SimpleNamespace

import pytest

from vllm.v1.executor.answers import Answers
from vllm.v1.executor.multiproc_executor import (
    FutureWrapper,
    MultiprocExecutor,
    WorkerProc,
)

OK, FAILED = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE


class Queue:
    """Answers in order; an empty queue times out."""

    def __init__(self) -> None:
        self.answers: deque = deque()
        self.timeouts: list[float | None] = []

    def dequeue(self, timeout=None):
        self.timeouts.append(timeout)
        if not self.answers:
            raise TimeoutError
        return self.answers.popleft()


def test_answers_to_earlier_calls_are_skipped():
    queue, answers = Queue(), Answers()
    queue.answers += ["to the first", "to the second"]
    answers.expect([queue])
    answers.expect([queue])
    assert answers.read(queue, None) == "to the second"


def test_a_late_answer_is_still_owed():
    queue, answers = Queue(), Answers()
    answers.expect([queue])
    with pytest.raises(TimeoutError):
        answers.read(queue, 0.0)
    queue.answers += ["late", "in time"]
    answers.expect([queue])
    assert answers.read(queue, 5.0) == "in time"
    assert all(timeout is not None and timeout <= 5 for timeout in queue.timeouts)


class Workers:
    """Two workers whose answers to each call are given."""

    def __init__(self) -> None:
        self.queues = [Queue(), Queue()]
        executor = self.executor = MultiprocExecutor.__new__(MultiprocExecutor)
        executor.is_failed = False
        executor.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(enable_fault_tolerance=False)
        )
        executor.response_mqs = self.queues
        executor.rpc_broadcast_mq = self
        executor.futures_queue = deque()

    def enqueue(self, call) -> None:
        """Takes the place of the queue to the workers."""

    def call(self, *answers, **options):
        for queue, answer in zip(self.queues, answers, strict=True):
            if answer is not None:
                queue.answers.append(answer)
        return self.executor.collective_rpc("wake_up", **options)


@pytest.mark.parametrize("failing", [0, 1])
def test_each_worker_answers_the_repeated_call(failing):
    workers = Workers()
    first = [(OK, "first"), (OK, "first")]
    first[failing] = (FAILED, "no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        workers.call(*first)
    assert workers.call((OK, "a"), (OK, "b")) == ["a", "b"]
    assert not any(queue.answers for queue in workers.queues)


def test_a_call_to_one_worker_expects_nothing_of_the_others():
    workers = Workers()
    assert workers.call(None, (OK, "b"), unique_reply_rank=1) == "b"
    assert workers.call((OK, "a"), (OK, "b")) == ["a", "b"]


def test_a_call_whose_result_is_read_later():
    workers = Workers()
    first = workers.call((FAILED, "no memory"), (OK, "first"), non_block=True)
    second = workers.call((OK, "a"), (OK, "b"), non_block=True)
    assert isinstance(first, FutureWrapper)
    assert second.result() == ["a", "b"]
    with pytest.raises(RuntimeError, match="no memory"):
        first.result()
