# SPDX-License-Identifier: Apache-2.0
"""Let a program read its arguments, and end it before it does anything.

    python parse_only.py (-m MODULE | FILE) ARGUMENTS

Exit status 2 is argparse's refusal. Else one line of JSON: ``rest``, what the program
passes on to another, and ``command``, a command that it would run.
"""

import argparse
import json
import os
import runpy
import sys
from typing import Any, NoReturn

_parse_known = argparse.ArgumentParser.parse_known_args
_inside = False


def _read(parser: argparse.ArgumentParser, arguments: Any, namespace: Any) -> Any:
    global _inside
    _inside = True
    try:
        return _parse_known(parser, arguments, namespace)
    finally:
        _inside = False


def _end(namespace: Any, rest: list[str]) -> NoReturn:
    command = getattr(namespace, "command", None)
    print(json.dumps({"rest": rest, "command": command}), flush=True)
    os._exit(0)


def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
    if _inside:  # a subcommand's parser
        return _parse_known(self, args, namespace)
    _end(*_read(self, args, namespace))


def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
    found, rest = _read(self, args, namespace)
    if rest:
        self.error(f"unrecognized arguments: {' '.join(rest)}")
    _end(found, rest)


def main() -> None:
    argparse.ArgumentParser.parse_known_args = parse_known_args
    argparse.ArgumentParser.parse_args = parse_args
    del sys.argv[0]
    sys.path[0] = os.getcwd()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
