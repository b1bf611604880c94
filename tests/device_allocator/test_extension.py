# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import subprocess
import sys
import types

import pytest

IMPORT = """
import sys, types
if {stub!r}:
    stub = types.ModuleType("vllm.cumem_allocator")
    if {stub!r} == "no driver":
        stub.driver_available = lambda: False
        sys.modules["vllm.cumem_allocator"] = stub
    else:
        sys.modules["vllm.cumem_allocator"] = None
from vllm.device_allocator import cumem, extension
print(cumem.cumem_available, cumem.libcudart is None, cumem.init_module is None)
"""


@pytest.mark.parametrize("stub", ["no driver", "not built"])
def test_cumem_imports_without_what_it_needs(stub):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(stub=stub)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[-2] == "False True True"


def test_this_machine_gets_an_answer():
    """The extension of the installed build, with or without a driver."""
    from vllm import cumem_allocator
    from vllm.device_allocator import cumem

    assert isinstance(cumem_allocator, types.ModuleType)
    assert cumem.cumem_available is cumem_allocator.driver_available()
