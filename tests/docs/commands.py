# SPDX-License-Identifier: Apache-2.0
"""Check a shell command without running it: its program takes these arguments."""

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from documents import ROOT

HERE = Path(__file__).parent


class CommandError(Exception):
    """A command in a document would not run."""


def split(text: str) -> list[list[str]]:
    """The commands of a shell block, as words."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    commands = []
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while "&&" in words:
            at = words.index("&&")
            commands.append(words[:at])
            words = words[at + 1 :]
        commands.append(words)
    return [words for words in commands if words]


def check(words: Sequence[str]) -> None:
    """CommandError unless the command's program takes its arguments."""
    words = list(words)
    if ">" in words:
        words = words[: words.index(">")]
    while words and re.match(r"[A-Z_]+=", words[0]):
        _variable(words.pop(0).partition("=")[0])
    if not words:
        raise CommandError("an assignment and no command")
    name = words[0].removeprefix(".venv/bin/")
    checker = _PROGRAMS.get(name)
    if checker is None:
        raise CommandError(
            f"nothing here checks {name!r}: put <!-- skip: reason --> above the block, "
            "or add a check to tests/docs/commands.py"
        )
    checker(words[1:])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=120
    )


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return ((done.stderr + done.stdout).strip().splitlines() or ["no message"])[-1]


def _variable(name: str) -> None:
    """Variables of vLLM must be vLLM's."""
    if not name.startswith("VLLM_"):
        return
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    if f'"{name}"' not in Path(package.origin).with_name("envs.py").read_text():
        raise CommandError(f"vLLM knows no variable {name}")


def _python(words: list[str]) -> None:
    if words[:1] != ["-m"]:
        _script(words)
    elif words[1] in _PROGRAMS:
        check(words[1:])
    else:
        _module(words[1], words[2:])


def _script(words: list[str]) -> None:
    path = ROOT / words[0]
    if not path.is_file():
        raise CommandError(f"there is no {words[0]}")
    if "argparse" in path.read_text():
        _parse([str(path), *words[1:]])
    elif words[1:] and "sys.argv" not in path.read_text():
        raise CommandError(f"{words[0]} takes no arguments")


def _module(name: str, arguments: list[str]) -> None:
    sys.path.insert(0, str(ROOT))
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    finally:
        sys.path.remove(str(ROOT))
    if found is None:
        raise CommandError(f"there is no module {name}")
    source = Path(str(found.origin)).with_name("__main__.py")
    path = source if found.submodule_search_locations else Path(str(found.origin))
    texts = [path.read_text()]
    if found.submodule_search_locations:
        texts += [p.read_text() for p in path.parent.glob("*.py")]
    if not any("argparse" in text for text in texts):
        if arguments:
            raise CommandError(f"{name} takes no arguments")
        return
    _parse(["-m", name, *arguments])


def _parse(words: list[str]) -> None:
    """Let a program of ours read its arguments."""
    done = _run([sys.executable, str(HERE / "parse_only.py"), *words])
    if done.returncode:
        raise CommandError(_last_line(done))
    if "--help" in words:
        return
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer["rest"]:
        _ask_vllm(["engine", "--model=m", *[w for w in answer["rest"] if w != "--"]])
    if isinstance(answer["command"], list):  # a command after --, no subcommand
        check([word for word in answer["command"] if word != "--"])


def _help_last(*program: str) -> Callable[[list[str]], None]:
    """For a program that reads its options before it minds ``--help``."""

    def checker(words: list[str]) -> None:
        done = _run([*program, *words, "--help"])
        if done.returncode:
            raise CommandError(_last_line(done))

    return checker


def _pytest(words: list[str]) -> None:
    known = _pytest_help()
    for word in words:
        if word.startswith("-"):
            if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", known):
                raise CommandError(f"pytest has no option {word}")
        elif "/" in word and not (ROOT / word.partition("::")[0]).exists():
            raise CommandError(f"there is no {word}")


@functools.cache
def _pytest_help() -> str:
    return _run([sys.executable, "-m", "pytest", "--help"]).stdout


def _make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for target in words:
        if not re.search(rf"^{re.escape(target)}:", text, re.M):
            raise CommandError(f"the Makefile has no target {target}")


def _git(words: list[str]) -> None:
    while words[:1] == ["-C"]:
        words = words[2:]
    usage = _run(["git", words[0], "-h"])
    said = usage.stdout + usage.stderr
    if "is not a git command" in said:
        raise CommandError(f"git has no command {words[0]}")
    for word in words[1:]:
        option = word.partition("=")[0]
        name = re.escape(option.removeprefix("--"))
        if option.startswith("--") and not re.search(
            rf"--(\[no-\])?{name}(?!\w)", said
        ):
            raise CommandError(f"git {words[0]} has no option {option}")


def _curl(words: list[str]) -> None:
    done = subprocess.run(["curl", *words, "--help"], capture_output=True, text=True)
    if done.returncode:
        raise CommandError(done.stderr.strip().splitlines()[0])
    for word in words:
        if ":8000" in word:
            path = urlsplit(word if "//" in word else f"http://{word}").path
            if f'"{path}"' not in _routes():
                raise CommandError(f"vLLM's server has no {path}")


@functools.cache
def _routes() -> str:
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.origin is not None
    folder = Path(package.origin).with_name("entrypoints")
    return "\n".join(path.read_text() for path in folder.rglob("*.py"))


def _vllm(words: list[str]) -> None:
    if words[0] != "serve":
        raise CommandError(f"only `vllm serve` is checked, not {words[0]}")
    _ask_vllm(words)


_server: "subprocess.Popen[str] | None" = None


def _ask_vllm(words: list[str]) -> None:
    global _server
    if _server is None:
        _server = subprocess.Popen(
            [sys.executable, str(HERE / "vllm_options.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert _server.stdin and _server.stdout
    _server.stdin.write(json.dumps(words) + "\n")
    _server.stdin.flush()
    refusal = json.loads(_server.stdout.readline())
    if refusal:
        raise CommandError(f"vLLM: {refusal}")


def _path(words: list[str]) -> None:
    if len(words) != 1:
        raise CommandError("one path")


def _any(words: list[str]) -> None:
    """The reader's own command."""


_PROGRAMS: dict[str, Any] = {
    "COMMAND": _any,
    "cd": _path,
    "curl": _curl,
    "git": _git,
    "make": _make,
    "mkdocs": _help_last(sys.executable, "-m", "mkdocs"),
    "pip": _help_last(sys.executable, "-m", "pip"),
    "pytest": _pytest,
    "python": _python,
    "python3": _python,
    "ruff": _help_last(sys.executable, "-m", "ruff"),
    "source": _path,
    "vllm": _vllm,
}
