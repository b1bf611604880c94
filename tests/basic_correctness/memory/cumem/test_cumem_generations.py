# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pool generations and the CuMem extension on a real GPU."""

import gc

import pytest
import torch

from tests.basic_correctness.memory.cumem.own_process import Checks

MIB = 1 << 20
GIB = 1 << 30
CHECKS = Checks(__file__)


def filled(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8, device="cuda")


def free_bytes() -> int:
    """Free device memory, once the kernels used here are loaded and take no more."""
    torch.cat([filled(8, 1), filled(8, 2)]).sum().item()
    torch.accelerator.empty_cache()
    return torch.accelerator.get_memory_info()[0]


def get_allocator():
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def segments(allocator) -> list:
    return list(allocator.pointer_to_data.values())


def mapped(allocator) -> int:
    """Bytes of device memory behind the allocator's segments."""
    return sum(data.handle[1] for data in segments(allocator) if not data.is_asleep)


@CHECKS.add
def out_of_memory_in_the_pool_can_be_retried() -> None:
    allocator = get_allocator()
    free = torch.accelerator.get_memory_info()[0]
    with allocator.use_memory_pool("weights"):
        kept = filled(64 * MIB, 7)
        ballast = torch.empty(free - GIB, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
            raise AssertionError("the card was not full")
        except torch.OutOfMemoryError:
            pass
        before = len(segments(allocator))
        del ballast
        from vllm.device_allocator.generations import reclaim

        reclaim(force=True)
        assert len(segments(allocator)) == before - 1
        retried = filled(2 * GIB, 9)
    assert int(kept[-1]) == 7 and int(retried[-1]) == 9
    assert mapped(allocator) == kept.nbytes + retried.nbytes


@CHECKS.add
def torch_frees_cached_memory_and_retries_by_itself() -> None:
    """What a retired generation still caches serves a later request."""
    allocator = get_allocator()
    free = torch.accelerator.get_memory_info()[0]
    with allocator.use_memory_pool("weights"):
        old = torch.empty(free - GIB, dtype=torch.uint8, device="cuda")
    with allocator.use_memory_pool("weights"):
        del old
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
            torch.accelerator.empty_cache()
        new = filled(2 * GIB, 3)
    assert int(new[-1]) == 3
    assert mapped(allocator) == new.nbytes


@CHECKS.add
def replaced_weights_go_back_during_the_load() -> None:
    from vllm.device_allocator.generations import reclaim

    allocator = get_allocator()
    start = free_bytes()
    with allocator.use_memory_pool("weights"):
        weights = [filled(256 * MIB, i) for i in range(8)]
        reclaim(force=True)
        for i in range(8):
            weights[i] = torch.cat([weights[i], filled(16 * MIB, i)])
        reclaim(force=True)
        live = sum(w.nbytes for w in weights)
        used = start - free_bytes()
        assert used <= live + 64 * MIB, (used, live)
    assert torch.accelerator.memory_reserved() == mapped(allocator)
    assert all(int(w[0]) == int(w[-1]) == i for i, w in enumerate(weights))


def _delete_while_asleep(tags: tuple[str, ...]) -> None:
    allocator = get_allocator()
    start = free_bytes()
    with allocator.use_memory_pool("weights"):
        gone, stays = filled(64 * MIB, 1), filled(64 * MIB, 2)
    address = stays.data_ptr()
    allocator.sleep(offload_tags=tags)
    assert mapped(allocator) == 0
    del gone
    gc.collect()
    torch.accelerator.empty_cache()
    assert len(segments(allocator)) == 1
    allocator.wake_up()
    assert stays.data_ptr() == address
    assert not tags or int(stays[-1]) == 2
    stays.fill_(5)
    assert mapped(allocator) == stays.nbytes
    del stays
    gc.collect()
    torch.accelerator.empty_cache()
    assert not segments(allocator)
    assert not allocator._mover.host_copies
    assert free_bytes() == start


@CHECKS.add
def weight_deleted_while_asleep_level_1() -> None:
    _delete_while_asleep(("weights",))


@CHECKS.add
def weight_deleted_while_asleep_level_2() -> None:
    _delete_while_asleep(())


@CHECKS.add
def weight_deleted_before_sleep_is_not_copied() -> None:
    allocator = get_allocator()
    with allocator.use_memory_pool("weights"):
        gone, stays = filled(64 * MIB, 1), filled(64 * MIB, 2)
    del gone
    allocator.sleep(offload_tags="weights")
    assert len(segments(allocator)) == 1
    allocator.wake_up()
    assert int(stays[-1]) == 2


@CHECKS.add
def failed_wake_can_be_repeated() -> None:
    allocator = get_allocator()
    with allocator.use_memory_pool("weights"):
        weights = [filled(GIB, i + 1) for i in range(4)]
    addresses = [w.data_ptr() for w in weights]
    allocator.sleep(offload_tags="weights")
    free = torch.accelerator.get_memory_info()[0]
    ballast = torch.empty(free - 2 * GIB - 64 * MIB, dtype=torch.uint8, device="cuda")
    try:
        allocator.wake_up()
        raise AssertionError("there was not enough memory to wake")
    except RuntimeError as error:
        assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error), error
    del ballast
    allocator.wake_up()
    assert [w.data_ptr() for w in weights] == addresses
    assert [int(w[-1]) for w in weights] == [1, 2, 3, 4]


@CHECKS.add
def nested_pools_keep_their_tags() -> None:
    from vllm.device_allocator.generations import reclaim

    allocator = get_allocator()
    with allocator.use_memory_pool("weights"):
        first = filled(16 * MIB, 1)
        with allocator.use_memory_pool("runtime"):
            state = filled(16 * MIB, 2)
            reclaim(force=True)
        last = filled(16 * MIB, 3)
    tags = {data.handle[2]: data.tag for data in segments(allocator)}
    assert tags[first.data_ptr()] == tags[last.data_ptr()] == "weights"
    assert tags[state.data_ptr()] == "runtime"
    allocator.sleep(offload_tags=("weights", "runtime"))
    allocator.wake_up(tags=["kv_cache"])
    assert int(state[-1]) == 2
    allocator.wake_up()
    assert int(first[-1]) == 1 and int(last[-1]) == 3


@CHECKS.add
def workspace_is_discarded_on_sleep_and_keeps_its_address() -> None:
    """An outgrown buffer stays usable until it is released, and is not woken then."""
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend
    from vllm.v1.worker.workspace import WorkspaceManager

    allocator = get_allocator()
    backend, graph = CuMemBackend(), torch.cuda.CUDAGraph()
    manager = WorkspaceManager(
        torch.device("cuda", 0),
        alloc_context=lambda: allocator.use_memory_pool(tag="workspace"),
    )
    outgrown, scratch = (
        manager.get_simultaneous(((size * MIB,), torch.uint8))[0] for size in (32, 64)
    )
    with torch.cuda.graph(graph):
        scratch.add_(1)
    backend.suspend(level=1)
    assert mapped(allocator) == 0
    assert all(data.cpu_backup_tensor is None for data in segments(allocator))
    backend.resume(tags=["kv_cache"])
    assert mapped(allocator) == outgrown.nbytes + scratch.nbytes
    scratch.zero_()
    graph.replay()
    assert int(scratch.sum()) == scratch.numel()
    del outgrown
    (larger,) = manager.get_simultaneous(((128 * MIB,), torch.uint8))
    backend.suspend(level=1)
    backend.resume(tags=["weights"])
    assert mapped(allocator) == scratch.nbytes + larger.nbytes


@CHECKS.add
def graph_pool_sleeps_with_its_contents() -> None:
    """A constant that replays never write must be copied; the capture stays valid."""
    allocator = get_allocator()
    with allocator.use_memory_pool("weights"):
        weight = filled(16 * MIB, 2)
    graph = torch.cuda.CUDAGraph()
    with (
        allocator.cudagraph_pool() as pool,
        torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()),
    ):
        constant = torch.empty_like(weight)
        result = weight + constant
    constant.fill_(3)
    allocator.sleep(offload_tags=("weights", "cudagraph"))
    assert mapped(allocator) == 0
    allocator.wake_up()
    graph.replay()
    assert int(result[0]) == int(result[-1]) == 5


@CHECKS.add
def bits_and_addresses_survive_cycles() -> None:
    allocator = get_allocator()
    with allocator.use_memory_pool("weights"):
        weights = [
            torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
            for size in (1, 511, MIB + 3, 10 * MIB - 1, 64 * MIB, 300 * MIB + 77)
        ]
    before = [(w.data_ptr(), w.cpu()) for w in weights]
    used = None
    for _ in range(3):
        allocator.sleep(offload_tags="weights")
        allocator.wake_up()
        for weight, (address, content) in zip(weights, before, strict=True):
            assert weight.data_ptr() == address
            assert torch.equal(weight.cpu(), content)
        now = torch.accelerator.get_memory_info()[0]
        assert used in (None, now)
        used = now


@CHECKS.add
def reclaim_while_other_threads_allocate() -> None:
    """For POOL_STRESS_SECONDS."""
    from tests.basic_correctness.memory.cumem import reclaim_stress

    allocator = get_allocator()
    before = free_bytes()
    reclaim_stress.reclaim_against_other_threads(allocator)
    gc.collect()
    allocator._generations.drain()
    assert segments(allocator) == []
    assert allocator._table.take_errors() == []
    assert free_bytes() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CHECKS.names)
def test_in_own_process(name):
    CHECKS.run(name)


if __name__ == "__main__":
    CHECKS.main()
