# SPDX-License-Identifier: Apache-2.0
"""What the documents tell a reader to try, tried with real vLLM on a simulated card."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from documents import ROOT, Block, all_blocks
from tiny_model import write_checkpoint

from tools.rehearsal.testing import VLLM_ENVIRONMENT, WarmProcess

BLOCKS = all_blocks()
SERVER = [b for b in BLOCKS if b.mode == "server" and "tools.rehearsal.run" in b.text]
CLIENT = [b for b in BLOCKS if b.mode == "client"]
LOG = [b for b in BLOCKS if b.mode == "log"]
PYTHON = [b for b in BLOCKS if b.mode == "python"]
STARTS_WITHIN = 400  # seconds; a minute on a quiet machine


def by_id(block: Block) -> str:
    return block.id


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


# --- Python --------------------------------------------------------------------------

# A small engine without a tokenizer, which the tiny model does not have.
PROLOGUE = """
import functools, vllm
MODEL = {model!r}
vllm.LLM = functools.partial(
    vllm.LLM, skip_tokenizer_init=True, enforce_eager=True, gpu_memory_utilization=0.5
)
"""
ENGINE = "llm = vllm.LLM(MODEL, enable_sleep_mode=True)\n"


@pytest.fixture(scope="module")
def warm():
    process = WarmProcess("import vllm, vllm.v1.worker.gpu_worker")
    yield process
    process.close()


@pytest.mark.parametrize("block", PYTHON, ids=by_id)
def test_python_runs(block, warm, model):
    if "on_card" in block.text:  # brings a card of its own
        exec(compile(block.text, block.id, "exec"), {})
        return
    before = PROLOGUE.format(model=str(model))
    if "LLM(" not in block.text:
        before += ENGINE
    result = warm.run(before + block.text)
    assert result.status == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert not result.report["misuse"]


# --- The server ----------------------------------------------------------------------


class Server:
    """The server that a block starts, on a free port."""

    def __init__(self, block: Block, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        text = block.text.replace("MODEL_FOLDER", str(model)).strip()
        # Its own weights, so that a level 2 sleep can be followed by a reload.
        text = text.replace("--load-format dummy", "--load-format auto")
        beside = Path(sys.executable).parent
        self.log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(
                ["bash", "-c", f"{text} --port {self.port}"],
                cwd=ROOT,
                env=os.environ
                | VLLM_ENVIRONMENT
                | {
                    "PATH": f"{beside}:{os.environ['PATH']}",
                    # Each process has a card of its own: that of the engine counts.
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                },
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        deadline = time.monotonic() + STARTS_WITHIN
        while not self._answers():
            assert self._process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    [block] = SERVER
    started = Server(block, model, tmp_path_factory.mktemp("server") / "log")
    yield started
    started.stop()


@pytest.mark.parametrize("block", CLIENT, ids=by_id)
def test_client_commands_succeed(block, server):
    text = block.text.replace(":8000", f":{server.port}")
    text = text.replace("curl ", "curl --fail -sS ")
    done = subprocess.run(["bash", "-ec", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + server.log.read_text()[-4000:]


def pattern(line: str) -> str:
    """A line of the log: digits and single capitals stand for numbers."""
    parts = re.split(r"(\.\.\.|\d+(?:\.\d+)?|\b[A-Z]\b)", line)
    return "".join(
        ".*" if part == "..." else r"[\d.]+" if at % 2 else re.escape(part)
        for at, part in enumerate(parts)
    )


@pytest.mark.parametrize("block", LOG, ids=by_id)
def test_the_log_says_what_the_documents_show(block, server):
    # After the commands above, in file order.
    log = server.log.read_text()
    for line in block.text.splitlines():
        assert re.search(pattern(line), log), log[-4000:]


def test_a_pattern_is_not_anything():
    line = "CuMem load: L GiB live in 1.35 GiB mapped; ..."
    assert re.search(pattern(line), "CuMem load: 1.2 GiB live in 3 GiB mapped; x")
    assert not re.search(pattern(line), "CuMem load: 1.2 GiB live in 3 GiB; x")
