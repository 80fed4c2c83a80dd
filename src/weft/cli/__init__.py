"""The command `weft`.

Exit codes: 0 ok, 2 usage, 3 model refused, 4 unsupported, 5 device, 70 our bug, 130 interrupted.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from weft.cli.app import run

    run()
