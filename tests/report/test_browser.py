"""The page in a real browser: it draws, sorts and selects; it asks for nothing, and no name of a model runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.records import HOSTILE, make_record
from tests.report.test_folding import layered

from weft.kernels.pretty import pretty
from weft.kernels.record import CompileRecord
from weft.report import render

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")

CHROMIUM = next((found for n in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(n))), None)
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=CHROMIUM, args=FLAGS, headless=True, offline=True,
            viewport={"width": 1400, "height": 900},
        )  # fmt: skip
        context.set_default_timeout(10_000)
        yield context
        context.close()


class Opened:
    """A page with everything that it said and asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda m: self.said.append(f"{m.type}: {m.text}"))
        page.on("pageerror", lambda e: self.said.append(f"error: {e}"))
        page.on("dialog", lambda d: self.said.append(f"dialog: {d.message}"))
        page.on("request", lambda r: self.asked.append(r.url))


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[[CompileRecord], Opened]]:
    pages: list[Opened] = []

    def open_(record: CompileRecord) -> Opened:
        file = tmp_path / "report.html"
        file.write_text(render(record), encoding="utf-8")
        found = Opened(browser.new_page())
        pages.append(found)
        found.page.goto(file.as_uri())
        return found

    yield open_
    for one in pages:
        assert one.said == [], "the console is silent"
        assert [u for u in one.asked if not u.startswith("file:")] == [] and len(one.asked) == 1, "one file, no request"
        one.page.close()


def _column(page: Any, number: int) -> list[str]:
    return page.locator(f"#kernel-table tbody tr td:nth-child({number})").all_inner_texts()


def test_a_row_shows_its_kernel(opened: Callable[[CompileRecord], Opened]) -> None:
    record = make_record(6)
    page = opened(record).page
    page.get_by_role("button", name="kernel 3: details").click()
    panel = page.locator("#panel")
    assert panel.locator("h3").inner_text() == "Kernel 3"
    assert panel.locator("pre").text_content() == pretty(record.steps[3].source)
    text = panel.inner_text()
    assert "5 kernels were measured" in text and "10.0 % more" in text and "slower than its parts" in text
    assert page.locator("#kernel-table tr[aria-current]").count() == 1
    assert page.locator("#boxes .sel").count() == len(record.steps[3].nodes)


def test_a_node_selects_its_kernel(opened: Callable[[CompileRecord], Opened]) -> None:
    record = make_record(4)
    page = opened(record).page
    node = record.steps[2].nodes[1]
    page.locator("#zoom-fit").click()
    box = page.locator(f"#boxes g[aria-label^='%{node} ']")
    box.hover()
    assert record.graph[node].type in page.locator("#tip").inner_text()
    box.click()
    assert page.locator("#panel h3").inner_text() == "Kernel 2"
    status = page.locator("#status").inner_text()
    assert f"%{node} {record.graph[node].prim}" in status and record.graph[node].operator in status
    page.locator("#view").select_option("kernels")
    assert page.locator("#boxes .box").count() == 4
    page.locator("#boxes .box").nth(1).click()
    assert page.locator("#panel h3").inner_text() == "Kernel 1"
    page.locator("#panel .chips button").first.click()
    assert page.locator("#view").input_value() == "primitives"


def test_headings_sort_and_the_filter_hides(opened: Callable[[CompileRecord], Opened]) -> None:
    record = make_record(6)
    page = opened(record).page
    by_time = sorted(record.steps, key=lambda s: -s.cost_us)
    assert _column(page, 1) == [str(s.position) for s in by_time], "dearest first at the start"
    page.get_by_role("button", name="Kernel", exact=True).click()
    assert _column(page, 1) == ["0", "1", "2", "3", "4", "5"]
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="Kernel", exact=True).click()
    assert _column(page, 1) == ["5", "4", "3", "2", "1", "0"]
    page.get_by_role("button", name="Runner-up", exact=True).click()
    assert {"1", "3", "5"} == set(_column(page, 1)[:3]), "kernels without a runner-up come last"
    page.locator("#filter").fill("cpp.tile(4)")
    assert page.locator("#kernel-table tbody tr:visible").count() == 1
    assert page.locator("#count").inner_text() == "1 of 6 kernels"


def test_the_keyboard_is_enough(opened: Callable[[CompileRecord], Opened]) -> None:
    page = opened(make_record(4)).page
    canvas = page.locator("#canvas")
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    active = canvas.get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    assert page.locator("#panel h3").inner_text() == "Kernel 0"
    before = page.locator("#world").get_attribute("transform")
    page.keyboard.press("+")
    zoomed = page.locator("#world").get_attribute("transform")
    page.keyboard.press("Shift+ArrowLeft")
    panned = page.locator("#world").get_attribute("transform")
    assert len({before, zoomed, panned}) == 3
    page.keyboard.press("Escape")
    assert page.locator("#boxes .sel").count() == 0
    assert page.locator(":is(a, button, select, input, [tabindex])").evaluate_all("e => e.every(x => x.tabIndex > -2)")


def test_hostile_names_stay_text(opened: Callable[[CompileRecord], Opened]) -> None:
    one = opened(make_record(8, names=HOSTILE))
    page = one.page
    for k in range(8):
        page.get_by_role("button", name=f"kernel {k}: details").click()
    page.locator("#view").select_option("all")
    for box in page.locator("#boxes .box").all()[:6]:
        box.dispatch_event("click")
        box.dispatch_event("pointermove", {"bubbles": True})
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, iframe, script[src]").count() == 0
    assert page.locator("script").count() == 2
    assert "</script><script>window.hacked=1</script>" in page.locator("body").inner_text()


def test_the_policy_stops_what_gets_in(opened: Callable[[CompileRecord], Opened]) -> None:
    """The second wall: even markup that was put into the page does not run or fetch."""
    one = opened(make_record(2))
    one.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hacked=1>')")
    one.page.evaluate(
        "() => { const s = document.createElement('script');"
        " s.textContent = 'window.hacked=1'; document.body.append(s); }"
    )
    one.page.wait_for_timeout(200)
    assert one.page.evaluate("window.hacked") is None
    refused = [line for line in one.said if "Content Security Policy" in line]
    assert len(refused) >= 2
    one.said.clear()
    del one.asked[1:]


def test_five_thousand_primitives_are_usable(opened: Callable[[CompileRecord], Opened]) -> None:
    page = opened(make_record(kernels=1250, members=3, source_size=2_000)).page
    page.get_by_role("button", name="kernel 700: details").wait_for(state="attached")
    assert page.locator("#boxes .box").count() == 1250, "large graphs start grouped by kernel"
    page.locator("#view").select_option("all")
    assert page.locator("#boxes .box").count() == 5001
    spent = page.evaluate(
        "() => { const b = document.getElementById('zoom-in'), all = [];"
        " for (let i = 0; i < 20; i++) { const t = performance.now(); b.click(); all.push(performance.now() - t); }"
        " return Math.min(...all) }"
    )
    assert spent < 50, f"the fastest of twenty steps of zoom took {spent:.0f} ms"
    box = page.locator("#boxes .box").nth(4000)
    box.dispatch_event("click")
    assert page.locator("#panel h3").inner_text().startswith("Kernel ")


def test_equal_kernels_are_one_row_and_one_box(opened: Callable[[CompileRecord], Opened]) -> None:
    record = layered(4, 12, 66, 4)
    page = opened(record).page
    assert page.locator("#view").input_value() == "folded" and page.locator("#boxes .box").count() == 20
    page.locator("#fold").check()
    assert (
        page.locator("#kernel-table tbody tr").count() == 20
        and page.locator("#count").inner_text() == "800 kernels in 20 rows"
    )
    row = page.get_by_role("button", name="66 kernels like 4: details")
    row.click()
    assert page.locator("#panel h3").inner_text() == "Kernel 4"
    row.click()
    assert page.locator("#panel h3").inner_text() == "Kernel 16", "each click shows the next of them"
    assert page.locator("#kernel-table tr[aria-current]").count() == 1
    assert page.locator("#boxes .sel").count() == 1
    cost = sum(s.cost_us for s in record.steps[4:796:12])
    shown = page.locator("#kernel-table tr[aria-current] td:nth-child(2)").inner_text()
    assert shown == f"{cost / 1e3:.3f} ms"
    page.locator("#fold").uncheck()
    assert page.locator("#kernel-table tbody tr").count() == 800
    page.locator("#view").select_option("kernels")
    assert page.locator("#boxes .box").count() == 800


def test_a_filter_marks_the_graph(opened: Callable[[CompileRecord], Opened]) -> None:
    page = opened(layered(4, 12, 66, 4)).page
    page.locator("#filter").fill("tma(11)")
    assert (
        page.locator("#boxes .box:not(.off)").count() == 1
        and page.locator("#count").inner_text() == "66 of 800 kernels"
    )
    tops = "q => q.map(s => document.querySelector(s).getBoundingClientRect().y)"  # at once: the page may still scroll
    box, canvas = page.evaluate(tops, ["#boxes .box:not(.off)", "#canvas"])
    assert canvas <= box <= canvas + page.locator("#canvas").bounding_box()["height"], "what was found is in sight"
    page.locator("#view").select_option("kernels")
    assert page.locator("#boxes .box:not(.off)").count() == 66
    page.locator("#filter").fill("")
    assert page.locator("#boxes .box.off").count() == 0


def test_the_overview_moves_the_graph(opened: Callable[[CompileRecord], Opened]) -> None:
    page = opened(layered(4, 12, 66, 4)).page
    page.locator("#view").select_option("kernels")
    overview = page.locator("#overview")
    overview.scroll_into_view_if_needed()
    place = overview.bounding_box()
    before = page.locator("#world").get_attribute("transform")
    page.mouse.click(place["x"] + place["width"] / 2, place["y"] + place["height"] * 0.9)
    assert page.locator("#world").get_attribute("transform") != before
    last, canvas = page.locator("#boxes .box").nth(720).bounding_box(), page.locator("#canvas").bounding_box()
    assert abs(last["y"] - canvas["y"] - canvas["height"] / 2) < canvas["height"], "nine tenths of the way down"
    page.locator("#zoom-fit").click()
    assert overview.is_hidden(), "all is in sight"


def test_the_table_is_one_stop_of_the_keyboard(opened: Callable[[CompileRecord], Opened]) -> None:
    page = opened(layered(4, 12, 66, 4)).page
    rows = "#kernel-table tbody button"
    assert page.locator(f"{rows}[tabindex='0']").count() == 1 and page.locator(rows).count() == 800
    page.locator(f"{rows}[tabindex='0']").focus()
    order = _column(page, 1)
    for key, at in (("Home", 0), ("ArrowDown", 1), ("ArrowDown", 2), ("ArrowUp", 1), ("End", 799), ("ArrowDown", 799)):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.textContent") == order[at], key
    page.keyboard.press("Enter")
    assert page.locator("#panel h3").inner_text() == f"Kernel {order[799]}"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#kernel-table')") is None, "Tab leaves the table"


@pytest.mark.parametrize("width", [390, 1280])
def test_every_column_can_be_reached(width: int, opened: Callable[[CompileRecord], Opened]) -> None:
    page = opened(layered(2, 3, 4, 2)).page
    page.set_viewport_size({"width": width, "height": 844})
    box = page.locator("#kernels .tall")
    box.focus()
    box.evaluate("e => { e.scrollLeft = e.scrollWidth }")
    last, frame = page.locator("#kernel-table thead th").last.bounding_box(), box.bounding_box()
    assert last["x"] + last["width"] <= frame["x"] + frame["width"] + 2
    first = page.locator("#kernel-table tbody td").first.bounding_box()
    assert abs(first["x"] - frame["x"]) <= 2, "the kernel's number stays"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page itself does not scroll sideways"
