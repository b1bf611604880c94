# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pool generations: a MemPool that gives memory back while a model loads.

`empty_cache()` returns no segment of a live ``torch.cuda.MemPool``. A pool whose Python
object is dropped becomes freeable instead: its live tensors stay valid, and each of its
segments goes back to the device once it is wholly free, at the next `empty_cache()`.
Weights are therefore allocated in a sequence of short-lived pools, the generations. At
a safe point of the load `reclaim` retires the open generation and opens the next one.
No tensor moves, and PyTorch's own accounting stays right.

Everything here is per thread, because ``use_mem_pool`` routes only the thread that
entered it: `reclaim` on a thread without an open generation does nothing.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field

import torch

from vllm.device_allocator.reclaim_policy import ReclaimPolicy
from vllm.logger import init_logger

logger = init_logger(__name__)

# Up to torch 2.12 the destructor of a pool asserts, and so aborts the process, while
# any pool context or capture is open on the device, whatever the thread.
_DROP_NEEDS_NO_OPEN_POOL = tuple(
    int(part) for part in torch.__version__.split(".")[:2]
) < (2, 13)


@dataclass
class Generation:
    """One pool, open on the thread that made it."""

    number: int
    tag: str
    device: int
    pool: torch.cuda.MemPool | None
    routing: AbstractContextManager


@dataclass
class _Scope:
    """The body of one `PoolGenerations.open`; the generation in it may change."""

    owner: "PoolGenerations"
    generation: Generation
    policy: ReclaimPolicy = field(default_factory=ReclaimPolicy)


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.scopes: list[_Scope] = []


_thread = _ThreadState()


class PoolGenerations:
    """Opens, retires and drains the generations of one pluggable allocator.

    Args:
        make_pool: makes a new, empty MemPool on the allocator.
        set_tag: told the tag of this thread's next allocations, each time that a
            generation opens and when the last one closes.
        enabled: whether `reclaim` may retire a generation during a load. If not, each
            scope keeps its one generation to the end, as upstream does.

    """

    def __init__(
        self,
        make_pool: Callable[[], torch.cuda.MemPool],
        set_tag: Callable[[str], None],
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.retired = 0
        self.drain_seconds = 0.0
        self._make_pool = make_pool
        self._set_tag = set_tag
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open = 0
        self._undropped: list[torch.cuda.MemPool] = []

    @contextmanager
    def open(self, tag: str, outer_tag: str) -> Iterator[None]:
        """Route this thread's allocations to generations with ``tag``.

        Args:
            tag: the tag of the allocations.
            outer_tag: the tag to go back to at the end.

        """
        scope = _Scope(self, self._enter(tag, self._make_pool()))
        _thread.scopes.append(scope)
        self._set_tag(tag)
        body_failed = True
        try:
            yield
            body_failed = False
        finally:
            _thread.scopes.pop()
            self._leave(scope.generation)
            self._set_tag(outer_tag)
            # After a CUDA error the drain fails too; the body's error is the news.
            with suppress(RuntimeError) if body_failed else nullcontext():
                self.drain(scope.generation.device)

    def _enter(self, tag: str, pool: torch.cuda.MemPool) -> Generation:
        routing = torch.cuda.use_mem_pool(pool)
        with self._lock:
            routing.__enter__()
            self._open += 1
        device = torch.accelerator.current_device_index()
        return Generation(next(self._numbers), tag, device, pool, routing)

    def _leave(self, generation: Generation) -> None:
        """Stop routing to the generation and drop its pool.

        The order matters: a pool is dropped outside its own context, and its last
        reference must die here, where no capture can be open.
        """
        pool, generation.pool = generation.pool, None
        assert pool is not None
        self._undropped.append(pool)
        del pool
        with self._lock:
            generation.routing.__exit__(None, None, None)
            self._open -= 1
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            if self._open and _DROP_NEEDS_NO_OPEN_POOL:
                return
            if torch.cuda.is_current_stream_capturing():
                return
            self._undropped.clear()

    def drain(self, device: int | None = None) -> None:
        """Return the free segments of dropped pools to the device.

        Does nothing while this thread's stream is being captured.

        Args:
            device: index of the device to wait for first, so that no kernel still
                works on what is unmapped; the current one if None.

        """
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return
        self._drop()
        if device is None:
            device = torch.accelerator.current_device_index()
        start = time.perf_counter()
        torch.accelerator.synchronize(device)
        torch.accelerator.empty_cache()
        self.drain_seconds += time.perf_counter() - start

    def retire(self, scope: _Scope) -> None:
        """Replace the scope's generation by a new one and drain."""
        with self._lock:
            others_open = self._open > 1
        if others_open and _DROP_NEEDS_NO_OPEN_POOL:
            return
        old, pool = scope.generation, self._make_pool()
        self._leave(old)
        scope.generation = self._enter(old.tag, pool)
        self._set_tag(old.tag)
        self.retired += 1
        self.drain(old.device)


def open_generation() -> int:
    """The number of the generation that this thread allocates from; 0 if none."""
    return _thread.scopes[-1].generation.number if _thread.scopes else 0


def open_owner() -> PoolGenerations | None:
    """Whose generation this thread allocates from; None outside a pool."""
    return _thread.scopes[-1].owner if _thread.scopes else None


def pool_is_open() -> bool:
    """Whether this thread allocates from a generation that `reclaim` may retire."""
    return bool(_thread.scopes) and _thread.scopes[-1].owner.enabled


def reclaim(*, force: bool = False) -> None:
    """Give memory that the load stranded back to the device, if there is much of it.

    Call it where no temporary of a finished step is alive any more: after the
    conversion of a layer, after all weights were loaded. Outside a memory pool, and
    while a stream is being captured, it does nothing.

    Args:
        force: retire the open generation, so that what it holds can be returned segment
            by segment from now on.

    """
    if not pool_is_open() or torch.cuda.is_current_stream_capturing():
        return
    scope = _thread.scopes[-1]
    owner, policy = scope.owner, scope.policy
    if not force and not policy.worth_draining(_cached_bytes()):
        return
    free = _free_bytes()
    if force:
        owner.retire(scope)
    else:
        owner.drain(scope.generation.device)
        if policy.worth_retiring(_cached_bytes()):
            owner.retire(scope)
    policy.reclaimed(_cached_bytes())
    after = _free_bytes()
    logger.debug(
        "Reclaimed %.1f MiB of device memory during the load, %.1f MiB are free",
        (after - free) / (1 << 20),
        after / (1 << 20),
    )


def _free_bytes() -> int:
    return torch.accelerator.get_memory_info()[0]


def _cached_bytes() -> int:
    """Free bytes in PyTorch's pools of the current device."""
    return torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()
