# SPDX-License-Identifier: Apache-2.0
"""A vLLM (stock or fork) on a simulated card, ready for jobs."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tools.rehearsal.build import cache_root, site_packages
from tools.rehearsal.cards import Card
from tools.rehearsal.jobs import Job, Outcome
from tools.rehearsal.run import environment
from tools.rehearsal.testing import VLLM_ENVIRONMENT

ROOT = Path(__file__).parents[2]


class SessionError(Exception):
    """vLLM did not come up on the simulated card."""


class Session:
    """A server process (server.py) and the conversation with it.

    `package` is a folder that holds the `vllm` to use; by default the one
    installed for `python`.
    """

    def __init__(
        self,
        card: Card,
        *,
        package: Path | None = None,
        python: str | Path = sys.executable,
        report: Path | None = None,
    ) -> None:
        self.card = card
        self._ready = False
        caches = cache_root() / "rehearsal" / "run"
        base = {
            **os.environ,
            **VLLM_ENVIRONMENT,
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            # Kernels that never run are not fetched either; the retries are slow.
            "FLASHINFER_NO_DOWNLOAD": os.environ.get("FLASHINFER_NO_DOWNLOAD", "1"),
            # torch must count cards without marking later forks as broken.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        }
        site = site_packages(python)
        env = environment(card, site=site, report=report, base=base)
        path = [str(package)] if package else []
        inherited = os.environ.get("PYTHONPATH")
        path += [str(ROOT), *([inherited] if inherited else [])]
        env["PYTHONPATH"] = os.pathsep.join(path)
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [str(python), "-m", "tools.rehearsal.server"],
            env=env,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Block until vLLM is imported. SessionError when that fails."""
        if self._ready:
            return
        if self._line() != "ready":
            raise SessionError(f"vLLM does not start here:\n{self._tail()}")
        self._ready = True

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _tail(self) -> str:
        self._process.wait(timeout=30)
        self._errors.seek(0)
        return "\n".join(self._errors.read().splitlines()[-20:])

    def run(self, job: Job) -> Outcome:
        """Rehearse one job. SessionError when the server itself is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(job.to_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SessionError(f"the server is gone:\n{self._tail()}") from None
        answer = self._line()
        if not answer:
            raise SessionError(f"the server is gone:\n{self._tail()}")
        return Outcome.from_json(Path(answer).read_text())

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
