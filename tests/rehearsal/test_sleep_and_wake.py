# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake of the real allocator on a simulated card."""

import textwrap
from collections.abc import Callable, Iterator

import pytest

from tools.rehearsal.testing import Outcome, WarmProcess

IMPORTS = """
import gc
import torch
from benchmarks.sleep_wake import cycle_many
from tools.rehearsal import card
from vllm.device_allocator import segment_mover
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.host_store import HostStore
# Looking for garbage among all that would take most of the time.
gc.collect()
gc.freeze()
"""

PROLOGUE = """
MIB = 1 << 20
allocator = CuMemAllocator.get_instance()
random = torch.Generator().manual_seed(1)

def tensors(tag, sizes):
    with allocator.use_memory_pool(tag):
        found = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    for tensor in found:
        # Written by the host: a kernel would do nothing here.
        tensor.copy_(torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8,
                                   generator=random))
    return found

def contents(tensors):
    return [tensor.cpu() for tensor in tensors]

def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

def asleep():
    return [d.is_asleep for d in allocator.pointer_to_data.values()]
"""


@pytest.fixture(scope="module")
def warm(fronts) -> Iterator[WarmProcess]:
    process = WarmProcess(IMPORTS)
    yield process
    process.close()


@pytest.fixture
def run(warm) -> Callable[[str], Outcome]:
    """Run text that has an allocator and the functions above, on 2 GiB."""
    return lambda text: warm.run(PROLOGUE + textwrap.dedent(text), memory="2GiB")


FAULTS = """
segment_mover.BATCH_BYTES = 1  # each segment is waited for alone
kept = tensors("weights", [1, 3 * MIB, 12 * MIB]) + tensors("runtime", [MIB])
lost = tensors("kv_cache", [12 * MIB, 14 * MIB])
expected = contents(kept)
# What a failing call must do: raise, or let the cycle end well.
harmless = {
    "cuThreadExchangeStreamCaptureMode", "cudaThreadExchangeStreamCaptureMode",
    "cudaEventDestroy", "cudaHostRegister",
    "cudaHostUnregister", "cudaGetLastError", "cudaGetErrorName", "cuGetErrorName",
}

# PyTorch ignores the error in some places, and the report after a sleep all.
either = {"cudaGetDevice", "cudaSetDevice", "cudaMemGetInfo"}
# PyTorch asks this in a destructor that must not throw.
fatal = {"cuDevicePrimaryCtxGetState"}

def sleep():
    allocator.sleep(offload_tags=("weights", "runtime"))

def wake():
    allocator.wake_up()

def forget():
    "What was made by the first sleep and is used by later ones."
    allocator._mover.store.release_free()
    allocator._mover._copies._streams.clear()

def new_calls(work):
    before = card.report()["calls"]
    work()
    return {name: count - before.get(name, 0)
            for name, count in card.report()["calls"].items()
            if count > before.get(name, 0) and name not in fatal}

first = new_calls(sleep)
wake()
later = new_calls(sleep)
woken = new_calls(wake)
problems = []

def check(step, name, nth, work, ready):
    ready()
    before = asleep()
    card.clear_faults()
    fired = card.faults_fired()
    card.fail(name, nth)
    try:
        work()
        raised = False
    except RuntimeError:
        raised = True
    card.clear_faults()
    where = f"{step}: {name} {nth}"
    if card.faults_fired() == fired and name not in either:
        problems.append(f"{where}: did not fire")
    if raised is (name in harmless) and name not in either:
        problems.append(f"{where}: raised {raised}")
    if raised and asleep() != before:
        problems.append(f"{where}: {before} became {asleep()}")
    if raised and step != "wake" and not same(contents(kept), expected):
        problems.append(f"{where}: contents after the failure")
    if raised:
        work()
    if step == "wake":
        sleep()
    wake()
    if not same(contents(kept), expected):
        problems.append(f"{where}: contents")
    if allocator._mover.host_copies:
        problems.append(f"{where}: host copies left")

tried = 0
for step, calls, work, ready in [
    ("first sleep", first, sleep, forget),
    ("sleep", later, sleep, lambda: None),
    ("wake", woken, wake, sleep),
]:
    for name, count in sorted(calls.items()):
        for nth in sorted({1, 2, count - 1, count} - {0}):
            if nth <= count:
                check(step, name, nth, work, ready)
                tried += 1
answer(problems=problems, tried=tried, misuse=card.misuse(),
       first=first, later=later, woken=woken)
"""


def test_fault_at_every_driver_call(run):
    result = run(FAULTS)
    assert result.status == 0, result.stderr[-4000:]
    assert not result.answer["problems"], "\n".join(result.answer["problems"])
    assert result.answer["misuse"] == 0
    assert result.answer["tried"] > 60
    # The calls that the faults were put at are those that matter.
    assert {"cudaHostRegister", "cudaMemcpyAsync", "cuMemUnmap"} <= set(
        result.answer["first"]
    )
    assert "cudaHostRegister" not in result.answer["later"]
    assert {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cudaMemcpyAsync"} <= set(
        result.answer["woken"]
    )


def test_a_neighbour_takes_the_memory_meanwhile(run):
    """The wake says what is missing and for what, and works once it is back."""
    result = run(
        """
        weights = tensors("weights", [60 * MIB, 20 * MIB])
        cache = tensors("kv_cache", [80 * MIB])
        expected = contents(weights)
        used = card.used()
        allocator.sleep(offload_tags="weights")
        neighbour = card.free() - 100 * MIB
        card.take(neighbour)
        errors = []
        for tags in (None, None, ["weights"], ["kv_cache"]):
            try:
                allocator.wake_up(tags)
                errors.append(None)
            except RuntimeError as error:
                errors.append(str(error))
        partly = same(contents(weights), expected)
        card.give(neighbour)
        allocator.wake_up()
        answer(errors=errors, partly=partly, used=card.used() - used,
               same=same(contents(weights), expected), asleep=asleep())
        """
    ).check()
    both, again, weights, cache = result.answer["errors"]
    assert both == again
    for text in (
        "CUDA_ERROR_OUT_OF_MEMORY",
        "0.08 GiB for weights",
        "0.08 GiB for kv_cache",
        "0.10 GiB are free, 0.06 GiB are missing",
    ):
        assert text in both
    assert weights is None and result.answer["partly"]
    assert "for the tag kv_cache" in cache
    assert result.answer["same"]
    assert result.answer["used"] == 0
    assert not any(result.answer["asleep"])


def test_levels_tags_and_reloads_in_turn(run):
    result = run(
        """
        weights = tensors("weights", [40 * MIB, 5 * MIB])
        state = tensors("runtime", [3 * MIB])
        graphs = tensors("cudagraph", [2 * MIB])
        cache = tensors("kv_cache", [50 * MIB])
        kept = ("weights", "runtime", "cudagraph")
        always = contents(state + graphs)
        wrong = []
        base = card.used()
        for cycle in range(12):
            level, split, discard = cycle % 3 + 1, cycle % 2, cycle % 4 == 3
            expected = contents(weights)
            if discard:
                allocator.discard("kv_cache")
                allocator.discard("kv_cache")
            allocator.sleep(offload_tags=kept if level != 2 else kept[1:])
            # A second sleep must change nothing, whatever it asks for.
            allocator.sleep(offload_tags=())
            if card.used() >= base:
                wrong.append(f"{cycle}: nothing freed")
            if split:
                allocator.wake_up(["weights"])
                if not same(contents(state + graphs), always):
                    wrong.append(f"{cycle}: state")
                if any(d.is_asleep != (d.tag == "kv_cache")
                       for d in allocator.pointer_to_data.values()):
                    wrong.append(f"{cycle}: partial wake")
            allocator.wake_up()
            allocator.wake_up()
            if level == 2:
                if same(contents(weights), expected):
                    wrong.append(f"{cycle}: level 2 kept the weights")
                for tensor, value in zip(weights, expected):
                    tensor.copy_(value)
            if not same(contents(weights), expected):
                wrong.append(f"{cycle}: weights")
            if not same(contents(state + graphs), always):
                wrong.append(f"{cycle}: state at the end")
        answer(wrong=wrong, growth=card.used() - base)
        """
    ).check()
    assert result.answer == {"wrong": [], "growth": 0}


def test_host_memory_policies(run):
    result = run("""
        weights = tensors("weights", [30 * MIB, 5 * MIB])
        expected = contents(weights)
        mover = allocator._mover
        first, runtime = mover.store, mover.store._runtime
        found = {}
        for policy in ("keep", "release", "prepare", "pageable"):
            store = mover.store = HostStore(runtime, policy)
            registered = card.calls("cudaHostRegister")
            allocator.prepare_sleep()
            store.wait_until_prepared()
            prepared = card.calls("cudaHostRegister")
            for _ in range(3):
                allocator.sleep(offload_tags="weights")
                allocator.wake_up()
            found[policy] = [prepared - registered,
                             card.calls("cudaHostRegister") - prepared,
                             store.free_bytes, store.registered_bytes,
                             same(contents(weights), expected)]
            store.release_free()
        answer(found=found, default=first.policy)
    """).check()
    # 5 MiB take a segment of 20 MiB.
    both = 50 << 20
    assert result.answer["default"] == "keep"
    assert result.answer["found"] == {
        "keep": [0, 2, both, both, True],
        "release": [0, 6, 0, 0, True],
        "prepare": [2, 0, both, both, True],
        "pageable": [0, 0, 0, 0, True],
    }


def test_memory_is_prepared_while_a_graph_is_captured(run):
    """As after a load: registering must not invalidate the capture."""
    result = run("""
        weights = tensors("weights", [30 * MIB, 5 * MIB])
        mover = allocator._mover
        store = mover.store = HostStore(mover.store._runtime, "prepare")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            allocator.prepare_sleep()
            store.wait_until_prepared()
            prepared = store.registered_bytes
            store.release_free()
        answer(prepared=prepared, left=store.registered_bytes)
    """).check()
    assert result.answer == {"prepared": 50 << 20, "left": 0}


def test_cycles_leave_nothing_behind(run):
    """As the benchmark does with --simulated, but fewer."""
    result = run("answer(**cycle_many(120))").check().answer
    assert result["checksums_equal"] is True
    growth = {
        "cycles": 120,
        "device_growth_bytes": 0,
        "host_growth_bytes": 0,
        "leaked_handles": 0,
        "open_files_growth": 0,
    }
    assert growth.items() <= result.items()
