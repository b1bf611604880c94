# SPDX-License-Identifier: Apache-2.0
"""Definitions of ours replace upstream's, or stand beside them; all else stays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.series import notice
from tools.series.manifest import Definitions
from tools.series.series import change_python


def test_replaces_a_method_where_it_stands(world: Any) -> None:
    world.fragment(
        "class Pool:\n    # In blocks.\n    def used(self):\n        return 2\n",
        ["Pool.used"],
    )
    before = (world.base / "vllm/pool.py").read_text()
    old = "    def used(self):\n        return self.size  # bytes\n"
    new = "    # In blocks.\n    def used(self):\n        return 2\n"
    notice_line = f"# {notice.WORDS}\n"
    expected = before.replace(old, new).replace("import gc", notice_line + "import gc")
    assert world.result() == expected


def test_replaces_a_class_with_the_comment_that_touches_it(world: Any) -> None:
    world.fragment("# Ours.\nclass Pool:\n    pass\n", ["Pool"])
    text = world.result()
    assert "\n\n\n# Ours.\nclass Pool:\n    pass\n\n\ndef load" in text
    assert "What a pool holds" not in text
    assert "import gc" not in text


def test_new_names_stand_at_the_end_of_their_scope(world: Any) -> None:
    world.fragment(
        "LIMIT = 3\n\n\nclass Pool:\n    deep = 4\n\n    def drop(self):\n"
        "        return LIMIT\n\n\ndef drain():\n    pass\n",
        ["Pool.drop", "Pool.deep", "drain"],
        '[[definitions]]\npath = "vllm/pool.py"\nnames = ["LIMIT"]\nafter = "imports"',
    )
    text = world.result()
    assert "import init_logger\n\nLIMIT = 3\n\nlogger" in text or (
        "import init_logger\nLIMIT = 3\n\nlogger" in text
    )
    assert "    size = 1\n    deep = 4\n\n    def trim" in text
    assert "# bytes\n\n    def drop(self):\n        return LIMIT\n\n\ndef load" in text
    assert text.endswith("    finish(model)\n\n\ndef drain():\n    pass\n")


def test_after_places_new_functions_in_order(world: Any) -> None:
    world.fragment(
        "def one():\n    pass\n\n\ndef two():\n    pass\n",
        ["one", "two"],
        'after = "Pool"',
    )
    text = world.result()
    assert (
        "# bytes\n\n\ndef one():\n    pass\n\n\ndef two():\n    pass\n\n\ndef load"
        in (text)
    )


def test_removes_a_definition_and_the_import_it_alone_used(world: Any) -> None:
    world.patch(
        '[[definitions]]\npath = "vllm/pool.py"\nremove = ["Pool.trim", "load"]'
    )
    text = world.result()
    assert "trim" not in text
    assert "import gc" not in text
    assert text.endswith("# bytes\n")


def test_keeps_windows_line_ends(world: Any) -> None:
    path = world.base / "vllm/pool.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    world.fragment("def load(model):\n    return model\n", ["load"])
    text = world.result()
    assert text.count("\n") == text.count("\r\n")
    assert "def load(model):\r\n    return model\r\n" in text


def test_replaces_all_parts_of_a_property(world: Any) -> None:
    world.upstream(
        "vllm/pool.py",
        "class Pool:\n    @property\n    def n(self):\n        return 1\n\n"
        "    @n.setter\n    def n(self, value):\n        pass\n",
    )
    world.fragment(
        "class Pool:\n    @property\n    def n(self):\n        return 2\n", ["Pool.n"]
    )
    text = world.result()
    assert text.count("def n(") == 1
    assert "return 2" in text


@pytest.mark.parametrize(
    ("code", "names", "rest", "message"),
    [
        (
            "class Pool:\n    def f(self): ...\n",
            ["Pool.f"],
            'remove = ["Pool.gone"]',
            "definition Pool.gone: it is missing",
        ),
        (
            "def f(): ...\n",
            ["f"],
            'after = "nowhere"',
            "definition f: after = 'nowhere' is missing",
        ),
        (
            "class Tank:\n    def f(self): ...\n",
            ["Tank.f"],
            "",
            "definition Tank.f: class Tank is missing",
        ),
    ],
)
def test_refuses_what_the_base_lacks(
    world: Any, code: str, names: list[str], rest: str, message: str
) -> None:
    patch = world.fragment(code, names, rest)
    assert world.refusal() == f"{patch}: vllm/pool.py: {message}"


def test_refuses_a_name_that_the_base_defines_twice(world: Any) -> None:
    world.upstream("vllm/pool.py", "x = 1\nx = 2\n")
    patch = world.fragment("x = 3\n", ["x"])
    assert world.refusal() == (
        f"{patch}: vllm/pool.py: definition x: it is found 2 times"
    )


NAMES = st.lists(
    st.sampled_from([f"f{i}" for i in range(12)]), min_size=1, max_size=8, unique=True
)
BODIES = st.sampled_from(
    [
        "    return 1\n",
        "    x = [\n        1,  # one\n      2]\n    return x\n",
        '    """Words.\n\n  more words"""\n    pass ;\n',
        "    if True: return 0\n    # end\n",
        "    return (\n1)\n",
    ]
)
GAPS = st.sampled_from(
    ["", "\n", "\n\n", "\n# apart\n\n", "\n\n# touching\n", "X = 1\n"]
)


@settings(max_examples=150, deadline=None)
@given(names=NAMES, data=st.data())
def test_replacing_one_function_leaves_every_other_byte(
    names: list[str], data: st.DataObject
) -> None:
    parts = [
        (data.draw(GAPS), f"def {name}(a, *, b=2) :\n{data.draw(BODIES)}")
        for name in names
    ]
    chosen = data.draw(st.integers(0, len(names) - 1))
    text = "import os\n" + "".join(gap + code for gap, code in parts) + "# tail\n"
    ours = f"def {names[chosen]}():\n    return 'ours'\n"
    gap, _ = parts[chosen]
    kept = gap.removesuffix("# touching\n")
    parts[chosen] = (kept, ours)
    expected = "import os\n" + "".join(g + c for g, c in parts) + "# tail\n"
    definitions = Definitions("f.py", names=(names[chosen],))
    assert change_python(text, ours, [definitions], []) == expected
