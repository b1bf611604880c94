# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the README and docs/, and what a comment above says to do.

``<!-- mode -->`` or ``<!-- mode: reason -->`` in the line above a block is its mode. A
block with commands and no mode is checked: the programs exist and take the arguments.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What a command starts with; another program fails the test that meets it in a shell
# block, so that nothing is passed over.
PROGRAMS = (
    r"(\$ |\w+=\S+ )*"
    r"(\.venv/bin/|python3? |pip |make |vllm |curl |git |pytest |docker )"
)
# A code span that is a command, and not a text that begins with a program's name.
SPAN = (
    r"(\w+=\S+ )*(\.venv/bin/\w+ |python3? -m |python3? \S+\.py|pip install "
    r"|make [a-z]+$|vllm serve |git [a-z]+ -|git clone |pytest \S*/)"
)
COMMENT = r"<!--\s*(\w+)(?::\s*(.*?))?\s*-->\s*"
SHELL = {"bash", "console", "sh", "shell"}


@dataclass(frozen=True)
class Block:
    """One code block, or the commands of one paragraph's code spans."""

    page: Path
    line: int
    language: str
    mode: str
    reason: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def is_shell(self) -> bool:
        plain = self.language == "" and re.match(PROGRAMS, self.text) is not None
        return self.language in SHELL or plain


def blocks(text: str, page: Path) -> list[Block]:
    """Every code block of a page, and each code span that is a command."""
    found, mode, reason = [], "", ""
    for token in MarkdownIt().enable("table").parse(text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            comment = re.fullmatch(COMMENT, token.content, re.S)
            mode, reason = (comment[1], comment[2] or "") if comment else ("", "")
            continue
        if token.type in ("fence", "code_block"):
            found.append(
                Block(page, line, token.info.strip(), mode, reason, token.content)
            )
        for child in token.children or ():
            span = child.content
            if child.type == "code_inline" and re.match(SPAN, span):
                found.append(Block(page, line, "bash", "", "", span))
        mode = reason = ""
    return found


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page.read_text(), page)]
