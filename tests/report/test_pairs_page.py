"""The page of pairs: a matrix that says what was measured, and nothing that a name could run."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.report.records import HOSTILE, MARKUP, make_record
from tests.tune.test_pairs import record
from tests.typed import approx

from weft.kernels.pairs import PairRecord, PairSummary
from weft.kernels.sm_timeline import RoleSpan, SmTimeline, timeline_from_json
from weft.report import render, render_pairs
from weft.report.pairs import LEFT, MOST_DRAWN, WIDTH, drawn, matrices
from weft.tune.pairs import refused, summed_up


class Cells(HTMLParser):
    """Rows of cells of each table, and every element with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[list[list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.tables[-1][-1][-1] += data


def pair(lc: str, be: str, ratio: float, **more: Any) -> PairRecord:
    """What was measured of one kernel; a ratio of 0: it was refused."""
    made = record(f"{lc}{be}", lc=lc, be=be, ratio=ratio or 1.0, **more)
    return made if ratio else refused(made, "the results differ")


def summaries(*records: PairRecord) -> Sequence[PairSummary]:
    return summed_up(records)


def test_the_matrix_says_ratio_and_whether_it_is_kept() -> None:
    found = summaries(pair("a", "mriq", 1.44), pair("a", "cp", 0.9), pair("b", "cp", 0.0))
    page = Cells(render_pairs(found))
    matrix, kept = page.tables
    assert matrix == [
        ["", "cp", "mriq", "mean"],
        ["a", "1.00 –", "1.44 ✓", "1.200"],
        ["b", "1.00 –", "", "1.000"],
        ["mean", "1.000", "1.440", "1.129"],
    ]
    told = {row[0] + row[1]: row for row in kept[1:]}
    assert told["amriq"][2:5] == ["0.100", "0.500", "1.440"] and told["amriq"][5] == "2 × 96 idle"
    assert told["acp"][5] == "not fused: 0.900 of the best peer (streams)" and "the results differ" in told["bcp"][5]
    titles = [a["title"] for t, a in page.elements if t == "td" and "title" in a]
    alone = "alone: LC 100.0 µs, BE 700.0 µs"
    assert titles == [
        f"0.900 of the best peer (streams); best kernel: 0.900 of streams (1.280 ms); s 0.100, f 0.500; {alone}",
        f"best kernel: 1.440 of streams (1.280 ms); s 0.100, f 0.500; {alone}",
        "the results differ",
    ]
    assert "1 of 3 pairs are kept" in render_pairs(found)


def test_shades_rise_with_the_ratio() -> None:
    found = summaries(*(pair("a", f"j{k}", 1.0 + k / 10) for k in range(6)))
    classes = [str(a["class"]) for t, a in Cells(render_pairs(found)).elements if t == "td" and "class" in a]
    assert classes == ["kept s1", "kept s2", "kept s3", "kept s4", "kept s4", "kept s5"]


def test_each_gpu_and_driver_has_a_matrix() -> None:
    other = pair("a", "cp", 1.2)
    other = replace(other, key=replace(other.key, gpu="NVIDIA A100"))
    found = summaries(pair("a", "cp", 1.3), other)
    assert [(m.gpu, m.mean, m.kept, m.measured) for m in matrices(found)] == [
        ("NVIDIA A100", approx(1.2), 1, 1), ("NVIDIA H200", approx(1.3), 1, 1),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="a pair twice on NVIDIA A100"):
        matrices([found[0], found[0]])


def test_nothing_measured_is_said() -> None:
    assert "No pair was measured" in render_pairs([]) and Cells(render_pairs([])).tables == []


def test_all_points_of_a_front_are_listed() -> None:
    points = [record(str(k), s=k / 10, f=0.2 + k / 4, ratio=1.1 + k / 50) for k in range(3)]
    _, kept = Cells(render_pairs(summaries(*points))).tables
    assert [row[2] for row in kept[1:]] == ["0.000", "0.100", "0.200"]
    bare = replace(record("x"), shape=None, schedule=None, cubin="")
    assert "1.300" in Cells(render_pairs(summaries(bare))).tables[1][1]


@pytest.mark.parametrize("name", [*HOSTILE, MARKUP])
def test_names_are_text(name: str) -> None:
    row = pair(name, name, 0.0)
    row = replace(row, declined=name or "x", key=replace(row.key, gpu=name, driver=name))
    harmless = Cells(render_pairs(summaries(pair("a", "b", 0.0))))
    page = Cells(render_pairs(summaries(row)))
    assert [t for t, _ in page.elements] == [t for t, _ in harmless.elements], "no element of its own"
    assert all(not k.startswith("on") and k != "style" for _, a in page.elements for k in a)


def recorded() -> SmTimeline:
    """Of an emulated launch (`tests/generate/cuda/role/test_trace.py`)."""
    path = Path(__file__).with_name("sm_timeline.json")
    return timeline_from_json(json.loads(path.read_text(encoding="utf-8")))


def test_a_timeline_has_a_bar_for_each_run_in_lanes_of_roles() -> None:
    one = recorded()
    made = drawn(one)
    assert len(made.bars) == len(one.spans) and made.left_out == 0
    assert {name for name, _ in made.lanes if name} == {"LC", "BE 1", "BE 2"}
    of_lane: dict[float, list[tuple[float, float]]] = {}
    for b in made.bars:
        assert b.x >= LEFT and b.x + b.width <= WIDTH and 0 <= b.y < made.height
        of_lane.setdefault(b.y, []).append((b.x, b.x + b.width))
    for runs in of_lane.values():
        assert all(a[1] <= b[0] + 0.51 for a, b in itertools.pairwise(sorted(runs))), "runs of a lane do not overlap"
    assert 2 <= len(made.ticks) <= 11 and made.ticks[0] == ("0", LEFT)
    assert all(
        float(text) * (WIDTH - LEFT - 10) / one.us + LEFT == pytest.approx(x, abs=0.01) for text, x in made.ticks
    )
    assert 0 < made.be_share <= 1 and made.lc_share == pytest.approx(one.busy_us(best_effort=False) / one.us)


def test_timelines_stand_on_the_page_and_in_a_report() -> None:
    found, one = summaries(pair("a", "cp", 1.2)), replace(recorded(), left_out=7)
    for page in (render_pairs(found, [one]), render(make_record(), found, [one])):
        elements = Cells(page).elements
        assert sum(t == "svg" and a.get("class") == "lanes" for t, a in elements) == 1
        assert sum((a.get("class") or "").startswith(("lc", "be")) for t, a in elements if t == "rect") == (
            len(one.spans)
        )
        assert "BE role 1, stage 0, block" in page and "no room to record 7 runs" in page and "1.20 ✓" in page
        assert "style" not in {k for _, a in elements for k in a}
    assert 'href="#pairs"' in render(make_record(), found) and 'href="#pairs"' not in render(make_record())
    only = Cells(render_pairs([], [one]))
    assert "No pair was measured" not in render_pairs([], [one]) and not only.tables


@pytest.mark.parametrize("name", [*HOSTILE, MARKUP])
def test_names_of_timelines_are_text(name: str) -> None:
    harmless, found = recorded(), summaries(pair("a", "cp", 1.2))
    hostile = replace(harmless, lc=name, be=name, gpu=name)
    for make in (lambda t: render_pairs([], [t]), lambda t: render(make_record(), found, [t])):
        assert [t for t, _ in Cells(make(hostile)).elements] == [t for t, _ in Cells(make(harmless)).elements]


def test_a_timeline_of_very_many_runs_is_cut() -> None:
    spans = tuple(RoleSpan(0, 1, 0, k, float(k), k + 0.5) for k in range(MOST_DRAWN + 5))
    page = render_pairs([], [replace(recorded(), spans=spans)])
    assert "5 runs are not drawn" in page and page.count("<title>BE role") == MOST_DRAWN
    assert drawn(replace(recorded(), spans=())).bars == ()


def test_the_page_asks_for_nothing_and_runs_nothing() -> None:
    page = render_pairs(summaries(pair("a", "b", 1.2)))
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = next(str(a["content"]) for t, a in Cells(page).elements if a.get("http-equiv"))
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert not {t for t, _ in Cells(page).elements} & {"script", "img", "link", "iframe", "object"}
    assert not re.search(r"https?:|url\(", page)
