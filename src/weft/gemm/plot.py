"""The plot of a search: estimate and time of every configuration in the order in which the model ranks them. SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from weft.gemm.search import Outcome, SearchResult

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 46, 52
MEASURED, MODELLED, BEST, LIBRARY, REFUSED = "#0072b2", "#999999", "#000000", "#d55e00", "#cc79a7"
"""Okabe and Ito's colours; each mark has a shape of its own too."""


def plot(result: SearchResult) -> str:
    """One SVG document that needs nothing else."""
    own, library = result.outcomes, result.library_us
    times = [x for x in (library, *(y for o in own for y in (o.modelled_us, o.median_us))) if 0 < x < math.inf]
    low, high = (min(times) / 1.1, max(times) * 1.1) if times else (1.0, 10.0)

    def x(i: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (i + 0.5) / max(1, len(own))

    def y(us: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(us / low) / math.log(high / low)

    head = f"{result.gemm.name} on {result.device}"
    told = f"{len(own)} of {result.feasible} configurations" + (
        f", best {result.best.median_us:.2f} µs, {result.tflops:.0f} TFLOP/s"
        if result.best is not None and result.measured
        else ""
    )
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        f' role="img" aria-label="{escape(f"{head}: {told}", quote=True)}" font-family="sans-serif" font-size="12">'
    )
    parts = [
        start,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 18, head, weight="bold"),
        _text(LEFT, 34, told),
    ]
    for us in _ticks(low, high):
        parts.append(_line(LEFT, y(us), WIDTH - RIGHT, y(us), "#dddddd"))
        parts.append(_text(LEFT - 6, y(us) + 4, f"{us:g}", anchor="end"))
    parts.append(_text(16, TOP - 8, "µs"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 30, "configurations, the most promising first", anchor="middle"))
    if library < math.inf:
        parts.append(_line(LEFT, y(library), WIDTH - RIGHT, y(library), LIBRARY, dash="6 4"))
    parts += _steps(own, x, y)
    for i, o in enumerate(own):
        parts.append(_mark(o, x(i), _place(y, o.modelled_us), _place(y, o.median_us)))
    parts += _legend(result, library < math.inf)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place(y: Callable[[float], float], us: float) -> float | None:
    return y(us) if 0 < us < math.inf else None


def _mark(o: Outcome, x: float, modelled: float | None, measured: float | None) -> str:
    """Estimate and time of one configuration, or a cross where it was rejected; its text on hovering."""
    told = f"{o.schedule}: {o.state}, model {o.modelled_us:.2f} µs" + (f", {o.median_us:.2f} µs" if measured else "")
    title = f"<title>{escape(told)}</title>"
    bar = _line(x - 3, modelled, x + 3, modelled, MODELLED, width=2) if modelled is not None else ""
    if measured is not None:
        return f'<g>{title}{bar}<circle cx="{x:.1f}" cy="{measured:.1f}" r="3.5" fill="{MEASURED}"/></g>'
    if o.state in ("not tried", "compiled"):
        return f"<g>{title}{bar}</g>"
    at = modelled if modelled is not None else HEIGHT - BOTTOM - 6.0
    cross = "".join(_line(x - 4, at - 4 * up, x + 4, at + 4 * up, REFUSED, width=2) for up in (1, -1))
    return f"<g>{title}{bar}{cross}</g>"


def _steps(own: Sequence[Outcome], x: Callable[[int], float], y: Callable[[float], float]) -> list[str]:
    """The best time so far."""
    best = math.inf
    points: list[str] = []
    for i, o in enumerate(own):
        if o.median_us < best:
            if points:
                points.append(f"{x(i):.1f},{y(best):.1f}")
            best = o.median_us
            points.append(f"{x(i):.1f},{y(best):.1f}")
    if not points:
        return []
    points.append(f"{x(len(own) - 1):.1f},{y(best):.1f}")
    return [f'<polyline points="{" ".join(points)}" fill="none" stroke="{BEST}" stroke-width="1.5"/>']


def _legend(result: SearchResult, library: bool) -> list[str]:
    parts = [("estimate", MODELLED)]
    if result.measured:
        parts += [("measured", MEASURED), ("best so far", BEST)]
    parts += [("rejected", REFUSED)] + ([("library", LIBRARY)] if library else [])
    return [
        f'<rect x="{LEFT + 110 * i}" y="{HEIGHT - 17}" width="10" height="10" fill="{colour}"/>'
        + _text(LEFT + 110 * i + 15, HEIGHT - 8, name)
        for i, (name, colour) in enumerate(parts)
    ]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two times: 1, 2 and 5 times powers of ten."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
    inside = [t for t in found if low <= t <= high]
    return inside or [float(f"{math.sqrt(low * high):.2g}")]


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, *, dash: str = "", width: float = 1.0
) -> str:  # fmt: skip
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
        f' stroke-width="{width:g}"{dashes}/>'
    )
