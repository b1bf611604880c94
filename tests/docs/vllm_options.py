# SPDX-License-Identifier: Apache-2.0
"""Does vLLM take these options? A line of JSON in, an error or "" out.

``["serve", ...]`` is read as ``vllm serve`` does, ``["engine", ...]`` as the engine's.
"""

import json
import os
import sys

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr

    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Refused(Exception):
        pass

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> None:  # type: ignore[override]
            raise Refused(message)

    parsers = {
        "serve": make_arg_parser(Parser()),
        "engine": EngineArgs.add_cli_args(Parser()),
    }
    for line in sys.stdin:
        kind, *options = json.loads(line)
        try:
            parsers[kind].parse_args(options)
            answer = ""
        except Refused as refusal:
            answer = str(refusal)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
