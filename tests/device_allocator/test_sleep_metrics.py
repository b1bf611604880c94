# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Bytes and throughput of sleep mode, from the allocator to the server's metrics."""

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.sleep_report import MoveTotals
from vllm.entrypoints.serve.dev.sleep import api_router, memory_metrics
from vllm.v1.worker.gpu_worker import Worker

SLEEP = {"copied": 3e9, "emptied": 5e9, "seconds": 0.5}


class Engine:
    """Two workers, the second twice as slow."""

    def __init__(self) -> None:
        self.workers: list = [{}, {}]
        self.failing = False

    async def sleep(self, level, mode) -> None:
        self.workers = [{"sleep": SLEEP}, {"sleep": SLEEP | {"seconds": 1.0}}]

    async def wake_up(self, tags) -> bool:
        self.workers = [{"wake": SLEEP}]
        return True

    async def release_kv_cache_memory(self) -> None:
        self.workers = [{"discard": SLEEP | {"copied": 0}}]

    async def collective_rpc(self, method: str) -> list:
        assert method == "take_sleep_mode_moves"
        if self.failing:
            raise NotImplementedError(method)
        workers, self.workers = self.workers, [{} for _ in self.workers]
        return workers


@pytest.fixture
def registry(monkeypatch):
    registry = CollectorRegistry()
    metrics = memory_metrics.SleepModeMemoryMetrics(registry)
    monkeypatch.setattr(memory_metrics, "sleep_mode_memory_metrics", lambda: metrics)
    return registry


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def server(engine, registry):
    app = FastAPI()
    app.state.engine_client = engine
    api_router.attach_router(app)
    return TestClient(app)


def value(registry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"vllm:sleep_mode_{name}", labels)


def test_a_sleep_counts_all_bytes_and_the_slowest_worker(server, registry):
    assert server.post("/sleep").status_code == 200
    label = {"operation": "sleep"}
    assert value(registry, "bytes_total", contents="copied", **label) == 6e9
    assert value(registry, "bytes_total", contents="none", **label) == 10e9
    assert value(registry, "worker_seconds_total", **label) == 1.0
    assert value(registry, "copy_gigabytes_per_second", **label) == 6.0


def test_each_move_counts_once(server, registry, engine):
    server.post("/sleep")
    server.post("/wake_up")
    assert engine.workers == [{}]
    for operation, copied in [("sleep", 6e9), ("wake", 3e9)]:
        label = {"operation": operation, "contents": "copied"}
        assert value(registry, "bytes_total", **label) == copied


def test_a_discard_has_the_name_that_its_duration_has(server, registry):
    server.post("/release_kv_cache_memory")
    label = {"operation": "release_kv_cache_memory"}
    assert value(registry, "bytes_total", contents="none", **label) == 5e9
    assert value(registry, "copy_gigabytes_per_second", **label) == 0


def test_workers_that_do_not_count_fail_no_operation(server, registry, engine):
    engine.failing = True
    assert server.post("/sleep").json()["status"] == "sleeping"
    assert value(registry, "worker_seconds_total", operation="sleep") is None


def test_totals_add_up_until_they_are_taken():
    totals = MoveTotals()
    totals.add("sleep", 1, 2, 0.5)
    totals.add("sleep", 10, 20, 0.25)
    totals.add("wake", 3, 0, 1.0)
    assert totals.take() == {
        "sleep": {"copied": 11, "emptied": 22, "seconds": 0.75},
        "wake": {"copied": 3, "emptied": 0, "seconds": 1.0},
    }
    assert totals.take() == {}


def test_a_worker_says_what_its_allocator_moved(monkeypatch):
    allocator = SimpleNamespace(take_moves=lambda: {"sleep": SLEEP})
    monkeypatch.setattr(CuMemAllocator, "instance", allocator)
    assert Worker.take_sleep_mode_moves(SimpleNamespace()) == {"sleep": SLEEP}
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    assert Worker.take_sleep_mode_moves(SimpleNamespace()) == {}
