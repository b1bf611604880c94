# SPDX-License-Identifier: Apache-2.0
"""What each rank of a tensor-parallel model takes to load, and keeps over sleep cycles.

    python benchmarks/ranks.py SHAPE [--layers N] [--sleep] [--fail-wake] ...

SHAPE is a name in benchmarks/shapes or a folder with a config.json. Needs as many GPUs
as ranks, with nothing else on them. It measures the ``vllm`` that Python imports, stock
or fork, and prints one line of JSON last; every figure of a rank is a list in the order
of the ranks, in GiB above what its GPU held before its worker loaded the model. See
engine_load.py for the figures. --fail-wake takes the memory that a rank needs to wake,
for each rank in turn, and notes what the engine says and whether a repeat wakes all.
"""

import argparse
import importlib
import json
import os
import shlex
import sys
import time
import traceback
from typing import Any

import contents
from engine_load import (
    ENGINE_OPTIONS,
    ENVIRONMENT,
    capability_without_cuda,
    model_folder,
)

PRELOADED = ("vllm.entrypoints.llm", "vllm.v1.worker.gpu_worker")
# FlashInfer would compile kernels for minutes, and both others ask for memory that all
# GPUs of a host share (multicast).
NCCL_ALONE = {
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
SHORT_OF_MEMORY_GIB = 1.0
"""What a rank that is to fail its wake has free."""


def fail_a_wake(llm: Any, rank: int, expected: list[Any]) -> dict[str, Any]:
    """One rank has no memory to wake with; then it has."""
    row: dict[str, Any] = {"rank": rank}
    llm.sleep(level=1)
    llm.collective_rpc("sleepload_take", args=(rank, SHORT_OF_MEMORY_GIB))
    try:
        llm.wake_up()
        row["error"] = None
    except Exception as error:
        row["error"] = str(error)[:300]
    row["used_after_failure"] = llm.collective_rpc("sleepload_used")
    llm.collective_rpc("sleepload_give", args=(rank,))
    llm.wake_up()
    row["used_after_repeat"] = llm.collective_rpc("sleepload_used")
    row["same_contents"] = llm.collective_rpc("sleepload_digests") == expected
    return row


def measure(args: argparse.Namespace, result: dict[str, Any]) -> None:
    llm = load(args)
    try:
        measure_engine(llm, args, result)
    finally:
        # The next run starts when the workers have given their memory back.
        llm.llm_engine.engine_core.shutdown()


def load(args: argparse.Namespace) -> Any:
    from vllm import LLM

    return LLM(
        model=model_folder(args.shape, args.layers),
        load_format="dummy",
        gpu_memory_utilization=args.utilization,
        enable_sleep_mode=args.sleep,
        tensor_parallel_size=args.tensor_parallel_size,
        worker_extension_cls="rank_meter.RankMeter",
        **ENGINE_OPTIONS,
    )


def measure_engine(llm: Any, args: argparse.Namespace, result: dict[str, Any]) -> None:
    ranks = llm.collective_rpc("sleepload_figures")
    result |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    llm.collective_rpc("sleepload_make_contents")
    before = llm.collective_rpc("sleepload_digests")
    result["contents"] = [contents.digest(found) for found in before]
    if not args.sleep:
        return
    result["cycles"] = []
    for _ in range(args.cycles):
        start = time.perf_counter()
        llm.sleep(level=1)
        slept = time.perf_counter()
        asleep = llm.collective_rpc("sleepload_used")
        woken = time.perf_counter()
        llm.wake_up()
        row = {
            "sleep_s": round(slept - start, 3),
            "wake_s": round(time.perf_counter() - woken, 3),
            "asleep": asleep,
            "awake": llm.collective_rpc("sleepload_used"),
        }
        result["cycles"].append(row)
    result["same_contents"] = llm.collective_rpc("sleepload_digests") == before
    if args.fail_wake:
        result["failed_wakes"] = [
            fail_a_wake(llm, rank, before) for rank in range(args.tensor_parallel_size)
        ]


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    import vllm

    result: dict[str, Any] = vars(args) | {
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }
    try:
        measure(args, result)
        result["ok"] = True
    except Exception as error:
        traceback.print_exc()
        result["ok"] = False
        result["error"] = f"{type(error).__name__}: {error}"[:300]
    return result


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("shape", nargs="?", help="a name in benchmarks/shapes, or a folder")
    add("--layers", type=int, help="keep only the first layers")
    add("--tensor-parallel-size", type=int, default=2, help="GPUs (default 2)")
    add("--sleep", action="store_true", help="enable sleep mode, sleep and wake")
    add("--cycles", type=int, default=20, help="sleep and wake so often (default 20)")
    add("--fail-wake", action="store_true", help="let each rank fail a wake")
    add("--utilization", type=float, default=0.9, help="of the card")
    add("--serve", action="store_true", help="a run per line of standard input")
    return parser


def main() -> None:
    args = parser().parse_args()
    for name, value in (ENVIRONMENT | NCCL_ALONE).items():
        os.environ.setdefault(name, value)
    if not args.serve and not args.shape:
        parser().error("which shape?")
    lines = sys.stdin if args.serve else [shlex.join(sys.argv[1:])]
    # As long as this process has not started CUDA, its workers are forked, not spawned.
    with capability_without_cuda():
        for name in PRELOADED:
            importlib.import_module(name)
        for line in lines:
            print(json.dumps(run(parser().parse_args(shlex.split(line)))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
