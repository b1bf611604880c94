# SPDX-License-Identifier: Apache-2.0
"""How much device memory a load takes: stock CuMem, this fork, the default allocator.

    python benchmarks/load_peak.py SET [SET ...] --fork DIR --stock DIR

DIR is a folder that holds a ``vllm`` package: this fork's, and the released one's. For
each allocator it finds the smallest card that loads the set, to 0.1 GiB, and prints the
peak and the end state on a roomy card. *fork-off* is the fork with generations switched
off. Needs a GPU; a smaller card is emulated by occupying the rest. Sizes are GiB above
what the process takes before the load.

Rows are added to benchmarks/results/load_peak.jsonl, unless the card is simulated.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from small_card import GIB, leave_free

STEP = 0.1
ALLOCATORS = ("default", "fork", "fork-off", "stock")
RESULTS = Path(__file__).resolve().parent / "results" / "load_peak.jsonl"


class Measurer:
    """A process per allocator that forks one child per card, CUDA still untouched."""

    def __init__(self, allocator: str, layer_set: str, site: str | None, split: str):
        command = [sys.executable, __file__, layer_set, "--serve", allocator]
        paths = [
            *([site] if site else []),
            *os.environ.get("PYTHONPATH", "").split(":"),
        ]
        env = os.environ | {"PYTHONPATH": ":".join(filter(None, paths))}
        if split:
            env["PYTORCH_ALLOC_CONF"] = f"max_split_size_mb:{split}"
        if allocator == "fork-off":
            env["VLLM_CUMEM_POOL_GENERATIONS"] = "0"
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def load(self, card: float) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        print(card, file=self._process.stdin, flush=True)
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("the measuring process ended early")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def serve(allocator: str, layer_set: str) -> None:
    """Read cards from stdin; answer each with a line of JSON."""
    import torch

    # Imported before the forks, so that each child only has to start CUDA.
    if allocator != "default":
        import vllm.device_allocator.cumem  # noqa: F401
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            row = measure(allocator, layer_set, float(line))
            print(json.dumps(row), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"ok": False, "error": f"status {status}"}), flush=True)
    assert not torch.cuda.is_initialized()


def measure(allocator: str, layer_set: str, card: float) -> dict[str, Any]:
    import torch
    from layer_sets import LAYER_SETS

    torch.empty(1, device="cuda")
    if card:
        leave_free(card)
    start = used()
    torch.cuda.reset_peak_memory_stats()
    reserved = torch.cuda.memory_reserved()
    row = versions() | {"allocator": allocator, "card": card}
    pool, reclaim = allocator_under_test(allocator)
    try:
        with pool:
            for step in LAYER_SETS[layer_set].load():
                weights = step.weights
                reclaim(step)
        row["ok"] = True
    except torch.OutOfMemoryError as error:
        row["ok"] = False
        row["error"] = str(error).split(". GPU")[0]
        row["live"] = gib(torch.cuda.memory_allocated())
        row["mapped"] = gib(torch.cuda.memory_reserved())
        return row
    torch.cuda.synchronize()
    live = sum(t.nbytes for layer in weights for t in layer.values())
    return row | {
        "peak": gib(torch.cuda.max_memory_reserved() - reserved),
        "end": gib(used() - start),
        "reserved": gib(torch.cuda.memory_reserved()),
        "live": gib(live),
    }


def versions() -> dict[str, Any]:
    import torch

    vllm = sys.modules.get("vllm")
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "vllm": getattr(vllm, "__version__", None),
    }


def allocator_under_test(name: str) -> tuple[Any, Any]:
    """The context to load in, and what to call after a step."""
    if name == "default":
        return split_limit(), lambda step: None
    from vllm.device_allocator.cumem import CuMemAllocator

    pool = CuMemAllocator.get_instance().use_memory_pool("weights")
    if name == "stock":
        return limited(pool), lambda step: None
    from vllm.device_allocator.generations import pool_is_open, reclaim

    def after_step(step: Any) -> None:
        assert pool_is_open() is (name == "fork")
        reclaim(force=step.layer is None)

    return (pool if name == "fork" else limited(pool)), after_step


@contextmanager
def split_limit() -> Iterator[None]:
    """The split policy that vLLM 0.33.0 forces while it loads."""
    import torch

    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:20")
    yield


@contextmanager
def limited(pool: Any) -> Iterator[None]:
    """A pool under the policy that loading forces unless the pool gives memory back."""
    with pool, split_limit():
        yield


def used() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def gib(size: int) -> float:
    return round(size / GIB, 3)


def smallest_card(measurer: Measurer, live: float, fits: float) -> tuple[float, list]:
    """The smallest card in steps of 0.1 GiB, and the tries.

    Args:
        measurer: loads the set.
        live: what the weights take when the load has ended, so that less cannot do.
        fits: a size known to load.
    """
    rows = []
    low, high = int(live / STEP) - 1, int(fits / STEP) + 1
    while high - low > 1:
        middle = (low + high) // 2
        rows.append(measurer.load(round(middle * STEP, 1)))
        if rows[-1]["ok"]:
            high = middle
        else:
            low = middle
    return round(high * STEP, 1), rows


def run(
    layer_set: str, allocator: str, site: str | None, split: str, cards: bool
) -> dict[str, Any]:
    """The row of one allocator; with the smallest card if ``cards``."""
    measurer = Measurer(allocator, layer_set, site, split)
    row = measurer.load(0.0)
    if row["ok"] and cards:
        fits = row["peak"] + 0.5
        row["smallest_card"], tries = smallest_card(measurer, row["live"], fits)
        failed = [t for t in tries if not t["ok"]][-1:]
        for attempt in failed:
            for key in row.keys() & {"gpu", "date", "torch", "vllm"}:
                attempt.pop(key, None)
        row["failed_on"] = failed
    measurer.close()
    return {"set": layer_set, "split": split or "default"} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", nargs="+", metavar="SET")
    parser.add_argument("--fork", help="folder with this fork's vllm package")
    parser.add_argument("--stock", help="folder with the released vllm package")
    parser.add_argument("--split", default="", help="the user's max_split_size_mb")
    parser.add_argument(
        "--no-cards", action="store_true", help="do not look for the smallest card"
    )
    parser.add_argument(
        "--only", choices=ALLOCATORS, action="append", help="not all allocators"
    )
    parser.add_argument("--json", type=Path, help="add the rows here instead")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve, args.sets[0])

    simulated = bool(os.environ.get("REHEARSAL_LIBRARIES"))
    target = args.json or (None if simulated else RESULTS)
    for layer_set in args.sets:
        command = f"python benchmarks/load_peak.py {layer_set}"
        if args.split:
            command += f" --split {args.split}"
        if args.no_cards:
            command += " --no-cards"
        command += " --fork FORK --stock STOCK"
        for allocator in args.only or ALLOCATORS:
            site = args.stock if allocator == "stock" else args.fork
            if allocator == "default":
                site = None
            row = run(layer_set, allocator, site, args.split, not args.no_cards)
            row = {"command": command} | row
            if simulated:
                row = {"simulated": True} | row
            print(json.dumps(row), flush=True)
            if target:
                with target.open("a") as file:
                    print(json.dumps(row), file=file)


if __name__ == "__main__":
    main()
