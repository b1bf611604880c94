# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The allocator's split policy while a worker loads and profiles."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.device_allocator.fake_device import FakeDevice
from vllm.device_allocator.generations import PoolGenerations
from vllm.v1.worker import gpu_worker


def _loading_worker(monkeypatch, pool, load):
    """A worker that loads by calling ``load`` and notes the limits in force."""
    monkeypatch.setattr(gpu_worker, "has_ec_transfer", lambda: False)
    monkeypatch.setattr(gpu_worker, "set_torch_threads_for_runtime", lambda: None)
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda _: nullcontext())
    limits: list[int] = []

    @contextmanager
    def scoped(max_split_size_mb):
        limits.append(max_split_size_mb)
        try:
            yield
        finally:
            limits.pop()

    return SimpleNamespace(
        vllm_config=SimpleNamespace(weight_transfer_config=None),
        model_runner=SimpleNamespace(load_model=lambda **_: load(list(limits))),
        _maybe_get_memory_pool_context=lambda tag: pool,
        _scoped_allocator_max_split=scoped,
        limits=limits,
    )


def _pool(monkeypatch, enabled):
    device = FakeDevice(1 << 30)
    device.install(monkeypatch)
    generations = PoolGenerations(device.make_pool, lambda tag: None, enabled=enabled)
    return generations.open("weights", "default")


@pytest.mark.parametrize("fails", [False, True])
def test_load_keeps_split_policy_of_a_pool(monkeypatch, fails):
    """In a pool that gives memory back, the user's own policy is in force."""
    seen = []

    def load(limits):
        seen.append(limits)
        if fails:
            raise RuntimeError("load failed")

    worker = _loading_worker(monkeypatch, _pool(monkeypatch, True), load)
    with pytest.raises(RuntimeError, match="load failed") if fails else nullcontext():
        gpu_worker.Worker.load_model(worker)
    assert seen == [[]]


@pytest.mark.parametrize("in_pool", [False, True], ids=["default", "switched-off"])
@pytest.mark.parametrize("fails", [False, True])
def test_load_limits_splits_of_the_default_allocator(monkeypatch, in_pool, fails):
    """Also in a pool that keeps what it has: the off switch restores upstream's way."""
    seen = []

    def load(limits):
        seen.append(limits)
        if fails:
            raise RuntimeError("load failed")

    pool = _pool(monkeypatch, False) if in_pool else nullcontext()
    worker = _loading_worker(monkeypatch, pool, load)
    with pytest.raises(RuntimeError, match="load failed") if fails else nullcontext():
        gpu_worker.Worker.load_model(worker)
    assert seen == [[20]]
    assert worker.limits == []


def test_profile_run_limits_splits(monkeypatch):
    """Profiling allocates from the default allocator, whatever the weights use."""

    class Profiled(Exception):
        pass

    limits = []

    @contextmanager
    def scoped(max_split_size_mb):
        limits.append(max_split_size_mb)
        yield

    def profile_run(**_):
        assert limits == [20]
        raise Profiled

    monkeypatch.setattr(gpu_worker, "maybe_apply_startup_plan", lambda _: None)
    monkeypatch.setattr(
        gpu_worker, "memory_profiling", lambda *_, **__: nullcontext(SimpleNamespace())
    )
    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", lambda _: nullcontext())
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        init_snapshot=None,
        model_runner=SimpleNamespace(model_memory_usage=0, profile_run=profile_run),
        randomize_dummy_inputs=False,
        _scoped_allocator_max_split=scoped,
    )
    with pytest.raises(Profiled), torch.inference_mode():
        gpu_worker.Worker.determine_available_memory(worker)
