"""What the command prints: tables for people, JSON for programs. Names from models are escaped here."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ArtifactError

if TYPE_CHECKING:
    from weft.kernels.record import CompileRecord

REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the order of the text around them, so that a name could show as another."""


def visible(text: str, limit: int = 64) -> str:
    """A name from a model, fit for a terminal: control, ANSI and bidi characters become `?`, the rest is cut."""
    kept = "".join(c if c.isprintable() and c not in REORDERING else "?" for c in text[: limit + 1])
    return kept if len(text) <= limit else kept[: limit - 1] + "…"


def plain(text: str, limit: int = 64) -> str:
    """`visible`, and safe from the markup of `Screen`."""
    from rich.markup import escape

    return escape(visible(text, limit))


class Screen:
    """Where results go: standard output, as text or JSON; progress goes to standard error."""

    def __init__(self, form: str, *, quiet: bool = False) -> None:
        from rich.console import Console

        self.json = form == "json"
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)
        self._quiet = quiet
        self._start = time.monotonic()
        self._last = 0.0
        self._live = sys.stderr.isatty()

    def progress(self, stage: str, line: str) -> None:
        """One line of progress: at most four a second on a terminal, one per 10 s of a stage elsewhere."""
        now = time.monotonic()
        if self._quiet or not line:
            return
        if self._live:
            if now - self._last > 0.25:
                self.err.print(f"\r\x1b[2K{stage:<12} {plain(line, 150)}", end="")
                self._last = now
        elif now - self._last > 10 or stage != "measure":
            self.err.print(f"[{now - self._start:6.1f} s] {stage:<12} {plain(line, 150)}")
            self._last = now

    def done(self) -> None:
        """End the progress line."""
        if self._live and not self._quiet:
            self.err.print("\r\x1b[2K", end="")

    def data(self, value: object) -> None:
        """Print one JSON value; numbers that JSON lacks become null."""
        print(json.dumps(_standard(value), indent=2, sort_keys=True, allow_nan=False))

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; the first column is text, the others are numbers."""
        from rich.table import Table

        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for position, name in enumerate(head):
            table.add_column(name, justify="left" if position == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.out.print(table)


def _standard(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _standard(v) for k, v in value.items()}
    return [_standard(v) for v in value] if isinstance(value, list | tuple) else value


def memory(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def microseconds(value: float) -> str:
    """A time for people."""
    if value != value or value == float("inf"):
        return "-"
    return f"{value / 1e3:.3f} ms" if value >= 1000 else f"{value:.1f} us"


def ratio(value: float) -> str:
    """A ratio for people, never rounded to nothing."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever keeps a result from being written is told as an error of ours."""
    try:
        yield
    except OSError as error:
        raise ArtifactError(
            where=visible(path.name),
            problem=f"it cannot be written: {error.strerror}",
            remedy="choose another place",
        ) from None


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for `--format json`: an error is told before a command has read it."""
    asked = [
        k for k, x in enumerate(arguments) if x == "--format=json" or [*arguments[k : k + 2]] == ["--format", "json"]
    ]
    return bool(asked) and "--" not in arguments[: asked[-1]]


def print_error(code: str, message: str, todo: str) -> None:
    """An error as one JSON object on standard output, for programs."""
    shown = {"code": code, "message": visible(message, 400), "todo": visible(todo, 400)}
    print(json.dumps({"error": shown}, indent=2, sort_keys=True))


def summary(screen: Screen, record: CompileRecord) -> None:
    """What a compilation found and chose."""
    from weft.kernels.dataclass_json import to_json

    if screen.json:
        screen.data(to_json(record))
        return
    r = record
    stages = [f"{plain(s.name)} {s.seconds:.1f} s" for s in r.stages if s.seconds >= 0.05]
    print_pairs(
        screen,
        {
            "model": plain(r.model),
            "operators": str(r.operators),
            "primitives": f"{r.primitives_before} after fission, {r.primitives} after the clean-ups",
            "candidates": f"{r.candidates_raw} sets visited, {r.candidates} candidates, {r.problems} distinct problems",
            "pruned": f"{r.pruned} problems never measured" + pruned_because(r),
            "measured": f"{r.measured} kernels now, {r.reused} known from the database",
            "rejected": ", ".join(f"{n} {plain(k, 90)}" for k, n in r.rejected_kernels[:8]) or "none",
            "fallbacks": ", ".join(f"{n} {plain(op)} ({plain(why, 90)})" for op, why, n in r.opaque) or "none",
            "solver": f"{plain(r.solver_status) if r.is_tuned else 'ran'} in {r.solver_seconds:.2f} s, {r.optimality}",
            "verdict": plain(r.verdict, 200),
            "plan": plain(next((s.detail for s in r.stages[-1:] if s.name == "link"), "")) or "made now",
            "kernels": f"{len(r.steps)} for {r.operators} operators",
            **({"of an SM": f"at most {plain(r.sm_budget, 200)}"} if r.sm_budget else {}),
            "memory": f"arena {memory(r.arena_bytes)}, largest live set {memory(r.live_bytes)}",
            "predicted": microseconds(r.objective_us) if r.is_tuned else "-",
            "chosen": f"{plain(r.chosen)} ({microseconds(r.median_us)})",
            "time": ", ".join(stages) or "less than 0.1 s",
        },
    )
    rows = []
    for p in r.plans:
        name = plain(p.name) + (" *" if p.name == r.chosen else "")
        predicted = microseconds(p.predicted_us or float("nan"))
        verified = "yes" if p.verified else f"NO: {plain(p.note, 60)}"
        count = str(p.kernels or "-")
        rows.append([name, count, predicted, microseconds(p.median_us), verified, f"{p.worst_error:.1e}"])
    screen.out.print()
    screen.table("", ["plan", "kernels", "predicted", "measured", "verified", "error"], rows)


def pruned_because(record: CompileRecord) -> str:
    """Why problems were not measured, in brackets."""
    from weft.kernels.record import Tuning

    if record.tuning == Tuning.COMPLETE.value:
        return " (no plan would use them at their optimistic price)"
    return " (no plan wanted them so far)"


def print_pairs(screen: Screen, pairs: Mapping[str, str]) -> None:
    """`name  value` lines; nothing of none."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        screen.out.print(f"[bold]{name:<{width}}[/bold]  {value}")
