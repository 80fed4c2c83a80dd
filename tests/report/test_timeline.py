"""Timelines as trace events: the form that viewers need, names that cannot break out, spans that overlap."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

from tests.report.records import HOSTILE, make_record

from weft.kernels.timeline import Span, Timeline
from weft.report.timeline import chrome_trace


def events(text: str, phase: str = "X") -> list[dict[str, Any]]:
    return [e for e in json.loads(text)["traceEvents"] if e["ph"] == phase]


def names(text: str) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events(text, "M") if e["name"] == "thread_name"}


SPANS = (
    Span("k0123", 0.0, 2.0, 7, 0),
    Span("k4567", 1.5, 3.0, 7, 1),  # began before its predecessor ended
    Span("cudnn", 4.5, 1.0, 9, 2),
    Span("Memcpy", 5.5, 0.5, 7, 2),
    Span("unknown", 6.0, 0.25, 7, -1),
)


def test_the_form_that_viewers_need() -> None:
    text = chrome_trace(Timeline(SPANS, "profiler"), title="net")
    found = json.loads(text)
    assert found["displayTimeUnit"] == "ns" and found["otherData"] == {"source": "profiler", "model": "net"}
    for event in events(text):
        assert {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"} == event.keys()
        assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["tid"], int)
    kernels = [e for e in events(text) if e["cat"] == "kernel"]
    assert {(e["name"], e["ts"], e["dur"], e["args"]["step"]) for e in kernels} == {
        (s.name, s.start_us, s.duration_us, s.step) for s in SPANS
    }
    assert {e["args"]["name"] for e in events(text, "M") if e["name"] == "process_name"} == {"net"}


def test_whole_steps_and_no_overlap_within_a_row() -> None:
    text = chrome_trace(Timeline(SPANS, "profiler"), title="net")
    steps = {e["name"]: (e["ts"], e["dur"], e["args"]["kernels"]) for e in events(text) if e["cat"] == "step"}
    assert steps == {"0 k0123": (0.0, 2.0, 1), "1 k4567": (1.5, 3.0, 1), "2 cudnn": (4.5, 1.5, 2)}
    rows: dict[int, list[tuple[float, float]]] = {}
    for e in events(text):
        rows.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for row in rows.values():
        row.sort()
        assert all(a[1] <= b[0] + 0.01 for a, b in itertools.pairwise(row)), row
    assert sorted(names(text).values()) == [
        "steps of the plan", "steps of the plan (2)", "stream 7", "stream 7 (2)", "stream 9",
    ]  # fmt: skip


def test_names_cannot_break_out() -> None:
    record = make_record(kernels=3, names=HOSTILE)
    step = replace(record.steps[0], operators=HOSTILE, cost_us=math.inf)
    record = replace(record, steps=(step, *record.steps[1:]))
    for title in HOSTILE:
        spans = tuple(Span(name, float(k), 1.0, 0, k % 3) for k, name in enumerate(HOSTILE))
        text = chrome_trace(Timeline(spans, "events"), title=title, record=record)
        assert text.isascii() and "<" not in text and "\x1b" not in text and "\x00" not in text
        shown = [e for e in events(text) if e["cat"] == "step"]
        assert shown[0]["name"].startswith("0 </script>") and shown[0]["args"]["alone_us"] is None
        assert len(shown) == 3 and len(events(text)) == 3 + len(HOSTILE)
        for event in events(text):
            assert event["name"].isprintable() and "\u202e" not in event["name"]


def test_times_that_are_none_are_left_out() -> None:
    spans = (Span("a", math.nan, 1.0), Span("b", 0.0, math.inf), Span("c", 1.0, 1.0))
    assert [e["name"] for e in events(chrome_trace(Timeline(spans, "clock"), title=""))] == ["c"]
    assert events(chrome_trace(Timeline((), "clock"), title="empty")) == []
