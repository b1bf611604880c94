# SPDX-License-Identifier: Apache-2.0
"""Will this model load on that card, with sleep mode? Real code, no GPU."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tools.rehearsal import calibration, packages, plot, report
from tools.rehearsal.build import BuildError, front_libraries
from tools.rehearsal.cards import Card, CardError, find_card, known_cards, size
from tools.rehearsal.jobs import Job, OptionError
from tools.rehearsal.models import ModelError, built_in_models, model_folder
from tools.rehearsal.packages import PackageError, Variant
from tools.rehearsal.plot import PlotError
from tools.rehearsal.rehearse import Answer, Rehearser
from tools.rehearsal.session import Session, SessionError
from tools.series.errors import Refusal


class PathError(Exception):
    """A result could not be written where it is wanted."""


ERRORS = (
    BuildError,
    CardError,
    ModelError,
    OptionError,
    PackageError,
    PathError,
    PlotError,
    SessionError,
    calibration.CalibrationError,
    Refusal,
)
USAGE = 2


def say(text: str) -> None:
    """A line of progress."""
    print(f"rehearsal: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.rehearsal",
        description=__doc__,
        epilog="Any other option is one of vLLM's engine and goes to it as it is, "
        "for example --tensor-parallel-size 2 or --quantization fp8. "
        "Exit status: 0 loads, 1 does not, 3 could not tell, 2 wrong arguments.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=f"a folder with a config.json, or {', '.join(built_in_models())}",
    )
    parser.add_argument(
        "--card", metavar="NAME", help=f"one of {', '.join(known_cards())}"
    )
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", type=size, help="total, as 15.47GiB"
    )
    parser.add_argument("--capability", metavar="X.Y", help="as 12.0")
    parser.add_argument(
        "--calibration", metavar="FILE", type=Path, help="as calibrate.py wrote it"
    )
    parser.add_argument(
        "--compare",
        metavar="LIST",
        help="of stock, fork, no-sleep: side by side, with the smallest card of each",
    )
    parser.add_argument(
        "--no-kv-cache", action="store_true", help="leave out the profile run"
    )
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--plot", metavar="FILE.png", type=Path)
    parser.add_argument(
        "--snapshot",
        metavar="FILE.pickle",
        type=Path,
        help="for pytorch.org/memory_viz; of rank 0 of the first variant",
    )
    return parser


def _variants(names: str | None) -> list[Variant]:
    wanted = names.split(",") if names else [packages.default_variant()]
    return [packages.find_variant(name.strip()) for name in wanted]


def _card(args: argparse.Namespace) -> Card:
    card = find_card(args.card, args.gpu_memory, args.capability)
    return calibration.calibrate(card, args.calibration)


def _rehearse(
    args: argparse.Namespace, card: Card, variants: list[Variant], job: Job
) -> list[Answer]:
    answers = []
    with ExitStack() as stack:
        say("vLLM is being imported; this takes most of the time")
        # Sessions of one package serve every variant that uses it. All start
        # at once: most of it is reading files.
        sessions = {
            variant.package: stack.enter_context(Session(card, package=variant.package))
            for variant in {v.package: v for v in variants}.values()
        }
        for variant in variants:
            session = sessions[variant.package]
            session.wait_until_ready()
            first = variant is variants[0]
            snapshot = str(args.snapshot.resolve()) if args.snapshot and first else None
            answers.append(
                Rehearser(session, variant, card, job, say).answer(
                    smallest=args.compare is not None,
                    kv_cache=not args.no_kv_cache,
                    snapshot=snapshot,
                )
            )
    return answers


def _require_folders(*paths: Path | None) -> None:
    """PathError for a file that could not be written: before the work, not after."""
    for path in filter(None, paths):
        if not path.resolve().parent.is_dir():
            raise PathError(
                f"there is no folder {path.resolve().parent} for {path.name}"
            )


def _deciding(answers: list[Answer]) -> Answer:
    """The answer that the exit status is about: the fork's, or the first."""
    return next((a for a in answers if a.variant.name == "fork"), answers[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse, print, write; the exit status."""
    args, options = _parser().parse_known_args(argv)
    try:
        card = _card(args)
        variants = _variants(args.compare)
        _require_folders(args.json, args.plot, args.snapshot)
        if args.plot:
            plot.require()
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch:
            folder = str(model_folder(args.model, Path(scratch)))
            say("the simulated card is being made ready")
            front_libraries()
            job = Job(folder, card.memory, sleep=True, options=tuple(options))
            answers = _rehearse(args, card, variants, job)
        print(report.to_text(args.model, card, answers))
        if args.json:
            document = report.to_json(args.model, card, answers)
            args.json.write_text(json.dumps(document) + "\n")
        if args.plot:
            plot.draw(args.model, card, answers, args.plot)
    except ERRORS as error:
        print(f"rehearsal: {error}", file=sys.stderr)
        return USAGE
    return report.exit_status(_deciding(answers))


if __name__ == "__main__":
    raise SystemExit(main())
