# SPDX-License-Identifier: Apache-2.0
"""Imports that our code needs are merged; those it made unused go."""

from __future__ import annotations

from typing import Any

import libcst as cst
import pytest

from tools.series import imports
from tools.series.errors import Refusal

LONG = "a_name_so_long_that_it_wants_a_line"
BASE = """\
import os
import sys
from typing import Any

import torch

from vllm.config import VllmConfig
from vllm.utils import (
    a,
    c,
)

x = 1
"""


def merged(line: str, base: str = BASE) -> str:
    module = cst.parse_module(base)
    return imports.merge(module, imports.of_lines([line], module)).code


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        ("import os", "", ""),
        ("from vllm.utils import b", "    a,\n", "    a,\n    b,\n"),
        ("from vllm.utils import Z", "    a,\n", "    Z,\n    a,\n"),
        ("from typing import cast", "import Any", "import Any, cast"),
        ("import gc", "import os", "import gc\nimport os"),
        ("from abc import ABC", "import sys\n", "import sys\nfrom abc import ABC\n"),
        ("import numpy", "import torch", "import numpy\nimport torch"),
        (
            "from vllm import envs",
            "from vllm.config",
            "from vllm import envs\nfrom vllm.config",
        ),
        ("from . import near", ")\n\nx", ")\n\nfrom . import near\n\nx"),
        (
            f"from vllm.config import {LONG}, another_long_name",
            "from vllm.config import VllmConfig\n",
            "from vllm.config import (\n    VllmConfig,\n"
            f"    {LONG},\n    another_long_name,\n)\n",
        ),
        (
            f"from {LONG}.{LONG} import {LONG}",
            "import torch",
            f"import torch\nfrom {LONG}.{LONG} import (\n    {LONG},\n)",
        ),
        (
            "from torch import nn",
            "import torch\n",
            "import torch\nfrom torch import nn\n",
        ),
    ],
)
def test_merges_into_the_right_place(line: str, old: str, new: str) -> None:
    assert merged(line) == BASE.replace(old, new)


def test_opens_the_first_section() -> None:
    assert merged("import os", "import torch\n\nx = 1\n") == (
        "import os\n\nimport torch\n\nx = 1\n"
    )
    assert merged("import os", '"""Words."""\nx = 1\n').startswith(
        '"""Words."""\n\nimport os\n'
    )


def test_leaves_a_statement_with_comments_alone() -> None:
    base = "from vllm.utils import (\n    a,  # why\n)\n"
    assert merged("from vllm.utils import b", base) == (
        base + "from vllm.utils import b\n"
    )


def test_refuses_another_thing_of_the_same_name() -> None:
    with pytest.raises(Refusal, match=r"the file has from vllm\.utils import a"):
        merged("from torch import a")
    with pytest.raises(Refusal, match="the file has a definition of x"):
        merged("from torch import x")


def test_type_checking_imports_go_into_their_block(world: Any) -> None:
    code = (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
        "    from vllm.config import VllmConfig\n"
        "    from vllm.other import Unused\n\n\n"
        'def load(model: "VllmConfig"):\n    return model\n'
    )
    world.upstream("vllm/config.py", "class VllmConfig:\n    pass\n")
    world.fragment(code, ["load"])
    text = world.result()
    assert "import gc\nfrom typing import TYPE_CHECKING\n\nfrom vllm.logger" in text
    block = "\n\nif TYPE_CHECKING:\n    from vllm.config import VllmConfig\n\nlogger"
    assert block in text
    assert "Unused" not in text


def test_an_import_needed_at_run_time_leaves_the_type_checking_block() -> None:
    base = (
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
        "    from vllm.a import A\n    from vllm.b import B\n"
    )
    text = merged("from vllm.a import A", base)
    assert text == (
        "from typing import TYPE_CHECKING\n\nfrom vllm.a import A\n\n"
        "if TYPE_CHECKING:\n    from vllm.b import B\n"
    )


@pytest.mark.parametrize(
    ("base", "used_before", "expected"),
    [
        ("import gc\nimport os\n", "gc.x\nos.x\n", "import os\n"),
        ("from a import gc, os\n", "gc.x\nos.x\n", "from a import os\n"),
        ("from a import (\n    gc,\n    os,\n)\n", "gc\nos\n", "from a import os\n"),
        ("import gc\nimport os\n", "os.x\n", "import gc\nimport os\n"),
        ("import gc\n\nimport os\n", "gc.x\nos.x\n", "import os\n"),
        ("from a import gc as gc\nimport os\n", "gc\nos\n", None),
        ("import gc  # noqa: F401\nimport os\n", "gc\nos\n", None),
        ("import gc\nimport os\n__all__ = ['gc']\n", "gc\nos\n", None),
    ],
)
def test_drops_an_import_only_if_our_edit_made_it_unused(
    base: str, used_before: str, expected: str | None
) -> None:
    after = cst.parse_module(base + "os.x\n")
    pruned = imports.prune(base + used_before, after).code
    assert pruned == (expected or base) + "os.x\n"
