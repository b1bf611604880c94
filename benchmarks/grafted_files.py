# SPDX-License-Identifier: Apache-2.0
"""Write the Python files that the series changes, as they are after it, to a folder.

    python benchmarks/grafted_files.py FOLDER [ID...]

With patch ids only those patches and their predecessors. `moe_conversion.py --fork
FOLDER` lays the folder over a released package, so that a machine without a network
needs only these files beside it.
"""

import dataclasses
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.series import fetch  # noqa: E402
from tools.series.base import open_base  # noqa: E402
from tools.series.manifest import load  # noqa: E402
from tools.series.series import apply_series, final  # noqa: E402


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    folder, wanted = Path(sys.argv[1]), set(sys.argv[2:])
    series = load(ROOT)
    base = open_base(fetch.wheel(series.bases[0]), series.bases)
    if wanted:
        known = {patch.id: patch for patch in series.patches}
        if wanted - known.keys():
            raise SystemExit(
                f"no such patch: {', '.join(sorted(wanted - known.keys()))}"
            )
        for patch_id in sorted(wanted):
            wanted |= {p.id for p in series.closure(known[patch_id]).patches}
        kept = tuple(p for p in series.patches if p.id in wanted)
        series = dataclasses.replace(series, patches=kept)
    shutil.rmtree(folder, ignore_errors=True)
    for path, change in final(apply_series(series, base)).items():
        if path.startswith("vllm/") and path.endswith(".py"):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(change.after)
            print(path)


if __name__ == "__main__":
    main()
