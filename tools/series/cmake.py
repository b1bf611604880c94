# SPDX-License-Identifier: Apache-2.0
"""Structural edits of CMake files: an anchor is a command and its leading arguments."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tools.series.errors import Refusal
from tools.series.manifest import Edit

_PART = re.compile(
    r"""
    (?P<bracket_comment>\#\[(?P<c>=*)\[.*?\](?P=c)\])
  | (?P<comment>\#[^\n]*)
  | (?P<bracket>\[(?P<b>=*)\[.*?\](?P=b)\])
  | (?P<quoted>"(?:\\.|[^"\\])*")
  | (?P<open>\()
  | (?P<close>\))
  | (?P<word>(?:\\.|\$\{[^}]*\}|[^\s()\#"\\])+)
  | (?P<space>\s+)
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Command:
    """One command: its name in lower case, its arguments, and where it stands."""

    name: str
    arguments: tuple[str, ...]
    start: int
    end: int


def commands(text: str) -> Iterator[Command]:
    """The commands of a CMake file in order. Raises ``Refusal`` on other text."""
    name, start, depth = "", 0, 0
    arguments: list[str] = []
    at = 0
    while at < len(text):
        part = _PART.match(text, at)
        if part is None:
            raise Refusal(f"is not a CMake file at byte {at}")
        kind, value = str(part.lastgroup), part[0]
        if part["bracket"] is not None:
            kind = "bracket"
        elif part["bracket_comment"] is not None:
            kind = "bracket_comment"
        if depth == 0 and kind == "word":
            name, start = value, at
        elif kind == "open":
            depth += 1
            if depth == 1:
                arguments = []
            else:
                arguments.append(value)
        elif kind == "close":
            depth -= 1
            if depth < 0 or not name:
                raise Refusal(f"is not a CMake file at byte {at}")
            if depth == 0:
                yield Command(name.lower(), tuple(arguments), start, part.end())
                name = ""
            else:
                arguments.append(value)
        elif depth > 0 and kind in ("word", "bracket", "quoted"):
            arguments.append(value.strip('"') if kind == "quoted" else value)
        at = part.end()
    if depth:
        raise Refusal("a CMake command is not closed")


def apply_edit(text: str, edit: Edit) -> str:
    """``text`` after one edit; op is after, before or replace.

    ``replace`` also replaces the comment lines that touch the command.
    """
    try:
        return _apply(text, edit)
    except Refusal as refusal:
        refusal.anchor = refusal.anchor or str(edit)
        raise


def _apply(text: str, edit: Edit) -> str:
    anchor = edit.anchor
    if anchor is None or anchor.kind != "command":
        raise Refusal("a CMake edit needs an anchor {command = ..., argument = ...}")
    if edit.op not in ("after", "before", "replace") or edit.within or edit.imports:
        raise Refusal("a CMake edit knows op after, before and replace, and no within")
    count = len(anchor.arguments)
    found = [
        command
        for command in commands(text)
        if command.name == anchor.value.lower()
        and command.arguments[:count] == anchor.arguments
    ]
    if len(found) != 1:
        times = "missing" if not found else f"found {len(found)} times"
        raise Refusal(f"the anchor is {times}")
    first = text.rfind("\n", 0, found[0].start) + 1
    indent = text[first : found[0].start]
    last = text.find("\n", found[0].end)
    last = len(text) if last < 0 else last + 1
    if indent.strip() or text[found[0].end : last].strip():
        raise Refusal("the anchor shares its line with something else")
    newline = "\r\n" if text[first:last].endswith("\r\n") else "\n"
    code = textwrap.indent(textwrap.dedent(edit.code).strip("\n"), indent) + "\n"
    list(commands(code))
    code = code.replace("\n", newline)
    if edit.op == "after":
        return text[:last] + code + text[last:]
    while edit.op == "replace":
        above = text.rfind("\n", 0, max(first - 1, 0)) + 1
        if first == 0 or not text[above:first].lstrip().startswith("#"):
            break
        first = above
    return text[:first] + code + text[first if edit.op == "before" else last :]
