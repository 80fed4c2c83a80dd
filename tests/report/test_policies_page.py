"""The page of scheduling policies: figures, drawings that stay in their frame, and nothing that a name could run."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from dataclasses import replace

import pytest
from tests.report.records import HOSTILE
from tests.report.test_pairs_page import Cells

from weft.kernels.policy_run import Chosen, Comparison, PolicyRun, Quantile, Refused, Summary, VariantShare
from weft.report.colocate import (
    BOTTOM,
    HEIGHT,
    LEFT,
    MOST,
    RIGHT,
    TOP,
    WIDTH,
    axis,
    latency_cdf,
    p99_over_load,
    render_policies,
    variants_over_time,
    work_over_latency,
)


def run(
    policy: str = "weft", *, p99_us: float = 450.0, load: float = 0.8, simulated: bool = True, void: str = ""
) -> PolicyRun:
    quantiles = (Quantile(0.5, 110.0, 109.0, 111.0), Quantile(0.99, p99_us, p99_us - 5, p99_us + 5))
    return PolicyRun(
        policy, "", "net", "work", simulated, load, "peak load", 4000.0, "poisson", "ab", 0, 500.0,
        Summary(1000, quantiles, 130.0, 7, 0.0, void), 1.1, 0.52, 1.03, 0.25,
        (VariantShare(0, "alone", 400), VariantShare(1, "role 5%", 500), VariantShare(2, "role 9%", 100)),
        ((100.0, 0.2), (110.0, 0.5), (p99_us, 0.99), (p99_us * 2, 1.0)),
        (Chosen(0.0, 1.0, 2), Chosen(0.1, math.nan, -1), Chosen(0.2, 2.0, 2)),
    )  # fmt: skip


def comparison(*runs: PolicyRun, refused: tuple[Refused, ...] = ()) -> Comparison:
    return Comparison("NVIDIA H200", "0123", runs or (run("exclusive"), run()), refused)


def test_the_page_has_the_figures_and_says_that_they_are_simulated() -> None:
    page = Cells(render_policies(comparison(run("exclusive", p99_us=400.0), run("aker", p99_us=700.0))))
    head, first, second = page.tables[0]
    assert head[0] == "policy" and first[:5] == ["exclusive", "0.110", "0.400", "0.395 to 0.405", "yes"]
    assert second[0] == "aker" and second[4] == "no" and second[6] == "7 of 1000" and second[7] == "0.520"
    text = render_policies(comparison())
    assert "Simulated: durations are drawn from samples" in text and "Scheduling policies, simulated" in text
    assert "imulated" not in render_policies(comparison(run(simulated=False))).split("<body>")[1]


def test_void_runs_and_refused_policies_are_told() -> None:
    text = render_policies(comparison(run(void="send delay p99 30 us"), refused=(Refused("mps", "no samples"),)))
    assert "void: send delay p99 30 us" in text and "mps was not run: no samples" in text


def test_nothing_is_fetched_or_run() -> None:
    text = render_policies(comparison())
    page = Cells(text)
    assert not [e for e, _ in page.elements if e in ("script", "link", "img", "iframe", "object", "embed", "base")]
    assert not re.search(r"https?:|//[a-z]|url\(|@import|javascript:", text.replace("<!doctype html>", ""))
    assert not [a for _, attrs in page.elements for a in attrs if a.startswith("on") or a in ("style", "src")]
    policy = next(a["content"] for e, a in page.elements if e == "meta" and "Content-Security-Policy" in a.values())
    style = text.split("<style>")[1].split("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy is not None and policy.startswith("default-src 'none'") and f"'sha256-{digest}'" in policy


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_escaped(name: str) -> None:
    hostile = replace(run(name), note=name, model=name, job=name, arrivals=name, load_of=name)
    hostile = replace(hostile, variants=tuple(VariantShare(k, name, 1) for k in range(3)))
    plain = Cells(render_policies(comparison(run("x"))))
    found = Cells(render_policies(replace(comparison(hostile, refused=(Refused(name, name),)), gpu=name, record=name)))
    kinds = [e for e, _ in plain.elements]
    extra = {"ul", "li", "small"}
    assert [e for e, _ in found.elements if e not in extra] == [e for e in kinds if e not in extra]
    assert not [a for _, attrs in found.elements for a in attrs if a.startswith("on")]


def inside(points: str) -> bool:
    pairs = [tuple(map(float, p.split(","))) for p in points.split()]
    return all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in pairs)


def test_lines_stay_in_their_frame() -> None:
    runs = [run("a", p99_us=1.0), run("b", p99_us=1e7), replace(run("c"), cdf=()), run("d", p99_us=math.nan)]
    over = [*runs, run("a", p99_us=3.0, load=0.3)]
    drawings = [latency_cdf(runs), p99_over_load(over, ["a", "b", "c", "d"]), work_over_latency(runs)]
    moving = variants_over_time(runs)
    assert moving is not None
    for d in [*drawings, moving]:
        for line in d.lines:
            assert inside(line.points) and inside(" ".join(f"{x},{y}" for x, y, _ in line.dots))
        assert d.x_ticks and d.y_ticks
    assert "nan" not in "".join(line.points for d in drawings for line in d.lines)


def test_p99_over_load_is_a_line_where_there_are_several_loads() -> None:
    over = [run("a", load=0.3, p99_us=300), run("a", load=0.8), run("b")]
    a, b = p99_over_load(over, ["a", "b"]).lines
    assert len(a.points.split()) == 2 and len(a.dots) == 2 and not b.points and len(b.dots) == 1
    (x0, y0), (x1, y1) = (tuple(map(float, p.split(","))) for p in a.points.split())
    assert x0 < x1 and y0 > y1  # more load, a longer p99: further up


def test_variants_over_time_leave_gaps_out_and_are_not_drawn_for_one_variant() -> None:
    (line,) = variants_over_time([run()]).lines  # type: ignore[union-attr]
    assert len(line.points.split()) == 2
    alone = replace(run(), variants=(VariantShare(0, "alone", 1000),))
    assert variants_over_time([alone]) is None
    assert "Plan variants over time" not in render_policies(comparison(alone))
    assert "No policy had several" in render_policies(comparison(alone))


def test_axes_of_nothing_and_of_one_value_have_a_length() -> None:
    for values in ([], [0.0], [5.0], [math.nan, math.inf]):
        for is_log in (True, False):
            made = axis(values, 0.0, 100.0, is_log=is_log)
            assert made.low < made.high and 0 <= made.at(5.0) <= 100 and made.ticks()


def test_policies_beyond_the_most_are_left_out_and_told() -> None:
    text = render_policies(comparison(*(run(f"p{k}") for k in range(MOST + 2))))
    assert "2 further policies are left out" in text and f">p{MOST}<" not in text


def test_a_page_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="without a run"):
        render_policies(Comparison("g", "r", ()))
