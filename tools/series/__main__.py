# SPDX-License-Identifier: Apache-2.0
import sys

try:
    from tools.series.cli import main
except ModuleNotFoundError as error:
    if error.name != "libcst":
        raise
    # `pip install .` builds with it and does not leave it behind.
    sys.exit("series: libcst is missing: pip install -r requirements/build.txt")

if __name__ == "__main__":
    sys.exit(main())
