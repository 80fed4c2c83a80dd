"""Commands that are loaded when they are called: help, completion and a look at a database need no framework."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

LATER: dict[str, tuple[str, str, str]] = {
    "mlp": ("weft.cli.mlp", "mlp_command", "Time a fully connected network as one kernel against its peers."),
    "gemm": (
        "weft.cli.gemm",
        "gemm_command",
        "Search the fastest kernel of a product of matrices, with what follows it, and write a folder about it.",
    ),
    "fuse": (
        "weft.cli.fuse",
        "fuse_command",
        "Fuse a latency-critical kernel with a best-effort job; only --search needs a GPU.",
    ),
    "serve": (
        "weft.cli.serve",
        "serve_command",
        "Serve saved plans over HTTP and gRPC (Open Inference Protocol).",
    ),
    "colocate": (
        "weft.cli.colocate",
        "app",
        "Two jobs on one GPU under a scheduling policy: on a GPU, or simulated from recorded samples.",
    ),
    "diff": (
        "weft.cli.diff",
        "diff_command",
        "Compare what each kernel of a plan stores with the framework's values, in float64.",
    ),
    "pairs": (
        "weft.cli.pairs",
        "pairs_command",
        "List measured pairs of a latency-critical kernel and a best-effort job in its thread blocks.",
    ),
    "repro": (
        "weft.cli.repro",
        "repro_command",
        "Build and run a plan that was refused: does it still fail, and which kernel is wrong? Exit code 1 if it does.",
    ),
}
"""By name: module, function or group of commands, and the first line of what it says of itself."""


class LaterGroup(TyperGroup):
    """The commands of `weft`: those of `LATER`, which a list of all names without loading them, before the others."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """All names."""
        return [*LATER, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; None: there is none."""
        if cmd_name not in LATER:
            return super().get_command(ctx, cmd_name)
        module, function, short = LATER[cmd_name]
        if self._listing:
            return _command(cmd_name, _nothing, short)
        found = getattr(importlib.import_module(module), function)
        return typer.main.get_command(found) if isinstance(found, typer.Typer) else _command(cmd_name, found)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Names and first lines."""
        with self._lists():
            super().format_commands(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Names that begin so."""
        with self._lists():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _lists(self) -> Iterator[None]:
        self._listing = True
        try:
            yield
        finally:
            self._listing = False


def _nothing() -> None: ...


def _command(name: str, function: Any, text: str | None = None) -> Any:
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name, help=text)(function)
    return typer.main.get_command(alone)
