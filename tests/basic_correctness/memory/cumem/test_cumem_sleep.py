# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sleep and wake on a real GPU: contents, host memory, a neighbour on the device."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import regex as re
import torch

from tests.basic_correctness.memory.cumem.own_process import Checks

MIB = 1 << 20
GIB = 1 << 30
SIZES = (1, 511, MIB + 3, 10 * MIB - 1, 64 * MIB, 300 * MIB + 77, GIB)
CHECKS = Checks(__file__)

NEIGHBOUR = """
import sys, torch
taken = None
for line in sys.stdin:
    del taken
    torch.accelerator.empty_cache()
    # In whole pages, or PyTorch asks for more.
    size = (torch.accelerator.get_memory_info()[0] - int(line)) >> 21 << 21
    taken = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.accelerator.synchronize()
    print("ready", flush=True)
"""


class Neighbour:
    """Another process on the device, which goes at the end of the context."""

    def __enter__(self) -> "Neighbour":
        self._process = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def leave(self, size: int) -> None:
        """Take all of the device's free memory but ``size`` bytes, or 2 MiB more."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{size}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ready\n"

    def __exit__(self, *_) -> None:
        self._process.communicate()


def error_of(work: Callable[[], None]) -> str:
    """What the call says when it fails, as it must."""
    try:
        work()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing failed")


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")


class Weights:
    """Random tensors in sleep mode's memory, and what they must hold."""

    def __init__(self, tag: str = "weights") -> None:
        from vllm.device_allocator import cumem

        self.allocator = cumem.CuMemAllocator.get_instance()
        with self.allocator.use_memory_pool(tag):
            self.tensors = [random_bytes(size) for size in SIZES]
        self.contents = [tensor.cpu() for tensor in self.tensors]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._poison_what_is_mapped(cumem)

    def _poison_what_is_mapped(self, cumem) -> None:
        map_memory = cumem.create_and_map

        def map_poisoned(allocation) -> None:
            map_memory(allocation)
            _, size, address, _ = allocation
            cumem.libcudart.cudaMemset(address, 0xA5, size)

        cumem.create_and_map = map_poisoned

    @property
    def store(self):
        return self.allocator._mover.store

    def state(self) -> list[tuple]:
        """All that a call which failed must not have changed."""
        data = self.allocator.pointer_to_data
        found = []
        for segment in self.allocator._table.segments():
            copy = data[segment.address].cpu_backup_tensor
            found.append((segment, None if copy is None else int(copy.sum())))
        return found

    def sleep(self) -> None:
        self.allocator.sleep(offload_tags="weights")
        assert self.allocator.mapped_bytes == 0

    def check(self) -> None:
        for tensor, address, content in zip(
            self.tensors, self.addresses, self.contents, strict=True
        ):
            assert tensor.data_ptr() == address
            assert torch.equal(tensor.cpu(), content)

    def cycle(self) -> None:
        self.sleep()
        self.allocator.wake_up()
        self.check()


@CHECKS.add
def contents_survive_and_nothing_grows() -> None:
    weights = Weights()
    used = []
    for _ in range(20):
        weights.cycle()
        held = weights.store.free_bytes, weights.store.registered_bytes
        used.append((torch.accelerator.get_memory_info()[0], *held))
    assert len(set(used[1:])) == 1, used
    assert used[0][1] == used[0][2] > 0, "no host memory was registered"


@CHECKS.add
def contents_survive_in_pageable_memory() -> None:
    weights = Weights()
    weights.store._runtime = None
    for _ in range(2):
        weights.cycle()
    assert weights.store.registered_bytes == weights.store.free_bytes == 0


@CHECKS.add
def contents_survive_when_part_is_registered() -> None:
    weights = Weights()
    weights.store._budget = 600 * MIB
    for _ in range(2):
        weights.cycle()
    assert 0 < weights.store.registered_bytes <= 600 * MIB


@CHECKS.add
def prepared_memory_is_used() -> None:
    weights = Weights()
    weights.store.policy = "prepare"
    weights.allocator.prepare_sleep()
    weights.store.wait_until_prepared()
    prepared = weights.store.registered_bytes
    assert prepared >= sum(SIZES)
    weights.cycle()
    assert weights.store.registered_bytes == prepared


@CHECKS.add
def work_before_the_sleep_is_in_the_copy() -> None:
    """On a stream of its own, and not waited for by the caller."""
    weights = Weights()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for tensor in weights.tensors:
            tensor.fill_(9)
    weights.sleep()
    weights.allocator.wake_up()
    assert all(bool((tensor == 9).all()) for tensor in weights.tensors)


@CHECKS.add
def neighbour_takes_the_memory_meanwhile() -> None:
    weights = Weights()
    weights.sleep()
    with Neighbour() as neighbour:
        neighbour.leave(GIB // 2)
        for _ in range(2):
            assert "are missing" in error_of(weights.allocator.wake_up)
            assert weights.allocator.mapped_bytes == 0
    weights.allocator.wake_up()
    weights.check()


@CHECKS.add
def wake_that_lacks_memory_at_any_segment_can_be_repeated() -> None:
    weights = Weights()
    with weights.allocator.use_memory_pool("kv_cache"):
        cache = [torch.empty(300 * MIB, dtype=torch.uint8, device="cuda") for _ in "12"]
    weights.sleep()
    asleep = weights.state()
    segments = [segment for segment, _ in asleep]
    # Those with contents wake first.
    segments.sort(key=lambda segment: segment.tag != "weights")
    needed = sum(segment.size for segment in segments)
    kept = sum(segment.size for segment in segments if segment.tag == "weights")
    with Neighbour() as neighbour:
        room = 0
        for segment in segments:
            # Room for all segments before this one, and for half of it.
            neighbour.leave(room + segment.size // 2)
            missing = needed - torch.accelerator.get_memory_info()[0]
            error = error_of(weights.allocator.wake_up)
            said = re.search(r"([\d.]+) GiB are missing", error)
            assert said and abs(float(said[1]) - missing / GIB) < 0.05, error
            assert f"{kept / GIB:.2f} GiB for weights" in error, error
            if segment.size >= 20 * MIB:
                # Else the granularity of the neighbour's memory may decide.
                assert f"for the tag {segment.tag}" in error, error
            assert weights.state() == asleep
            room += segment.size
        # By tag: the weights fit, the cache does not.
        neighbour.leave(kept + cache[0].nbytes // 2)
        weights.allocator.wake_up(["weights"])
        weights.check()
        partly = weights.state()
        error = error_of(lambda: weights.allocator.wake_up(["kv_cache"]))
        assert "for the tag kv_cache" in error, error
        assert "for weights" not in error, error
        assert weights.state() == partly
        weights.check()
    weights.allocator.wake_up()
    weights.check()
    assert weights.allocator.mapped_bytes == needed


@CHECKS.add
def sleep_without_registered_host_memory_keeps_the_contents() -> None:
    """A budget that is too small, and a driver that refuses."""
    weights = Weights()
    weights.store._budget = 1
    weights.cycle()
    assert weights.store.registered_bytes == 0
    weights.store._budget = None
    register = weights.store._runtime.register

    def refuse(address: int, size: int) -> None:
        register(0, size)

    weights.store._runtime.register = refuse
    weights.cycle()
    assert weights.store.registered_bytes == 0
    weights.store._runtime.register = register
    weights.cycle()
    assert weights.store.registered_bytes > 0


@CHECKS.add
def sleep_without_host_memory_leaves_everything_awake() -> None:
    from vllm.device_allocator import host_store

    weights = Weights()
    awake = weights.state()
    map_piece, calls = host_store.map_piece, []

    def map_few(size: int):
        calls.append(size)
        return map_piece(size if len(calls) < 3 else 1 << 62)

    host_store.map_piece = map_few
    assert "the host has no" in error_of(weights.sleep)
    host_store.map_piece = map_piece
    assert weights.state() == awake
    weights.check()
    weights.cycle()


@CHECKS.add
def memory_is_prepared_while_a_graph_is_captured() -> None:
    """The driver forbids registering to every thread then, unless it is told."""
    weights = Weights()
    weights.store.policy = "prepare"
    result = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights.allocator.prepare_sleep()
        weights.store.wait_until_prepared()
        result.add_(1)
    assert weights.store.registered_bytes >= sum(SIZES)
    graph.replay()
    assert result.tolist() == [1, 1, 1, 1]
    weights.cycle()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CHECKS.names)
def test_in_own_process(name):
    CHECKS.run(name)


if __name__ == "__main__":
    CHECKS.main()
