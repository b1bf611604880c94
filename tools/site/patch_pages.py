# SPDX-License-Identifier: Apache-2.0
"""One page for each patch, from its manifest and its diff of the release."""

import re
from collections.abc import Sequence

from tools.series import diff
from tools.series.manifest import Patch
from tools.series.series import Applied, Change

FOLDER = "patches"
# Longer than any fence inside the files that are shown.
FENCE = "~" * 8


def pages(applied: Sequence[Applied], version: str) -> dict[str, str]:
    """Markdown by path within the site, the overview first.

    Args:
        applied: the series on a base with sources.
        version: the base's, to say what the diffs are of.
    """
    made = {f"{FOLDER}/index.md": overview(applied, version)}
    for done in applied:
        made[f"{FOLDER}/{done.patch.id}.md"] = page(done, version)
    return made


def overview(applied: Sequence[Applied], version: str) -> str:
    """A table of the patches: what each is, and when it can go."""
    lines = [
        "# Patches",
        "",
        f"In the order in which they go onto vLLM {version}. Lines are added and "
        "removed ones of upstream's files; new files are ours as a whole. "
        "[The series](../series.md) says how patches are written and applied.",
        "",
        "| patch | does | lines | new files | can go when |",
        "|---|---|---|---|---|",
    ]
    for done in applied:
        patch = done.patch
        changed, new = _split(done.changes)
        cells = (
            f"[{patch.id.partition('-')[0]}]({patch.id}.md)",
            escape(patch.title),
            str(changed_lines(changed)),
            str(len(new)),
            escape(patch.goes_when),
        )
        lines.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def page(done: Applied, version: str) -> str:
    """What the manifest says, then the diff."""
    patch = done.patch
    changed, new = _split(done.changes)
    parts = [f"# {escape(patch.title)}", f"Patch `{patch.id}`. {_after(patch)}"]
    for head, text in (
        ("Why", patch.why),
        ("What changes", patch.how),
        ("Trade-offs", patch.trade_offs),
        ("Tested", patch.tested),
        ("When it can go", patch.goes_when),
        ("Related", patch.related),
    ):
        if text.strip():
            parts += [f"## {head}", escape(text.strip())]
    parts.append("## The diff")
    if changed:
        parts.append(
            f"{changed_lines(changed)} lines of upstream's files, of vLLM {version} "
            "with the patches before this one:"
        )
        parts.append(_fenced("diff", diff.unified(changed)))
    if new:
        parts.append("New files:" if changed else "Only new files:")
    for change in new:
        text = change.after.decode()
        summary = f"{change.path} ({len(text.splitlines())} lines)"
        block = _fenced(_language(change.path), text)
        head = f'<details markdown="1"><summary>{summary}</summary>'
        parts.append(f"{head}\n\n{block}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def changed_lines(changes: Sequence[Change]) -> int:
    """Added and removed lines together, as `git diff --stat` counts them."""
    return sum(
        line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- "))
        for line in diff.unified(changes).splitlines()
    )


def escape(text: str) -> str:
    """Plain text of a manifest, so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_\[\]<>#])", r"\\\1", text)


def _split(changes: Sequence[Change]) -> tuple[list[Change], list[Change]]:
    """Changes of files that were there, and new files."""
    changed = [change for change in changes if change.before is not None]
    return changed, [change for change in changes if change.before is None]


def _after(patch: Patch) -> str:
    if not patch.requires:
        return "It needs no other patch."
    links = [f"[{need}]({need}.md)" for need in patch.requires]
    return f"It comes after {', '.join(links)}."


def _language(path: str) -> str:
    suffix = path.rpartition(".")[2]
    return {"py": "python", "h": "cpp", "cpp": "cpp"}.get(suffix, "text")


def _fenced(language: str, text: str) -> str:
    return f"{FENCE}{language}\n{text.rstrip()}\n{FENCE}"
