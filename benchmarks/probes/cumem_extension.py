# SPDX-License-Identifier: Apache-2.0
"""Checks the built CuMem extension on a real card. Needs torch 2.11 or later, no vLLM.

    python benchmarks/probes/cumem_extension.py build/cumem_allocator.abi3.so
        [--stock-so .../vllm/cumem_allocator.abi3.so] [--only NAME] [--simulated]

Each check runs in a process of its own. The last lines of the output are JSON, one per
check: {"check", "ok", "seconds", ...what was measured, sizes in bytes}. The exit status
is 0 when every check passed. With --stock-so the same forced out-of-memory is shown
with the extension of a vLLM release; there "ok" means that the process ran through, and
"retry" says what became of the retry.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import json
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
# cuMemGetInfo moves by a few pages when a kernel is first loaded.
SLACK = 4 * MIB
CAPTURE_MODE_RELAXED = 2

Figures = dict[str, Any]
# (device, size, address, handle, tag, asleep, serial, generation)
Segment = tuple[Any, ...]


# On a simulated card kernels do nothing, so their results and times say nothing.
simulated = False


def expect(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def expect_of_kernels(condition: object, what: str) -> None:
    if not simulated:
        expect(condition, what)


class Extension:
    """A CuMem extension behind torch's pluggable allocator."""

    def __init__(self, path: pathlib.Path) -> None:
        import torch

        spec = importlib.util.spec_from_file_location("cumem_allocator", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no extension module")
        self.module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.library = ctypes.CDLL(str(path))
        self.library.my_malloc.restype = ctypes.c_void_p
        arguments: list[Any] = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.library.my_malloc.argtypes = arguments
        self.library.my_free.argtypes = [ctypes.c_void_p, *arguments]
        # Kept for ever: torch calls into it for as long as a segment exists.
        self.allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(path), "my_malloc", "my_free"
        )

    def new_pool(self) -> Any:
        import torch

        return torch.cuda.MemPool(self.allocator.allocator())

    def sleep(self, segments: list[Segment]) -> None:
        for segment in segments:
            self.module.python_unmap_and_release(*segment[:4])

    def wake(self, segments: list[Segment]) -> None:
        for segment in segments:
            self.module.python_create_and_map(*segment[:4])

    def expect_no_errors(self) -> None:
        errors = self.module.take_errors()
        expect(errors == [], f"the extension reports {errors}")


def free_memory() -> int:
    import torch

    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def start(extension: Extension) -> int:
    """Free device memory after CUDA, and the kernels used here, have been loaded."""
    import torch

    value = torch.ones(4 * MIB, dtype=torch.uint8, device="cuda")
    value.random_(0, 255)
    value.add_(1)
    _ = bool(value.sum())
    _ = torch.equal(value, value.clone())
    del value
    torch.cuda.empty_cache()
    del extension
    return free_memory()


def expect_start_again(extension: Extension, before: int) -> Figures:
    """Nothing of the extension's is left, and the card is as free as at the start."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    segments = extension.module.segments()
    expect(segments == [], f"segments are left: {segments}")
    extension.expect_no_errors()
    counters = extension.module.counters()
    expect(counters["reserved_bytes"] == 0, f"addresses are left: {counters}")
    missing = before - free_memory()
    expect(abs(missing) <= SLACK, f"{missing} bytes of the card did not come back")
    return {"missing": missing}


def check_pool(extension: Extension) -> Figures:
    """Tensors outlive their pool; each segment goes when its last tensor has gone."""
    import torch

    before = start(extension)
    extension.module.set_scope("weights", 3)
    pool = extension.new_pool()
    with torch.cuda.use_mem_pool(pool):
        tensors = [
            torch.full((64 * MIB,), index, dtype=torch.uint8, device="cuda")
            for index in range(8)
        ]
    segments = extension.module.segments()
    expect(len(segments) == 8, f"8 segments expected: {segments}")
    expect(all(s[4:6] == ("weights", False) for s in segments), "labels are wrong")
    expect(all(s[7] == 3 for s in segments), "generations are wrong")
    mapped = extension.module.counters()["mapped_bytes"]
    expect(mapped == 8 * 64 * MIB, f"{mapped} bytes are mapped")
    del pool
    gc.collect()
    survivors = tensors[::2]
    del tensors
    torch.cuda.empty_cache()
    left = len(extension.module.segments())
    expect(left == 4, f"{left} segments are left after half of the tensors went")
    for index, tensor in enumerate(survivors):
        expect_of_kernels(
            bool((tensor == 2 * index).all()), "a surviving tensor changed"
        )
        del tensor
    del survivors
    return {"mapped": mapped, **expect_start_again(extension, before)}


@contextlib.contextmanager
def ballast(leave: int) -> Iterator[list[Any]]:
    """Fills the card, by the default allocator, until about `leave` bytes are free."""
    import torch

    held = []
    while (room := free_memory() - leave) >= 2 * MIB:
        size = min(room, 4 * GIB) // (2 * MIB) * (2 * MIB)
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    yield held


def out_of_memory_then_retry(extension: Extension) -> Figures:
    import torch

    size = 512 * MIB
    pool = extension.new_pool()
    figures: Figures = {"wanted": size}
    with ballast(leave=256 * MIB) as held:
        with torch.cuda.use_mem_pool(pool):
            try:
                torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                figures["first"] = "out of memory"
            else:
                figures["first"] = "succeeded"
        held.clear()
        torch.cuda.empty_cache()
        figures["free_before_retry"] = free_memory()
        with torch.cuda.use_mem_pool(pool):
            try:
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError as error:
                figures["retry"] = f"failed: {str(error).splitlines()[0]}"
                return figures
        tensor.fill_(7)
        expect_of_kernels(
            bool((tensor == 7).all()), "the memory of the retry does not hold data"
        )
        figures["retry"] = "succeeded"
    return figures


def check_out_of_memory(extension: Extension) -> Figures:
    """Out of memory in the pool, memory is freed, the retry succeeds."""
    before = start(extension)
    figures = out_of_memory_then_retry(extension)
    expect(figures["first"] == "out of memory", "there was memory: no test")
    expect(figures["retry"] == "succeeded", figures["retry"])
    errors = extension.module.take_errors()
    expect(errors, "the failure was not reported")
    expect(all("CUDA_ERROR_OUT_OF_MEMORY" in e for e in errors), f"{errors}")
    return {**figures, "errors": errors, **expect_start_again(extension, before)}


def check_sleep(extension: Extension) -> Figures:
    """Sleep, delete one tensor while asleep, wake: same addresses, same bytes."""
    import torch

    before = start(extension)
    pool = extension.new_pool()
    with torch.cuda.use_mem_pool(pool):
        doomed = torch.ones(96 * MIB, dtype=torch.uint8, device="cuda")
        kept = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda").random_(0, 255)
    address, copy = kept.data_ptr(), kept.cpu()
    awake = free_memory()
    segments = extension.module.segments()
    extension.sleep(segments)
    asleep = free_memory()
    expect(asleep - awake >= 224 * MIB, f"sleep freed {asleep - awake} bytes only")
    del doomed, pool
    gc.collect()
    torch.cuda.empty_cache()
    extension.expect_no_errors()
    remaining = extension.module.segments()
    expect(len(remaining) == 1, f"one segment expected: {remaining}")
    expect(remaining[0][5], "the surviving segment is not asleep")
    for _ in range(3):
        began = time.perf_counter()
        extension.wake(remaining)
        waking = time.perf_counter() - began
        expect(kept.data_ptr() == address, "the address changed")
        kept.zero_()
        kept.copy_(copy)
        expect_of_kernels(torch.equal(kept.cpu(), copy), "the bytes changed")
        extension.sleep(remaining)
    extension.wake(remaining)
    del kept
    return {
        "freed_by_sleep": asleep - awake,
        "wake_seconds": waking,
        **expect_start_again(extension, before),
    }


def check_wait(extension: Extension) -> Figures:
    """Freeing waits for the kernels of the segment's stream."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Loading the kernel takes memory that does not come back.
        torch.cuda._sleep(1)
    before = start(extension)
    address = extension.library.my_malloc(64 * MIB, 0, stream.cuda_stream)
    expect(address, f"{extension.module.take_errors()}")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
    began = time.perf_counter()
    extension.library.my_free(address, 64 * MIB, 0, stream.cuda_stream)
    waited = time.perf_counter() - began
    expect(stream.query(), "the stream was still busy after the free")
    expect_of_kernels(
        waited > 0.1, f"the free took {waited} s beside a kernel of about 0.5 s"
    )
    return {"waited_seconds": waited, **expect_start_again(extension, before)}


def capture_beside(work: Callable[[], object]) -> bool:
    """Whether a graph capture survives `work` on another thread meanwhile."""
    import torch

    value = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    try:
        with torch.cuda.graph(graph):
            value.add_(1)
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            value.add_(1)
    except RuntimeError:
        return False
    finally:
        if failure:
            raise failure[0]
    graph.replay()
    torch.cuda.synchronize()
    expect_of_kernels(bool((value == 2).all()), "the graph computes something else")
    return True


def check_capture(extension: Extension) -> Figures:
    """Allocating and freeing on another thread leaves a capture valid."""
    import torch

    start(extension)
    stream = torch.cuda.Stream().cuda_stream
    survived = True
    for used in (stream, 0):
        address = extension.library.my_malloc(64 * MIB, 0, used)

        def work(address: int = address, used: int = used) -> None:
            extension.library.my_free(address, 64 * MIB, 0, used)
            other = extension.library.my_malloc(64 * MIB, 0, used)
            expect(other, f"{extension.module.take_errors()}")
            (segment,) = extension.module.segments()
            extension.sleep([segment])
            extension.wake([segment])
            extension.library.my_free(other, 64 * MIB, 0, used)

        survived = survived and capture_beside(work)
    expect(survived, "the capture was invalidated")
    extension.expect_no_errors()
    expect(extension.module.segments() == [], "segments are left")
    return {}


def check_context_sync_and_capture(extension: Extension) -> Figures:
    """Why freeing waits for streams: what cuCtxSynchronize does to a capture.

    A measurement: passes either way.
    """
    import torch

    start(extension)
    driver = ctypes.CDLL("libcuda.so.1")
    codes = []

    def work() -> None:
        torch.cuda.current_stream()
        context = ctypes.c_void_p()
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        driver.cuCtxSetCurrent(context)
        mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        codes.append(driver.cuCtxSynchronize())

    return {"capture_survives": capture_beside(work), "result": codes}


def check_second_device(extension: Extension) -> Figures:
    """Segments of device 1, from a thread that works on device 0."""
    import torch

    if torch.cuda.device_count() < 2:
        return {"skipped": "there is one device only"}
    torch.cuda.set_device(0)
    with torch.cuda.device(1):  # a pool belongs to the device that it is made on
        pool = extension.new_pool()
    with torch.cuda.use_mem_pool(pool, device=1):
        tensor = torch.full((64 * MIB,), 5, dtype=torch.uint8, device="cuda:1")
    expect(torch.cuda.current_device() == 0, "the current device changed")
    segments = extension.module.segments()
    expect([s[0] for s in segments] == [1], f"device 1 expected: {segments}")
    torch.cuda.synchronize(1)
    extension.sleep(segments)
    extension.wake(segments)
    tensor.fill_(6)
    expect_of_kernels(bool((tensor == 6).all()), "the memory does not hold data")
    here = torch.ones(4, device="cuda")
    expect_of_kernels(bool(here.all()), "device 0 does not work")
    del tensor, pool
    gc.collect()
    torch.cuda.empty_cache()
    extension.expect_no_errors()
    expect(extension.module.segments() == [], "segments are left")
    return {}


def check_exit(extension: Extension) -> Figures:
    """The process ends with tensors alive, one segment asleep, and observers set."""
    import torch

    kept: list[Any] = []
    extension.module.init_module(kept.append, kept.append)
    pool = extension.new_pool()
    with torch.cuda.use_mem_pool(pool):
        for _ in range(2):
            kept.append(torch.ones(32 * MIB, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    extension.sleep(extension.module.segments()[:1])
    # Kept until the interpreter is gone.
    sys.kept_until_exit = kept, pool, extension  # type: ignore[attr-defined]
    return {}


CHECKS: dict[str, Callable[[Extension], Figures]] = {
    "pool": check_pool,
    "out_of_memory": check_out_of_memory,
    "sleep": check_sleep,
    "wait": check_wait,
    "capture": check_capture,
    "context_sync_and_capture": check_context_sync_and_capture,
    "second_device": check_second_device,
    "exit": check_exit,
}


def stock_out_of_memory(path: pathlib.Path) -> Figures:
    """The same with a release's extension, whose Python side keeps the table."""
    stock = Extension(path)
    table: dict[int, Segment] = {}

    def on_malloc(segment: Segment) -> None:
        table[segment[2]] = segment

    stock.module.init_module(on_malloc, table.pop)
    return out_of_memory_then_retry(stock)


def run_one(name: str, path: pathlib.Path) -> None:
    import torch

    expect(torch.cuda.is_available(), "there is no CUDA device")
    figures: Figures = {"torch": torch.__version__}
    figures["device"] = torch.cuda.get_device_name(0)
    began = time.perf_counter()
    if name == "stock_out_of_memory":
        figures |= stock_out_of_memory(path)
    else:
        extension = Extension(path)
        expect(extension.module.driver_available(), "the driver does not open")
        figures |= CHECKS[name](extension)
    figures["seconds"] = round(time.perf_counter() - began, 3)
    print(json.dumps(figures), flush=True)


def run_all(names: list[str], paths: dict[str, pathlib.Path]) -> int:
    lines = []
    for name in names:
        done = subprocess.run(
            [sys.executable, __file__, str(paths[name]), "--run", name]
            + ["--simulated"] * simulated,
            capture_output=True,
            text=True,
            timeout=300,
        )
        sys.stderr.write(done.stderr)
        result: Figures = {"check": name, "ok": done.returncode == 0}
        if done.stdout.strip():
            result |= json.loads(done.stdout.splitlines()[-1])
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
            result["error"] = f"status {done.returncode}: {reason[0]}"
        lines.append(result)
    for result in lines:
        print(json.dumps(result))
    return 0 if all(result["ok"] for result in lines) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("extension", type=pathlib.Path, help="cumem_allocator.abi3.so")
    parser.add_argument("--stock-so", type=pathlib.Path, help="a release's extension")
    parser.add_argument("--only", choices=sorted(CHECKS), help="run this check alone")
    parser.add_argument(
        "--simulated", action="store_true", help="the card is simulated: no data, times"
    )
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    global simulated
    simulated = options.simulated
    if options.run:
        run_one(options.run, options.extension.resolve())
        return 0
    names = [options.only] if options.only else list(CHECKS)
    paths = dict.fromkeys(names, options.extension.resolve())
    if options.stock_so:
        names.append("stock_out_of_memory")
        paths["stock_out_of_memory"] = options.stock_so.resolve()
    return run_all(names, paths)


if __name__ == "__main__":
    sys.exit(main())
