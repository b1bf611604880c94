# SPDX-License-Identifier: Apache-2.0
"""How fast sleep and wake are, and whether many cycles leave anything behind.

    python benchmarks/sleep_wake.py --fork DIR --stock DIR [--sizes 1,20] [--json FILE]
    python benchmarks/sleep_wake.py --cycles 1000 [--simulated] [--json FILE]

The first form needs a GPU. DIR is a folder that holds a ``vllm`` package: this fork's,
and the released one's. For each size (GiB) and build, a new process times the
allocator's calls: the first cycle, the median of five later ones, and pinned copies of
as many bytes. "fork, prepared" made its host memory before the first sleep. Each line
of the output is a measurement as JSON, in seconds and GB/s. One process runs at a time,
so the host needs memory for the largest size once, and a sixth more: stock's pinned
allocations are powers of two. A size that the host has no room for is left out, and a
line says so.

The second form runs cycles of the installed vllm on random contents, with memory
overwritten whenever it is mapped, and compares every byte. With --simulated it does so
on a simulated card.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MIB, GIB = 1 << 20, 1 << 30
LATER_CYCLES = 5
LAYER_MIB = (256, 192, 48, 12, 4)
"""Sizes of the tensors of one layer; 512 MiB together."""

STOCK_ROUNDING = 7 / 6
"""Of its pinned memory to the sizes above, by which powers of two exceed them."""

PINNED_BUFFER = GIB
POISON = 0xA5


# --- Speed ---------------------------------------------------------------------------


def seconds(work: Callable[[], Any]) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def pinned_copies(size: int) -> tuple[float, float]:
    """Seconds to copy ``size`` bytes from and to the device through pinned memory."""
    import torch

    host = torch.empty(PINNED_BUFFER, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    pieces = range(0, size, PINNED_BUFFER)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        for start in pieces:
            length = min(PINNED_BUFFER, size - start)
            target[:length].copy_(source[:length], non_blocking=True)

    best = []
    for target, source in ((host, device), (device, host)):
        copy(target[:MIB], source[:MIB])
        best.append(min(seconds(lambda t=target, s=source: copy(t, s)) for _ in "123"))
    return best[0], best[1]


def checksum(tensors: Sequence[Any]) -> list[int]:
    import torch

    return [int(t.view(torch.int32).sum(dtype=torch.int64)) for t in tensors]


def huge_pages() -> str:
    """The system's choice: always, madvise or never."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "never"
    return text.partition("[")[2].partition("]")[0]


def kilobytes(file: str, field: str) -> int:
    """A field of a file of the kernel's with lines ``field: N kB``."""
    lines = Path(file).read_text().splitlines()
    return next((int(x.split()[1]) for x in lines if x.startswith(f"{field}:")), 0)


def measure(name: str, gib: float) -> dict[str, Any]:
    """Time one build, the vllm that this process imports."""
    import torch

    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    weights = []
    with allocator.use_memory_pool("weights"):
        for _ in range(int(gib * GIB / (sum(LAYER_MIB) * MIB))):
            for size in LAYER_MIB:
                piece = torch.empty(size * MIB // 4, dtype=torch.int32, device="cuda")
                weights.append(piece.random_())
    size = sum(weight.nbytes for weight in weights)
    before = checksum(weights)
    result: dict[str, Any] = {
        "build": name,
        "gib": gib,
        "tensors": len(weights),
        "huge_pages": huge_pages(),
    }
    if name == "fork, prepared":
        start = time.perf_counter()
        allocator.prepare_sleep()
        allocator._mover.store.wait_until_prepared()
        result["prepare_s"] = time.perf_counter() - start
    equal = True
    sleeps, wakes = [], []
    for cycle in range(1 + LATER_CYCLES):
        sleeps.append(seconds(lambda: allocator.sleep(offload_tags="weights")))
        if cycle == 0:
            granted = kilobytes("/proc/self/smaps_rollup", "AnonHugePages")
            result["huge_pages_gib"] = round(granted / (1 << 20), 2)
        wakes.append(seconds(allocator.wake_up))
        equal &= checksum(weights) == before
    to_host, to_device = pinned_copies(size)
    times = {
        "first_sleep": sleeps[0],
        "first_wake": wakes[0],
        "sleep": statistics.median(sleeps[1:]),
        "wake": statistics.median(wakes[1:]),
        "pinned_to_host": to_host,
        "pinned_to_device": to_device,
    }
    for step, duration in times.items():
        result[f"{step}_s"] = round(duration, 4)
        result[f"{step}_gb_s"] = round(size / 1e9 / duration, 2)
    result["sleep_of_pinned"] = round(to_host / times["sleep"], 3)
    result["wake_of_pinned"] = round(to_device / times["wake"], 3)
    result["checksums_equal"] = equal
    return result


def compare(builds: dict[str, str], sizes: list[float]) -> list[dict[str, Any]]:
    """Each build (its folder) at each size, in a process of its own."""
    results = []
    for gib in sizes:
        room = (kilobytes("/proc/meminfo", "MemAvailable") << 10) - PINNED_BUFFER
        if gib * GIB * STOCK_ROUNDING > room:
            print(f"{gib} GiB left out: the host has room for {room / GIB:.0f} GiB")
            continue
        for name, site in builds.items():
            path = ":".join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
            env = os.environ | {"PYTHONPATH": path}
            if name == "fork, prepared":
                env["VLLM_CUMEM_HOST_MEMORY"] = "prepare"
            command = [sys.executable, __file__, "--serve", name, "--sizes", str(gib)]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode or not lines:
                raise SystemExit(f"{name} at {gib} GiB failed:\n{done.stderr[-3000:]}")
            results.append(json.loads(lines[-1]))
            print(json.dumps(results[-1]), flush=True)
    return results


# --- Cycles --------------------------------------------------------------------------


class Card:
    """What the device holds for this process, simulated or not."""

    def __init__(self) -> None:
        from tools.rehearsal import card

        self._card = card if card.is_simulated() else None

    def used(self) -> int:
        import torch

        if self._card:
            return self._card.used()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def handles(self) -> int:
        """Allocations of physical memory that exist."""
        if self._card:
            memory = self._card.report()["memory"]
            return memory["handles"] + memory["unreachable_handles"]
        from vllm.device_allocator.cumem import extension

        return extension.counters()["segments"]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def slope(values: Sequence[float]) -> float:
    """Of a straight line through the values, per step."""
    if len(values) < 2:
        return 0.0
    return statistics.linear_regression(range(len(values)), values).slope


def cycle_many(cycles: int) -> dict[str, Any]:
    """Cycles over tags and levels, every byte compared."""
    import torch

    from vllm.device_allocator import cumem

    allocator = cumem.CuMemAllocator.get_instance()
    card = Card()
    source = random.Random(1)
    map_memory = cumem.create_and_map

    def map_poisoned(allocation: Any) -> None:
        map_memory(allocation)
        _, size, address, _ = allocation
        cumem.libcudart.cudaMemset(address, POISON, size)

    cumem.create_and_map = map_poisoned
    pools = {
        "weights": (1, 5000, MIB, MIB, MIB),
        "runtime": (70_000,),
        "kv_cache": (9,),
    }
    tensors, expected = {}, {}
    for tag, sizes in pools.items():
        with allocator.use_memory_pool(tag):
            tensors[tag] = [
                torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes
            ]

    def write(tag: str) -> None:
        expected[tag] = [
            torch.frombuffer(bytearray(source.randbytes(t.nbytes)), dtype=torch.uint8)
            for t in tensors[tag]
        ]
        for tensor, value in zip(tensors[tag], expected[tag], strict=True):
            tensor.copy_(value)

    def intact(tag: str) -> bool:
        return all(
            torch.equal(tensor.cpu(), value)
            for tensor, value in zip(tensors[tag], expected[tag], strict=True)
        )

    for tag in pools:
        write(tag)
    # What was imported is not garbage; looking through it takes most of a cycle.
    gc.collect()
    gc.freeze()
    equal = True
    warm_up = min(100, cycles // 3)
    resident: list[float] = []
    store = allocator._mover.store

    def holdings() -> dict[str, int]:
        host = store.free_bytes + store.registered_bytes
        files = len(os.listdir("/proc/self/fd"))
        return {
            "device": card.used(),
            "host": host,
            "files": files,
            "handles": card.handles(),
        }

    start: dict[str, int] = {}
    began = time.perf_counter()
    for cycle in range(cycles):
        if cycle == warm_up:
            start = holdings()
        level = 2 if cycle % 5 == 4 else 1
        kept = ("weights", "runtime") if level == 1 else ("runtime",)
        allocator.sleep(offload_tags=kept)
        if cycle % 2:
            allocator.wake_up(["weights"])
            equal &= intact("runtime")
        allocator.wake_up()
        if level == 2:
            equal &= not intact("weights")  # or the comparison is worth nothing
            write("weights")
        elif cycle % 7 == 0:
            equal &= intact("weights")
            write("weights")
        equal &= intact("weights") and intact("runtime")
        if cycle >= warm_up:
            resident.append(resident_bytes())
    end = holdings()
    return {
        "cycles": cycles,
        "checksums_equal": equal,
        "device_growth_bytes": end["device"] - start["device"],
        "host_growth_bytes": end["host"] - start["host"],
        "leaked_handles": end["handles"] - start["handles"],
        "open_files_growth": end["files"] - start["files"],
        "resident_bytes_per_cycle": round(slope(resident), 1),
        "seconds": round(time.perf_counter() - began, 1),
    }


def on_simulated_card(arguments: Sequence[str]) -> int:
    """Run this file again, on a simulated card."""
    from tools.rehearsal.build import site_packages
    from tools.rehearsal.cards import Card as SimulatedCard
    from tools.rehearsal.run import environment

    card = SimulatedCard("Simulated card", "9.0", 4 * GIB)
    env = environment(card, site=site_packages(sys.executable))
    return subprocess.run([sys.executable, __file__, *arguments], env=env).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fork", help="a folder with this fork's vllm package")
    parser.add_argument("--stock", help="a folder with the released vllm package")
    parser.add_argument("--sizes", default="1,4,20,60", help="GiB of weights")
    parser.add_argument("--cycles", type=int, help="compare contents over many cycles")
    parser.add_argument("--simulated", action="store_true", help="on a simulated card")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    sizes = [float(size) for size in args.sizes.split(",")]
    if args.serve:
        print(json.dumps(measure(args.serve, sizes[0])))
        return 0
    results: Any
    if args.cycles is not None:
        if args.cycles < 3:
            parser.error("--cycles: at least 3, the first ones are the warm-up")
        if args.simulated:
            rest = ["--json", str(args.json)] if args.json else []
            return on_simulated_card(["--cycles", str(args.cycles), *rest])
        results = cycle_many(args.cycles)
        print(json.dumps(results))
    else:
        if not args.fork or not args.stock:
            parser.error("--fork and --stock, or --cycles")
        builds = {"stock": args.stock, "fork": args.fork, "fork, prepared": args.fork}
        results = compare(builds, sizes)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
