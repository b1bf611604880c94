# SPDX-License-Identifier: Apache-2.0
"""The load itself, in a process on a simulated card.

The worker, the loader, the allocator and the CuMem extension are vLLM's and
PyTorch's own; only the engine around the worker is left out. Weights are
dummies, as on the command line with `--load-format dummy`.
"""

import importlib
import os
import sys
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from tools.rehearsal import card
from tools.rehearsal.jit import compile_nothing
from tools.rehearsal.jobs import Failure, Job, OptionError, Outcome
from tools.rehearsal.phases import AFTER, Phases, watch_loader
from tools.rehearsal.ranks import imagine_peers, set_rank
from tools.rehearsal.timeline import read_history, thin

# A rehearsal has no tokenizer, compiles nothing and captures no graph: none
# of them is part of a load.
FIXED_OPTIONS = (
    "--load-format=dummy",
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--disable-custom-all-reduce",
)
TIMELINE_POINTS = 3000
FRAME_ROOT = f"{os.sep}vllm{os.sep}"
WARM_UP = (
    "torch.testing._internal.distributed.fake_pg",
    "vllm.engine.arg_utils",
    "vllm.model_executor.model_loader.dummy_loader",
    "vllm.usage.usage_lib",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
)


def engine_arguments(job: Job) -> Any:
    """vLLM's EngineArgs for a job. OptionError for options that it refuses."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(message: str) -> NoReturn:
        raise OptionError(f"vLLM refuses an option: {message}")

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    parser.error = refuse
    options = [f"--model={job.model}", *FIXED_OPTIONS, *job.options]
    if job.sleep:
        options.append("--enable-sleep-mode")
    return EngineArgs.from_cli_args(parser.parse_args(options))


def _innermost_frame(trace: TracebackType | None) -> str:
    # A tensor subclass stands between each operation and its caller.
    frames = [f for f in traceback.extract_tb(trace) if f.name != "__torch_function__"]
    ours = [f for f in frames if FRAME_ROOT in f.filename] or frames
    if not ours:
        return ""
    frame = ours[-1]
    path = frame.filename.rpartition(FRAME_ROOT)[2]
    return f"{path}:{frame.lineno} in {frame.name}"


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    # vLLM's own checks before and after the load are about memory as well.
    known = ("CUDA out of memory", "Free memory on device", "No available memory")
    return any(part in text for part in known)


def _describe(error: BaseException) -> Failure:
    return Failure(
        kind=type(error).__name__,
        message=str(error).strip(),
        frame=_innermost_frame(error.__traceback__),
        out_of_memory=_is_out_of_memory(error),
    )


class Rehearsal:
    """One job under way. `run` fills `outcome`, whatever happens."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcome = Outcome(rank=job.rank)
        self._uncompiled: set[str] = set()

    def run(self) -> Outcome:
        """Load; then whatever else the job asks for. Never raises."""
        began = time.monotonic()
        out = self.outcome
        try:
            self._load()
            out.loads = True
        except Exception as error:
            traceback.print_exc()
            out.failure = _describe(error)
            out.loads = False if out.failure.out_of_memory else None
        if out.base is not None and out.peak is None:
            out.peak = card.peak()
        self._read_trace()
        self._read_card()
        out.uncompiled = sorted(self._uncompiled)
        out.seconds = time.monotonic() - began
        return out

    def _load(self) -> None:
        card.resize(self.job.memory)
        if self.job.cycles:
            # Locked memory is touched: it would hold a whole model of zeros.
            os.environ.setdefault("VLLM_CUMEM_HOST_MEMORY", "pageable")
        config = self._config()
        import torch

        torch.cuda.init()
        torch.empty(1, device="cuda")
        self.outcome.base = card.used()
        card.peak(reset=True)
        if self.job.trace:
            record = torch.cuda.memory._record_memory_history
            record("all", context=None, stacks="python", max_entries=sys.maxsize)
        self.phases = Phases(torch.cuda.memory._set_memory_metadata)
        watch_loader(self.phases)
        self._uncompiled = compile_nothing()

        executor = self._executor_class()(config)
        self.outcome.after_load = card.used()
        self.outcome.peak = card.peak()
        self._read_trace()
        self.phases.enter(AFTER)
        if self.job.kv_cache:
            self._profile(executor)
        for _ in range(self.job.cycles):
            executor.sleep(level=1)
            self.outcome.asleep = card.used()
            executor.wake_up()

    def _config(self) -> Any:
        from vllm.usage.usage_lib import UsageContext

        arguments = engine_arguments(self.job)
        world = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
        self.outcome.world_size = world
        if world > 1:
            set_rank(self.job.rank, world)
            imagine_peers(self.job.rank, world)
            arguments.distributed_executor_backend = "external_launcher"
        return arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)

    def _executor_class(self) -> Any:
        from vllm.v1.executor.uniproc_executor import (
            ExecutorWithExternalLauncher,
            UniProcExecutor,
        )

        alone = self.outcome.world_size == 1
        return UniProcExecutor if alone else ExecutorWithExternalLauncher

    def _profile(self, executor: Any) -> None:
        # The load has passed: a profile run that needs real results from a
        # kernel leaves the KV cache unknown, not the verdict.
        try:
            self.outcome.kv_cache = int(min(executor.determine_available_memory()))
        except Exception as error:
            traceback.print_exc()
            self.outcome.kv_cache_note = f"{type(error).__name__}: {error}"

    def _read_trace(self) -> None:
        # Once: after a load that passed, a profile run goes on allocating.
        job, out = self.job, self.outcome
        if not job.trace or out.base is None or out.mapped is not None:
            return
        import torch

        snapshot = torch.cuda.memory._snapshot()
        history = read_history(snapshot["device_traces"][0])
        out.live, out.mapped = history.live, history.mapped
        out.phase_at_peak = history.phase_at_peak
        out.live_at_peak = history.live_at_peak
        out.timeline = thin(history.points, TIMELINE_POINTS)
        if job.snapshot is not None:
            torch.cuda.memory._dump_snapshot(job.snapshot)

    def _read_card(self) -> None:
        report = card.report()
        out = self.outcome
        out.retries = report["cards"][0]["refusals"]
        out.unsupported = report["unsupported"]
        out.misuse = report["misuse"]
        out.leaks = {
            name: report["memory"][name]
            for name in ("unreachable_handles",)
            if report["memory"][name]
        }
        if out.unsupported:
            out.loads = None


def warm_up() -> None:
    """Import what every load needs, without touching a card."""
    for name in WARM_UP:
        importlib.import_module(name)
