# SPDX-License-Identifier: Apache-2.0
"""Measure, on the card of this machine, what calibration.toml holds.

    python -m tools.rehearsal.calibrate > my-card.toml

Takes half a minute and a card with 4 GiB free. The first-launch figure is what
the card has in use, beyond PyTorch's own memory and a bare context, once a
small model of real vLLM has been loaded and its kernels have run.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.rehearsal.jobs import Job
from tools.rehearsal.models import model_folder

MIB = 1 << 20
MODEL = "llama-3.1-8b"  # outside the table of docs/rehearsal.md
SMALL = '--hf-overrides={"num_hidden_layers": 2}'
# Left for allocations of libraries that differ from load to load.
MARGIN_MIB = 64


def used_before_context() -> int:
    """Bytes in use on card 0 before this process has a context there.

    Without what the driver reserves: that is not in the total that CUDA tells either.
    """
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    # The first version of the call counts the reserved part as used.
    info = pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2)
    return int(info.used)


def used() -> int:
    """Bytes in use on card 0 by everyone."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


def context_bytes(before: int) -> int:
    """What the first context takes; it stays open."""
    import torch

    torch.cuda.init()
    torch.empty(1, device="cuda")
    # The allocator's first segment is not the context's.
    return used() - before - int(torch.cuda.memory_reserved())


def first_launch_bytes(folder: Path) -> int:
    """What a load takes beyond a context and PyTorch's memory."""
    import torch

    from tools.rehearsal.load import engine_arguments
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    bare = used() - torch.cuda.memory_reserved()
    job = Job(str(folder), memory=0, sleep=False, options=(SMALL,))
    config = engine_arguments(job).create_engine_config(UsageContext.ENGINE_CONTEXT)
    UniProcExecutor(config)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return max(int(used() - torch.cuda.memory_reserved() - bare), 0)


def table(name: str, driver: str, figures: dict[str, int]) -> str:
    """The TOML table for one card. Figures in bytes by key."""
    lines = [f'["{name}"]', f'driver = "{driver}"']
    lines += [f"{key}_mib = {value / MIB:.0f}" for key, value in figures.items()]
    return "\n".join(lines)


def measure() -> str:
    """All figures of this machine's card 0 as a TOML table."""
    import pynvml

    before = used_before_context()
    figures = {"reserved": before, "context": context_bytes(before)}
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(MODEL, Path(scratch))
        figures["first_launch"] = first_launch_bytes(folder)
    # One card alone has no communicator to measure.
    figures["communicator"] = 0
    figures["margin"] = MARGIN_MIB * MIB
    driver: Any = pynvml.nvmlSystemGetDriverVersion()
    return table(torch.cuda.get_device_name(0), str(driver), figures)


def main() -> None:
    """Print the table; what vLLM says goes to standard error."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(measure(), file=out, flush=True)
    sys.stdout.flush()
    # vLLM's threads and process groups have nothing more to say.
    os._exit(0)


if __name__ == "__main__":
    main()
