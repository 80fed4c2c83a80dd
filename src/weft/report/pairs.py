"""Pairs of kernels as a page: a matrix of LC by BE for each GPU, what is kept, timelines of roles. No script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.kernels.pairs import PairSummary, geometric_mean
from weft.kernels.sm_timeline import RoleSpan, SmTimeline
from weft.report.frame import asset, csp_hash, template
from weft.report.text import microseconds

SHADES = (1.0, 1.1, 1.2, 1.3, 1.5)
"""Ratios from which a kept pair has the next shade."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A pair in the matrix."""

    summary: PairSummary | None
    """None: it was not measured."""

    @property
    def shade(self) -> str:
        """Name of its style."""
        if self.summary is None:
            return "none"
        return f"kept s{sum(self.summary.ratio >= x for x in SHADES)}" if self.summary.kept else "declined"

    @property
    def title(self) -> str:
        """What is said of it besides: why not, and the figures of the best kernel."""
        return "" if self.summary is None else figures(self.summary)


@dataclass(frozen=True, slots=True)
class Row:
    """An LC kernel with all jobs."""

    lc: str
    cells: tuple[Cell, ...]
    mean: float
    """Geometric mean of what was measured; NaN: nothing was."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One GPU with one driver."""

    gpu: str
    driver: str
    jobs: tuple[str, ...]
    rows: tuple[Row, ...]
    means: tuple[float, ...]
    """Of the columns."""
    mean: float
    kept: int
    measured: int


def matrices(summaries: Sequence[PairSummary]) -> list[Matrix]:
    """One for each GPU and driver. Rows and columns are in the order in which they first come.

    Raises:
        ValueError: a pair twice.
    """
    places = dict.fromkeys((s.gpu, s.driver) for s in summaries)
    return [
        _matrix(gpu, driver, [s for s in summaries if (s.gpu, s.driver) == (gpu, driver)]) for gpu, driver in places
    ]


def _matrix(gpu: str, driver: str, of: Sequence[PairSummary]) -> Matrix:
    at = {(s.lc, s.be): s for s in of}
    if len(at) < len(of):
        raise ValueError(f"a pair twice on {gpu} with driver {driver}")
    jobs = tuple(dict.fromkeys(s.be for s in of))
    rows = tuple(
        Row(lc, tuple(Cell(at.get((lc, be))) for be in jobs), geometric_mean(tuple(s for s in of if s.lc == lc)))
        for lc in dict.fromkeys(s.lc for s in of)
    )
    means = tuple(geometric_mean(tuple(s for s in of if s.be == be)) for be in jobs)
    return Matrix(gpu, driver, jobs, rows, means, geometric_mean(tuple(of)), sum(s.kept for s in of), len(of))


def figures(summary: PairSummary) -> str:
    """Why a pair is not fused; what its best kernel costs and gains, and the time of the best peer."""
    said = [summary.reason] if summary.reason else []
    best = summary.best
    if best is not None and math.isfinite(best.lc_us + best.be_us):
        name, us = best.best_peer
        said.append(f"best kernel: {best.ratio:.3f} of {name or 'a peer'} ({microseconds(us)})")
        said.append(f"s {best.slowdown:.3f}, f {best.fraction:.3f}")
        said.append(f"alone: LC {microseconds(best.lc_us)}, BE {microseconds(best.be_us)}")
    return "; ".join(said)


WIDTH = 1000.0
"""Of a drawing, in its own units."""
LEFT = 70.0
"""Where time begins: the names of lanes stand before it."""
LANE = 18.0
MOST_DRAWN = 4000
"""Spans of a drawing."""
_MOST_TICKS = 10


@dataclass(frozen=True, slots=True)
class Bar:
    """A run of a role, in units of the drawing."""

    x: float
    y: float
    width: float
    best_effort: bool
    other: bool
    """Every other block, so that neighbours differ."""
    title: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """A timeline as a drawing."""

    timeline: SmTimeline
    lanes: tuple[tuple[str, float], ...]
    """Name and height of each."""
    bars: tuple[Bar, ...]
    ticks: tuple[tuple[str, float], ...]
    """Microseconds and place of each."""
    height: float
    lc_share: float
    """Part of the time in which LC ran."""
    be_share: float
    left_out: int
    """Spans that are not drawn."""


def drawn(timeline: SmTimeline) -> Drawn:
    """Lanes of LC first, then of each BE role; runs that overlap have lanes of their own."""
    shown = timeline.spans[:MOST_DRAWN]
    us = max((s.end_us for s in shown), default=0.0) or 1.0
    scale = (WIDTH - LEFT - 10.0) / us
    lanes: list[tuple[str, float]] = []
    bars: list[Bar] = []
    for role in sorted({s.role for s in shown}):
        ends: list[float] = []
        for number, s in enumerate(s for s in shown if s.role == role):
            row = next((k for k, end in enumerate(ends) if end <= s.begin_us), len(ends))
            ends[row:] = [s.end_us, *ends[row + 1 :]]
            y = LANE * (len(lanes) + row)
            bars.append(
                Bar(
                    round(LEFT + s.begin_us * scale, 2),
                    y,
                    round(max(0.5, (s.end_us - s.begin_us) * scale), 2),
                    role > 0,
                    bool(number % 2),
                    _run(s),
                )
            )
        name = f"BE {role}" if role else "LC"
        lanes += [(name if k == 0 else "", LANE * (len(lanes) + k)) for k in range(len(ends))]
    step = _step(us)
    ticks = tuple((f"{k * step:g}", round(LEFT + k * step * scale, 2)) for k in range(int(us / step) + 1))
    whole = timeline.us or 1.0
    return Drawn(
        timeline,
        tuple(lanes),
        tuple(bars),
        ticks,
        LANE * len(lanes),
        timeline.busy_us(best_effort=False) / whole,
        timeline.busy_us(best_effort=True) / whole,
        len(timeline.spans) - len(shown),
    )


def _run(s: RoleSpan) -> str:
    what = f"BE role {s.role}, stage {s.stage}, block {s.block}" if s.role else "LC"
    return f"{what}, CTA {s.cta}: {s.begin_us:.2f} to {s.end_us:.2f} µs ({s.end_us - s.begin_us:.2f} µs)"


def _step(us: float) -> float:
    """A round number of microseconds, of which at most ten are in the drawing."""
    least = us / _MOST_TICKS
    ten = 10.0 ** math.floor(math.log10(least))
    return next(k * ten for k in (1, 2, 5, 10) if k * ten >= least * (1 - 1e-9))


def sections(summaries: Sequence[PairSummary], timelines: Sequence[SmTimeline] = ()) -> str:
    """The parts of a page, which has the styles of `report.css` and `pairs.css`.

    Raises:
        ValueError: a pair twice on one GPU.
    """
    return template("pairs_sections.jinja").render(
        matrices=matrices(summaries), summaries=list(summaries), timelines=[drawn(t) for t in timelines]
    )


def render_pairs(summaries: Sequence[PairSummary], timelines: Sequence[SmTimeline] = ()) -> str:
    """The page as one HTML file that fetches nothing and runs nothing.

    Raises:
        ValueError: a pair twice on one GPU.
    """
    style = asset("report.css") + asset("pairs.css")
    return template("pairs.jinja").render(
        style=style, style_hash=csp_hash(style), sections=sections(summaries, timelines)
    )
