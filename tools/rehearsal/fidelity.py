# SPDX-License-Identifier: Apache-2.0
"""The same loads on a real and on a simulated card, side by side.

On a machine with the card, once with stock vLLM and once with the fork:

    python -m tools.rehearsal.calibrate > card.toml
    python -m tools.rehearsal.fidelity run stock --out real.json
    python -m tools.rehearsal.fidelity run fork --out real.json

Anywhere, with the fork installed; without --calibration for bare figures:

    python -m tools.rehearsal.fidelity simulate --card h200 \\
        --calibration card.toml --out simulated.json
    python -m tools.rehearsal.fidelity table real.json simulated.json [bare.json]

Each load is a process of its own. Files accumulate: a row is replaced by a new
run of the same load with the same vLLM.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
# Figures of a row in bytes, except for the counts of segments.
Row = dict[str, Any]


@dataclass(frozen=True)
class ModelLoad:
    """A load of real vLLM."""

    model: str
    sleep: bool
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerLoad:
    """Layers that a conversion replaces one by one, without vLLM's loader.

    `room` is what the card has free, in GiB; the rest is taken by ballast.
    """

    room: float
    pool: bool
    split: bool  # max_split_size_mb:20, as stock vLLM sets while it loads


def loads() -> dict[str, ModelLoad | LayerLoad]:
    """Every load of the table by name."""
    table: dict[str, ModelLoad | LayerLoad] = {}
    for room in (13.5, 10.6):
        for pool in (False, True):
            for split in (False, True):
                name = f"layers, {room} GiB, {'pool' if pool else 'no pool'}"
                table[name + (", split 20" if split else "")] = LayerLoad(
                    room, pool, split
                )
    models = {
        "qwen2.5-7b fp8": ("qwen2.5-7b", ("--quantization=fp8",)),
        "qwen3-30b-a3b": ("qwen3-30b-a3b", ()),
        "gpt-oss-120b, 12 layers": (
            "gpt-oss-120b",
            ('--hf-overrides={"num_hidden_layers": 12}',),
        ),
    }
    for name, (model, options) in models.items():
        for sleep in (True, False):
            key = f"{name}, {'sleep' if sleep else 'no sleep'}"
            table[key] = ModelLoad(model, sleep, options)
    return table


# ---- One load, in this process, on whatever card it has


def used() -> int:
    """Bytes in use on the card."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(total - free)


@contextmanager
def watch_peak() -> Iterator[Callable[[], int]]:
    """A function for the highest use within the block.

    A simulated card knows it; a real one is asked every millisecond.
    """
    from tools.rehearsal import card

    if card.is_simulated():
        card.peak(reset=True)
        # mem_get_info counts what was in use before the process as well.
        others = used() - card.used()
        yield lambda: card.peak() + others
        return
    highest, stop = [used()], threading.Event()

    def sample() -> None:
        while not stop.wait(0.001):
            highest[0] = max(highest[0], used())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: highest[0]
    finally:
        stop.set()
        thread.join()


def load_model(load: ModelLoad) -> Row:
    """Load with real vLLM; bytes above a bare context."""
    import torch

    from tools.rehearsal.jobs import Job
    from tools.rehearsal.load import engine_arguments
    from tools.rehearsal.models import model_folder
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    with tempfile.TemporaryDirectory() as scratch:
        folder = str(model_folder(load.model, Path(scratch)))
        job = Job(folder, memory=0, sleep=load.sleep, options=load.options)
        arguments = engine_arguments(job)
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        torch.empty(1, device="cuda")
        base = used()
        with watch_peak() as peak:
            UniProcExecutor(config)
            torch.cuda.synchronize()
            return {
                "loads": True,
                "peak": peak() - base,
                "after": used() - base,
                "live": int(torch.cuda.memory_allocated()),
            }


# Nemotron-3-Nano-30B NVFP4 at tensor parallel size 2: per layer, the experts'
# packed weights and block scales.
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 23, 128, 2688, 928


def _swizzled(scales: Any) -> Any:
    """Scales in the layout of the tensor cores: padded, then permuted."""
    import torch

    experts, rows, columns = scales.shape
    padded_rows = -(-rows // 128) * 128
    padded_columns = -(-columns // 4) * 4
    padded = torch.zeros(
        (experts, padded_rows, padded_columns), dtype=scales.dtype, device="cuda"
    )
    padded[:, :rows, :columns] = scales
    tiles = padded.reshape(experts, padded_rows // 128, 4, 32, padded_columns // 4, 4)
    tiles = tiles.permute(0, 1, 4, 3, 2, 5).contiguous()
    return tiles.reshape(experts, padded_rows, padded_columns)


def _convert(layer: dict[str, Any]) -> None:
    """Pad a layer's weights and scales to whole tiles."""
    from torch.nn.functional import pad

    scales = _swizzled(layer["up_scales"])
    rows = scales.size(1) - layer["up"].size(1)
    layer["up"] = pad(layer["up"], (0, 0, 0, rows))
    layer["up_scales"] = scales
    layer["down"] = pad(layer["down"], (0, rows // 2, 0, 0))
    layer["down_scales"] = _swizzled(pad(layer["down_scales"], (0, rows // 16)))


def _make_layer() -> dict[str, Any]:
    import torch

    def weights(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.uint8, device="cuda")

    return {
        "up": weights(EXPERTS, INTERMEDIATE, HIDDEN // 2),
        "up_scales": weights(EXPERTS, INTERMEDIATE, HIDDEN // 16),
        "down": weights(EXPERTS, HIDDEN, INTERMEDIATE // 2),
        "down_scales": weights(EXPERTS, HIDDEN, INTERMEDIATE // 16),
    }


def _reclaim() -> None:
    """The fork's safe point; stock has none."""
    try:
        from vllm.device_allocator.generations import reclaim
    except ImportError:
        return
    reclaim()


def load_layers(load: LayerLoad) -> Row:
    """Create all layers, then convert each; bytes above the ballast."""
    import torch

    from vllm.device_allocator.cumem import CuMemAllocator

    torch.empty(1, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(int(free - load.room * GIB), dtype=torch.uint8, device="cuda")
    if load.split:
        torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    base, base_live = used(), torch.cuda.memory_allocated()
    before = torch.cuda.memory_stats()
    pool = (
        CuMemAllocator.get_instance().use_memory_pool("weights")
        if load.pool
        else nullcontext()
    )
    row: Row = {"loads": True}
    with watch_peak() as peak:
        try:
            with pool:
                layers = [_make_layer() for _ in range(LAYERS)]
                for layer in layers:
                    _convert(layer)
                    _reclaim()
        except torch.OutOfMemoryError:
            row["loads"] = False
        torch.cuda.synchronize()
        row["peak"] = peak() - base
    row["after"] = used() - base
    row["live"] = int(torch.cuda.memory_allocated() - base_live)
    after = torch.cuda.memory_stats()
    for key in ("num_device_alloc", "num_device_free"):
        row[key] = after[key] - before[key]
    del ballast
    return row


def run_one(name: str) -> Row:
    """One load by name; an error becomes the row's."""
    load = loads()[name]
    try:
        return load_model(load) if isinstance(load, ModelLoad) else load_layers(load)
    except Exception as error:
        return {"loads": False, "error": f"{type(error).__name__}: {error}"}


# ---- Many loads


def _spawn(name: str, env: dict[str, str]) -> Row:
    began = time.monotonic()
    command = [sys.executable, "-m", "tools.rehearsal.fidelity", "one", name]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not lines:
        tail = done.stderr.strip().splitlines()[-1:]
        return {"loads": False, "error": f"exit {done.returncode}: {tail}"}
    row: Row = json.loads(lines[-1].removeprefix("ROW "))
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def _environment() -> dict[str, str]:
    from tools.rehearsal.testing import VLLM_ENVIRONMENT

    return {**os.environ, **VLLM_ENVIRONMENT}


def _run_all(label: str, names: Sequence[str], env: dict[str, str], out: Path) -> None:
    rows = json.loads(out.read_text()) if out.exists() else {}
    for name in names:
        rows[f"{label}: {name}"] = row = _spawn(name, env)
        out.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{label}: {name}: {row}", file=sys.stderr, flush=True)


def _names(pattern: str) -> list[str]:
    return [name for name in loads() if pattern in name]


def _simulate(args: argparse.Namespace) -> None:
    from tools.rehearsal.calibration import calibrate
    from tools.rehearsal.cards import find_card
    from tools.rehearsal.packages import find_variant
    from tools.rehearsal.run import environment

    card = calibrate(find_card(args.card, None, None), args.calibration)
    for label in ("stock", "fork"):
        package = find_variant(label).package
        env = environment(card, base=_environment())
        paths = [str(package)] if package else []
        paths += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        env["PYTHONPATH"] = os.pathsep.join(paths)
        _run_all(label, _names(args.only), env, args.out)


def _cell(row: Row | None, key: str) -> str:
    if row is None or row.get(key) is None:
        return "-"
    return f"{row[key] / GIB:.3f}" if key in ("peak", "after") else str(row[key])


def table(files: Sequence[Path]) -> str:
    """A Markdown table: one row for each load, the columns of each file."""
    data = [json.loads(path.read_text()) for path in files]
    keys = {
        "loads": "loads",
        "peak": "peak GiB",
        "after": "after GiB",
        "num_device_alloc": "segments made",
        "num_device_free": "freed",
    }
    titles = [f"{title}, {path.stem}" for title in keys.values() for path in files]
    lines = [f"| load | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name in data[0]:
        cells = [_cell(rows.get(name), key) for key in keys for rows in data]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Fidelity of the simulated card.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("one", help="one load in this process")
    one.add_argument("name", choices=list(loads()))
    run = commands.add_parser("run", help="all loads on this machine's card")
    run.add_argument("label", choices=["stock", "fork"])
    simulate = commands.add_parser("simulate", help="all loads on a simulated card")
    simulate.add_argument("--card", required=True)
    simulate.add_argument("--calibration", type=Path)
    for command in (run, simulate):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--only", default="", help="part of a load's name")
    show = commands.add_parser("table", help="files side by side, as Markdown")
    show.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args(argv)
    if args.command == "one":
        print("ROW " + json.dumps(run_one(args.name)), flush=True)
        os._exit(0)
    elif args.command == "run":
        _run_all(args.label, _names(args.only), _environment(), args.out)
    elif args.command == "simulate":
        _simulate(args)
    else:
        print(table(args.files))


if __name__ == "__main__":
    main()
