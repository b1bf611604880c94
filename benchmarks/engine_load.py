# SPDX-License-Identifier: Apache-2.0
"""Load a model with dummy weights in vLLM and report what the load takes.

    python benchmarks/engine_load.py SHAPE [--layers N] [--sleep] [--card GIB] ...

SHAPE is a name in benchmarks/shapes or a folder with a config.json. It measures the
``vllm`` that Python imports, stock or fork, and prints one line of JSON last. Sizes are
GiB above what the process takes before the engine starts. A smaller card is emulated by
occupying the rest. Dummy weights are seeded by name, so the digest of what the model
holds (contents.py) compares between runs.
"""

import argparse
import functools
import importlib
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import contents
from small_card import GIB, leave_free, simulated_card

SHAPES = Path(__file__).resolve().parent / "shapes"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker runs in this process
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would compile kernels for minutes
}
ENGINE_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 8,
}
PRELOADED = (
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.quantization.mxfp4",
    "vllm.model_executor.layers.quantization.online.fp8",
    "vllm.model_executor.model_loader.dummy_loader",
    "vllm.model_executor.models.gpt_oss",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.device_allocator.cumem",
)


class LoadOnly(Exception):
    """Raised after the load when nothing else is to be measured."""


class Meter:
    """Follows the current card's used memory, sampled every 2 ms; exact on a simulated
    card, where no kernel makes a peak last."""

    def __init__(self) -> None:
        import torch

        self._card = simulated_card()
        self._sampled = 0.0
        self._device = torch.cuda.current_device()
        self._start = self._read()
        self.restart()
        if not self._card:
            threading.Thread(target=self._watch, daemon=True).start()

    def _read(self) -> int:
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free

    def _watch(self) -> None:
        import torch

        torch.cuda.set_device(self._device)  # a new thread starts on the first one
        while True:
            self._sampled = max(self._sampled, self.used())
            time.sleep(0.002)

    @property
    def peak(self) -> float:
        """Highest use since the last restart."""
        if not self._card:
            return self._sampled
        above = self._card.peak(self._device) - self._card.used(self._device)
        return round(self.used() + above / GIB, 3)

    def used(self) -> float:
        return round((self._read() - self._start) / GIB, 3)

    def restart(self) -> None:
        self._sampled = self.used()
        if self._card:
            self._card.peak(self._device, reset=True)


def model_folder(shape: str, layers: int | None) -> str:
    """A folder whose config.json has the shape, cut to the first layers."""
    if Path(shape).is_dir():
        return shape
    config = json.loads((SHAPES / f"{shape}.json").read_text())
    if layers:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    folder = Path(tempfile.mkdtemp(prefix=f"{shape}-"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_checkpoint(folder: str) -> None:
    """Random weights for the folder's config.json, as safetensors."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16)
    model.save_pretrained(folder)


def measure_worker(meter: Meter, result: dict[str, Any], load_only: bool) -> None:
    """Note memory around the worker's load and its KV cache; change nothing else."""
    import torch

    from vllm.v1.worker.gpu_worker import Worker

    load, available = Worker.load_model, Worker.determine_available_memory

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        meter.restart()
        start = time.perf_counter()
        load(self, *args, **kwargs)
        torch.cuda.synchronize()
        result["load_s"] = round(time.perf_counter() - start, 2)
        result["load_peak"] = meter.peak
        result["after_load"] = meter.used()
        result["allocated"] = round(torch.cuda.memory_allocated() / GIB, 3)
        result["reserved"] = round(torch.cuda.memory_reserved() / GIB, 3)
        if load_only:
            raise LoadOnly

    @functools.wraps(available)
    def determine_available_memory(self: Any) -> int:
        size = available(self)
        result["kv_cache"] = round(size / GIB, 3)
        return size

    Worker.load_model = load_model
    Worker.determine_available_memory = determine_available_memory


def scrub_on_wake() -> Callable[[], int]:
    """Fill each segment between its mapping and its restoring; returns the count."""
    import torch

    from vllm.device_allocator import cumem

    create_and_map, scrubbed = cumem.create_and_map, [0]

    def scrubbing(allocation: Any) -> None:
        create_and_map(allocation)
        _, size, address, _ = allocation
        cumem.libcudart.cudaMemset(address, 0xA5, size)
        torch.cuda.synchronize()
        scrubbed[0] += 1

    cumem.create_and_map = scrubbing
    return lambda: scrubbed[0]


def digest(llm: Any) -> str:
    """Of vLLM's checksums: parameters alone, through the host."""
    [sums] = llm.collective_rpc("compute_weight_checksums")
    return contents.digest(sums)


def measure(args: argparse.Namespace, meter: Meter, result: dict[str, Any]) -> None:
    import torch

    from vllm import LLM

    measure_worker(meter, result, args.load_only)
    share = args.card * GIB / torch.cuda.mem_get_info()[1] if args.card else 1.0
    folder = model_folder(args.shape, args.layers)
    if args.level == 2 and folder != args.shape:
        write_checkpoint(folder)
    options: dict[str, Any] = {
        "model": folder,
        "load_format": "safetensors" if args.level == 2 else "dummy",
        "gpu_memory_utilization": args.utilization * share,
        "enable_sleep_mode": args.sleep,
        **ENGINE_OPTIONS,
    }
    if args.quantization:
        options["quantization"] = args.quantization
    llm = LLM(**options)
    llm.collective_rpc(contents.make)
    before = llm.collective_rpc(contents.digests)
    [result["contents"]] = map(contents.digest, before)
    if args.checksums:
        result["digest"] = digest(llm)
    if not args.sleep:
        return
    scrubbed = scrub_on_wake()
    result["cycles"] = []
    for _ in range(args.cycles):
        row: dict[str, Any] = {}
        start = time.perf_counter()
        llm.sleep(level=args.level)
        row["sleep_s"] = round(time.perf_counter() - start, 2)
        row["asleep"] = meter.used()
        start = time.perf_counter()
        llm.wake_up()
        if args.level == 2:
            llm.collective_rpc("reload_weights")
        torch.cuda.synchronize()
        row["wake_s"] = round(time.perf_counter() - start, 2)
        row["awake"] = meter.used()
        row["same_contents"] = llm.collective_rpc(contents.digests) == before
        result["cycles"].append(row)
    if args.checksums:
        result["same_digest"] = digest(llm) == result["digest"]
    result["scrubbed"] = scrubbed()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("shape", nargs="?", help="a name in benchmarks/shapes, or a folder")
    add("--layers", type=int, help="keep only the first layers")
    add("--sleep", action="store_true", help="enable sleep mode, sleep and wake")
    add("--cycles", type=int, default=3, help="sleep and wake so often (default 3)")
    level = "2: keep nothing, reload the weights from a folder's or a made checkpoint"
    add("--level", type=int, choices=(1, 2), default=1, help=level)
    add("--card", type=float, default=0.0, metavar="GIB", help="a smaller card")
    add("--utilization", type=float, default=0.9, help="of the (smaller) card")
    add("--quantization", help="vLLM's argument, such as fp8")
    add("--load-only", action="store_true", help="stop after the weights")
    add("--checksums", action="store_true", help="also vLLM's own, slow, of parameters")
    add("--serve", action="store_true", help="a run per line of standard input")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    result: dict[str, Any] = vars(args) | {"torch": torch.__version__}
    torch.empty(1, device="cuda")  # the context is not part of the figures
    try:
        if args.card:
            leave_free(args.card)
        meter = Meter()
        import vllm

        result["vllm"] = vllm.__version__
        measure(args, meter, result)
        result["ok"] = True
    except LoadOnly:
        result["ok"] = True
    except Exception as error:
        traceback.print_exc()
        result["ok"] = False
        result["error"] = f"{type(error).__name__}: {error}"[:300]
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        result["at"] = [f"{Path(f.filename).name}:{f.name}" for f in frames]
    return result


@contextmanager
def capability_without_cuda() -> Iterator[None]:
    """FlashInfer asks for the card's capability when it is imported; torch would start
    CUDA to answer, and refuse it in a child."""
    import torch

    from vllm.platforms import current_platform

    known = current_platform.get_device_capability()
    real = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: (known.major, known.minor)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = real


def serve() -> None:
    """Import once, then fork a child for each line of arguments; answer in JSON."""
    with capability_without_cuda():
        for name in PRELOADED:
            importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            result = run(parser().parse_args(shlex.split(line)))
            print(json.dumps(result), flush=True)
            os._exit(0)  # an engine's shutdown can hang, or print after the result
        deadline = time.monotonic() + 240
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.05)
        print("DONE", flush=True)


def main() -> None:
    args = parser().parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if args.serve:
        return serve()
    if not args.shape:
        parser().error("which shape?")
    print(json.dumps(run(args)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
