# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of MoE weight conversions, released vllm beside the fork.

    python benchmarks/moe_conversion.py --device cpu
    python benchmarks/moe_conversion.py --device cuda --json conversions.json

Each side runs in a process of its own: the fork is the vllm that this Python imports,
the release is unpacked from its wheel. Where there is no network, `--stock DIR` names a
folder that holds the released package and `--fork DIR` one that holds only the fork's
changed files (docs/conversions.md says how to make it).

Columns: `live` is the peak of live bytes over the layer's own bytes, source included;
`scratch` what the peak exceeds the larger of source and result by; `x copy` the time
over the time to copy the layer's bytes once on this device, measured here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: name, case for a GPU, smaller sizes for a CPU
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "BF16 TRTLLM block layout",
        dict(format="bf16_trtllm", hidden=4096, intermediate=384, gated=True),
        dict(hidden=1024, intermediate=256),
    ),
    (
        "NVFP4 TRTLLM",
        dict(format="nvfp4", hidden=4096, intermediate=768, gated=True),
        dict(hidden=2048),
    ),
    (
        "NVFP4 TRTLLM, padded",
        dict(format="nvfp4", hidden=2688, intermediate=1856, gated=False),
        dict(hidden=1344, intermediate=928),
    ),
    (
        "NVFP4 CUTLASS",
        dict(
            format="nvfp4",
            backend="FLASHINFER_CUTLASS",
            hidden=4096,
            intermediate=768,
            gated=True,
        ),
        dict(hidden=2048),
    ),
    (
        "NVFP4 CUTLASS, padded",
        dict(
            format="nvfp4",
            backend="FLASHINFER_CUTLASS",
            hidden=2688,
            intermediate=1856,
            gated=False,
        ),
        dict(hidden=1344, intermediate=928),
    ),
    (
        "NVFP4 CUTLASS, padded, Nemotron TP 2",
        dict(
            format="nvfp4",
            backend="FLASHINFER_CUTLASS",
            hidden=2688,
            intermediate=928,
            gated=False,
        ),
        dict(hidden=1344, intermediate=464),
    ),
    (
        "w1/w3 reorder, NVFP4",
        dict(format="reorder_w1w3", hidden=4096, intermediate=768, gated=True),
        dict(hidden=2048),
    ),
    (
        "FP8 per tensor",
        dict(format="fp8_tensor", hidden=4096, intermediate=768, gated=True),
        dict(hidden=2048, intermediate=512),
    ),
    (
        "FP8 per tensor, padded",
        dict(format="fp8_tensor", hidden=2688, intermediate=1856, gated=False),
        dict(hidden=1344, intermediate=928),
    ),
    (
        "FP8 block",
        dict(format="fp8_block", hidden=4096, intermediate=768, gated=True),
        dict(hidden=2048, intermediate=512),
    ),
    (
        "MXFP8",
        dict(format="mxfp8", hidden=4096, intermediate=768, gated=True),
        dict(hidden=2048, intermediate=512),
    ),
    (
        "MXFP8, padded",
        dict(format="mxfp8", hidden=2816, intermediate=704, gated=True),
        dict(hidden=1408, intermediate=352),
    ),
    (
        "align_fp4_moe_weights",
        dict(
            format="align_fp4",
            hidden=2688,
            intermediate=1856,
            gated=False,
            arguments=[False, 128],
        ),
        dict(hidden=1344, intermediate=928),
    ),
    (
        "align_moe_weights",
        dict(
            format="align",
            hidden=2816,
            intermediate=704,
            gated=True,
            arguments=[True, 128],
        ),
        dict(hidden=704, intermediate=352),
    ),
    (
        "MXFP4 swizzle for SM 9.0",
        dict(format="mxfp4_swizzle", hidden=2880, intermediate=2880, gated=True),
        dict(hidden=960, intermediate=960),
    ),
    (
        "Marlin NVFP4",
        dict(format="marlin_nvfp4", hidden=4096, intermediate=768, gated=True),
        dict(hidden=1024, intermediate=256),
    ),
    (
        "Marlin FP8",
        dict(format="marlin_fp8", hidden=4096, intermediate=768, gated=True),
        dict(hidden=1024, intermediate=256),
    ),
]
GPU_EXPERTS, CPU_EXPERTS = 128, 8


def chosen_cases(device: str, experts: int | None, only: str | None):
    for name, case, small in CASES:
        if only and only.lower() not in name.lower():
            continue
        cpu = device == "cpu"
        case = case | (small if cpu else {})
        yield (
            name,
            case | dict(experts=experts or (CPU_EXPERTS if cpu else GPU_EXPERTS)),
        )


# --- One side, in its own process ------------------------------------------


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
        import torch
        from torch.utils import _pytree

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
        from torch.utils._python_dispatch import TorchDispatchMode

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
    import torch

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
        import torch

        self.torch, self.device = torch, device
        self.cases = load_cases_module()
        self.cuda = device == "cuda"
        if not self.cuda:
            # One thread: parallel copies of a few MiB vary tenfold on a busy machine.
            torch.set_num_threads(1)
        if not flashinfer_interleave:
            self.cases.use_stand_ins()

    def inputs(self, case):
        inputs = self.cases.Inputs(case, self.device)
        build, run = self.cases.FORMATS[case["format"]]
        build(inputs)
        return inputs, run

    def typical(self, seconds: list[float]) -> float:
        """On a busy CPU the least disturbed run says most."""
        return statistics.median(seconds) if self.cuda else min(seconds)

    def sync(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def timed(self, run, *args) -> float:
        self.sync()
        start = time.perf_counter()
        run(*args)
        self.sync()
        return time.perf_counter() - start

    def measure(self, case: dict, repeat: int) -> dict:
        torch = self.torch
        # The first run compiles kernels and builds tables; its result is compared.
        inputs, run = self.inputs(case)
        results = run(inputs)
        self.sync()
        answer = self.cases.describe_layer(inputs.layer)
        answer["results"] = self.cases.describe(results)
        del inputs, results
        memory = self.memory(case)
        seconds = []
        for _ in range(repeat):
            inputs, run = self.inputs(case)
            seconds.append(self.timed(run, inputs))
            del inputs
        if self.cuda:
            torch.cuda.empty_cache()
        return memory | {"seconds": self.typical(seconds), "answer": answer}

    def memory(self, case: dict) -> dict:
        """Peak live bytes of one run."""
        torch = self.torch
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

    def copy_rate(self) -> float:
        """Bytes read and written per second by a plain copy."""
        torch = self.torch
        size = (1 << 30) if self.cuda else (1 << 27)
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        target.copy_(source)
        runs = [self.timed(target.copy_, source) for _ in range(7)]
        return 2 * size / self.typical(runs)

    def serve(self) -> None:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer
        import vllm

        print(json.dumps(vllm.__file__), file=answers, flush=True)
        for line in sys.stdin:
            task = json.loads(line)
            try:
                if "case" in task:
                    answer = self.measure(task["case"], task["repeat"])
                else:
                    answer = {"copy_rate": self.copy_rate()}
            except Exception as error:  # noqa: BLE001
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


# --- Both sides --------------------------------------------------------------


class Side:
    """A worker process that imports vllm from the folder `package`, if given."""

    def __init__(self, package: Path | None, options: argparse.Namespace):
        path = [str(package)] if package else []
        path += filter(None, [os.environ.get("PYTHONPATH")])
        command = [sys.executable, "-P", "-W", "ignore", __file__, "--worker"]
        command += ["--device", options.device]
        if options.flashinfer_interleave:
            command.append("--flashinfer-interleave")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tempfile.gettempdir(),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, **task: Any) -> dict:
        assert self.process.stdin is not None
        print(json.dumps(task), file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def released_package() -> Path:
    sys.path.insert(0, str(ROOT))
    from tests.kernels.moe.conversion_oracle import unpacked_release

    return unpacked_release()


def overlay(stock: Path, changed: Path, scratch: Path) -> Path:
    """A folder with the package in `stock`, files of `changed` in place of its own."""
    package = stock / "vllm"
    for folder, folders, files in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        inner = Path(folder).relative_to(stock)
        (scratch / inner).mkdir(parents=True)
        for name in files:
            (scratch / inner / name).symlink_to(Path(folder).resolve() / name)
    for source in (changed / "vllm").rglob("*.py"):
        target = scratch / source.relative_to(changed)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.symlink_to(source.resolve())
    return scratch


def make_row(name: str, case: dict, fork: dict, stock: dict, rate: float) -> dict:
    layer = fork["layer_bytes"]
    needed = max(layer, fork["result_bytes"])
    return {
        "format": name,
        "shape": [case["experts"], case["hidden"], case["intermediate"]],
        "live": fork["peak_bytes"] / layer,
        "stock_live": stock["peak_bytes"] / layer,
        "scratch_bytes": max(0, fork["peak_bytes"] - needed),
        "layer_bytes": layer,
        "equal_to_stock": fork["answer"] == stock["answer"],
        "seconds": fork["seconds"],
        "stock_seconds": stock["seconds"],
        "copy_ratio": fork["seconds"] / (2 * layer / rate),
    }


HEADER = (
    f"{'conversion':<38} {'MiB':>6} {'live':>6} {'stock':>6} {'scratch':>8} "
    f"{'ms':>9} {'stock ms':>9} {'x copy':>7} {'stock':>7}  equal"
)


def print_row(row: dict, rate: float) -> None:
    copy = 2 * row["layer_bytes"] / rate
    print(
        f"{row['format']:<38} {row['layer_bytes'] / 2**20:6.0f} {row['live']:6.3f} "
        f"{row['stock_live']:6.3f} {row['scratch_bytes'] / row['layer_bytes']:8.2%} "
        f"{row['seconds'] * 1e3:9.3f} {row['stock_seconds'] * 1e3:9.3f} "
        f"{row['copy_ratio']:7.2f} {row['stock_seconds'] / copy:7.1f}  "
        f"{row['equal_to_stock']}",
        flush=True,
    )


def compare(options: argparse.Namespace) -> list[dict]:
    stock_package = options.stock or released_package()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        fork_package = None
        if options.fork:
            fork_package = overlay(stock_package, options.fork, Path(scratch))
        fork, stock = Side(fork_package, options), Side(stock_package, options)
        found = fork.read(), stock.read()
        print(f"fork:    {found[0]}\nrelease: {found[1]}")
        if found[0] == found[1]:
            raise SystemExit("both sides import the same vllm: give --fork or --stock")
        rate = fork.ask()["copy_rate"]
        print(f"copy: {rate / 1e12:.2f} TB/s, read and written\n\n{HEADER}")
        for name, case in chosen_cases(options.device, options.experts, options.only):
            ours = fork.ask(case=case, repeat=options.repeat)
            theirs = stock.ask(case=case, repeat=max(1, options.repeat // 3))
            if "error" in ours or "error" in theirs:
                print(f"{name:<38} fork: {ours.get('error')}; ", end="")
                print(f"release: {theirs.get('error')}", flush=True)
                rows.append({"format": name, "error": [ours, theirs]})
                continue
            rows.append(make_row(name, case, ours, theirs, rate))
            print_row(rows[-1], rate)
        fork.close()
        stock.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--stock", type=Path, metavar="DIR")
    parser.add_argument("--fork", type=Path, metavar="DIR")
    parser.add_argument("--only", metavar="TEXT", help="conversions with this in name")
    parser.add_argument("--experts", type=int, help="experts of each layer")
    parser.add_argument("--repeat", type=int, default=None, help="timed runs")
    parser.add_argument(
        "--flashinfer-interleave",
        action="store_true",
        help="the release uses FlashInfer's scale interleave, compiled at first use, "
        "in place of an equal torch operator",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        Worker(options.device, options.flashinfer_interleave).serve()
        return 0
    options.repeat = options.repeat or (9 if options.device == "cuda" else 3)
    rows = compare(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(not row.get("equal_to_stock") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
