# SPDX-License-Identifier: Apache-2.0
"""Compile ``csrc/`` with CMake. Needs g++ and cuda.h from a pip package, no nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.series.errors import Refusal
from tools.series.manifest import Series

SOURCE = "csrc/cumem/extension.cpp"
LIBRARY = "cumem_allocator.abi3.so"


def compile_extension(series: Series) -> bytes | None:
    """The compiled extension, or None where no patch brings its source."""
    if not any(SOURCE in patch.new_files for patch in series.patches):
        return None
    cmake = _find("cmake")
    if cmake is None:
        raise Refusal("cmake is not installed: pip install cmake")
    include = _cuda_include()
    with tempfile.TemporaryDirectory() as scratch:
        build, prefix = f"{scratch}/build", f"{scratch}/out"
        _run(
            cmake,
            "-S",
            str(series.root),
            "-B",
            build,
            f"-DCUDA_INCLUDE={include}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            *(["-G", "Ninja"] if _find("ninja") else []),
        )
        _run(cmake, "--build", build, "--target", "cumem_allocator")
        _run(cmake, "--install", build, "--prefix", prefix)
        found = list(Path(prefix).rglob(LIBRARY))
        if len(found) != 1:
            raise Refusal(f"CMake installed {len(found)} of {LIBRARY}, not one")
        return found[0].read_bytes()


def _find(name: str) -> str | None:
    """A program beside the running Python, where pip puts it, or on the path."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join([beside, os.environ["PATH"]]))


def _cuda_include() -> Path:
    """The folder of cuda.h: in a pip package, else in CUDA_HOME."""
    places = [Path(p) / "nvidia/cu13/include" for p in sys.path]
    if home := os.environ.get("CUDA_HOME"):
        places.append(Path(home) / "include")
    for place in places:
        if (place / "cuda.h").is_file():
            return place.resolve()
    raise Refusal("cuda.h is not there: pip install 'nvidia-cuda-runtime==13.0.*'")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-4000:]
        raise Refusal(f"compiling failed: {' '.join(command)}\n{said}", file=SOURCE)
