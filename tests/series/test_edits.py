# SPDX-License-Identifier: Apache-2.0
"""Every op and every kind of anchor, on the smallest code that shows it."""

from __future__ import annotations

import textwrap
from typing import Any

import libcst as cst
import pytest

from tools.series.edits import apply_edit
from tools.series.errors import Refusal
from tools.series.manifest import Anchor, Edit

SOURCE = """\
TABLE: dict[str, int] = {
    # first
    "a": 1,  # one
    # last
}
SHORT = {"x", "y"}
NAMES = [
    "a",
    "b"
]


def load(model, device):
    '''Load.'''
    first(model)

    # About the loop.
    for layer in model.layers():
        with on_device(layer, device):
            convert(layer)
        free(layer)
    if is_cpu(device):
        free(device)
    elif device.fast:
        free(device, now=True)
    else:
        total = a + b
    call(
        one,
        two=2,
    )
    try:
        from vllm import extension
    except ImportError:
        extension = None
    while model.busy():
        pass
    return model.ready
"""


def edited(op: str, anchor: Anchor | None, code: str = "new()", **more: Any) -> str:
    within = more.pop("within", "load")
    edit = Edit("f.py", op, code, within=within, anchor=anchor, **more)
    return apply_edit(cst.parse_module(SOURCE), edit).code


def A(kind: str, value: str, *arguments: str, inside: Any = None) -> Anchor:
    return Anchor(kind, value, arguments, inside)


@pytest.mark.parametrize(
    ("op", "anchor", "code", "old", "new"),
    [
        (
            "after",
            A("call", "first"),
            "new()",
            "first(model)\n",
            "first(model)\n    new()\n",
        ),
        (
            "before",
            A("for_call", "layers"),
            "# Why.\nnew()",
            "\n    # About the loop.",
            "\n    # Why.\n    new()\n    # About the loop.",
        ),
        (
            "after",
            A("with_call", "on_device"),
            "if x:\n    new()",
            "convert(layer)\n",
            "convert(layer)\n        if x:\n            new()\n",
        ),
        (
            "replace",
            A("call", "free", inside="for"),
            "new()",
            "        free(layer)\n",
            "        new()\n",
        ),
        (
            "remove",
            A("call", "free", inside="for"),
            "",
            "        free(layer)\n",
            "",
        ),
        (
            "after",
            A("call", "free", "now"),
            "new()",
            "now=True)\n",
            "now=True)\n        new()\n",
        ),
        (
            "after",
            A("call", "free", inside=A("if_call", "is_cpu")),
            "new()",
            "",
            None,
        ),
        (
            "after",
            A("call", "free", "device", inside=A("if", "is_cpu( device )")),
            "new()",
            "",
            None,
        ),
        (
            "wrap",
            A("assign", "total"),
            "scale({original}, 2)",
            "a + b",
            "scale((a + b), 2)",
        ),
        (
            "wrap",
            A("call", "layers"),
            "checked({original})",
            "model.layers()",
            "checked(model.layers())",
        ),
        (
            "wrap",
            A("return", "model . ready"),
            "{original}.later",
            "model.ready",
            "model.ready.later",
        ),
        (
            "wrap",
            A("while_call", "model.busy"),
            "not {original}",
            "while model.busy()",
            "while not model.busy()",
        ),
        (
            "argument",
            A("call", "call"),
            "three=3",
            "two=2,\n",
            "two=2,\n        three=3,\n",
        ),
        (
            "wrap",
            A("call", "call"),
            "kept({original})",
            "call(\n        one,\n        two=2,\n    )",
            "kept(call(\n        one,\n        two=2,\n    ))",
        ),
        ("argument", A("call", "first"), "n=1", "first(model)", "first(model, n=1)"),
        (
            "replace",
            A("try_import", "vllm"),
            "extension = load()",
            SOURCE[SOURCE.index("    try:") : SOURCE.index("    while")],
            "    extension = load()\n",
        ),
        (
            "append",
            A("for", "model.layers()"),
            "new()",
            "free(layer)\n",
            "free(layer)\n        new()\n",
        ),
        ("append", None, "new()", "model.ready\n", "model.ready\n    new()\n"),
        ("prepend", None, "new()", "'''\n", "'''\n    new()\n"),
        (
            "append",
            A("if", "device.fast"),
            "new()",
            "now=True)\n",
            "now=True)\n        new()\n",
        ),
    ],
)
def test_edit(op: str, anchor: Anchor | None, code: str, old: str, new: Any) -> None:
    if new is None:
        with pytest.raises(Refusal, match="found 2 times"):
            edited(op, anchor, code)
        return
    assert SOURCE.count(old) == 1
    assert edited(op, anchor, code) == SOURCE.replace(old, new)


@pytest.mark.parametrize(
    ("op", "anchor", "code", "old", "new"),
    [
        (
            "dict_entry",
            A("dict", "TABLE"),
            '# second\n"b": max(\n    2,\n),',
            "    # last\n",
            '    # last\n    # second\n    "b": max(\n        2,\n    ),\n',
        ),
        ("set_entry", A("set", "SHORT"), '"z"', '"y"}', '"y", "z"}'),
        ("list_entry", A("list", "NAMES"), '"c"', '"b"\n', '"b",\n    "c",\n'),
    ],
)
def test_entry(op: str, anchor: Anchor, code: str, old: str, new: str) -> None:
    text = edited(op, anchor, code, within=None)
    assert text == SOURCE.replace(old, new)
    compile(text, "f.py", "exec")


@pytest.mark.parametrize(
    ("op", "anchor", "code", "message"),
    [
        ("after", A("call", "gone"), "new()", "the anchor is missing"),
        ("after", A("call", "free"), "new()", "the anchor is found 3 times"),
        ("after", A("if", "device.fast"), "new()", "elif"),
        ("remove", A("call", "convert"), "", "would be empty"),
        ("after", A("call", "first"), "new(", "the patch's code is not Python"),
        ("wrap", A("call", "first"), "new(", "is not an expression"),
        ("append", A("call", "first"), "new()", "anchor that has a block"),
        ("argument", A("assign", "total"), "a=1", "needs a call"),
        ("dict_entry", A("assign", "total"), '"b": 2', "such a literal"),
        ("after", A("call", "first"), "new()\n# lost", "would be lost"),
    ],
)
def test_refusal_names_the_anchor(
    op: str, anchor: Anchor, code: str, message: str
) -> None:
    with pytest.raises(Refusal, match=message) as caught:
        edited(op, anchor, code)
    assert str(anchor) in str(caught.value)
    assert "within load" in str(caught.value)


def test_the_scope_must_be_there() -> None:
    with pytest.raises(Refusal, match=r"within Gone\.load.*Gone is missing"):
        edited("after", A("call", "first"), within="Gone.load")


def test_the_edit_reaches_a_method(world: Any) -> None:
    world.upstream("vllm/drain.py", "def drain():\n    pass\n")
    world.edit(
        'within = "Pool.trim"\nop = "before"\nanchor = {call = "gc.collect"}\n'
        'code = "drain()"\nimports = ["from vllm.drain import drain"]'
    )
    text = world.result()
    assert "    def trim(self):\n        drain()\n        gc.collect()\n" in text
    assert "from vllm.drain import drain\nfrom vllm.logger" in text


def test_layout_of_the_code_is_kept() -> None:
    code = textwrap.dedent("""\
        x = {
            "k": 1,
        }

        # Then.
        y = x
    """)
    text = edited("after", A("call", "convert"), code)
    assert textwrap.indent(code, " " * 12).replace(" " * 12 + "\n", "\n") in text
