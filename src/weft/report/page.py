"""The page: a frame with tables (autoescaped), the record as inert JSON, one style sheet and one script, both hashed.

Nothing in the page is fetched, and its content security policy forbids it: `default-src 'none'`, and only the style
sheet and script with these hashes apply. Names from the model are text everywhere: autoescape in the frame,
`textContent` in the script.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.kernels.interval import median_interval
from weft.kernels.pairs import PairSummary
from weft.kernels.record import CompileRecord, PlanRecord, StageRecord
from weft.kernels.sm_timeline import SmTimeline
from weft.report.beside import section
from weft.report.data import MAX_DRAWN, MAX_STEPS, page_data
from weft.report.frame import asset, csp_hash, template
from weft.report.pairs import sections
from weft.report.text import script_json

MAX_BYTES = 5 * 10**6
SOURCE_BUDGETS = (2_500_000, 1_000_000, 250_000, 0)
"""Characters of kernel text to keep: the first that fits the page into its limit."""

COLOURS = 8
VISIBLE = 5.0
"""Thousandths of the bar from which a stage is named beside it."""

BASELINES = ("library", "eager", "onnxruntime", "heuristic")
"""Plans that the chosen one is compared with."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan with what the page derives: the interval of its median and the place of both on a common axis."""

    plan: PlanRecord
    low: float
    high: float
    chosen: bool
    ratio: float
    """Its median over the chosen plan's."""
    left: float
    """Start of the interval in percent of the axis."""
    width: float
    middle: float


@dataclass(frozen=True, slots=True)
class StageBar:
    """A stage with its part of the bar, in thousandths."""

    stage: StageRecord
    start: float
    width: float
    colour: int


def render(
    record: CompileRecord,
    pairs: Sequence[PairSummary] = (),
    timelines: Sequence[SmTimeline] = (),
    *,
    beside: CompileRecord | None = None,
) -> str:
    """The report as one HTML file: offline, at most 5 MB for a model of 5,000 primitives.

    The texts of the cheapest kernels are left out where the page would grow beyond its limit. `pairs`, `timelines`: of
    best-effort jobs beside latency-critical kernels on the model's GPU. `beside`: another plan of the model, compared
    kernel by kernel.
    """
    page = ""
    shared = sections(pairs, timelines) if pairs or timelines else ""
    compared = section(record, beside) if beside is not None else ""
    for budget in SOURCE_BUDGETS:
        page = _render(record, budget, shared, compared)
        if len(page.encode()) <= MAX_BYTES:
            break
    return page


def _render(record: CompileRecord, source_budget: int, shared: str, compared: str) -> str:
    style, script = asset("report.css") + (asset("pairs.css") if shared else ""), asset("report.js")
    rows = plan_rows(record)
    chosen = next((r for r in rows if r.chosen), None)
    return template("report.jinja").render(
        r=record,
        style=style,
        script=script,
        style_hash=csp_hash(style),
        script_hash=csp_hash(script),
        data=script_json(page_data(record, source_budget)),
        plans=rows,
        chosen=chosen,
        baselines=[r for r in rows if r.plan.name in BASELINES and not r.chosen and math.isfinite(r.ratio)],
        stages=stage_bars(record.stages),
        visible=VISIBLE,
        cuts=_cuts(record, source_budget),
        pairs=shared,
        beside=compared,
    )


def plan_rows(record: CompileRecord) -> list[PlanRow]:
    """The timed plans, fastest first; those without a time last."""
    ranges = {p.name: median_interval(p.samples_us) for p in record.plans}
    ends = [x for pair in ranges.values() for x in pair if math.isfinite(x)]
    ends += [p.median_us for p in record.plans if math.isfinite(p.median_us)]
    axis = max(ends, default=1.0) * 1.02 or 1.0
    rows = []
    for p in record.plans:
        low, high = ranges[p.name]
        ratio = p.median_us / record.median_us if record.median_us > 0 else math.nan
        spread = (100 * low / axis, 100 * max(high - low, 0) / axis) if math.isfinite(low + high) else (0.0, 0.0)
        middle = 100 * p.median_us / axis if math.isfinite(p.median_us) else 0.0
        rows.append(PlanRow(p, low, high, p.name == record.chosen, ratio, *spread, middle))
    return sorted(rows, key=lambda r: (not math.isfinite(r.plan.median_us), r.plan.median_us, r.plan.name))


def stage_bars(stages: Sequence[StageRecord]) -> list[StageBar]:
    """The stages one after the other on a bar of a thousand units."""
    total = sum(max(s.seconds, 0.0) for s in stages) or 1.0
    bars: list[StageBar] = []
    start, colour = 0.0, 0
    for s in stages:
        width = 1000 * max(s.seconds, 0.0) / total
        bars.append(StageBar(s, round(start, 2), round(width, 2), colour % COLOURS))
        start += width
        colour += width >= VISIBLE
    return bars


def _cuts(record: CompileRecord, source_budget: int) -> list[str]:
    """What this page leaves out for its size."""
    found = []
    if len(record.graph) > MAX_DRAWN:
        found.append(f"The graph of {len(record.graph):,} primitives is not drawn (limit {MAX_DRAWN:,}).")
    if len(record.steps) > MAX_STEPS:
        found.append(f"Only the first {MAX_STEPS:,} of {len(record.steps):,} kernels are listed.")
    if sum(len(s) for s in {s.source for s in record.steps}) > source_budget:
        found.append("The texts of the cheapest kernels are left out; `weft explain --format json` has them.")
    return found
