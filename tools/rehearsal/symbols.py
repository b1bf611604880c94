# SPDX-License-Identifier: Apache-2.0
"""Generate what the front libraries do not write by hand.

Each front library must export every name that the library it stands in for
exports. What `src/` implements is found in the compiled objects; for the rest
a stub is written, harmless or unsupported as `reviewed.toml` says. For the
driver also the table behind cuGetProcAddress, from cuda.h and cudaTypedefs.h.
"""

import argparse
import fnmatch
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


class SymbolError(Exception):
    """An input of the generator is missing or makes no sense."""


@dataclass(frozen=True)
class Front:
    """One front library: what it exports and what it answers."""

    name: str  # key in reviewed.toml
    prefixes: tuple[str, ...]  # of exported names
    unsupported: int  # error code


FRONTS = {
    front.name: front
    for front in (
        Front("cuda", ("cu",), 801),
        Front("cudart", ("cuda", "__cuda"), 801),
        Front("nvml", ("nvml",), 3),
        Front("cublas", ("cublas",), 15),
        Front("cublasLt", ("cublasLt",), 15),
        Front("nccl", ("nccl", "pnccl"), 3),
    )
}


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SymbolError(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


def defined_symbols(path: Path, *, dynamic: bool) -> dict[str, str]:
    """Defined functions of an object or library: name -> version node or ''."""
    lines = _run("nm", *(["-D"] if dynamic else []), "--defined-only", path)
    found = {}
    for line in lines.splitlines():
        fields = line.split()
        if len(fields) == 3 and fields[1] in "TWi":
            name, _, version = fields[2].partition("@")
            found[name] = version.lstrip("@")
    return found


def driver_names(include: Path) -> set[str]:
    """Every function that cuda.h declares, in each of its ABI versions."""
    names: set[str] = set()
    for define in ("-DCURRENT", "-D__CUDA_API_VERSION_INTERNAL"):
        flags = ("-E", "-P", "-x", "c", define, "-I", str(include))
        text = _run("gcc", *flags, include / "cuda.h")
        names |= set(re.findall(r"CUresult\s+(cu[A-Z]\w*)\s*\(", text))
    return names


def nvml_names(bindings: Path) -> set[str]:
    """The functions that NVIDIA's Python bindings look up."""
    return set(re.findall(r"['\"](nvml[A-Z]\w+)['\"]", bindings.read_text()))


def _suffix(symbol: str) -> int:
    match = re.search(r"_v(\d+)$", symbol)
    return int(match[1]) if match else 1


def entry_points(include: Path, symbols: set[str]) -> list[tuple[str, int, str]]:
    """(name, first CUDA version of the ABI, symbol), oldest ABI first.

    cudaTypedefs.h has one typedef for each ABI of a function, named after the
    CUDA version that brought it; the symbols have a suffix _v2, _v3 in the
    same order. Typedefs of names without per-thread suffix only.
    """
    versions: dict[str, set[int]] = {}
    text = (include / "cudaTypedefs.h").read_text()
    for name, version in re.findall(r"PFN_(cu\w+?)_v(\d{4,5})\)", text):
        versions.setdefault(name, set()).add(int(version))
    by_base: dict[str, list[str]] = {}
    for symbol in symbols:
        if not symbol.endswith(("_ptsz", "_ptds")):
            by_base.setdefault(re.sub(r"_v\d+$", "", symbol), []).append(symbol)
    table = []
    for base, variants in sorted(by_base.items()):
        variants.sort(key=_suffix)
        since = sorted(versions.get(base, ()))
        # More symbols than typedefs: the newest of both belong together.
        since = [0] * (len(variants) - len(since)) + since[-len(variants) :]
        for version, symbol in zip(since, variants, strict=True):
            table.append((base, version, symbol))
            if symbol != base:
                table.append((symbol, 0, symbol))
    return sorted(table)


def reviewed(front: Front) -> dict[str, str]:
    """Pattern -> reason."""
    lists = tomllib.loads((HERE / "reviewed.toml").read_text())
    if front.name not in lists:
        raise SymbolError(f"reviewed.toml has no table [{front.name}]")
    reasons: dict[str, str] = lists[front.name]
    return reasons


def is_harmless(name: str, patterns: dict[str, str]) -> bool:
    """Whether a pattern covers the name; 64-bit variants go with their base."""
    base = name.removesuffix("_64")
    return any(fnmatch.fnmatchcase(base, p) for p in patterns)


def stub_source(front: Front, names: set[str], implemented: set[str]) -> str:
    """C++ source with a stub for each name that is not implemented."""
    patterns = reviewed(front)
    missing = sorted(n for n in names - implemented if n.startswith(front.prefixes))
    lines = ['#include "ledger.h"', ""]
    for number, name in enumerate(missing):
        harmless = is_harmless(name, patterns)
        code = 0 if harmless else front.unsupported
        lines.append(
            f'static RehearsalStub stub_{number} = {{"{name}", "{front.name}", '
            f"{int(harmless)}, {code}, 0, nullptr}};\n"
            f'extern "C" __attribute__((visibility("default"))) '
            f"int {name}() {{ return rehearsal_stub(&stub_{number}); }}"
        )
    return "\n".join(lines) + "\n"


def entry_point_source(table: list[tuple[str, int, str]]) -> str:
    """C++ source of the table behind cuGetProcAddress."""
    symbols = sorted({symbol for _, _, symbol in table})
    declared = "\n".join(f'extern "C" int {symbol}();' for symbol in symbols)
    rows = "\n".join(
        f'    {{"{name}", {since}, reinterpret_cast<void*>(&{symbol})}},'
        for name, since, symbol in table
    )
    return (
        f'#include "entry_points.h"\n\n{declared}\n\n'
        'extern "C" const RehearsalEntryPoint rehearsal_entry_points[] = {\n'
        f"{rows}\n    {{nullptr, 0, nullptr}},\n}};\n"
    )


def version_script(front: Front, nodes: set[str]) -> str:
    """A linker script with the version node of the real library, if it has one."""
    # The runtime's front finds the driver's functions through this one.
    ours = "rehearsal_find_entry_point; " if front.name == "cuda" else ""
    exported = ours + " ".join(f"{prefix}*;" for prefix in front.prefixes)
    node = next(iter(sorted(nodes)), "")
    return f"{node} {{ global: {exported} local: *; }};\n"


def main(argv: list[str] | None = None) -> None:
    """Write `stubs.cpp`, `exports.map` and, for the driver, `entry_points`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("front", choices=sorted(FRONTS))
    parser.add_argument("--include", type=Path, required=True)
    parser.add_argument("--real", type=Path, help="library or Python bindings")
    parser.add_argument("--object", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    front = FRONTS[args.front]
    implemented = set(defined_symbols(args.object, dynamic=False))
    nodes: set[str] = set()
    if front.name == "cuda":
        names = driver_names(args.include)
    elif args.real is None:
        raise SymbolError(f"--real is needed for {front.name}")
    elif front.name == "nvml":
        names = nvml_names(args.real)
    else:
        exported = defined_symbols(args.real, dynamic=True)
        names = set(exported)
        nodes = {node for node in exported.values() if node}
    args.out.mkdir(parents=True, exist_ok=True)
    source = stub_source(front, names, implemented)
    if front.name == "cuda":
        driver = {n for n in names | implemented if n.startswith("cu")}
        source += entry_point_source(entry_points(args.include, driver))
    (args.out / "stubs.cpp").write_text(source)
    (args.out / "exports.map").write_text(version_script(front, nodes))


if __name__ == "__main__":
    try:
        main()
    except SymbolError as error:
        raise SystemExit(f"symbols: {error}") from error
