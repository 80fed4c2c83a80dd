"""The page: a frame with tables (autoescaped), the record as inert JSON, one style sheet and one script, both hashed.

Nothing in the page is fetched, and its content security policy forbids it: `default-src 'none'`, and only the style
sheet and script with these hashes apply. Names from the model are text everywhere: autoescape in the frame,
`textContent` in the script.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import jinja2

from weft.kernels.interval import median_interval
from weft.kernels.record import CompileRecord, PlanRecord, StageRecord
from weft.report.data import MAX_DRAWN, MAX_STEPS, page_data
from weft.report.text import clean, microseconds, script_json, seconds, size

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


def render(record: CompileRecord) -> str:
    """The report as one HTML file: offline, at most 5 MB for a model of 5,000 primitives.

    The texts of the cheapest kernels are left out where the page would grow beyond its limit.
    """
    page = ""
    for budget in SOURCE_BUDGETS:
        page = _render(record, budget)
        if len(page.encode()) <= MAX_BYTES:
            break
    return page


def _render(record: CompileRecord, source_budget: int) -> str:
    style, script = asset("report.css"), asset("report.js")
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


def csp_hash(text: str) -> str:
    """A style sheet or script as the content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def asset(name: str) -> str:
    """A file of `templates`."""
    return resources.files("weft.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def template(name: str) -> jinja2.Template:
    """A page's frame: autoescaped, and an error where it names what is not given."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(us=microseconds, clean=clean, seconds=seconds, size=size)
    return environment.from_string(asset(name))
