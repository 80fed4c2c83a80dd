from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.co_runner.plans import BUDGET, TRIES, tried
from benchmarks.co_runner.rows import (
    LIMITS,
    WAYS,
    Sample,
    Way,
    beside,
    chosen,
    fitted,
    groups,
    lost_or_doubled,
    marked,
    quantile,
    wanted,
)
from benchmarks.co_runner.units import KINDS, Unit, co_runner, plain, unit_of
from benchmarks.gpu_corunner import budget_of, known, main
from benchmarks.harness.record import Record
from tests.slow import few
from tests.typed import some

from weft.colocate.gpu import whole_sm
from weft.device.cuda.facts import GpuFacts
from weft.errors import OptionError
from weft.ir.declined import Declined
from weft.kernels.colocation import left_beside


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_way_is_what_its_text_says(way: Way) -> None:
    assert Way.of(str(way)) == way


def test_ways_that_are_written_by_hand() -> None:
    assert Way.of("96-duty12-sms40") == Way("co-runner", 96, 12, 40)
    assert Way.of("128-duty90-sync") == Way("co-runner", 128, 90, sync=True)
    assert str(Way.of("192-duty90-sync-sms66")) == "192-duty90-sync-sms66"
    assert Way.of("green36-plain") == Way("green", 36, plain=True)
    assert Way.of("short").kind == "short"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "100",
        "0",
        "288",
        "128-duty0",
        "128-duty257",
        "128-sync",
        "128-duty256-sync",
        "short5",
        "green",
        "serial0",
        "128-plain",
        "mps",
    ],
)
def test_what_is_no_way(text: str) -> None:
    with pytest.raises(ValueError, match=r"whole warps|neither like|a number above 0"):
        Way.of(text)


def test_quantiles_are_values_that_were_seen() -> None:
    values = [float(x) for x in range(1, 101)]
    assert [quantile(values, p) for p in (0.5, 0.95, 0.99, 1.0, 0.0)] == [50.0, 95.0, 99.0, 100.0, 1.0]
    assert quantile([7.0], 0.99) == 7.0 and quantile([], 0.5) != quantile([], 0.5)


def sample(us: float, work: float = 0.0, count: int = 200) -> Sample:
    return Sample([us] * count, us * count, work)


def test_a_row_is_over_the_same_plan_alone() -> None:
    made = beside(Way.of("128"), sample(110.0, 110.0 * 200 * 50.0), sample(100.0), sample(80.0), 200.0)
    assert made["lc_p50"] == made["lc_p99"] == 1.1 and made["be"] == 0.25
    assert made["added"] == pytest.approx(1 / 1.1 + 0.25, abs=1e-4)
    assert made["added_plain"] == pytest.approx(80 / 110 + 0.25, abs=1e-4)
    assert made["price"] == 1.25 and made["queries"] == 200
    peer = beside(Way.of("short-plain"), sample(160.0), sample(100.0), sample(80.0), 200.0)
    assert peer["lc_p50"] == 2.0 and peer["added"] == peer["added_plain"] == 0.5


def row(case: str, p99: float, added: float, p50: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"case": case, "way": "co-runner", "lc_p99": p99, "lc_p50": p50, "be": 0.3, "added": added, **more}


def test_the_chosen_row_keeps_the_limit_and_adds_most() -> None:
    rows = [row("a", 1.07, 1.2), row("b", 1.08, 1.4), row("c", 1.081, 1.9), row("d", 1.0, 1.3, way="green")]
    assert chosen(rows, 1) == "b"
    assert chosen([*rows, row("e", 1.0, 1.5, failed="no")], 1) == "b"
    assert chosen([row("a", 1.2, 1.9, p50=1.11), row("b", 1.2, 1.1, p50=1.10)], 16) == "b"
    assert set(LIMITS) == {1, 16}


def test_sizes_over_the_limit_are_tried_with_the_duty_that_keeps_it() -> None:
    found = {
        Way.of("64"): 1.05,
        Way.of("128"): 1.10,
        Way.of("256"): 1.25,
        Way.of("128-duty96"): 1.2,
        Way.of("short"): 5.0,
    }
    # of 8 per cent 2 are its presence's: 6 of 8 beyond that are left for 128, 6 of 23 for 256
    assert list(map(str, fitted(found, 1))) == [
        "128-duty192-sync",
        "128-duty154-sync",
        "256-duty67-sync",
        "256-duty53-sync",
    ]
    assert fitted({Way.of("128"): 1.079}, 1) == [] and fitted({Way.of("256"): float("nan")}, 16) == []


def test_nothing_is_chosen_where_nothing_is_added_or_no_limit_kept() -> None:
    assert chosen([row("a", 1.09, 1.8), row("b", 1.0, 1.0)], 1) == "" and chosen([], 16) == ""


def test_only_marks_that_change_are_written_anew() -> None:
    rows = [row("a", 1.0, 1.2, chosen=True), row("b", 1.0, 1.5), row("c", 1.5, 2.0, chosen=False)]
    found = {x["case"]: x["chosen"] for x in marked(rows, 1)}
    assert found == {"a": False, "b": True}
    assert marked([row("g", 1.0, 1.2, way="green")], 1) == []
    declined = {"case": "d", "way": "co-runner", "declined": "over the budget"}
    assert marked([declined], 1) == [] and chosen([declined], 1) == ""


def test_cases_are_named_by_whole_parts() -> None:
    assert wanted("resnet50/b1/ffma/128", ["b1/ffma"]) and wanted("resnet50/b1/ffma/128", [])
    assert not wanted("resnet50/b16/ffma/128", ["b1"]) and not wanted("x/b1/ffma/128-duty96", ["128"])
    found = groups(["resnet50/b1/ffma/128", "vgg16/b16"], WAYS, KINDS)
    assert found["resnet50", 1, "ffma"] == [Way.of("128")]
    assert set(found) == {("resnet50", 1, "ffma"), *(("vgg16", 16, k) for k in KINDS)}


@pytest.mark.parametrize("finished", [0, 1, 7, 8, 9, 8 * 5 + 3])
def test_blocks_that_count_themselves(finished: int) -> None:
    cells = [sum(1 for i in range(finished) if i % 8 == k) for k in range(8)]
    assert lost_or_doubled(cells, finished) == ""
    for change in (1, -1):
        wrong = [cells[0], cells[1] + change, *cells[2:]]
        assert "1 of 8 cells differ: cell 1" in lost_or_doubled(wrong, finished)


@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_work_is_a_role_of_any_block(kind: str) -> None:
    facts = GpuFacts()
    for threads in (64, 256):
        unit = unit_of(kind, threads, 16)
        assert unit.work == threads * unit.turns and unit.turns == 4 * unit_of(kind, threads, 1).turns
        made = co_runner(unit, 132, facts)
        assert made.threads == threads and made.grid == (132, 1, 1) and made.stages == (1 << 30,)
        assert plain(unit, 77).launches[0].grid == (77, 1, 1)
    assert unit_of(kind, 256, 16, short=True).turns < unit_of(kind, 256, 1).turns


def test_work_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no work 'tensor'"):
        unit_of("tensor", 64, 1)
    with pytest.raises(ValueError, match="0 CTAs of 64 threads"):
        co_runner(Unit("ffma", 64, 1), 0, GpuFacts())


def test_the_budget_leaves_room_for_the_largest_co_runner() -> None:
    facts = GpuFacts()
    left = left_beside(whole_sm(facts), budget_of(BUDGET))
    assert not isinstance(left, Declined)
    assert (left.registers, left.threads, left.ctas) == (8192, 256, 1) and some(left.shared_bytes) >= 2176
    with pytest.raises(ValueError, match="registers"):
        budget_of("registers=3")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plans", "x", "--ways", "129"], "invalid"),
        (["--plans", "x", "--kinds", "tensor"], "invalid"),
        (["--plans", "x", "--only", "resnet18"], "no case is named so"),
        (["--plans", "x", "--rounds", "0"], "at least 1"),
        (["--sm-budget", "registers=5", "--dry"], "no multiple of 256"),
        ([], "one of --prepare, --plans and --dry"),
        (["--plans", "x", "--prepare", "y"], "one of --prepare, --plans and --dry"),
    ],
)
def test_arguments_that_are_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_case_is_known_by_a_good_row_of_this_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_COMMIT", "abc")
    record = Record("cpu", "x", path=tmp_path / "x.jsonl", command="test")
    record.add({"record": "case", "case": "a"})
    record.add({"record": "case", "case": "b", "failed": "no"})
    record.add({"record": "case", "case": "c", "commit": "older"})
    assert known(record, "a") and not any(known(record, x) for x in "bcd") and not known(None, "a")


def test_a_plan_under_a_budget_is_tried_again_where_its_time_ended_alone() -> None:
    calls: list[int] = []

    def ends(option: str, after: int) -> Callable[[], Any]:
        def make() -> str:
            calls.append(1)
            if len(calls) < after:
                raise OptionError(option=option, problem="no plan")
            return "a plan"

        calls.clear()
        return make

    found: object = tried(ends("budget_s", 3))
    assert found == "a plan" and len(calls) == 3
    with pytest.raises(OptionError, match="'sm_budget'"):
        tried(ends("sm_budget", 3))
    assert len(calls) == 1
    with pytest.raises(OptionError, match="'budget_s'"):
        tried(ends("budget_s", TRIES + 1))
    assert len(calls) == TRIES
