# SPDX-License-Identifier: Apache-2.0
"""A signpost for tools that look for ``setup.py``.

``pip install .`` does not run it: ``pyproject.toml`` names ``tools.series.backend``,
which fetches the released wheel, grafts the series onto it and compiles ``csrc/``.
``python setup.py`` says the same and stops, because setuptools would build a package of
fragments that cannot be imported.
"""

import sys

if __name__ == "__main__":
    sys.exit(
        "setup.py builds nothing here. Use `pip install .` to install the fork, or "
        "`python -m tools.series wheel` to build its wheel."
    )
