"""The page as text: what is in it, what can never be in it, and how large it is."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.report.records import HOSTILE, MARKUP, make_record

from weft.kernels.pretty import pretty
from weft.kernels.record import CompileRecord
from weft.report import render
from weft.report.data import MAX_DRAWN
from weft.report.page import MAX_BYTES


class _Elements(HTMLParser):
    """Every element with its attributes, and the text inside `script`, `style` and `title`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag in ("script", "style"):
            self.texts.append((tag, ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.texts[-1] = (self._inside, self.texts[-1][1] + data)


def _parse(page: str) -> _Elements:
    found = _Elements()
    found.feed(page)
    return found


def _data(page: str) -> dict[str, Any]:
    raw = next(text for tag, text in _parse(page).texts if tag == "script")
    return json.loads(raw, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))


def test_the_page_says_what_was_chosen() -> None:
    page = render(make_record())
    for part in ("103.5 µs", "207.0 µs", "2.00×", "solution-1", "n = 8", "optimal", "3.0 MiB", "12.3 s", "1,234"):
        assert part in page, part


def test_data_carries_every_kernel_and_node() -> None:
    record = make_record(kernels=4, members=3)
    data = _data(render(record))
    assert [k["n"] for k in data["kernels"]] == [0, 1, 2, 3]
    assert len(data["nodes"]) == len(record.graph)
    assert data["sources"][data["kernels"][2]["source"]] == pretty(record.steps[2].source)
    assert sum(k["share"] for k in data["kernels"]) == pytest.approx(1.0, rel=1e-3)
    assert data["kernels"][1]["near"][1][1] is None, "an infinite cost is no number in JSON"
    assert data["strings"][data["kernels"][1]["schedule"]] == "cpp.tile(1)"


def test_a_kernel_tells_its_file() -> None:
    record = make_record(kernels=2)
    step = replace(record.steps[0], schedule="cuda(bm=64,template=tma)")
    data = _data(render(replace(record, steps=(step, record.steps[1]))))
    assert data["strings"][data["kernels"][0]["written"]] == "weft/generate/cuda/gemm/tma/kernel.py"
    assert data["strings"][data["kernels"][1]["written"]] == ""


def test_graph_of_kernels_follows_values_through_free_nodes() -> None:
    record = make_record(kernels=4)
    view = _data(render(record))["views"]["kernels"]
    assert view["in"] == [[], [0], [0, 1], [1, 2]]
    assert view["y"] == [0, 1, 2, 3]
    viewed = len(record.graph)
    free = replace(record.graph[0], id=viewed, prim="reshape", inputs=(record.steps[0].nodes[-1],), steps=())
    last = replace(record.steps[3], inputs=(f"%{viewed} 8xf32 row",))
    through = replace(record, graph=(*record.graph, free), steps=(*record.steps[:3], last))
    assert _data(render(through))["views"]["kernels"]["in"][3] == [0]


def test_weights_are_left_out_of_the_smaller_drawing_only() -> None:
    record = make_record(kernels=3)
    views = _data(render(record))["views"]
    constants = {n.id for n in record.graph if n.prim == "constant"}
    assert not constants & set(views["primitives"]["ids"])
    assert constants <= set(views["all"]["ids"])


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text(name: str) -> None:
    hostile, calm = render(make_record(names=(name,))), render(make_record())
    assert MARKUP not in hostile
    hostile.encode()  # no unpaired surrogate is left
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u2028\u202a-\u202e\u2066-\u2069]", hostile)
    found, expected = _parse(hostile), _parse(calm)
    assert [t for t, _ in found.tags] == [t for t, _ in expected.tags], "a name made or closed an element"
    assert [sorted(a) for _, a in found.tags] == [sorted(a) for _, a in expected.tags], "a name made an attribute"
    handlers = [a for _, attributes in found.tags for a in attributes if a.startswith("on")]
    assert handlers == []


def test_a_name_reaches_the_data_whole() -> None:
    data = _data(render(make_record(names=(MARKUP,))))
    assert MARKUP in data["strings"]


def test_policy_allows_this_script_and_style_and_nothing_else() -> None:
    page = render(make_record(names=HOSTILE))
    found = _parse(page)
    policy = next(
        a["content"] or "" for t, a in found.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert set(parts) == {"default-src", "style-src", "script-src", "base-uri", "form-action"}
    assert parts["default-src"] == parts["base-uri"] == parts["form-action"] == "'none'"
    style = next(text for tag, text in found.texts if tag == "style")
    script = [text for tag, text in found.texts if tag == "script"][-1]
    for text, allowed in ((style, parts["style-src"]), (script, parts["script-src"])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed == f"'sha256-{digest}'"
    assert page.index("Content-Security-Policy") < page.index("<style")


def test_nothing_is_fetched() -> None:
    found = _parse(render(make_record()))
    for tag, attributes in found.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
        assert not {"src", "srcset", "action", "style", "xlink:href"} & set(attributes)
        if "href" in attributes:
            assert (attributes["href"] or "").startswith("#")
    frame = "".join(text for _, text in found.texts)
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|fetch\(|XMLHttp|innerHTML|insertAdjacent|eval\(", frame)


@pytest.mark.slow
def test_five_thousand_primitives_fit() -> None:
    small, record = (
        make_record(kernels=n, members=3, names=("/model/layers.12/mlp/gate_proj/Mul",), source_size=8_000)
        for n in (312, 1250)
    )
    assert len(record.graph) > 5_000
    began = time.process_time()
    render(small)
    between = time.process_time()
    page = render(record)
    assert time.process_time() - between < 8 * (between - began), "four times the kernels take far more than that"
    assert len(page.encode()) <= MAX_BYTES
    data = _data(page)
    assert len(data["kernels"]) == 1250 and len(data["nodes"]) == len(record.graph)
    dearest = max(data["kernels"], key=lambda k: k["cost"])
    assert dearest["source"] >= 0, "the dearest kernels keep their texts"
    assert "texts of the cheapest kernels are left out" in page


def test_a_graph_too_large_to_draw_keeps_its_kernels() -> None:
    record = make_record(kernels=3, members=MAX_DRAWN // 3 + 1, source_size=40)
    page = render(record)
    data = _data(page)
    assert data["nodes"] == [] and set(data["views"]) == {"kernels"}
    assert "is not drawn" in page and len(data["kernels"]) == 3


def test_an_empty_record() -> None:
    empty = replace(
        make_record(0), plans=(), stages=(), graph=(), notes=(), opaque=(), environment=(), rejected_kernels=(),
        rejected_candidates=(), chosen="", objective_us=math.nan, solver_gap=math.inf,
    )  # fmt: skip
    page = render(empty)
    assert "every operator is compiled" in page and "not timed" in page
    assert _data(page)["kernels"] == []


def test_a_record_that_went_wrong_still_renders() -> None:
    """A record is read from a file that anyone may have edited: edges may point anywhere."""
    record = make_record(3)
    graph = (replace(record.graph[0], inputs=(5, 0, -1, 10**9)), *record.graph[1:])
    step = replace(record.steps[0], inputs=("%999999 f32", "nonsense"), nodes=(10**9,), cost_us=math.nan)
    data = _data(render(replace(record, graph=graph, steps=(step, *record.steps[1:]))))
    assert data["kernels"][0]["cost"] is None
    assert data["views"]["kernels"]["in"][0] == []


def test_rendering_is_deterministic() -> None:
    record: CompileRecord = make_record(5)
    assert render(record) == render(record)
