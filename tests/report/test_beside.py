"""Two plans side by side: every kernel of both stands in one row, with those that do the same."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.records import HOSTILE, MARKUP, make_record

from weft.kernels.record import StepRecord
from weft.report import beside, render

BASE = make_record(1).steps[0]


def step(name: str, us: float, *operators: str, measured: bool = True) -> StepRecord:
    return replace(BASE, schedule=name, cost_us=us, operators=operators, measured=measured)


def test_kernels_of_the_same_operators_stand_in_one_row() -> None:
    mine = [step("fused", 9.0, "conv", "relu"), step("pool", 3.0, "pool"), step("copy", 1.0)]
    other = [step("conv", 7.0, "conv"), step("relu", 4.0, "relu"), step("pool", 3.5, "pool"), step("fill", 2.0)]
    rows = beside.rows_of(mine, other)
    assert [r.operators for r in rows] == [("conv", "relu"), (), ("pool",)]
    assert [r.difference_us for r in rows] == pytest.approx([2.0, 1.0, 0.5])
    assert [s.schedule for s in rows[0].other.steps] == ["conv", "relu"]


def test_a_kernel_that_spans_two_rows_joins_them() -> None:
    rows = beside.rows_of([step("a", 1.0, "x"), step("b", 1.0, "y")], [step("both", 1.5, "x", "y")])
    assert len(rows) == 1 and rows[0].difference_us == pytest.approx(-0.5)


def test_what_nobody_measured_has_no_difference_and_comes_last() -> None:
    rows = beside.rows_of(
        [step("a", 1.0, "x", measured=False), step("b", 1.0, "y")], [step("c", 2.0, "x"), step("d", 1.1, "y")]
    )
    assert [r.operators for r in rows] == [("y",), ("x",)] and math.isnan(rows[1].difference_us)


def test_a_side_lists_the_dearest_and_counts_the_rest() -> None:
    side = beside.Side([step(f"k{i}", float(i)) for i in range(beside.MAX_KERNELS + 3)] + [step("k1", 1.0)])
    shown = side.shown
    assert len(shown) == beside.MAX_KERNELS + 1 and shown[0][0] == f"k{beside.MAX_KERNELS + 2}"
    assert shown[-1][0] == "… 3 more"
    assert beside.Side([step("k", 1.0), step("k", 2.0)]).shown[0][0] == "2 × k"


OPERATORS = st.lists(st.sampled_from("abcde"), max_size=3, unique=True)
PLANS = st.lists(st.tuples(st.floats(0.5, 50), OPERATORS), max_size=12)


@given(PLANS, PLANS)
def test_no_kernel_is_lost_doubled_or_apart_from_its_operators(
    left: list[tuple[float, list[str]]], right: list[tuple[float, list[str]]]
) -> None:
    mine = [step(f"m{i}", us, *names) for i, (us, names) in enumerate(left)]
    other = [step(f"o{i}", us, *names) for i, (us, names) in enumerate(right)]
    rows = beside.rows_of(mine, other)
    assert sorted(s.schedule for r in rows for s in r.mine.steps) == sorted(s.schedule for s in mine)
    assert sorted(s.schedule for r in rows for s in r.other.steps) == sorted(s.schedule for s in other)
    every = [name for r in rows for name in r.operators]
    assert len(every) == len(set(every)) and set(every) == {n for s in [*mine, *other] for n in s.operators}
    for r in rows:
        assert all(set(s.operators) <= set(r.operators) for s in [*r.mine.steps, *r.other.steps])
    gaps = [abs(r.difference_us) for r in rows]
    assert gaps == sorted(gaps, reverse=True)


def test_the_page_has_the_section_where_it_is_asked_for_and_names_stay_text() -> None:
    one, two = make_record(6, names=HOSTILE), make_record(4, names=HOSTILE)
    page = render(one, beside=two)
    assert 'id="beside"' in page and 'href="#beside"' in page and MARKUP not in page
    plain = render(one)
    assert 'id="beside"' not in plain and 'href="#beside"' not in plain


def test_rows_beyond_the_limit_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "MAX_ROWS", 2)
    record = make_record(1)
    record = replace(record, steps=tuple(step(f"k{i}", float(i + 1), f"op{i}") for i in range(5)))
    found = beside.section(record, record)
    assert "3 rows with the smallest differences are left out" in found and "5 of 5 rows have the same kernels" in found


def test_a_template_is_there() -> None:
    assert (Path(beside.__file__).parent / "templates" / "beside.jinja").is_file()
