"""`weft repro`: a plan that was refused, built and run again."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from weft.cli.show import Screen, plain
from weft.options import Options


def repro_command(
    bundle: Annotated[Path, typer.Argument(help="folder that the warning of a refused plan names")],
    trust: Annotated[str | None, typer.Option(help="digest of a bundle that somebody else wrote")] = None,
    format: Annotated[Literal["text", "json"], typer.Option("--format", help="text for people, json for programs")] = (
        "text"
    ),
) -> None:
    """Build and run a plan that was refused: does it still fail, and which kernel is wrong? Exit code 1 if it does.

    Example: weft repro ~/.cache/weft/repro/1f3a5c7e9b2d4f60.
    """
    from weft.pipeline.repro import replay

    screen = Screen(format)
    found = replay(bundle, Options.from_environment(os.environ), trust=trust)
    wrong = found.culprit
    if screen.json:
        screen.data(
            {
                "then": found.then, "fails": found.fails, "whole": asdict(found.whole), "drawn": list(found.drawn),
                "kernel": None if wrong is None else wrong.step, "steps": [asdict(s) for s in found.steps],
            }
        )  # fmt: skip
    else:
        screen.out.print(f"then: {plain(found.then, 600)}")
        for what in found.drawn:
            screen.out.print(f"the {what} of then are not in the bundle: drawn anew")
        whole = "right" if found.whole.ok else f"wrong: {plain(found.whole.note, 300)}"
        screen.out.print(f"now, the whole plan of {len(found.steps)} kernels is {whole}")
        if wrong is None:
            screen.out.print("each kernel is right by itself")
        for s in (s for s in found.steps if not s.ok):
            screen.out.print(f"kernel {s.step} {plain(s.schedule, 160)} is wrong: {plain(s.note, 300)}")
            screen.out.print(f"  of {plain(', '.join(s.operators), 300)}")
    if found.fails:
        raise typer.Exit(1)
