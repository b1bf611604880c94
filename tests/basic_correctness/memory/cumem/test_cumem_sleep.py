# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake on a real GPU: contents, host memory, a neighbour on the device.

Each check runs in a process of its own: ``python test_cumem_sleep.py NAME`` runs one by
hand.
"""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

MIB = 1 << 20
GIB = 1 << 30
SIZES = (1, 511, MIB + 3, 10 * MIB - 1, 64 * MIB, 300 * MIB + 77, GIB)
CHECKS: list[Callable[[], None]] = []

NEIGHBOUR = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
taken = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


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


@check
def contents_survive_and_nothing_grows() -> None:
    weights = Weights()
    used = []
    for _ in range(20):
        weights.cycle()
        held = weights.store.free_bytes, weights.store.registered_bytes
        used.append((torch.cuda.mem_get_info()[0], *held))
    assert len(set(used[1:])) == 1, used
    assert used[0][1] == used[0][2] > 0, "no host memory was registered"


@check
def contents_survive_in_pageable_memory() -> None:
    weights = Weights()
    weights.store._runtime = None
    for _ in range(2):
        weights.cycle()
    assert weights.store.registered_bytes == weights.store.free_bytes == 0


@check
def contents_survive_when_part_is_registered() -> None:
    weights = Weights()
    weights.store._budget = 600 * MIB
    for _ in range(2):
        weights.cycle()
    assert 0 < weights.store.registered_bytes <= 600 * MIB


@check
def prepared_memory_is_used() -> None:
    weights = Weights()
    weights.store.policy = "prepare"
    weights.allocator.prepare_sleep()
    weights.store.wait_until_prepared()
    prepared = weights.store.registered_bytes
    assert prepared >= sum(SIZES)
    weights.cycle()
    assert weights.store.registered_bytes == prepared


@check
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


@check
def neighbour_takes_the_memory_meanwhile() -> None:
    weights = Weights()
    weights.sleep()
    command = [sys.executable, "-c", NEIGHBOUR, str(GIB // 2)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as neighbour:
        assert neighbour.stdout and neighbour.stdout.readline() == "ready\n"
        for _ in range(2):
            try:
                weights.allocator.wake_up()
                raise AssertionError("there was not enough memory to wake")
            except RuntimeError as error:
                assert "are missing" in str(error), error
            assert weights.allocator.mapped_bytes == 0
    weights.allocator.wake_up()
    weights.check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [function.__name__ for function in CHECKS])
def test_in_own_process(name):
    done = subprocess.run(
        [sys.executable, __file__, name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


if __name__ == "__main__":
    {function.__name__: function for function in CHECKS}[sys.argv[1]]()
    print("passed")
