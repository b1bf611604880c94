# SPDX-License-Identifier: Apache-2.0
"""What pool generations must do, on a card, with the real PyTorch and extension.

Functions for `forked.run_checks`. Kernels do nothing on the simulated card, so contents
are written and read by copies.
"""

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.basic_correctness.memory.cumem.reclaim_stress import (
    Threads,
    filled,
    holds,
    reclaim_against_other_threads,
)
from tools.rehearsal import card
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.generations import pool_is_open, reclaim

MIB = 1 << 20
LAYERS = 8
LAYER = 256 * MIB

alive: list[object] = []
"""What outlives a check, until the interpreter ends."""


def start() -> CuMemAllocator:
    """The allocator, on a device whose context exists, with nothing allocated."""
    torch.empty(1, device="cuda")
    torch.cuda.empty_cache()
    return CuMemAllocator.get_instance()


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def drain() -> None:
    gc.collect()
    CuMemAllocator.get_instance()._generations.drain()


def assert_nothing_left(allocator: CuMemAllocator) -> None:
    drain()
    assert allocator.get_current_usage() == 0, allocator.memory_by_tag()
    assert allocator._table.take_errors() == []


def only(size: int) -> None:
    """Leave ``size`` bytes of the card free, as another program would."""
    card.take(card.free() - size)


@contextmanager
def refused(kind: type[Exception] = torch.OutOfMemoryError) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError("it did not fail")


def load(layers: int = LAYERS) -> list[torch.Tensor]:
    """Create the weights, then replace each by a tensor that fits no hole."""
    weights = [block(LAYER) for _ in range(layers)]
    reclaim(force=True)
    for index in range(layers):
        weights[index] = block(LAYER + (index + 1) * 2 * MIB)
        reclaim()
    return weights


def live(weights: list[torch.Tensor]) -> int:
    return sum(weight.nbytes for weight in weights)


# Memory goes back.


def replaced_weights_go_back_during_the_load() -> None:
    allocator = start()
    before = card.used()
    with allocator.use_memory_pool("weights"):
        weights = load()
        reclaim(force=True)
        used = card.used() - before
        assert live(weights) <= used <= live(weights) + 64 * MIB, used
        mapped = allocator.memory_by_tag()["weights"].mapped
        assert mapped == used
    assert card.used() - before == allocator.memory_by_tag()["weights"].mapped
    weights.clear()
    assert_nothing_left(allocator)
    assert card.used() == before


def smallest_card(room: int) -> None:
    allocator = start()
    only(LAYERS * LAYER + room)
    with allocator.use_memory_pool("weights"):
        load()


def a_tight_card_loads() -> None:
    smallest_card(LAYER + 256 * MIB)


def a_tight_card_does_not_load_switched_off() -> None:
    os.environ["VLLM_CUMEM_POOL_GENERATIONS"] = "0"
    with refused():
        smallest_card(LAYER + 256 * MIB)


def switched_off_keeps_one_pool_to_its_end() -> None:
    os.environ["VLLM_CUMEM_POOL_GENERATIONS"] = "0"
    allocator = start()
    with allocator.use_memory_pool("weights"):
        assert not pool_is_open()
        weights = load()
        [tag] = allocator.memory_by_tag().values()
        assert tag.mapped >= live(weights) + LAYER
    [tag] = allocator.memory_by_tag().values()
    assert tag.mapped <= live(weights) + 64 * MIB
    assert allocator._generations.retired == 0


def the_report_agrees_with_the_card() -> None:
    from vllm.device_allocator.load_report import load_reported

    allocator = start()
    before = card.used()
    elsewhere = block(40 * MIB)
    reserved = torch.cuda.max_memory_reserved()
    card.peak(reset=True)
    with load_reported(allocator.use_memory_pool("weights")):
        weights = load()
    report = allocator.load_report()
    assert report is not None
    assert report.live == live(weights)
    assert report.mapped == card.used() - before - elsewhere.nbytes
    assert report.peak_mapped == card.peak() - before - elsewhere.nbytes
    assert report.returned >= LAYERS * LAYER
    assert report.generations == allocator._generations.retired + 1 >= 2
    assert report.reclaim_seconds > 0
    # PyTorch's own peak was not reset.
    assert torch.cuda.max_memory_reserved() >= reserved
    allocator.sleep(offload_tags="weights")
    sleeping = allocator.memory_by_tag()["weights"]
    assert (sleeping.mapped, sleeping.asleep) == (0, report.mapped)
    allocator.wake_up()


# Out of memory.


def out_of_memory_in_the_pool_can_be_retried() -> None:
    allocator = start()
    with allocator.use_memory_pool("weights"):
        kept = filled(64 * MIB, 7)
        only(256 * MIB)
        ballast = block(192 * MIB)
        with refused():
            block(128 * MIB)
        del ballast
        reclaim(force=True)
        retried = filled(128 * MIB, 9)
    assert holds(kept, 7) and holds(retried, 9)
    assert allocator.memory_by_tag()["weights"].mapped == 192 * MIB


def torch_retries_by_itself_with_what_was_retired() -> None:
    allocator = start()
    only(256 * MIB)
    with allocator.use_memory_pool("weights"):
        old = block(160 * MIB)
    with allocator.use_memory_pool("weights"):
        del old
        new = filled(128 * MIB, 3)
        assert card.refusals() == 1
    assert holds(new, 3)


# Scopes.


def nested_pools_keep_their_tags() -> None:
    allocator = start()
    with allocator.use_memory_pool("weights"):
        first = filled(32 * MIB, 1)
        with allocator.use_memory_pool("runtime"):
            gone = block(64 * MIB)
            state = filled(32 * MIB, 2)
            del gone
            reclaim(force=True)
            assert allocator.memory_by_tag()["runtime"].mapped == 32 * MIB
            more = filled(32 * MIB, 3)
        last = filled(32 * MIB, 4)
    tags = {s.address: s.tag for s in allocator._table.segments()}
    kept = {"weights": (first, last), "runtime": (state, more)}
    for tag, tensors in kept.items():
        assert all(tags[tensor.data_ptr()] == tag for tensor in tensors)
    allocator.sleep(offload_tags=("weights", "runtime"))
    allocator.wake_up()
    assert [int(t[-1].cpu()) for t in (first, state, more, last)] == [1, 2, 3, 4]


def a_weight_deleted_while_asleep_is_unmapped_once() -> None:
    allocator = start()
    with allocator.use_memory_pool("weights"):
        gone, stays = filled(32 * MIB, 1), filled(32 * MIB, 2)
    allocator.sleep(offload_tags="weights")
    del gone
    drain()
    assert allocator.memory_by_tag()["weights"].asleep == 32 * MIB
    allocator.wake_up()
    assert holds(stays, 2)
    del stays
    assert_nothing_left(allocator)


def a_thread_without_a_pool_is_left_alone() -> None:
    allocator = start()
    found: list[object] = []

    def other() -> None:
        reclaim(force=True)
        found.append(pool_is_open())
        found.append(block(32 * MIB))

    with allocator.use_memory_pool("weights"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert not allocator.memory_by_tag()
    assert found[0] is False


def expandable_segments_are_off_in_a_pool_only() -> None:
    from vllm.device_allocator.alloc_conf import (
        EXPANDABLE_SEGMENTS,
        conf_flag_enabled,
        current_alloc_conf,
        set_alloc_conf,
    )

    def expandable() -> bool:
        return conf_flag_enabled(current_alloc_conf(), EXPANDABLE_SEGMENTS)

    allocator = start()
    set_alloc_conf("expandable_segments:True")
    outside = block(64 * MIB)
    with allocator.use_memory_pool("weights"):
        assert not expandable()
        weights = load()
        assert allocator.memory_by_tag()["weights"].mapped >= live(weights)
    assert expandable()
    found = torch.cuda.memory_snapshot(include_traces=False)
    by_address = {segment["address"]: segment["is_expandable"] for segment in found}
    ours = {segment.address for segment in allocator._table.segments()}
    assert ours and not any(by_address[address] for address in ours)
    assert by_address[outside.data_ptr()]
    allocator.sleep(offload_tags=())
    allocator.wake_up()
    del weights
    assert_nothing_left(allocator)


# Graph capture.


def capture_is_left_alone() -> None:
    allocator = start()
    graph = torch.cuda.CUDAGraph()
    with allocator.use_memory_pool("weights"):
        weight = filled(32 * MIB, 1)
        gone = block(64 * MIB)
        del gone
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            weight.add_(1)
            reclaim(force=True)
            reclaim()
        assert allocator._generations.retired == 0
        assert allocator.memory_by_tag()["weights"].mapped == 96 * MIB
        reclaim(force=True)
        assert allocator.memory_by_tag()["weights"].mapped == 32 * MIB
    graph.replay()


def a_scope_that_ends_in_a_capture_is_drained_after_it() -> None:
    allocator = start()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with allocator.use_memory_pool("weights"):
        weight = filled(32 * MIB, 1)
        gone = block(64 * MIB)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        weight.add_(1)
        with allocator.use_memory_pool("workspace"):
            scratch = block(32 * MIB)
            del gone
        weight.add_(scratch)
    graph.replay()
    del scratch, graph
    drain()
    assert allocator.memory_by_tag()["weights"].mapped == 32 * MIB


def a_capture_after_a_load_finds_nothing_to_free() -> None:
    """The graph pool drains first; what is freed while capturing waits."""
    allocator = start()
    with allocator.use_memory_pool("weights"):
        weights = load()
        gone = block(64 * MIB)
    del gone
    graph = torch.cuda.CUDAGraph()
    with (
        allocator.cudagraph_pool() as pool,
        torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()),
    ):
        assert allocator.memory_by_tag()["weights"].mapped <= live(weights) + 64 * MIB
        constant = block(32 * MIB)
        constant.add_(1)
    assert allocator.memory_by_tag()["cudagraph"].mapped == 32 * MIB
    allocator.sleep(offload_tags=("weights", "cudagraph"))
    allocator.wake_up()
    graph.replay()


def tables_of_conversions_lie_outside_the_pool() -> None:
    """They are kept for later loads, and a level 2 sleep loses what the pool holds."""
    from vllm.model_executor.layers.quantization.utils.weight_permutation import (
        Conversion,
    )

    allocator = start()
    with allocator.use_memory_pool("weights"):
        weight = block(MIB)
        device = weight.device
        tables = Conversion([3, -1, 0, 1, 2], (4, 128)).row_index(device)
    segments = allocator._table.segments()
    for tensor, inside in ((weight, True), *((table, False) for table in tables)):
        found = any(
            s.address <= tensor.data_ptr() < s.address + s.size for s in segments
        )
        assert found is inside


# Threads.


def stress_of_reclaim_against_other_threads() -> None:
    allocator = start()
    before = card.used()
    reclaim_against_other_threads(allocator)
    assert_nothing_left(allocator)
    torch.cuda.empty_cache()
    assert card.used() - torch.cuda.memory_reserved() == before


def stress_of_reclaim_against_out_of_memory() -> None:
    """Threads that drive the card out of memory retry by freeing each other's pools."""
    allocator = start()
    only(96 * MIB)
    before = card.used()

    def load_and_reclaim(number: int) -> None:
        with allocator.use_memory_pool("weights"):
            try:
                old = filled(21 * MIB, number)
                new = filled(33 * MIB, number + 1)
                reclaim(force=True)
                assert holds(old, number) and holds(new, number + 1)
            except torch.OutOfMemoryError:
                pass

    def fill_the_card(number: int) -> None:
        try:
            tensor = filled(60 * MIB, number)
            assert holds(tensor, number)
        except torch.OutOfMemoryError:
            pass

    def read_statistics(number: int) -> None:
        torch.cuda.memory_stats()
        time.sleep(0.0005)

    Threads().run(load_and_reclaim, load_and_reclaim, fill_the_card, read_statistics)
    assert card.refusals() > 0
    allocator._table.take_errors()
    assert_nothing_left(allocator)
    torch.cuda.empty_cache()
    assert card.used() == before


# Faults.


def a_pool_that_cannot_be_made_leaves_the_open_generation() -> None:
    allocator = start()
    generations = allocator._generations

    def broken() -> torch.cuda.MemPool:
        raise RuntimeError("no pool")

    with allocator.use_memory_pool("weights"):
        before = filled(32 * MIB, 1)
        make_pool, generations._make_pool = generations._make_pool, broken
        with refused(RuntimeError):
            reclaim(force=True)
        generations._make_pool = make_pool
        after = filled(32 * MIB, 2)
        reclaim(force=True)
        assert holds(before, 1) and holds(after, 2)
    del before, after
    assert_nothing_left(allocator)


def a_device_that_fails_in_a_switch_leaves_an_open_generation() -> None:
    """The new generation is open by then; the scope goes on and ends well."""
    allocator = start()
    with allocator.use_memory_pool("weights"):
        weight = filled(32 * MIB, 1)
        gone = block(64 * MIB)
        del gone
        card.fail("cuCtxSynchronize", code=999)
        card.fail("cudaDeviceSynchronize", code=999)
        try:
            reclaim(force=True)
        except RuntimeError:
            pass
        card.clear_faults()
        after = filled(32 * MIB, 2)
        reclaim(force=True)
        assert holds(weight, 1) and holds(after, 2)
        assert allocator.memory_by_tag()["weights"].mapped == 64 * MIB
    allocator._table.take_errors()
    del weight, after
    assert_nothing_left(allocator)


def an_unmap_that_fails_is_reported_and_nothing_else_is_lost() -> None:
    allocator = start()
    with allocator.use_memory_pool("weights"):
        stays = filled(32 * MIB, 1)
        gone = block(64 * MIB)
        del gone
        card.fail("cuMemUnmap", code=999)
        reclaim(force=True)
        assert card.faults_fired() == 1
        [error] = allocator._table.take_errors()
        assert "CUDA_ERROR_UNKNOWN" in error
        later = filled(64 * MIB, 2)
    assert holds(stays, 1) and holds(later, 2)


CALLS_OF_AN_ALLOCATION = (
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
)


def every_call_of_an_allocation_fails_in_turn() -> None:
    """PyTorch retries once; so it is two calls in a row that fail a load."""
    allocator = start()
    before = card.used()
    fired = 0
    for call in CALLS_OF_AN_ALLOCATION:
        for nth in range(1, 2 * LAYERS + 1, 3):
            card.fail(call, nth)
            with allocator.use_memory_pool("weights"):
                weights = load()
            assert card.faults_fired() == fired + 1, (call, nth)
            weights.clear()
            drain()
            card.fail(call, nth, and_later=True)
            with refused(), allocator.use_memory_pool("weights"):
                weights = load()
            card.clear_faults()
            fired = card.faults_fired()
            assert not pool_is_open()
            allocator._table.take_errors()
            assert_nothing_left(allocator)
            assert card.used() == before, (call, nth)


def a_load_that_fails_is_followed_by_one_that_passes() -> None:
    allocator = start()
    before = card.used()
    # What keeps the failed load's tensors alive: the error's frames.
    try:
        with allocator.use_memory_pool("weights"):
            weights = load(3)
            with allocator.use_memory_pool("runtime"):
                state = block(32 * MIB)
                raise ValueError("a broken checkpoint")
    except ValueError as error:
        caught = error
    assert allocator.get_current_usage() > live(weights) + state.nbytes - MIB
    del caught, weights, state
    assert not pool_is_open()
    assert allocator.current_tag == "default"
    # What a worker does before it loads.
    gc.collect()
    torch.accelerator.empty_cache()
    assert allocator.get_current_usage() == 0
    assert card.used() == before
    with allocator.use_memory_pool("weights"):
        weights = load()
    assert allocator.memory_by_tag().keys() == {"weights"}
    del weights


def an_engine_after_an_engine() -> None:
    allocator = start()
    before = card.used()
    for _ in range(3):
        with allocator.use_memory_pool("weights"):
            weights = load()
        with allocator.use_memory_pool("kv_cache"):
            cache = block(512 * MIB)
        allocator.sleep(offload_tags=())
        allocator.wake_up()
        allocator.release_pools()
        del weights, cache
        allocator.release_pools()
        assert_nothing_left(allocator)
        assert card.used() == before


# The end of the interpreter.


def exit_with_tensors_alive() -> None:
    allocator = start()
    with allocator.use_memory_pool("weights"):
        alive.extend(load())


def exit_after_release_pools() -> None:
    exit_with_tensors_alive()
    CuMemAllocator.get_instance().release_pools()
    CuMemAllocator.get_instance().release_pools()


def exit_while_a_pool_is_open() -> None:
    allocator = start()
    pool = allocator.use_memory_pool("weights")
    pool.__enter__()
    alive.extend([pool, *load()])


def exit_while_a_load_fails() -> None:
    """Nobody catches the error: its frames die with the interpreter."""
    allocator = start()
    with allocator.use_memory_pool("weights"):
        alive.extend(load())
        raise SystemExit(0)


def exit_while_another_thread_has_a_pool_open() -> None:
    """It waits. A daemon thread that is inside PyTorch when the interpreter ends aborts
    the process, whatever the allocator: PyTorch's own bindings take the GIL again."""
    allocator = start()
    loaded = threading.Event()

    def work() -> None:
        with allocator.use_memory_pool("weights"):
            alive.extend(load())
            reclaim(force=True)
            loaded.set()
            threading.Event().wait()

    threading.Thread(target=work, daemon=True).start()
    assert loaded.wait(60)


def exit_while_asleep() -> None:
    exit_with_tensors_alive()
    CuMemAllocator.get_instance().sleep(offload_tags="weights")


def exit_with_a_graph_alive() -> None:
    allocator = start()
    with allocator.use_memory_pool("weights"):
        weights = load()
    graph = torch.cuda.CUDAGraph()
    with (
        allocator.cudagraph_pool() as pool,
        torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()),
    ):
        constant = block(32 * MIB)
        constant.add_(1)
    alive.extend([*weights, graph, constant])
