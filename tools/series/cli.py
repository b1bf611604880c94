# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m tools.series``."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.series import bases, diff, export, extension, fetch, lint
from tools.series.base import Base, open_base
from tools.series.checkout import apply_to_checkout
from tools.series.errors import Refusal
from tools.series.manifest import Patch, Series, load
from tools.series.series import Applied, apply_series, final
from tools.series.wheel import PATCH_LIST, build_wheel

ROOT = Path(__file__).resolve().parents[2]

_EPILOG = """\
BASE is a wheel, an unpacked package (a site-packages folder), a source archive or a
git checkout of upstream, or a version such as 0.33.0, which is then the released wheel,
fetched by pip and kept in ~/.cache/vllm-series/. A base is read and never run, except
for its scripts in tools/pre_commit, by `lint`.

exit status: 0 done; 1 refused, with one message on stderr and nothing changed;
2 wrong usage.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        series = load(options.root, options.allow_unowned)
        options.run(series, options)
    except Refusal as refusal:
        print(f"series: {refusal}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.series",
        description="Put our series of patches onto a released vLLM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the repository (default: this one)"
    )
    parser.add_argument(
        "--allow-unowned",
        action="store_true",
        help="while writing a patch: leave out what no patch owns yet",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="the patches in order")
    listing.set_defaults(run=_list)

    check = commands.add_parser("check", help="does every patch fit a base?")
    check.add_argument(
        "base", nargs="?", metavar="BASE", help="(default: a table of all known bases)"
    )
    check.add_argument(
        "--page", action="store_true", help="write the table into docs/bases.md"
    )
    check.add_argument(
        "--alone",
        action="store_true",
        help="also try each patch with only its stated predecessors",
    )
    check.set_defaults(run=_check)

    show = commands.add_parser("diff", help="the series as a unified diff of a base")
    show.add_argument("base", metavar="BASE")
    show.add_argument("--patch", metavar="ID", help="only this patch's changes")
    show.set_defaults(run=_diff)

    apply = commands.add_parser("apply", help="one commit per patch on a git checkout")
    apply.add_argument("checkout", type=Path, metavar="CHECKOUT")
    apply.set_defaults(run=_apply)

    mails = commands.add_parser("export", help="mails for upstream, with a cover")
    mails.add_argument(
        "--base",
        required=True,
        metavar="CHECKOUT",
        help="upstream's source tree, under git or not, its archive, or a version",
    )
    mails.add_argument("--out", type=Path, required=True, metavar="DIR")
    mails.add_argument(
        "--patch", metavar="ID", help="only this patch and its stated predecessors"
    )
    mails.set_defaults(run=_export)

    source = commands.add_parser("source", help="fetch upstream's source archive")
    source.add_argument("version", nargs="?", metavar="VERSION")
    source.set_defaults(run=_source)

    wheel = commands.add_parser("wheel", help="build the fork's wheel")
    wheel.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR")
    wheel.add_argument("--base", default=None, metavar="BASE", help="another wheel")
    wheel.set_defaults(run=_wheel)

    linting = commands.add_parser("lint", help="upstream's checks on the grafted files")
    linting.add_argument("base", nargs="?", metavar="BASE")
    linting.set_defaults(run=_lint)

    installed = commands.add_parser(
        "installed", help="import the vllm of this Python and list its patches"
    )
    installed.set_defaults(run=_installed)
    return parser


def _base_path(text: str) -> Path:
    if text in fetch.known_versions() and not Path(text).exists():
        return fetch.wheel(text)
    return Path(text)


def _base(series: Series, text: str) -> Base:
    return open_base(_base_path(text), series.bases)


def _list(series: Series, _: argparse.Namespace) -> None:
    for patch in series.patches:
        files = len(patch.paths())
        print(f"{patch.id}  {patch.title}  ({files} file{'s' * (files != 1)})")


def _check(series: Series, options: argparse.Namespace) -> None:
    if options.base is None:
        _check_all(series, options.page)
        return
    base = _base(series, options.base)
    for done in apply_series(series, base):
        print(f"{done.patch.id}  applies  ({_count(done)})")
    if options.alone:
        for patch in series.on(base.version).patches:
            apply_series(series.closure(patch), base)
            print(
                f"{patch.id}  applies with only {', '.join(patch.requires) or 'itself'}"
            )


def _check_all(series: Series, into_page: bool) -> None:
    told = {}
    for version in series.bases:
        base = open_base(fetch.source_archive(version), series.bases)
        told[version] = bases.states(series, base)
    made = bases.page(series, told)
    if into_page:
        bases.PAGE.write_text(bases.filled(bases.PAGE.read_text(), made))
    print(made, end="")


def _count(done: Applied) -> str:
    if not done.changes:
        return "only files that this kind of base does not have"
    new = sum(change.before is None for change in done.changes)
    return f"{len(done.changes) - new} changed, {new} new"


def _diff(series: Series, options: argparse.Namespace) -> None:
    applied = apply_series(series, _base(series, options.base))
    if options.patch is None:
        changes = list(final(applied).values())
    else:
        name = _patch(series, options.patch).id
        changes = [c for done in applied if done.patch.id == name for c in done.changes]
    sys.stdout.write(diff.unified(changes))


def _apply(series: Series, options: argparse.Namespace) -> None:
    for done in apply_to_checkout(series, options.checkout):
        print(f"{done.patch.id}  committed  ({_count(done)})")


def _export(series: Series, options: argparse.Namespace) -> None:
    base = open_base(_source_path(options.base), series.bases)
    if options.patch is not None:
        series = series.closure(_patch(series, options.patch))
    folder = Path(options.base) if Path(options.base).is_dir() else Path.cwd()
    for row in export.export(series, base, export.identity(folder), options.out):
        print(f"{row['file']}  ({row['changed_lines']} changed lines)")


def _source(series: Series, options: argparse.Namespace) -> None:
    print(fetch.source_archive(options.version or series.bases[0]))


def _source_path(text: str) -> Path:
    if text in fetch.known_versions() and not Path(text).exists():
        return fetch.source_archive(text)
    return Path(text)


def _patch(series: Series, name: str) -> Patch:
    for patch in series.patches:
        if patch.id == name:
            return patch
    raise Refusal("there is no such patch", patch=name)


def _lint(series: Series, options: argparse.Namespace) -> None:
    base = open_base(_source_path(options.base or series.bases[0]), series.bases)
    applied = apply_series(series, base, notices=False)
    export.measured(base, applied)
    changed = final(applied)
    found = lint.findings(base, changed.values())
    if found:
        raise Refusal("\n".join(["the graft brings new findings:", *found]))
    print(f"{len(changed)} grafted files: nothing new from upstream's checks")


def _installed(series: Series, _: argparse.Namespace) -> None:
    distribution = importlib.metadata.distribution("vllm")
    listing = distribution.read_text(PATCH_LIST)
    if listing is None:
        raise Refusal(f"vllm {distribution.version} carries no series")
    vllm = importlib.import_module("vllm")
    print(f"vllm {vllm.__version__} from {Path(str(vllm.__file__)).parent}")
    for row in json.loads(listing):
        print(f"{row['id']}  {row['title']}")


def _wheel(series: Series, options: argparse.Namespace) -> None:
    print(make_wheel(series, options.out, options.base))


def make_wheel(series: Series, out: Path, base: str | None = None) -> Path:
    """Fetch, graft, compile and write the wheel: what every build entry calls."""
    path = _base_path(base or series.bases[0])
    if path.suffix != ".whl":
        raise Refusal("a wheel is made from a wheel", file=str(path))
    applied = apply_series(series, open_base(path, series.bases))
    return build_wheel(series, path, applied, extension.compile_extension(series), out)
