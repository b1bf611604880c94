# SPDX-License-Identifier: Apache-2.0
"""Every command in the README and docs/ is run, checked, or skipped with a reason."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import CommandError, check, split
from documents import PAGES, ROOT, Block, all_blocks, blocks
from tiny_model import write_config

MODES = {"", "run", "skip", "server", "client", "log", "python"}
BLOCKS = all_blocks()
SHELL = [block for block in BLOCKS if block.is_shell]
CHECKED = [block for block in SHELL if block.mode in ("", "server", "client")]
RUN = [block for block in SHELL if block.mode == "run"]


def by_id(block: Block) -> str:
    return block.id


@pytest.mark.parametrize("block", BLOCKS, ids=by_id)
def test_every_block_is_understood(block):
    assert block.mode in MODES
    assert block.mode != "skip" or block.reason, "say why it is skipped"


@pytest.mark.parametrize("block", CHECKED, ids=by_id)
def test_commands_would_run(block):
    for words in split(block.text):
        check(words)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory) -> Path:
    """A copy of the repository, so that a command may write."""
    folder = tmp_path_factory.mktemp("clone") / "fork"
    leave = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", ".*_cache", "*.pyc"
    )
    shutil.copytree(ROOT, folder, ignore=leave)
    return folder


@pytest.mark.parametrize("block", RUN, ids=by_id)
def test_commands_run(block, scratch, tmp_path):
    text = block.text.replace("MODEL_FOLDER", str(write_config(tmp_path)))
    beside = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text.replace(".venv/bin/", "")],
        cwd=scratch,
        env=os.environ | {"PATH": f"{beside}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "python"], ids=by_id
)
def test_python_is_python(block):
    ast.parse(block.text)


def test_all_pages_are_read():
    assert {"README.md", "operating.md", "rehearsal.md"} <= {p.name for p in PAGES}
    assert len(CHECKED) > 20 and len(RUN) > 2


@pytest.mark.parametrize(
    "command",
    [
        "python -m tools.serie list",
        "python -m tools.series lst",
        "python -m tools.series check BASE --alne",
        "python -m tools.series diff",
        "python -m tools.rehearsal MODEL --card h200 --quantisation fp8",
        "python -m tools.rehearsal MODEL --gpu-memory 16x",
        "python -m tools.rehearsal.run --crd h200 -- python benchmarks/tables.py",
        "python -m tools.rehearsal.run --card h200 -- python benchmarks/table.py",
        "python benchmarks/engine_load.py MODEL --slep",
        "python benchmarks/tables.py --all",
        ".venv/bin/python -m pytest tests/kernel/moe",
        "python -m pytest tests --collectonli",
        "python -m mkdocs build --stric",
        "VLLM_CUMEM_HOST_MEMRY=keep vllm serve MODEL",
        "vllm serve MODEL --enable-sleepmode",
        "curl -X POST 'localhost:8000/sleeep?level=1'",
        "curl --reqest POST localhost:8000/sleep",
        "make tset",
        "pip install . --no-dep-s",
        "git comit",
        "git clone --dept=1 URL",
        "frobnicate",
    ],
)
def test_a_misspelt_command_is_found(command):
    with pytest.raises(CommandError):
        [words] = split(command)
        check(words)


PAGE = """\
Text with `make test` in it.

<!-- skip: needs Docker -->
```bash
docker run x
```

```
python a.py \\
    --flag      # a comment
VAR=1 pip list && make x
```

    .venv/bin/python -m b

```
just text
```

| `python c.py` | cell |
|---|---|
"""


def test_blocks_and_spans_are_found():
    found = [block for block in blocks(PAGE, Path("p.md")) if block.is_shell]
    assert [(b.line, b.mode, b.reason) for b in found] == [
        (1, "", ""),
        (4, "skip", "needs Docker"),
        (8, "", ""),
        (14, "", ""),
        (20, "", ""),
    ]
    assert split(found[2].text) == [
        ["python", "a.py", "--flag"],
        ["VAR=1", "pip", "list"],
        ["make", "x"],
    ]
