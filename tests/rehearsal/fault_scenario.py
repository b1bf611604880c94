# SPDX-License-Identifier: Apache-2.0
"""Load, sleep and wake with one driver call failing; run on a simulated card.

Imports once, then forks for each fault. A child loads layers of known bytes,
converts them one by one, sleeps, wakes and compares; what fails is tried once
more, as a server would. Then everything is dropped, and nothing may be left.
"""

import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from tools.rehearsal import card
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.device_allocator.generations import reclaim

MIB = 1 << 20
# Segments of their own, and one that small blocks share.
SIZES = (11 * MIB, 2 * MIB, 700_000, 12 * MIB)
CALLS = (
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
    "cuCtxSynchronize",
    "cudaMalloc",
    "cudaHostAlloc",
    "cudaHostRegister",
    "cudaMemcpyAsync",
    "cudaMemcpy",
    "cudaDeviceSynchronize",
)


def pattern(index: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


PATTERNS = [pattern(index, size) for index, size in enumerate(SIZES)]


def load(allocator: CuMemAllocator) -> list[torch.Tensor]:
    """Layers with the patterns, each replaced by a larger copy of itself."""
    with allocator.use_memory_pool("weights"):
        layers = [data.cuda() for data in PATTERNS]
        for index, layer in enumerate(layers):
            larger = torch.empty(layer.numel() + MIB, dtype=torch.uint8, device="cuda")
            larger[: layer.numel()].copy_(layer)
            layers[index] = larger
            del layer, larger
            reclaim(force=True)
    return layers


def check(layers: list[torch.Tensor]) -> None:
    for data, layer in zip(PATTERNS, layers, strict=True):
        if not torch.equal(layer[: data.numel()].cpu(), data):
            raise AssertionError("bytes differ")


class Attempts:
    """Runs steps, each once more when it fails, and notes what failed."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def run(self, step: Any, *args: Any) -> Any:
        try:
            return step(*args)
        except (RuntimeError, MemoryError) as error:
            self.errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
        return step(*args)


def scenario(call: str | None, nth: int) -> dict[str, Any]:
    """One child's work. An exception that is not a clean error escapes."""
    allocator = CuMemAllocator.get_instance()
    torch.empty(1, device="cuda")
    attempts = Attempts()
    if call is not None:
        card.fail(call, nth)
    layers = attempts.run(load, allocator)
    attempts.run(check, layers)
    for _ in range(2):
        attempts.run(allocator.sleep, "weights")
        asleep = card.report()["memory"]["mappings"]
        attempts.run(allocator.wake_up)
        attempts.run(check, layers)
    calls = {name: card.calls(name) for name in CALLS}
    card.clear_faults()
    del layers
    torch.cuda.synchronize()
    allocator.release_pools()
    torch.cuda.empty_cache()
    report = card.report()
    left = {
        key: report["memory"][key]
        for key in ("handles", "unreachable_handles", "mappings", "reservations")
    }
    return {
        "errors": attempts.errors,
        "fired": card.faults_fired(),
        "asleep": asleep,
        "left": left,
        "misuse": report["misuse"],
        "calls": calls,
    }


def in_child(call: str | None, nth: int, folder: Path) -> dict[str, Any]:
    out = folder / "result.json"
    out.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        try:
            result = scenario(call, nth)
        except BaseException:
            result = {"broke": traceback.format_exc()[-1500:]}
        out.write_text(json.dumps(result))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not out.exists():
        return {"broke": f"the child ended with {status}"}
    return json.loads(out.read_text())


def main() -> None:
    """Faults to try as arguments NAME:N; without any, all of a clean run."""
    with tempfile.TemporaryDirectory() as folder:
        # Else every child walks and copies all that the imports made.
        gc.collect()
        gc.freeze()
        clean = in_child(None, 0, Path(folder))
        results = {"": clean}
        faults = [f.split(":") for f in sys.argv[1:]]
        if not faults:
            faults = [
                (name, str(n))
                for name, count in clean["calls"].items()
                for n in range(1, count + 1)
            ]
        for name, nth in faults:
            results[f"{name}:{nth}"] = in_child(name, int(nth), Path(folder))
    Path(os.environ["REHEARSAL_TEST_ANSWER"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
