# SPDX-License-Identifier: Apache-2.0
"""The notice of change that the Apache licence, section 4(b), asks for."""

from __future__ import annotations

import re

WORDS = "Modified from upstream vLLM by the sleepload patch series."
_COMMENT = {".py": "#", ".txt": "#", ".cmake": "#", ".cpp": "//", ".h": "//"}


def has_notice(text: str) -> bool:
    return WORDS in text


def with_notice(text: str, path: str) -> str:
    """``text`` with one comment line of notice after its SPDX lines, or on top."""
    mark = _COMMENT["." + path.rpartition(".")[2]]
    lines = text.splitlines(keepends=True)
    at = 0
    for i, line in enumerate(lines):
        if not line.startswith(mark) and not line.startswith("#!"):
            break
        if "SPDX-" in line or line.startswith("#!") or re.match(r"#.*coding[:=]", line):
            at = i + 1
    newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    return "".join([*lines[:at], f"{mark} {WORDS}{newline}", *lines[at:]])
