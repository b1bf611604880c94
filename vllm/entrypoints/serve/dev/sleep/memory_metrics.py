# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prometheus metrics of the memory that sleep mode moves.

The workers count; the API server, which keeps the metrics, asks them after each
operation. So what was moved without the server, as by a `collective_rpc` of the user's,
appears with the next operation.
"""

from collections.abc import Iterable, Mapping
from functools import cache

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from vllm.engine.protocol import EngineClient
from vllm.logger import init_logger

logger = init_logger(__name__)

LABELS = {"discard": "release_kv_cache_memory"}
"""The operations that upstream's durations call by another name."""

Moves = Mapping[str, Mapping[str, float]]
"""By operation: bytes ``copied`` and ``emptied``, and ``seconds``."""


class SleepModeMemoryMetrics:
    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.bytes = Counter(
            "vllm:sleep_mode_bytes",
            "Device memory that sleep mode freed or mapped, whose contents were copied "
            "or not.",
            ["operation", "contents"],
            registry=registry,
        )
        self.seconds = Counter(
            "vllm:sleep_mode_worker_seconds",
            "Time that the slowest worker spent moving memory.",
            ["operation"],
            registry=registry,
        )
        self.rate = Gauge(
            "vllm:sleep_mode_copy_gigabytes_per_second",
            "Bytes that all workers copied in the last operation, per its seconds.",
            ["operation"],
            multiprocess_mode="mostrecent",
            registry=registry,
        )

    def record(self, workers: Iterable[Moves | None]) -> None:
        """Add what the workers have moved."""
        moves = [moves for moves in workers if moves]
        for operation in sorted({name for worker in moves for name in worker}):
            found = [worker[operation] for worker in moves if operation in worker]
            copied = sum(move["copied"] for move in found)
            seconds = max(move["seconds"] for move in found)
            label = LABELS.get(operation, operation)
            self.bytes.labels(label, "copied").inc(copied)
            self.bytes.labels(label, "none").inc(sum(m["emptied"] for m in found))
            self.seconds.labels(label).inc(seconds)
            if seconds:
                self.rate.labels(label).set(copied / 1e9 / seconds)


@cache
def sleep_mode_memory_metrics() -> SleepModeMemoryMetrics:
    """The metrics of this process, made at first use."""
    return SleepModeMemoryMetrics()


async def record_moves(client: EngineClient) -> None:
    """Ask the workers what they have moved. Never raises: the operation is done."""
    try:
        workers = await client.collective_rpc("take_sleep_mode_moves")
        sleep_mode_memory_metrics().record(workers)
    except Exception as error:
        logger.warning_once("No metrics of sleep mode's memory: %s", error)
