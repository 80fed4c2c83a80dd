"""Scheduling policies as a page: latencies against the target, p99 over load, the job's work, variants over time.

One file that fetches nothing and runs nothing; every figure that is simulated is called so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.kernels.policy_run import Comparison, PolicyRun
from weft.report.frame import asset, csp_hash, template

WIDTH, HEIGHT = 920.0, 300.0
"""Of a drawing, in its own units."""
LEFT, RIGHT, TOP, BOTTOM = 64.0, 14.0, 12.0, 40.0
STYLES = 12
"""Colours and dashes that policies have in turn."""
MOST = 24
"""Policies in a drawing."""


@dataclass(frozen=True, slots=True)
class Line:
    """One policy in a drawing."""

    name: str
    style: int
    points: str
    """Of a polyline; empty: it has single dots only."""
    dots: tuple[tuple[float, float, str], ...]
    """Place and what is said there."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart."""

    title: str
    note: str
    across: str
    up: str
    lines: tuple[Line, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    target_x: float | None
    """Where the target stands, if it is across."""
    target_y: float | None
    """The same upwards."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Values to places; logarithmic where values span decades."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool

    def at(self, value: float) -> float:
        """The place of a value; those outside stand at the end."""
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        x = math.log10(max(value, self.low)) if self.is_log else value
        share = min(1.0, max(0.0, (x - low) / (high - low)))
        return round(self.begin + share * (self.end - self.begin), 2)

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """Round values."""
        if self.is_log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            values = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
            if last - first > 2:
                values = [10.0**k for k in range(first, last + 1)]
        else:
            rough = (self.high - self.low) / 5
            ten = 10.0 ** math.floor(math.log10(rough))
            step = next(k * ten for k in (1, 2, 5, 10) if k * ten >= rough * (1 - 1e-9))
            values = [step * k for k in range(math.floor(self.low / step), math.ceil(self.high / step) + 1)]
        inside = [v for v in values if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
        return tuple((self.at(v), f"{v:g}") for v in inside)


def axis(values: Sequence[float], begin: float, end: float, *, is_log: bool) -> Axis:
    """Around all values that are finite; of none or one there is still a length."""
    found = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)]
    low, high = (min(found), max(found)) if found else (1.0, 10.0)
    if is_log:
        low, high = low / 1.1, high * 1.1
    else:
        low, high = min(low, 0.0), high * 1.05 if high > 0 else 1.0
    return Axis(low, high if high > low else low + 1.0, begin, end, is_log)


def _across(values: Sequence[float], *, is_log: bool) -> Axis:
    return axis(values, LEFT, WIDTH - RIGHT, is_log=is_log)


def _up(values: Sequence[float], *, is_log: bool) -> Axis:
    return axis(values, HEIGHT - BOTTOM, TOP, is_log=is_log)


def _points(x: Axis, y: Axis, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x.at(a):g},{y.at(b):g}" for a, b in points if math.isfinite(a) and math.isfinite(b))


def latency_cdf(runs: Sequence[PolicyRun]) -> Drawing:
    """Share of the queries that took longer, over milliseconds: the tail is what counts, so both are logarithmic."""
    target = runs[0].target_us / 1e3 if runs else math.nan
    x = _across([us / 1e3 for r in runs for us, _ in r.cdf] + [target], is_log=True)
    least = min((1 / max(r.latency.queries, 1) for r in runs), default=0.01)
    y = _up([least, 1.0], is_log=True)
    lines = tuple(
        Line(r.policy, k, _points(x, y, [(us / 1e3, max(1 - share, least)) for us, share in r.cdf]), ())
        for k, r in enumerate(runs)
    )
    note = "Share of the queries that took longer. The target holds if a line is below 0.01 where it meets the target."
    return Drawing("Latencies against the target", note, "latency, ms", "share that took longer", lines,
                   x.ticks(), y.ticks(), x.at(target) if math.isfinite(target) else None, y.at(0.01))  # fmt: skip


def p99_over_load(runs: Sequence[PolicyRun], names: Sequence[str]) -> Drawing:
    """p99 of each policy over the load; one that was run at one load is a dot."""
    target = runs[0].target_us / 1e3 if runs else math.nan
    x = _across([r.load for r in runs], is_log=False)
    y = _up([r.p99_us / 1e3 for r in runs] + [target], is_log=True)
    lines = []
    for k, name in enumerate(names):
        own = sorted((r for r in runs if r.policy == name), key=lambda r: r.load)
        dots = tuple((x.at(r.load), y.at(r.p99_us / 1e3), f"{name}, load {r.load:.2f}: p99 {r.p99_us / 1e3:.3f} ms")
                     for r in own if math.isfinite(r.p99_us))  # fmt: skip
        line = _points(x, y, [(r.load, r.p99_us / 1e3) for r in own]) if len(own) > 1 else ""
        lines.append(Line(name, k, line, dots))
    return Drawing("p99 over load", "", "load", "p99, ms", tuple(lines), x.ticks(), y.ticks(), None,
                   y.at(target) if math.isfinite(target) else None)  # fmt: skip


def work_over_latency(runs: Sequence[PolicyRun]) -> Drawing:
    """What the job gets over what the model pays: up and to the left is better."""
    target = runs[0].target_us / 1e3 if runs else math.nan
    x = _across([r.p99_us / 1e3 for r in runs] + [target], is_log=True)
    y = _up([r.be_throughput for r in runs], is_log=False)
    lines = tuple(
        Line(r.policy, k, "", ((x.at(r.p99_us / 1e3), y.at(r.be_throughput),
                                f"{r.policy}: p99 {r.p99_us / 1e3:.3f} ms, best-effort {r.be_throughput:.3f}"),))
        for k, r in enumerate(runs) if math.isfinite(r.p99_us)
    )  # fmt: skip
    return Drawing("Best-effort work over latency", "Of the whole GPU. Left of the target it holds.", "p99, ms",
                   "best-effort throughput", lines, x.ticks(), y.ticks(),
                   x.at(target) if math.isfinite(target) else None, None)  # fmt: skip


def variants_over_time(runs: Sequence[PolicyRun]) -> Drawing | None:
    """Mean number of the plan variants that ran; None: no policy had several."""
    several = [(k, r) for k, r in enumerate(runs) if len(r.variants) > 2 and r.chosen]
    if not several:
        return None
    x = _across([c.begin_s for _, r in several for c in r.chosen], is_log=False)
    y = _up([float(len(r.variants) - 1) for _, r in several], is_log=False)
    lines = tuple(Line(r.policy, k, _points(x, y, [(c.begin_s, c.mean) for c in r.chosen]), ()) for k, r in several)
    note = "Mean number of the variant by which queries ran; 0 is the plan by itself."
    return Drawing("Plan variants over time", note, "time, s", "variant", lines, x.ticks(), y.ticks(), None, None)


def _of_model(model: str, runs: Sequence[PolicyRun], over_load: Sequence[PolicyRun], *, several: bool) -> list[Drawing]:
    """The charts of one model, which say so where there are several."""
    own = [r for r in runs if r.model == model]
    names = [r.policy for r in own]
    further = [r for r in over_load if r.model == model and r.policy in names]
    found = [
        latency_cdf(own), p99_over_load([*own, *further], names), work_over_latency(own), variants_over_time(own),
    ]  # fmt: skip
    drawings = [d for d in found if d is not None]
    return [replace(d, title=f"{d.title}: {model}") for d in drawings] if several else drawings


def render_policies(found: Comparison) -> str:
    """The page as one HTML file that fetches nothing and runs nothing.

    Raises:
        ValueError: a comparison without a run.
    """
    if not found.runs:
        raise ValueError("a comparison without a run")
    models = list(dict.fromkeys(r.model for r in found.runs))
    names = list(dict.fromkeys(r.policy for r in found.runs))
    runs = [r for r in found.runs if r.policy in names[:MOST]]
    drawings = [d for m in models for d in _of_model(m, runs, found.over_load, several=len(models) > 1)]
    style = asset("report.css") + asset("policies.css")
    return template("policies.jinja").render(
        style=style, style_hash=csp_hash(style), found=found, runs=runs, left_out=max(0, len(names) - MOST),
        firsts=[r for r in runs if r.policy == names[0]], job=next((r.job for r in runs if r.job), ""),
        simulated=any(r.simulated for r in runs), drawings=drawings, styles=STYLES, width=WIDTH, height=HEIGHT,
        left=LEFT, right=WIDTH - RIGHT, top=TOP, bottom=HEIGHT - BOTTOM,
    )  # fmt: skip
