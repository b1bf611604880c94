# SPDX-License-Identifier: Apache-2.0
"""Real loads in vLLM: without sleep mode, with stock's, with this fork's.

    python benchmarks/engine_table.py --fork DIR --stock DIR [--json FILE] [MODEL ...]

DIR is a folder that holds a ``vllm`` package. For each model it loads on the whole
card (peak, memory after the load, KV cache, digests over cycles of sleep and wake),
finds the smallest card that loads it without sleep mode, to 0.1 GiB, and loads with
sleep mode 0.1 GiB above that. Needs a GPU; see engine_load.py for the units.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MODELS = {
    "gpt-oss-120b": "gpt-oss-120b --layers 12",
    "qwen2.5-7b": "qwen2.5-7b --quantization fp8",
}


class Server:
    """engine_load.py with one vLLM imported."""

    def __init__(self, site: str | None) -> None:
        script = Path(__file__).with_name("engine_load.py")
        paths = [*([site] if site else []), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
            env=os.environ | {"PYTHONPATH": ":".join(filter(None, paths))},
        )

    def run(self, arguments: str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        print(arguments, file=self._process.stdin, flush=True)
        row: dict[str, Any] = {"ok": False, "error": "no result"}
        for line in self._process.stdout:
            if line.startswith("{"):
                row = json.loads(line)
            elif line == "DONE\n":
                return row
            else:
                sys.stderr.write(line)
        raise RuntimeError("the measuring process ended early")


def smallest_card(server: Server, model: str, fits: float, rows: list) -> float:
    """In GiB, to 0.1; ``fits`` is a size known to load."""
    low, high = int(fits * 5), int(fits * 10) + 1
    while high - low > 1:
        # The answer is usually not far below the peak.
        middle = max((low + high) // 2, high - 32)
        row = server.run(f"{model} --load-only --card {middle / 10}")
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        if row["ok"]:
            # A load that fits may have needed less than its card has.
            high = min(middle, int(row["load_peak"] * 10) + 3)
        else:
            low = middle
    return high / 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)} (all)")
    parser.add_argument("--fork", help="folder with this fork's vllm package")
    parser.add_argument("--stock", help="folder with the released vllm package")
    parser.add_argument("--json", type=Path, help="append every run here")
    args = parser.parse_args()
    stock, fork = Server(args.stock), Server(args.fork)
    for name in args.models or MODELS:
        model = MODELS[name]
        rows: list[dict[str, Any]] = []

        def note(mode: str, server: Server, options: str, rows=rows, model=model):
            row = {"mode": mode} | server.run(f"{model} {options}")
            rows.append(row)
            print(json.dumps(row), flush=True)
            return row

        without = note("no-sleep", stock, "")
        note("fork", fork, "--sleep")
        note("stock", stock, "--sleep --cycles 0")
        tries: list[dict[str, Any]] = []
        smallest = smallest_card(stock, model, without["load_peak"] + 0.2, tries)
        rows += tries
        card = round(smallest + 0.1, 1)
        print(json.dumps({"model": name, "no_sleep_smallest_card": smallest}))
        note("fork", fork, f"--sleep --load-only --card {card}")
        note("stock", stock, f"--sleep --load-only --card {card}")
        if args.json:
            with args.json.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
