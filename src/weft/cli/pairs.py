"""`weft pairs`: what the tuning database knows of pairs of kernels that share multiprocessors."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weft.cli.show import Screen, plain, visible, writing
from weft.errors import ArtifactError
from weft.options import Options

if TYPE_CHECKING:
    from weft.kernels.pairs import PairSummary
    from weft.kernels.sm_timeline import SmTimeline

_MOST_BYTES = 64 << 20
"""Of a file of records."""


def pairs_command(
    lc: Annotated[str, typer.Option(help="only latency-critical kernels with this in their name")] = "",
    be: Annotated[str, typer.Option(help="only best-effort jobs with this in their name")] = "",
    gpu: Annotated[str, typer.Option(help="only GPUs with this in their name")] = "",
    kept: Annotated[bool, typer.Option("--kept", help="leave out pairs that are not fused")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="also earlier versions: of sources, drivers, and what measures")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="also write the matrix as an HTML file")] = None,
    add: Annotated[Path | None, typer.Option(help="first take over records that --export wrote elsewhere")] = None,
    export: Annotated[Path | None, typer.Option(help="also write the records, as lines of JSON")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="first take over when the roles of a pair ran, a JSON file recorded on a GPU")
    ] = None,
    format: Annotated[Literal["text", "json"], typer.Option("--format", help="text for people, json for programs")] = (
        "text"
    ),
) -> None:
    """List measured pairs of a latency-critical kernel and a best-effort job in its thread blocks.

    Of each pair at most four kernels are kept, by what they cost and gain; that it is not fused is always possible.
    Example: weft pairs --kept --report pairs.html.
    """
    from weft.kernels.pairs import geometric_mean
    from weft.report import render_pairs
    from weft.tune import pairs
    from weft.tune.store import Database

    screen = Screen(format)
    with Database.open(Options.from_environment(os.environ).cache) as database:
        if add is not None:
            pairs.keep(database, pairs.read_rows(_read(add)))
        if timeline is not None:
            pairs.keep_timeline(database, _timeline(timeline))
        drawn = [t for t in pairs.timelines(database) if lc in t.lc and be in t.be and gpu.lower() in t.gpu.lower()]
        records = [r for r in pairs.known(database) if lc in r.lc and be in r.be and gpu.lower() in r.key.gpu.lower()]
        problems = list(database.problems)
    for problem in problems:
        screen.err.print(plain(problem, 400))
    found = [s for s in pairs.summed_up(records, all_versions=every) if s.kept or not kept]
    if export is not None:
        _write(export, pairs.write_rows(records))
    if report is not None:
        _write(report, render_pairs(pairs.newest(found), drawn))
    if screen.json:
        screen.data({"pairs": [_data(s) for s in found], "geometric_mean": geometric_mean(tuple(found))})
        return
    _show(screen, found)


def _timeline(path: Path) -> SmTimeline:
    from weft.kernels.sm_timeline import timeline_from_json

    try:
        return timeline_from_json(json.loads(_read(path)))
    except (ValueError, RecursionError):
        raise ArtifactError(
            where=visible(path.name), problem="no JSON", remedy="give what `benchmarks.pair_timeline` wrote"
        ) from None


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ArtifactError(
                where=visible(path.name), problem=f"more than {_MOST_BYTES >> 20} MiB", remedy="export fewer pairs"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"it cannot be read: {getattr(error, 'strerror', None) or 'no text in UTF-8'}"
        raise ArtifactError(
            where=visible(path.name), problem=problem, remedy="give what `weft pairs --export` wrote"
        ) from None


def _write(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text, encoding="utf-8")


def _data(s: PairSummary) -> dict[str, object]:
    from weft.kernels.pairs import record_to_json

    return {
        "lc": s.lc, "be": s.be, "gpu": s.gpu, "driver": s.driver, "kept": s.kept, "ratio": s.ratio,
        "measured": s.measured, "declined": s.declined, "reason": s.reason,
        "front": [record_to_json(p) for p in s.front],
    }  # fmt: skip


def _show(screen: Screen, found: Sequence[PairSummary]) -> None:
    from weft.kernels.pairs import geometric_mean

    if not found:
        screen.out.print("no pairs in the tuning database")
        return
    for gpu, driver in dict.fromkeys((s.gpu, s.driver) for s in found):
        here = [s for s in found if (s.gpu, s.driver) == (gpu, driver)]
        rows = [
            [
                f"{plain(s.lc, 80)} + {plain(s.be, 40)}",
                f"{s.ratio:.3f}",
                "yes" if s.kept else "no",
                f"{s.measured}+{s.declined}",
                " ".join(f"{p.slowdown:.2f}/{p.fraction:.2f}" for p in s.front) or plain(s.reason, 60),
            ]
            for s in here
        ]
        head = ["pair", "ratio", "kept", "kernels", "costs/gains, or why not"]
        screen.table(f"{plain(gpu, 60)}, driver {plain(driver, 40)}", head, rows)
        mean = geometric_mean(tuple(here))
        screen.out.print(f"{sum(s.kept for s in here)} of {len(here)} pairs kept, geometric mean {mean:.3f}\n")
