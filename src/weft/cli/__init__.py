"""The command `weft`.

Exit codes: 0 ok, 2 usage, 3 model refused, 4 unsupported, 5 device, 70 our bug, 130 interrupted.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from weft.cli.app import run

        run()
    except KeyboardInterrupt:  # while this was being loaded, which takes seconds on a busy machine
        print("weft: interrupted", file=sys.stderr)
        sys.exit(130)
