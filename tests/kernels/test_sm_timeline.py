"""Spans as a kernel wrote them become a timeline of one multiprocessor; stored ones are judged when they are read."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.typed import approx

from weft.errors import ArtifactError
from weft.kernels.sm_timeline import (
    SPAN_BYTES,
    RawSpan,
    raw_spans,
    timeline,
    timeline_from_json,
    timeline_to_json,
    trace_bytes,
)
from weft.tune.pairs import keep_timeline, timelines
from weft.tune.store import Database


def span(sm: int, role: int, begin: int, end: int, mhz: float = 2000.0, shift: int = 10**18) -> RawSpan:
    return RawSpan(sm, 7, role, 0, 3, begin, end, shift + round(end * 1000 / mhz))


RAW = [span(1, 0, 1000, 21000), span(1, 1, 3000, 9000), span(1, 1, 9000, 15000), span(2, 0, 0, 40000), span(2, 0, 0, 1)]


def packed(spans: list[RawSpan], count: int, room: int) -> bytes:
    body = b"".join(struct.pack("<6I3Q", s.sm, s.cta, s.role, s.stage, s.block, 0, s.begin, s.end, s.ns) for s in spans)
    return struct.pack("<4I", count, 0, 0, 0) + body.ljust(SPAN_BYTES * room, b"\0")


def test_spans_are_read_from_memory() -> None:
    assert raw_spans(packed(RAW, 5, 8)) == (RAW, 0)
    assert raw_spans(packed(RAW[:3], 9, 3)) == (RAW[:3], 6)
    assert len(packed(RAW, 5, 8)) == trace_bytes(8)
    for bad in (b"", packed(RAW, 5, 8)[:-1]):
        with pytest.raises(ValueError, match="are no head and spans"):
            raw_spans(bad)


def test_clocks_become_microseconds_by_the_time_of_the_gpu() -> None:
    found = timeline(RAW, 2, lc="a", be="b", gpu="g", kernel="k")
    assert found.sm == 1, "the one with both roles"
    assert [(s.role, s.begin_us, s.end_us) for s in found.spans] == [
        (0, 0.0, approx(10.0, rel=1e-3)), (1, approx(1.0, rel=1e-3), approx(4.0, rel=1e-3)),
        (1, approx(4.0, rel=1e-3), approx(7.0, rel=1e-3)),
    ]  # fmt: skip
    assert found.busy_us(best_effort=True) == pytest.approx(6.0, rel=1e-3) and found.us == pytest.approx(10, rel=1e-3)
    assert found.left_out == 2
    assert timeline(RAW, sm=2, mhz=1000.0).us == 40.0


@pytest.mark.parametrize(
    ("raw", "given", "said"),
    [
        (RAW, {"sm": 9}, "nothing was recorded on multiprocessor 9"),
        ([], {}, "nothing was recorded"),
        ([replace(RAW[0], end=0)], {}, "ends before it begins"),
        (RAW[:1], {}, "the clock cannot be told from 0 ns"),
    ],
)
def test_spans_that_are_no_timeline(raw: list[RawSpan], given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        timeline(raw, **given)


def test_timelines_are_kept_and_judged(tmp_path: Path) -> None:
    one = timeline(RAW, lc="a", be="b", gpu="g")
    other = replace(one, be="c")
    with Database.open(tmp_path) as database:
        keep_timeline(database, replace(one, left_out=4))
        keep_timeline(database, other)
        keep_timeline(database, one)
        database.keep("pair timeline", [("x", {"lc": 1})])
    with Database.open(tmp_path) as again:
        assert set(timelines(again)) == {one, other} and len(timelines(again)) == 2
    data: Any = timeline_to_json(one)
    assert timeline_from_json(data) == one
    for change in ({"begin_us": -1.0}, {"end_us": 0.1, "begin_us": 0.2}, {"end_us": float("inf")}, {"role": -1}):
        bad = {**data, "spans": [{**data["spans"][0], **change}]}
        with pytest.raises(ArtifactError, match="malformed"):
            timeline_from_json(bad)
    several: Any = ({}, [], None, {**data, "spans": data["spans"][::-1]}, {**data, "colour": 1})
    for wrong in several:
        with pytest.raises(ArtifactError, match="malformed"):
            timeline_from_json(wrong)
