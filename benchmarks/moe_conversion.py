# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of MoE weight conversions, released vllm beside the fork.

    python benchmarks/moe_conversion.py --device cpu
    python benchmarks/moe_conversion.py --device cuda --json conversions.json
    python benchmarks/moe_conversion.py --device cuda --only "nvfp4 cutlass" --profile

Each side runs in a process of its own (`conversion_worker.py`): the fork is the vllm
that this Python imports, the release is unpacked from its wheel. Where there is no
network, `--stock DIR` names a folder that holds the released package and `--fork DIR`
one that holds only the fork's changed files (docs/conversions.md says how to make it).

Columns: `live` is the peak of live bytes over the layer's own bytes, source included;
`scratch` what the peak exceeds the larger of source and result by; `x copy` the time
over the time to copy the layer's bytes once on this device, measured here. Rows are
written to the JSON file as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("conversion_worker.py")

#: hidden and intermediate size, gated; on a GPU, and smaller for a CPU
SHAPES: dict[str, tuple[tuple[int, int, bool], tuple[int, int]]] = {
    "Qwen3-30B": ((4096, 768, True), (1024, 256)),
    "Qwen3-30B, TP 2": ((4096, 384, True), (1024, 256)),
    "Nemotron": ((2688, 1856, False), (672, 464)),
    "Nemotron, TP 2": ((2688, 928, False), (672, 464)),
    "Gemma": ((2816, 704, True), (704, 352)),
    "gpt-oss": ((2880, 2880, True), (480, 480)),
}
CUTLASS = {"backend": "FLASHINFER_CUTLASS"}

#: name, format, shape, more
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("NVFP4 TRTLLM", "nvfp4", "Qwen3-30B", {}),
    ("NVFP4 TRTLLM, padded", "nvfp4", "Nemotron", {}),
    ("NVFP4 CUTLASS", "nvfp4", "Qwen3-30B", CUTLASS),
    ("NVFP4 CUTLASS, padded", "nvfp4", "Nemotron", CUTLASS),
    ("NVFP4 CUTLASS, padded, TP 2", "nvfp4", "Nemotron, TP 2", CUTLASS),
    ("MXFP4 swizzle for SM 9.0", "mxfp4_swizzle", "gpt-oss", {}),
    ("Marlin NVFP4", "marlin_nvfp4", "Qwen3-30B", {}),
    ("Marlin FP8", "marlin_fp8", "Qwen3-30B", {}),
    ("BF16 TRTLLM block layout", "bf16_trtllm", "Qwen3-30B, TP 2", {}),
    ("w1/w3 reorder, NVFP4", "reorder_w1w3", "Qwen3-30B", {}),
    ("FP8 per tensor", "fp8_tensor", "Qwen3-30B", {}),
    ("FP8 per tensor, padded", "fp8_tensor", "Nemotron", {}),
    ("FP8 block", "fp8_block", "Qwen3-30B", {}),
    ("MXFP8", "mxfp8", "Qwen3-30B", {}),
    ("MXFP8, padded", "mxfp8", "Gemma", {}),
    ("align_fp4_moe_weights", "align_fp4", "Nemotron", {"arguments": [False, 128]}),
    ("align_moe_weights", "align", "Gemma", {"arguments": [True, 128]}),
]
GPU_EXPERTS, CPU_EXPERTS = 128, 4


def chosen_cases(
    device: str, experts: int | None, only: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    cpu = device == "cpu"
    for name, format, shape, more in CASES:
        if only and only.lower() not in name.lower():
            continue
        (hidden, intermediate, gated), small = SHAPES[shape]
        if cpu:
            hidden, intermediate = small
        yield (
            name,
            more
            | dict(
                format=format,
                experts=experts or (CPU_EXPERTS if cpu else GPU_EXPERTS),
                hidden=hidden,
                intermediate=intermediate,
                gated=gated,
            ),
        )


class Side:
    """A worker process that imports vllm from the folder `package`, if given."""

    def __init__(self, package: Path | None, options: argparse.Namespace):
        path = [str(package)] if package else []
        path += filter(None, [os.environ.get("PYTHONPATH")])
        command = [sys.executable, "-P", "-W", "ignore", str(WORKER)]
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

    def send(self, **task: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(task), file=self.process.stdin, flush=True)

    def ask(self, **task: Any) -> dict:
        self.send(**task)
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
        "host_seconds": fork["host_seconds"],
        "stock_seconds": stock["seconds"],
        "copy_ratio": fork["seconds"] / (2 * layer / rate),
    }


HEADER = (
    f"{'conversion':<28} {'MiB':>6} {'live':>6} {'stock':>6} {'scratch':>8} "
    f"{'ms':>9} {'host ms':>8} {'stock ms':>9} {'x copy':>7} {'stock':>7}  equal"
)


def print_row(row: dict, rate: float) -> None:
    copy = 2 * row["layer_bytes"] / rate
    print(
        f"{row['format']:<28} {row['layer_bytes'] / 2**20:6.0f} {row['live']:6.3f} "
        f"{row['stock_live']:6.3f} {row['scratch_bytes'] / row['layer_bytes']:8.2%} "
        f"{row['seconds'] * 1e3:9.3f} {row['host_seconds'] * 1e3:8.3f} "
        f"{row['stock_seconds'] * 1e3:9.3f} "
        f"{row['copy_ratio']:7.2f} {row['stock_seconds'] / copy:7.1f}  "
        f"{row['equal_to_stock']}",
        flush=True,
    )


def compare(fork: Side, stock: Side, options: argparse.Namespace) -> list[dict]:
    rate = fork.ask(do="copy")["copy_rate"]
    print(f"copy: {rate / 1e12:.2f} TB/s, read and written\n\n{HEADER}", flush=True)
    rows: list[dict] = []
    for name, case in chosen_cases(options.device, options.experts, options.only):
        fork.send(do="measure", case=case, repeat=options.repeat)
        # One GPU for one at a time; on a CPU each has one thread.
        ours = fork.read() if options.device == "cuda" else None
        stock.send(do="measure", case=case, repeat=max(1, options.repeat // 3))
        theirs = stock.read()
        ours = ours or fork.read()
        if "error" in ours or "error" in theirs:
            print(f"{name:<28} fork: {ours.get('error')}; ", end="")
            print(f"release: {theirs.get('error')}", flush=True)
            rows.append({"format": name, "error": [ours, theirs]})
        else:
            rows.append(make_row(name, case, ours, theirs, rate))
            print_row(rows[-1], rate)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def print_profile(fork: Side, options: argparse.Namespace) -> None:
    """Where the time of each conversion goes: kernels, and the host's calls."""
    rate = fork.ask(do="copy")["copy_rate"]
    print(f"copy: {rate / 1e12:.2f} TB/s, read and written")
    for name, case in chosen_cases(options.device, options.experts, options.only):
        found = fork.ask(do="profile", case=case, repeat=options.repeat)
        if "error" in found:
            print(f"\n{name}: {found['error']}", flush=True)
            continue
        kernels, functions = found["kernels"], found["functions"]
        launches = sum(count for _, count, _ in kernels)
        busy = sum(ms for _, _, ms in kernels)
        print(
            f"\n{name}: {found['seconds'] * 1e3:.3f} ms, the host's calls "
            f"{found['host_seconds'] * 1e3:.3f} ms, {launches} launches, "
            f"{busy:.3f} ms in them"
        )
        for title, rows in (("kernels", kernels), ("host, profiled", functions)):
            print(f"  {title}")
            for what, count, ms in rows:
                print(f"    {ms:8.3f} ms {count:5.0f} x  {what[:100]}")
        sys.stdout.flush()


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
        "--profile",
        action="store_true",
        help="time per kernel and per host function, of the fork alone",
    )
    parser.add_argument(
        "--flashinfer-interleave",
        action="store_true",
        help="the release uses FlashInfer's scale interleave, compiled at first use, "
        "in place of an equal torch operator",
    )
    options = parser.parse_args()
    options.repeat = options.repeat or (9 if options.device == "cuda" else 2)
    start = time.monotonic()
    stock_package = options.stock or released_package()
    with tempfile.TemporaryDirectory() as scratch:
        fork_package = None
        if options.fork:
            fork_package = overlay(stock_package, options.fork, Path(scratch))
        fork = Side(fork_package, options)
        if options.profile:
            print(f"fork:    {fork.read()}")
            print_profile(fork, options)
            fork.close()
            return 0
        stock = Side(stock_package, options)
        found = fork.read(), stock.read()
        print(f"fork:    {found[0]}\nrelease: {found[1]}")
        if found[0] == found[1]:
            raise SystemExit("both sides import the same vllm: give --fork or --stock")
        rows = compare(fork, stock, options)
        fork.close()
        stock.close()
    print(f"\n{len(rows)} conversions in {time.monotonic() - start:.0f} s")
    return int(any(not row.get("equal_to_stock") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
