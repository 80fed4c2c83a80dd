"""`python -m weft`: the command without an installed script."""

from __future__ import annotations

from weft.cli import main

main()
