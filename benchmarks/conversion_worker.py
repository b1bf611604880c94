# SPDX-License-Identifier: Apache-2.0
"""One side of `moe_conversion.py`: runs conversions of the vllm that it imports.

Reads tasks as lines of JSON from stdin and answers each with one line on stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
SLOW = 0.02  # seconds: longer conversions are timed once


def load_cases_module():
    path = ROOT / "tests/kernels/moe/conversion_cases.py"
    spec = importlib.util.spec_from_file_location("conversion_cases", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CpuPeak:
    """Live bytes of storages that operators return, as seen by torch's dispatcher."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}

    def see(self, value: Any) -> None:
        for tensor in _pytree.tree_leaves(value):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._add(tensor.untyped_storage())

    def _add(self, storage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self._known:
            return

        def gone(_) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        peak = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                peak.see(result)
                return result

        with Mode():
            yield


def storage_bytes(*values: Any) -> int:
    """Bytes of the distinct storages behind tensors, also wrapped ones."""
    seen: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif hasattr(value, "storage") and hasattr(value.storage, "data"):
            visit(value.storage.data)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)

    for value in values:
        visit(value)
    return sum(seen.values())


class Worker:
    """Runs cases with the vllm that this process imports."""

    def __init__(self, device: str, flashinfer_interleave: bool):
        self.device = device
        self.cuda = device == "cuda"
        self.cases = load_cases_module()
        if self.cuda:
            # This script runs without its folder in the path.
            sys.path.append(str(Path(__file__).parent))
            from contents import tensor_digest

            self.cases.digest = tensor_digest
        else:
            # One thread: parallel copies of a few MiB vary tenfold on a busy machine.
            torch.set_num_threads(1)
        if not flashinfer_interleave:
            self.cases.use_stand_ins()

    def inputs(self, case: dict):
        inputs = self.cases.Inputs(case, self.device)
        build, run = self.cases.FORMATS[case["format"]]
        build(inputs)
        return inputs, run

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, run, *args) -> tuple[float, float]:
        """Seconds until the call returned, and until the device was done."""
        self.sync()
        start = time.perf_counter()
        run(*args)
        returned = time.perf_counter()
        self.sync()
        return returned - start, time.perf_counter() - start

    def typical(self, seconds: list[float]) -> float:
        """On a busy CPU the least disturbed run says most."""
        return statistics.median(seconds) if self.cuda else min(seconds)

    def measure(self, case: dict, repeat: int) -> dict:
        # The first run compiles kernels and builds tables; its result is compared.
        inputs, run = self.inputs(case)
        results = run(inputs)
        answer = self.cases.describe_layer(inputs.layer)
        answer["results"] = self.cases.describe(results)
        del inputs, results
        memory = self.memory(case)
        host, device = [], []
        for _ in range(repeat):
            inputs, run = self.inputs(case)
            times = self.timed(run, inputs)
            host.append(times[0])
            device.append(times[1])
            del inputs
            if times[1] > SLOW:
                break
        if self.cuda:
            torch.cuda.empty_cache()
        times = {"seconds": self.typical(device), "host_seconds": self.typical(host)}
        return memory | times | {"answer": answer}

    def memory(self, case: dict) -> dict:
        """Peak live bytes of one run."""
        if self.cuda:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            inputs, run = self.inputs(case)
            source = storage_bytes(list(inputs.layer.parameters()))
            torch.cuda.reset_peak_memory_stats()
            results = run(inputs)
            self.sync()
            peak = torch.cuda.max_memory_allocated() - before
        else:
            inputs, run = self.inputs(case)
            source = storage_bytes(list(inputs.layer.parameters()))
            tracker = CpuPeak()
            tracker.see(list(inputs.layer.parameters()))
            with tracker.watching():
                results = run(inputs)
            peak = tracker.peak
        result = storage_bytes(list(inputs.layer.parameters()), results)
        return {"layer_bytes": source, "result_bytes": result, "peak_bytes": peak}

    def profile(self, case: dict, repeat: int) -> dict:
        """Milliseconds and launches per kernel of one run, and of the host's calls."""
        from torch.profiler import ProfilerActivity, profile

        times = self.measure(case, repeat)
        inputs, run = self.inputs(case)
        self.sync()
        activities = [ProfilerActivity.CPU]
        if self.cuda:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as seen:
            run(inputs)
            self.sync()
        total: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for event in seen.events():
            on_device = event.device_type != torch.autograd.DeviceType.CPU
            if on_device == self.cuda and not event.name.startswith("ProfilerStep"):
                time_us = event.device_time if on_device else event.self_cpu_time_total
                total[event.name] += time_us
                count[event.name] += 1
        rows = [(name, count[name], us / 1e3) for name, us in total.most_common(20)]
        return {
            "seconds": times["seconds"],
            "host_seconds": times["host_seconds"],
            "kernels": rows,
            "functions": self.host_profile(case),
        }

    def host_profile(self, case: dict, runs: int = 5) -> list[tuple[str, float]]:
        """Python functions by their own time in one run, in milliseconds."""
        import cProfile
        import pstats

        profiler = cProfile.Profile()
        for _ in range(runs):
            inputs, run = self.inputs(case)
            self.sync()
            profiler.enable()
            run(inputs)
            profiler.disable()
            self.sync()
        # pstats fills `stats` at run time.
        entries: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
        rows = [
            (f"{Path(file).name}:{line} {name}", calls / runs, own / runs * 1e3)
            for (file, line, name), (_, calls, own, *_) in entries.items()
        ]
        return sorted(rows, key=lambda row: -row[2])[:12]

    def copy_rate(self) -> float:
        """Bytes read and written per second by a plain copy."""
        size = (1 << 30) if self.cuda else (1 << 27)
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        target.copy_(source)
        runs = [self.timed(target.copy_, source)[1] for _ in range(7)]
        return 2 * size / self.typical(runs)

    def answer(self, task: dict) -> dict:
        if task["do"] == "measure":
            return self.measure(task["case"], task["repeat"])
        if task["do"] == "profile":
            return self.profile(task["case"], task["repeat"])
        return {"copy_rate": self.copy_rate()}


def serve(device: str, flashinfer_interleave: bool) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import vllm
    import vllm.model_executor.layers.fused_moe  # what takes most of the first case

    worker = Worker(device, flashinfer_interleave)
    print(json.dumps(vllm.__file__), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = worker.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--flashinfer-interleave", action="store_true")
    options = parser.parse_args()
    serve(options.device, options.flashinfer_interleave)
