# SPDX-License-Identifier: Apache-2.0
"""Build the front libraries for an environment, once.

The result is cached by the sources and by the libraries that the fronts stand
in for, in ~/.cache/vllm-series/rehearsal.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.series import fetch

HERE = Path(__file__).parent


class BuildError(Exception):
    """The front libraries cannot be built here; the message says why."""


@dataclass(frozen=True)
class Toolkit:
    """What an environment's site-packages offers to stand in for."""

    include: Path
    cudart: tuple[Path, ...]  # the runtime, and copies under other names
    cublas: Path
    cublaslt: Path
    nccl: Path
    nvml: Path  # Python bindings: the list of NVML's functions

    def libraries(self) -> tuple[Path, ...]:
        """Every file that a front must match."""
        return (*self.cudart, self.cublas, self.cublaslt, self.nccl, self.nvml)


def cache_root() -> Path:
    """The folder for everything that can be made again."""
    return fetch.cache()


def site_packages(python: str | Path) -> Path:
    """The site-packages folder of an interpreter."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{python} does not run: {done.stderr.strip()}")
    return Path(done.stdout.strip())


def find_toolkit(site: Path) -> Toolkit:
    """Find the CUDA packages that pip installed along with torch."""

    def one(pattern: str, package: str) -> Path:
        found = sorted(site.glob(pattern))
        if not found:
            raise BuildError(
                f"no {pattern} in {site}: install {package} there "
                f"(it comes with a CUDA build of torch)"
            )
        return found[0]

    header = one("nvidia/**/include/cuda_runtime_api.h", "nvidia-cuda-runtime")
    if not (header.parent / "crt").is_dir():
        raise BuildError(f"no crt/ in {header.parent}: install nvidia-cuda-crt")
    copies = sorted(site.glob("*.libs/libcudart[.-]*.so.*"))
    return Toolkit(
        include=header.parent,
        cudart=(one("nvidia/**/lib/libcudart.so.*", "nvidia-cuda-runtime"), *copies),
        cublas=one("nvidia/**/lib/libcublas.so.*", "nvidia-cublas"),
        cublaslt=one("nvidia/**/lib/libcublasLt.so.*", "nvidia-cublas"),
        nccl=one("nvidia/**/lib/libnccl.so.*", "nvidia-nccl"),
        nvml=one("pynvml.py", "nvidia-ml-py"),
    )


def _key(toolkit: Toolkit) -> str:
    digest = hashlib.sha256()
    sources = [*HERE.glob("src/*"), HERE / "CMakeLists.txt", HERE / "symbols.py"]
    for path in sorted([*sources, HERE / "reviewed.toml"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for path in (toolkit.include / "cuda.h", *toolkit.libraries()):
        digest.update(f"{path.name}:{path.stat().st_size}".encode())
    return digest.hexdigest()[:16]


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise BuildError(f"{name} is not installed; the simulated card needs it")
    return found


def _configure(toolkit: Toolkit, build: Path) -> list[str]:
    settings = {
        "Python3_EXECUTABLE": sys.executable,
        "REHEARSAL_INCLUDE": toolkit.include,
        "REHEARSAL_CUDART": ";".join(map(str, toolkit.cudart)),
        "REHEARSAL_CUBLAS": toolkit.cublas,
        "REHEARSAL_CUBLASLT": toolkit.cublaslt,
        "REHEARSAL_NCCL": toolkit.nccl,
        "REHEARSAL_NVML": toolkit.nvml,
    }
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    return [_program("cmake"), "-S", str(HERE), "-B", str(build), *defines]


def _make(toolkit: Toolkit, folder: Path) -> None:
    for tool in ("g++", "nm", "ld"):
        _program(tool)
    build = folder.with_name(folder.name + ".build")
    shutil.rmtree(build, ignore_errors=True)
    jobs = str(min(os.cpu_count() or 1, 4))
    compile_ = [_program("cmake"), "--build", str(build), "-j", jobs]
    for command in (_configure(toolkit, build), compile_):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
            raise BuildError(f"{' '.join(command)} failed:\n{tail}")
    described = {"libraries": [str(p) for p in toolkit.libraries()]}
    (build / "lib" / "made-for.json").write_text(json.dumps(described, indent=1))
    (build / "lib").rename(folder)
    shutil.rmtree(build)


def front_libraries(site: Path | None = None) -> Path:
    """Folder of the front libraries for the packages in `site`.

    `site` is by default that of this interpreter. Builds them at the first
    call (about 40 s on 2 cores). Raises BuildError.
    """
    toolkit = find_toolkit(site or site_packages(sys.executable))
    root = cache_root() / "rehearsal"
    root.mkdir(parents=True, exist_ok=True)
    folder = root / _key(toolkit)
    # Two test runs at once must not build into the same folder.
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _make(toolkit, folder)
    return folder


if __name__ == "__main__":
    print(front_libraries(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
