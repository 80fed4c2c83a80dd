"""A timeline as JSON in the trace event format, which chrome://tracing and Perfetto open.

Format: "Trace Event Format" (Google, 2016), its JSON object form: complete events (`X`, microseconds), metadata (`M`).
Names from models are cleaned and the text is ASCII without `<`, so that it may stand in a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.kernels.record import CompileRecord
from weft.kernels.timeline import Span, Timeline
from weft.report.text import clean, script_json

STEPS = "steps of the plan"
_SLACK_US = 1e-3
_PROCESS = 1
Facts = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _Bar:
    """One complete event, not yet on a row."""

    track: str
    name: str
    start_us: float
    duration_us: float
    facts: Facts


def chrome_trace(timeline: Timeline, *, title: str, record: CompileRecord | None = None) -> str:
    """The JSON text: whole steps first, then what each stream of the device did.

    Args:
        timeline: spans with the steps of a plan.
        title: what was run; from a model or a file name, cleaned here.
        record: names and predictions of the steps, where there is one.
    """
    spans = [s for s in timeline.spans if math.isfinite(s.start_us) and math.isfinite(s.duration_us)]
    about = _steps(record)
    bars = [_step(step, parts, about) for step, parts in _by_step(spans).items()]
    bars += [
        _Bar(f"stream {s.lane}", clean(s.name), s.start_us, s.duration_us, {"step": s.step})
        for s in sorted(spans, key=lambda s: (s.lane, s.start_us))
    ]
    events = [_meta("process_name", 0, clean(title)), *_rows(bars)]
    told = {"source": timeline.source, "model": clean(title)}
    return script_json({"traceEvents": events, "displayTimeUnit": "ns", "otherData": told})


def _rows(bars: Sequence[_Bar]) -> list[dict[str, object]]:
    """Events of the bars: one that begins before another of its track has ended gets a further row."""
    ends: dict[str, list[float]] = {}
    place: dict[tuple[str, int], int] = {}
    events: list[dict[str, object]] = []
    for bar in bars:
        rows = ends.setdefault(bar.track, [])
        row = next((k for k, end in enumerate(rows) if end <= bar.start_us + _SLACK_US), len(rows))
        rows[row:] = [bar.start_us + bar.duration_us, *rows[row + 1 :]]
        if (bar.track, row) not in place:
            place[bar.track, row] = len(place)
            events.append(_meta("thread_name", place[bar.track, row], bar.track + (f" ({row + 1})" if row else "")))
            events.append(_meta("thread_sort_index", place[bar.track, row], place[bar.track, row]))
        events.append(_event(bar, place[bar.track, row]))
    return events


def _by_step(spans: Sequence[Span]) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in spans:
        if span.step >= 0:
            found.setdefault(span.step, []).append(span)
    return dict(sorted(found.items()))


def _step(step: int, parts: Sequence[Span], about: Mapping[int, Facts]) -> _Bar:
    start = min(s.start_us for s in parts)
    end = max(s.start_us + s.duration_us for s in parts)
    facts = {"kernels": len(parts), **about.get(step, {})}
    name = str(facts.pop("name", "") or clean(parts[0].name))
    return _Bar(STEPS, f"{step} {name}", start, end - start, facts)


def _steps(record: CompileRecord | None) -> dict[int, Facts]:
    """Per step what the record says of it, cleaned."""
    return {
        s.position: {
            "name": clean(", ".join(s.operators) or "+".join(s.primitives)),
            "schedule": clean(s.schedule, 300),
            "primitives": clean(", ".join(s.primitives), 400),
            "alone_us": s.cost_us if s.measured and math.isfinite(s.cost_us) else None,
        }
        for s in (record.steps if record is not None else ())
    }


def _event(bar: _Bar, row: int) -> dict[str, object]:
    return {
        "name": bar.name,
        "cat": "step" if bar.track == STEPS else "kernel",
        "ph": "X",
        "ts": round(bar.start_us, 3),
        "dur": round(max(bar.duration_us, 0.0), 3),
        "pid": _PROCESS,
        "tid": row,
        "args": dict(bar.facts),
    }


def _meta(kind: str, row: int, value: str | int) -> dict[str, object]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": row, "args": {key: value}}
