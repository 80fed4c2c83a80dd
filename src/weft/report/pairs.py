"""Pairs of kernels as a page: a matrix of LC by BE for each GPU, and what is kept of each pair. No script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.kernels.pairs import PairSummary, geometric_mean
from weft.report.page import asset, csp_hash, template

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


def render_pairs(summaries: Sequence[PairSummary]) -> str:
    """The page as one HTML file that fetches nothing and runs nothing.

    Raises:
        ValueError: a pair twice on one GPU.
    """
    style = asset("report.css") + asset("pairs.css")
    return template("pairs.jinja").render(
        style=style, style_hash=csp_hash(style), matrices=matrices(summaries), summaries=list(summaries)
    )
