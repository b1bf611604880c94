# SPDX-License-Identifier: Apache-2.0
"""Pool generations on PyTorch's real allocator and MemPool, and the real extension."""

import textwrap

import pytest

from tools.rehearsal.packages import installed_version, is_fork
from tools.rehearsal.testing import WarmProcess

IMPORTS = """
import threading
import torch
from tools.rehearsal import card
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.generations import reclaim
MIB = 1 << 20

def empty(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

def reserved():
    return torch.cuda.memory_reserved() // MIB
"""
START = """
allocator = CuMemAllocator.get_instance()
torch.empty(1, device="cuda")
"""


@pytest.fixture(scope="module")
def process(fronts):
    if not is_fork(installed_version()):
        pytest.skip("the installed vLLM is not the fork")
    process = WarmProcess(IMPORTS)
    yield process
    process.close()


@pytest.fixture
def run(process):
    def run_text(text, **options):
        return process.run(START + textwrap.dedent(text), **options)

    return run_text


def test_converting_layers_strands_nothing(run):
    """Each layer is replaced by a larger one; stock's pool would double."""
    result = run(
        """
        card.peak(reset=True)
        base = card.used()
        with allocator.use_memory_pool("weights"):
            layers = [empty(200) for _ in range(16)]
            for index in range(16):
                layers[index] = empty(204 + 2 * index)
                reclaim()
        answer(peak=(card.peak() - base) // MIB, after=(card.used() - base) // MIB,
               live=sum(layer.numel() for layer in layers) // MIB,
               torch=reserved())
        """,
        memory="5GiB",
    ).check()
    live = result.answer["live"]
    assert result.answer["after"] <= live + 44
    assert result.answer["peak"] < live * 1.4
    assert result.answer["torch"] <= live + 64


def test_out_of_memory_in_the_pool_is_retried(run):
    """What a failed conversion left is given back; the next attempt succeeds."""
    result = run(
        """
        with allocator.use_memory_pool("weights"):
            weights = empty(2000)
            scratch = empty(1000)
            try:
                empty(3000)
                failed = False
            except torch.OutOfMemoryError:
                failed = True
            del scratch
            reclaim(force=True)
            more = empty(1400)
        answer(failed=failed, reserved=reserved(), refusals=card.refusals())
        """,
        memory="4.25GiB",
    ).check()
    assert result.answer["failed"]
    assert result.answer["reserved"] < 3450


def test_a_nested_pool_keeps_its_tag(run):
    result = run("""
        with allocator.use_memory_pool("weights"):
            outer = empty(30)
            with allocator.use_memory_pool("runtime"):
                inner = empty(40)
                reclaim(force=True)
                again = empty(50)
            last = empty(60)
        tags = {}
        for data in allocator.pointer_to_data.values():
            size = data.handle[1] // MIB
            tags.setdefault(data.tag, []).append(size)
        answer(tags={tag: sorted(sizes) for tag, sizes in tags.items()})
    """).check()
    assert result.answer["tags"]["runtime"] == [40, 50]
    assert result.answer["tags"]["weights"] == [30, 60]


def test_other_threads_allocate_outside(run):
    """Only the thread that entered the pool allocates in it; both reclaim safely."""
    result = run("""
        kept, errors = [], []

        def outside():
            try:
                for _ in range(30):
                    kept.append(empty(12))
                    reclaim(force=True)
                    torch.cuda.memory_stats()
                    kept.pop()
                    torch.cuda.empty_cache()
                kept.append(empty(14))
            except Exception as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=outside) for _ in range(3)]
        with allocator.use_memory_pool("weights"):
            for thread in threads: thread.start()
            layers = []
            for _ in range(30):
                layers.append(empty(16))
                empty(20)
                reclaim(force=True)
            for thread in threads: thread.join()
        pooled = sum(d.handle[1] for d in allocator.pointer_to_data.values()) // MIB
        answer(errors=errors, pooled=pooled, live=30 * 16,
               default=len(kept))
    """).check()
    assert result.answer["errors"] == []
    assert result.answer["default"] == 3
    assert result.answer["live"] <= result.answer["pooled"] <= 30 * 16 + 44


@pytest.mark.parametrize("limit", ["", "20", "512"])
def test_any_split_policy_gives_memory_back(run, limit):
    policy = f"max_split_size_mb:{limit}" if limit else ""
    result = run(
        f"""
        torch._C._accelerator_setAllocatorSettings({policy!r})
        base = card.used()
        with allocator.use_memory_pool("weights"):
            layers = [empty(100) for _ in range(8)]
            for index in range(8):
                layers[index] = empty(110 + index)
                reclaim(force=True)
        answer(over=(card.used() - base) // MIB - sum(l.numel() for l in layers) // MIB)
        """
    ).check()
    assert 0 <= result.answer["over"] <= 44


def test_sleep_and_wake_keep_bytes_and_addresses(run):
    result = run("""
        data = [torch.randint(0, 256, (n,), dtype=torch.uint8)
                for n in (5 * MIB, 40 * MIB + 3, 999)]
        with allocator.use_memory_pool("weights"):
            weights = [d.cuda() for d in data]
            reclaim(force=True)
            weights.append(data[0].cuda())
        with allocator.use_memory_pool("kv_cache"):
            cache = empty(64)
        where = [w.data_ptr() for w in weights]
        awake = card.used()
        same = []
        for _ in range(3):
            allocator.sleep("weights")
            asleep = card.used()
            allocator.wake_up()
            same.append(all(torch.equal(w.cpu(), d)
                            for w, d in zip(weights, [*data, data[0]])))
        answer(same=same, freed=(awake - asleep) // MIB, back=card.used() == awake,
               moved=where != [w.data_ptr() for w in weights])
    """).check()
    assert result.answer["same"] == [True] * 3
    assert result.answer["freed"] >= 50 + 64
    assert result.answer["back"]
    assert not result.answer["moved"]


def test_a_weight_dropped_while_asleep_leaves_nothing(run):
    result = run("""
        with allocator.use_memory_pool("weights"):
            weights = [empty(40), empty(50)]
        allocator.sleep("weights")
        weights.pop()
        torch.cuda.empty_cache()
        allocator.wake_up()
        size = weights[0].numel()
        weights.clear()
        torch.cuda.empty_cache()
        answer(size=size, left=card.report()["memory"]["mappings"])
    """).check()
    assert result.answer == {"size": 40 << 20, "left": 0}
    assert result.report["memory"]["handles"] == 0
    assert result.report["memory"]["reservations"] == 0


def test_reclaim_never_disturbs_a_capture(run):
    result = run("""
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        x = torch.zeros(10, device="cuda")
        with allocator.use_memory_pool("weights"):
            weights = empty(100)
            weights = empty(120)
            with torch.cuda.graph(graph, stream=stream):
                x.add_(1)
                reclaim(force=True)
        graph.replay()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        answer(captured=True)
    """).check()
    assert result.answer["captured"]
