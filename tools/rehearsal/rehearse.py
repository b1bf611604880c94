# SPDX-License-Identifier: Apache-2.0
"""Rehearse a model on a card: ranks, the verdict, the smallest card."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tools.rehearsal.cards import Card
from tools.rehearsal.jobs import Job, OptionError, Outcome
from tools.rehearsal.packages import Variant
from tools.rehearsal.session import Session

GIB = 1 << 30
RESOLUTION = GIB // 10  # of the smallest card
LARGEST_CARD = 1024 * GIB
# The load itself does not depend on it, but vLLM refuses to start when less
# of the card is free, which on a small card its context alone can cause.
LOW_UTILIZATION = "--gpu-memory-utilization=0.5"

Progress = Callable[[str], None]


class Verdict(Enum):
    """What a rehearsal says. The value is its text."""

    LOADS = "loads"
    FAILS = "does not load"
    CLOSE_LOADS = "loads, too close to call"
    CLOSE_FAILS = "does not load, too close to call"
    UNKNOWN = "could not tell"


@dataclass
class Answer:
    """All that was learned of one variant on one card."""

    variant: Variant
    verdict: Verdict
    ranks: list[Outcome] = field(default_factory=list)
    smallest_card: int | None = None  # bytes, to RESOLUTION
    margin: int = 0  # bytes of doubt about the card's own use

    @property
    def worst(self) -> Outcome:
        """The rank that decides: one that fails, or the one with most memory."""
        return max(self.ranks, key=lambda o: (o.loads is not True, o.peak or 0))


def judge(outcome: Outcome, loads_within_margin: bool | None) -> Verdict:
    """The verdict, given what the same load does on a card a margin away.

    The other card is smaller for a load that passed, larger for one that did
    not. None: that run could not tell.
    """
    if outcome.loads is None or loads_within_margin is None:
        return Verdict.UNKNOWN
    if outcome.loads:
        return Verdict.LOADS if loads_within_margin else Verdict.CLOSE_LOADS
    return Verdict.CLOSE_FAILS if loads_within_margin else Verdict.FAILS


def find_smallest(
    loads: Callable[[int], bool | None], known_good: int | None, start: int
) -> int | None:
    """Smallest memory in bytes for which `loads` is true, to RESOLUTION.

    `known_good` is one that is known to do; without it the search goes up from
    `start`. None when nothing up to LARGEST_CARD does, or when a run could not
    tell.
    """
    bad = 0
    good = known_good
    size = start
    while good is None:
        size += max(size // 4, RESOLUTION)
        if size > LARGEST_CARD:
            return None
        match loads(size):
            case None:
                return None
            case True:
                good = size
            case False:
                bad = size
    while good - bad > RESOLUTION:
        middle = (good + bad) // 2
        # Less than a context takes is not worth a run.
        verdict = False if middle < GIB else loads(middle)
        if verdict is None:
            return None
        if verdict:
            good = middle
        else:
            bad = middle
    return good


class Rehearser:
    """Rehearses one model on one card with one variant of vLLM."""

    def __init__(
        self, session: Session, variant: Variant, card: Card, job: Job, say: Progress
    ) -> None:
        self._session = session
        self._variant = variant
        self._card = card
        self._job = dataclasses.replace(job, sleep=variant.sleep, memory=card.memory)
        self._say = say

    def answer(
        self, *, smallest: bool, kv_cache: bool, snapshot: str | None = None
    ) -> Answer:
        """Every rank on the card, then the margin, then the smallest card.

        OptionError when vLLM refuses one of the job's options.
        """
        ranks = [self._run(trace=True, snapshot=snapshot)]
        failure = ranks[0].failure
        if failure is not None and failure.kind == OptionError.__name__:
            raise OptionError(failure.message)
        for rank in range(1, ranks[0].world_size):
            ranks.append(self._run(rank=rank, trace=True))
        answer = Answer(self._variant, Verdict.UNKNOWN, ranks)
        answer.margin = self._card.calibration.margin_bytes
        worst = answer.worst
        if worst.loads is not None:
            away = -answer.margin if worst.loads else answer.margin
            answer.verdict = judge(worst, self._loads(worst, away))
        if kv_cache and worst.loads:
            profiled = self._run(rank=worst.rank, kv_cache=True)
            worst.kv_cache = profiled.kv_cache
            worst.kv_cache_note = profiled.kv_cache_note
        if smallest and worst.loads is not None:
            answer.smallest_card = self._smallest(worst)
        return answer

    def _smallest(self, worst: Outcome) -> int | None:
        memory = self._card.memory

        def loads(size: int) -> bool | None:
            return self._loads(worst, size - memory)

        return find_smallest(loads, memory if worst.loads else None, memory)

    def _loads(self, worst: Outcome, away: int) -> bool | None:
        options = (*self._job.options, LOW_UTILIZATION)
        memory = self._card.memory + away
        return self._run(rank=worst.rank, memory=memory, options=options).loads

    def _run(self, **changes: object) -> Outcome:
        job = dataclasses.replace(self._job, **changes)  # type: ignore[arg-type]
        outcome = self._session.run(job)
        self._say(f"{self._variant.name}: {describe(job, outcome)}")
        return outcome


def describe(job: Job, outcome: Outcome) -> str:
    """One line of progress."""
    where = f"{job.memory / GIB:.2f} GiB card"
    if outcome.world_size > 1:
        where = f"rank {job.rank} of {outcome.world_size}, {where}"
    if outcome.loads:
        how = "loads"
    elif outcome.loads is None:
        how = "could not tell"
    else:
        how = "does not load"
    peak = ""
    if outcome.peak is not None and outcome.base is not None:
        peak = f", peak {(outcome.peak - outcome.base) / GIB:.2f} GiB"
    return f"{where}: {how}{peak} ({outcome.seconds:.1f} s)"
