"""Drawing, interval and texts, each alone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kernels.interval import median_interval
from weft.report.layout import draw
from weft.report.text import clean, clean_source, finite, microseconds, script_json, seconds, size


@st.composite
def dags(draw_: st.DrawFn) -> list[list[int]]:
    count = draw_(st.integers(0, 40))
    return [draw_(st.lists(st.integers(0, i - 1), max_size=3)) if i else [] for i in range(count)]


@given(dags())
def test_edges_point_down_and_boxes_do_not_overlap(inputs: list[list[int]]) -> None:
    drawing = draw(inputs)
    for node, sources in enumerate(inputs):
        assert all(drawing.row[s] < drawing.row[node] for s in sources)
    for row in set(drawing.row):
        places = sorted(x for x, r in zip(drawing.column, drawing.row, strict=True) if r == row)
        assert all(b - a >= 0.98 for a, b in pairwise(places))
    assert min(drawing.column, default=0.0) >= 0.0


def test_a_chain_is_straight_and_a_weight_stands_by_its_user() -> None:
    assert draw([[], [0], [1], [2]]).column == (0.0,) * 4
    drawing = draw([[], [], [0], [2], [3, 1]])
    assert drawing.row == (0, 2, 1, 2, 3)


def test_an_edge_that_points_up_is_refused() -> None:
    with pytest.raises(ValueError, match="does not come before"):
        draw([[1], []])


@pytest.mark.parametrize(
    ("n", "low", "high"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (8, 0, 7), (9, 1, 7), (15, 3, 11), (20, 5, 14), (30, 9, 20)]
)
def test_interval_of_the_median(n: int, low: int, high: int) -> None:
    """Ranks of the tables of the sign test at 95 % (two-sided), counted from zero."""
    assert median_interval([float(i) for i in reversed(range(n))]) == (low, high)


def test_interval_without_samples() -> None:
    assert all(map(math.isnan, median_interval([])))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain / name.1", "plain / name.1"),
        ("Größe 大きさ ✓", "Größe 大きさ ✓"),
        ("\x1b[31m", "\\u001b[31m"),
        ("a\u202eb", "a\\u202eb"),
        ("a\nb", "a\\nb"),
        ("\ud800", "\\ud800"),
        ("<b>&", "<b>&"),
    ],
)
def test_clean(text: str, shown: str) -> None:
    assert clean(text) == shown


def test_clean_cuts() -> None:
    assert clean("x" * 500, 10) == "x" * 9 + "…"
    assert clean("x" * 10, 10) == "x" * 10
    assert clean_source("a\n\tb\r\nc\x00", 100) == "a\n\tb\nc\\u0000"
    assert clean_source("x" * 30, 10) == "x" * 10 + "\n… 20 characters left out\n"


@given(st.text())
def test_json_in_a_script_element(text: str) -> None:
    made = script_json([clean(text)])
    assert made.isascii() and "<" not in made


def test_json_refuses_what_is_no_json() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        script_json(math.inf)
    assert finite(math.inf) is None and finite(math.nan) is None and finite(123.456) == 123.5


def test_numbers_for_people() -> None:
    assert [microseconds(v) for v in (0.0, math.inf, 12.34, 1234.5, 2.5e6)] == [
        "–",
        "–",
        "12.3 µs",
        "1.234 ms",
        "2.50 s",
    ]
    assert [seconds(v) for v in (0.012, 3.21, 600.0)] == ["12 ms", "3.2 s", "10.0 min"]
    assert [size(v) for v in (0, 1023, 1536, 5 << 20, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.00 GiB"]
