# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import gc
import threading

import pytest
import torch

from tests.device_allocator.fake_device import FakeDevice, OutOfMemory
from vllm.device_allocator import generations
from vllm.device_allocator.generations import PoolGenerations, pool_is_open, reclaim

GIB = 1 << 30
LAYER = GIB


class Load:
    """A load that replaces each layer by a copy, on a device with ``capacity``."""

    def __init__(self, monkeypatch, capacity: int, enabled: bool = True) -> None:
        self.device = FakeDevice(capacity)
        self.device.install(monkeypatch)
        self.tags: list[str] = []
        self.generations = PoolGenerations(
            self.device.make_pool, self.tags.append, enabled=enabled
        )

    def open(self, tag: str = "weights", outer_tag: str = "default"):
        return self.generations.open(tag, outer_tag)

    def run(self, layers: int, force_first: bool = True) -> list[int]:
        device = self.device
        weights = [device.allocate(LAYER) for _ in range(layers)]
        if force_first:
            reclaim(force=True)
        for index, weight in enumerate(weights):
            # Results never fit the hole that the layer before left.
            weights[index] = device.allocate(LAYER + (index + 1) * 2048)
            device.free(weight)
            reclaim()
        return weights


def test_tight_device_loads_only_with_generations(monkeypatch):
    layers = 8
    capacity = (layers + 2) * LAYER + GIB
    load = Load(monkeypatch, capacity)
    with load.open():
        load.run(layers)
    assert load.generations.retired > 0
    stock = Load(monkeypatch, capacity, enabled=False)
    with pytest.raises(OutOfMemory), stock.open():
        stock.run(layers)


def test_roomy_device_retires_once(monkeypatch):
    """Only after load_weights: each retirement costs memory."""
    load = Load(monkeypatch, 100 * LAYER)
    with load.open():
        load.run(8)
    assert load.generations.retired == 1


def test_a_generation_that_holds_much_is_retired(monkeypatch):
    load = Load(monkeypatch, 100 * GIB)
    with load.open():
        load.device.free(load.device.allocate(7 * GIB))
        reclaim()
        assert load.generations.retired == 0
        load.device.free(load.device.allocate(9 * GIB))
        reclaim()
        assert load.generations.retired == 1
        assert load.device.free_bytes() == 100 * GIB


def test_roomy_device_returns_replaced_weights_step_by_step(monkeypatch):
    """Retiring is not needed for that: they lie in a pool that is retired already."""
    layers = 8
    load = Load(monkeypatch, 100 * LAYER)
    with load.open():
        load.run(layers)
    assert load.device.peak < (layers + 2) * LAYER


def test_end_of_a_scope_strands_nothing(monkeypatch):
    load = Load(monkeypatch, 100 * LAYER)
    with load.open():
        weights = load.run(8)
    used = load.device.capacity - load.device.free_bytes()
    assert used == sum(load.device.segments[w][1] for w in weights)


def test_memory_freed_after_the_scope_goes_back_at_the_next_drain(monkeypatch):
    load = Load(monkeypatch, 100 * LAYER)
    with load.open():
        weight = load.device.allocate(LAYER)
    load.device.free(weight)
    load.generations.drain()
    assert load.device.free_bytes() == load.device.capacity
    assert load.device.synchronized


def test_default_pool_is_emptied_without_a_retirement(monkeypatch):
    load = Load(monkeypatch, 8 * GIB)
    load.device.free(load.device.allocate(7 * GIB))
    with load.open():
        load.device.free(load.device.allocate(GIB // 2))
        reclaim()
        assert load.generations.retired == 0
        assert load.device.free_bytes() == 8 * GIB - GIB // 2


def test_outside_a_pool_reclaim_does_nothing(monkeypatch):
    load = Load(monkeypatch, GIB)
    cached = load.device.allocate(GIB)
    load.device.free(cached)
    reclaim(force=True)
    assert load.device.free_bytes() == 0
    assert not load.device.synchronized


def test_another_thread_neither_reclaims_nor_allocates_here(monkeypatch):
    load = Load(monkeypatch, 100 * GIB)
    seen = []

    def other():
        reclaim(force=True)
        seen.append((pool_is_open(), load.device.allocate(GIB)))

    with load.open():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert pool_is_open()
    [(opened, address)] = seen
    assert not opened
    assert load.device.segments[address][0] == FakeDevice.DEFAULT_POOL
    assert load.generations.retired == 0


def test_nested_scopes_have_their_own_tags_and_pools(monkeypatch):
    load = Load(monkeypatch, 100 * GIB)
    device = load.device
    with load.open("weights"):
        weight = device.allocate(GIB)
        with load.open("runtime", outer_tag="weights"):
            state = device.allocate(GIB)
            reclaim(force=True)
            more = device.allocate(GIB)
        late = device.allocate(GIB)
    assert load.tags == ["weights", "runtime", "runtime", "weights", "default"]
    pools = [device.segments[a][0] for a in (weight, state, more, late)]
    assert pools[0] == pools[3]
    assert len(set(pools)) == 3


def test_nested_pool_waits_for_the_outermost_where_torch_needs_it(monkeypatch):
    """Up to torch 2.12 a pool must not die while another one is open."""
    monkeypatch.setattr(generations, "_DROP_NEEDS_NO_OPEN_POOL", True)
    load = Load(monkeypatch, 100 * GIB)
    with load.open("weights"):
        with load.open("runtime", outer_tag="weights"):
            reclaim(force=True)
        assert len(load.device.live_pools) == 2
        assert load.generations.retired == 0
    assert not load.device.live_pools
    with load.open():
        reclaim(force=True)
        assert load.generations.retired == 1


def test_capture_is_left_alone(monkeypatch):
    """While a stream is captured no pool is destroyed and nothing is unmapped."""
    load = Load(monkeypatch, 100 * GIB)
    with load.open():
        load.device.free(load.device.allocate(GIB))
        load.device.capturing = True
        reclaim(force=True)
    assert load.generations.retired == 0
    assert load.device.destroyed_while_capturing == 0
    assert load.device.free_bytes() == 99 * GIB
    load.device.capturing = False
    load.generations.drain()
    assert load.device.free_bytes() == 100 * GIB


@pytest.mark.parametrize("drain_fails", [False, True])
def test_failed_load_ends_its_scope(monkeypatch, drain_fails):
    load = Load(monkeypatch, 100 * GIB)
    with pytest.raises(OutOfMemory), load.open():
        load.device.free(load.device.allocate(GIB))
        if drain_fails:

            def broken(device):
                raise RuntimeError("device is lost")

            monkeypatch.setattr(torch.accelerator, "synchronize", broken)
        raise OutOfMemory
    assert not pool_is_open()
    assert load.tags[-1] == "default"
    gc.collect()
    assert not load.device.live_pools
    load.device.empty_cache()
    assert load.device.free_bytes() == 100 * GIB


def test_failed_switch_keeps_the_open_generation(monkeypatch):
    load = Load(monkeypatch, 100 * GIB)
    with load.open():
        before = load.device.allocate(GIB)

        def broken():
            raise RuntimeError("no pool")

        monkeypatch.setattr(load.generations, "_make_pool", broken)
        with pytest.raises(RuntimeError, match="no pool"):
            reclaim(force=True)
        after = load.device.allocate(GIB)
        segments = load.device.segments
        assert segments[before][0] == segments[after][0]
    assert not load.device.live_pools


def test_switched_off_keeps_one_generation(monkeypatch):
    load = Load(monkeypatch, 100 * LAYER, enabled=False)
    with load.open():
        assert not pool_is_open()
        load.run(4)
        assert len({segment[0] for segment in load.device.segments.values()}) == 1
    assert load.generations.retired == 0
