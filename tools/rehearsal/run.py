# SPDX-License-Identifier: Apache-2.0
"""Run a command on a simulated card.

python -m tools.rehearsal.run [--gpu-memory 16GiB] [--capability 12.0]
    [--card NAME] [--cards N] [--fault CALL:N] [--report FILE] -- COMMAND
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.rehearsal.build import BuildError, front_libraries, site_packages
from tools.rehearsal.calibration import calibrate
from tools.rehearsal.cards import Card, CardError, find_card, size


def environment(
    card: Card,
    *,
    site: Path | None = None,
    cards: int = 1,
    faults: Sequence[str] = (),
    report: Path | None = None,
    commit_limit: int = 2 << 30,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Environment in which a process finds `card` instead of a real one.

    `site` is the site-packages folder of the interpreter that will run. A
    `report` may hold %p for the process id: each child process writes its own.
    """
    folder = str(front_libraries(site))
    result = dict(os.environ if base is None else base)
    for name in [n for n in result if n.startswith("REHEARSAL_")]:
        del result[name]
    result.update(card.environment())
    result["REHEARSAL_CARDS"] = str(cards)
    result["REHEARSAL_COMMIT_LIMIT"] = str(commit_limit)
    result["REHEARSAL_LIBRARIES"] = folder
    if faults:
        result["REHEARSAL_FAULTS"] = ",".join(faults)
    if report is not None:
        result["REHEARSAL_REPORT"] = str(report)
    result["LD_AUDIT"] = str(Path(folder) / "librehearsal_audit.so")
    # Triton links its launchers against libcuda by folder, not through dlopen.
    result["TRITON_LIBCUDA_PATH"] = folder
    search = result.get("LD_LIBRARY_PATH")
    result["LD_LIBRARY_PATH"] = f"{folder}:{search}" if search else folder
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(prog="tools.rehearsal.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--card", help="a name in cards.toml")
    parser.add_argument("--gpu-memory", type=size, help="total, as 15.47GiB")
    parser.add_argument("--capability", help="as 12.0")
    parser.add_argument("--cards", type=int, default=1, help="how many of them")
    parser.add_argument(
        "--fault", action="append", default=[], help="the n-th call fails: CALL:N"
    )
    parser.add_argument("--report", type=Path, help="JSON written at exit")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("which command?")
    try:
        card = calibrate(find_card(args.card, args.gpu_memory, args.capability))
        env = environment(
            card,
            site=site_packages(sys.executable),
            cards=args.cards,
            faults=args.fault,
            report=args.report,
        )
    except (BuildError, CardError) as error:
        print(f"rehearsal: {error}", file=sys.stderr)
        return 2
    try:
        return subprocess.run(command, env=env).returncode
    except OSError as error:
        print(f"rehearsal: {command[0]} does not start: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
