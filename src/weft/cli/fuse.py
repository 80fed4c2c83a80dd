"""`weft fuse`: two kernels in one, compiled without a GPU, with a program that proves and times it."""

from __future__ import annotations

import os
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from weft.cli.show import Screen, plain, print_pairs
from weft.errors import OptionError
from weft.options import Options

if TYPE_CHECKING:
    from weft.colocate.fuse import Pair

_MOST_CHANGE = 10_000


def fuse_command(
    kernels: Annotated[
        list[Path],
        typer.Argument(
            metavar="LC BE [BE ...]", help="kernel.toml of the latency-critical kernel, then of each best-effort stage"
        ),
    ],
    ratio: Annotated[
        float, typer.Option(help="best-effort blocks that a launch may draw, over those of the whole job")
    ] = 1.0,
    output: Annotated[Path, typer.Option("-o", "--output", help="folder of the result")] = Path("fused"),
    changes: Annotated[
        list[str],
        typer.Option("--set", metavar="SIDE.KEY=VALUE", help="over what a file says, e.g. be0.grid=[64,1,1]"),
    ] = [],  # noqa: B006
    small: Annotated[bool, typer.Option("--small", help="the smaller launches that the files have for tests")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="verify and time the shapes on this machine's GPU, and take the best")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(help="seconds of a search, after which no measurement is begun [default: 120]")
    ] = None,
    format: Annotated[Literal["text", "json"], typer.Option("--format", help="text for people, json for programs")] = (
        "text"
    ),
) -> None:
    """Fuse a latency-critical kernel with a best-effort job; only --search needs a GPU.

    Each kernel is a .cu file described by a kernel.toml, or a product by `product = "MNK=4096"` (docs/fuse.md). The
    folder holds the fused source, its parameters, all cubins, and test.cpp: on a GPU it compares every bit, and times.
    Example: weft fuse product.toml mriq/kernel.toml --ratio 0.5 -o pair.
    """
    from weft.colocate.fuse import fuse_pair, parameters, write

    screen = Screen(format)
    began = time.perf_counter()
    if budget is not None and not search:
        raise OptionError(option="--budget", problem="only a search has one: give --search too")
    if search:
        pair = _searched(screen, kernels, ratio, small, _changes(changes), budget)
    else:
        pair = fuse_pair(kernels[0], kernels[1:], ratio=ratio, small=small, changes=_changes(changes))
    write(pair, output)
    seconds = time.perf_counter() - began
    if screen.json:
        screen.data(parameters(pair) | {"folder": str(output), "total_seconds": round(seconds, 3)})
        return
    _show(screen, pair, output, seconds)


def _searched(
    screen: Screen,
    kernels: list[Path],
    ratio: float,
    small: bool,
    changes: dict[str, dict[str, object]],
    budget: float | None,
) -> Pair:
    """The pair in the shape that measurements chose; they are kept in the tuning database."""
    from weft.colocate.search import SECONDS, search_pair
    from weft.tune.store import Database

    with Database.open(Options.from_environment(os.environ).cache) as database:
        pair = search_pair(
            kernels[0], kernels[1:], database=database, ratio=ratio, small=small, changes=changes,
            budget_s=SECONDS if budget is None else budget,
        )  # fmt: skip
        for problem in database.problems:
            screen.err.print(plain(problem, 400))
    return pair


def _changes(texts: list[str]) -> dict[str, dict[str, object]]:
    """`be0.grid=[1]` -> {"be0": {"grid": [1]}}; values are TOML."""
    found: dict[str, dict[str, object]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        side, dot, inner = key.strip().partition(".")
        if not equals or not dot or not inner or len(text) > _MOST_CHANGE:
            raise OptionError(option="--set", problem=f"{plain(text)!r} is not SIDE.KEY=VALUE")
        try:
            found.setdefault(side, {})[inner] = tomllib.loads(f"value = {value}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            raise OptionError(
                option="--set", problem=f"{plain(value)!r} is no value of TOML: a text stands in quotes"
            ) from None
    return found


def _show(screen: Screen, pair: Pair, output: Path, seconds: float) -> None:
    """One pair for people."""
    from weft.colocate.fuse import resources

    f = pair.fused
    facts = {
        "latency-critical": f"{plain(pair.sides[0].title, 200)}, {f.lc.threads} threads",
        "best-effort": ", ".join(plain(s.title, 200) for s in pair.sides[1:])
        + f", {len(f.be)} roles of {f.be[0].threads} threads",
        "launch": f"{f.grid[0]} x {f.grid[1]} x {f.grid[2]} CTAs of {f.threads} threads, {f.shared_bytes} bytes shared",
        "ratio": f"{pair.ratio:g}: up to {pair.limit} of {sum(f.stages)} best-effort blocks in a launch",
        "folder": plain(str(output), 400),
        "time": f"{seconds:.2f} s",
    }
    if pair.measured is not None:
        m = pair.measured
        facts["measured"] = (
            f"{m['ratio']} of the best peer ({m['peer']}) on {plain(str(m['gpu']), 60)}; in a launch "
            f"{m['fraction']} of the latency-critical kernel's time gained, {m['slowdown']} lost"
        )
        cut = "" if m["complete"] else "; the budget ended: the same command goes on"
        facts["search"] = f"{m['measured']} kernels measured, {m['declined']} declined{cut}"
    for side in pair.sides:
        for note in side.notes:
            facts[f"note ({side.name})"] = plain(note, 200)
    print_pairs(screen, facts)
    rows = [
        [str(r["kernel"]), str(r["arch"]), str(r["registers"]), f"{r['spilled_bytes']} bytes",
         f"{r['shared_bytes']} bytes", str(r["barriers"])]
        for r in resources(pair)
    ]  # fmt: skip
    rows += [["fused", arch, "-", "declined", plain(reason, 200), "-"] for arch, reason in pair.declined.items()]
    screen.out.print()
    screen.table("", ["kernel", "architecture", "registers", "spilled", "shared memory", "barriers"], rows)
    screen.out.print(
        "\ng++ -std=c++17 -O2 test.cpp -o test -ldl && ./test   # in the folder, on a machine with the GPU"
    )
