# SPDX-License-Identifier: Apache-2.0
"""Every name of the real libraries is exported, and none silently."""

import json
import re
from pathlib import Path

import pytest

from tools.rehearsal import symbols
from tools.rehearsal.build import find_toolkit, site_packages

SOURCES = Path(symbols.__file__).parent / "src"


@pytest.fixture(scope="module")
def toolkit(fronts):
    import sys

    return find_toolkit(site_packages(sys.executable))


def real_names(toolkit, front: str) -> set[str]:
    if front == "cuda":
        return symbols.driver_names(toolkit.include)
    if front == "nvml":
        return symbols.nvml_names(toolkit.nvml)
    library = {
        "cudart": toolkit.cudart[0],
        "cublas": toolkit.cublas,
        "cublasLt": toolkit.cublaslt,
        "nccl": toolkit.nccl,
    }[front]
    prefixes = symbols.FRONTS[front].prefixes
    names = symbols.defined_symbols(library, dynamic=True)
    return {name for name in names if name.startswith(prefixes)}


@pytest.mark.parametrize("front", sorted(symbols.FRONTS))
def test_a_front_exports_what_the_real_library_does(toolkit, fronts, front):
    file = {
        "cuda": "libcuda.so.1",
        "cudart": toolkit.cudart[0].name,
        "nvml": "libnvidia-ml.so.1",
        "cublas": toolkit.cublas.name,
        "cublasLt": toolkit.cublaslt.name,
        "nccl": toolkit.nccl.name,
    }[front]
    exported = set(symbols.defined_symbols(fronts / file, dynamic=True))
    wanted = real_names(toolkit, front)
    assert len(wanted) > 80
    assert wanted - exported == set()


@pytest.mark.parametrize("front", sorted(symbols.FRONTS))
def test_every_reviewed_pattern_names_something_left_to_stubs(toolkit, front):
    """A pattern that matches nothing, or what is written by hand, misleads."""
    text = "".join(path.read_text() for path in SOURCES.glob("*.cpp"))
    by_hand = set(re.findall(r"EXPORT [\w *]*?\b(\w+)\(", text))
    names = {re.sub(r"_v\d+$", "", n) for n in real_names(toolkit, front)}
    names |= real_names(toolkit, front)
    for pattern in symbols.reviewed(symbols.FRONTS[front]):
        matched = {n for n in names if symbols.is_harmless(n, {pattern: ""})}
        assert matched, pattern
        assert matched - by_hand, pattern


def test_reasons_are_given():
    for front in symbols.FRONTS.values():
        for pattern, reason in symbols.reviewed(front).items():
            assert len(reason) > 5, pattern


def test_entry_points_go_by_the_typedefs(tmp_path):
    (tmp_path / "cudaTypedefs.h").write_text(
        "typedef CUresult (CUDAAPI *PFN_cuThing_v4000)(int);\n"
        "typedef CUresult (CUDAAPI *PFN_cuThing_v11020)(int, int);\n"
        "typedef CUresult (CUDAAPI *PFN_cuThing_v11020_ptsz)(int, int);\n"
        "typedef CUresult (CUDAAPI *PFN_cuOld_v2000)(int);\n"
    )
    names = {"cuThing", "cuThing_v2", "cuThing_v2_ptsz", "cuOld", "cuOld_v2"}
    table = symbols.entry_points(tmp_path, names)
    assert ("cuThing", 4000, "cuThing") in table
    assert ("cuThing", 11020, "cuThing_v2") in table
    # One typedef for two symbols: it is the newer one's.
    assert ("cuOld", 0, "cuOld") in table
    assert ("cuOld", 2000, "cuOld_v2") in table
    assert not any("ptsz" in symbol for _, _, symbol in table)


def test_stubs_are_harmless_or_unsupported():
    front = symbols.FRONTS["cublas"]
    names = {"cublasSetStream_v2", "cublasSetStream_v2_64", "cublasXyz", "cublasMine"}
    source = symbols.stub_source(front, names, {"cublasMine"})
    assert '"cublasSetStream_v2", "cublas", 1, 0,' in source
    assert '"cublasSetStream_v2_64", "cublas", 1, 0,' in source
    assert '"cublasXyz", "cublas", 0, 15,' in source
    assert "cublasMine" not in source


def test_a_library_that_is_not_there_is_named(tmp_path):
    with pytest.raises(symbols.SymbolError, match="nothing.so"):
        symbols.defined_symbols(tmp_path / "nothing.so", dynamic=True)


def test_the_cache_says_what_it_was_made_for(fronts, toolkit):
    made_for = json.loads((fronts / "made-for.json").read_text())
    # Environments with the same libraries share it.
    names = [Path(path).name for path in made_for["libraries"]]
    assert names == [path.name for path in toolkit.libraries()]
