from __future__ import annotations

from typing import Any

from benchmarks.co_runner.networks import NetworkWay
from benchmarks.co_runner.networks import row as network_row
from benchmarks.co_runner.role_stops import RoleTrials
from benchmarks.co_runner.rows import Sample, Way, beside
from benchmarks.gpu_stop import Trials, role_row_of, row_of
from tools.co_runner_tables import (
    HEAD,
    best_of,
    budget_rows,
    co_runner_rows,
    first_query_rows,
    network_rows,
    presence_rows,
    role_stop_rows,
    stop_rows,
)


def sample(us: float, work: float = 0.0) -> Sample:
    return Sample([us] * 200, us * 200, work)


def row(case: str, us: float, be: float, **more: Any) -> dict[str, Any]:
    """What the benchmark makes of queries of `us` beside work at a rate of `be`."""
    made = beside(Way.of(case.rpartition("/")[2]), sample(us, be * us * 200), sample(100.0), sample(98.0), 1.0)
    return {"record": "case", "case": case, "commit": "c", **made, **more}


LINES = [
    {"record": "environment", "device": "NVIDIA H200", "command": "c"},
    row("vgg16/b1/ffma/128", 104.0, 0.3, chosen=True),
    row("vgg16/b1/ffma/256", 125.0, 0.5, chosen=False),
    row("vgg16/b1/ffma/short", 400.0, 0.8),
    row("vgg16/b1/ffma/green12", 110.0, 0.08),
    row("vgg16/b1/ffma/green36", 130.0, 0.26),
    row("vgg16/b1/histogram/64", 150.0, 0.1, chosen=False),
    {"record": "case", "case": "vgg16/b1/ffma/slices2", "failed": "late", "commit": "c"},
]


def test_what_was_chosen_stands_beside_the_best_of_its_peers() -> None:
    ffma, histogram, mean = co_runner_rows(LINES)
    assert all(len(x) == len(HEAD) for x in (ffma, histogram, mean))
    assert ffma[:8] == ["vgg16/b1/ffma", "100.0", "1.020", "128", "1.04", "1.04", "0.30", "1.26"]
    assert ffma[8:11] == ["4.00", "4.00", "1.05"] and ffma[11] == "1.30 (green36)" and ffma[14:17] == ["", "", ""]
    assert histogram[3] == "none: in turn" and histogram[4:8] == ["", "", "", ""]
    assert mean[0].startswith("batch 1: chosen in 1 of 2") and mean[7] == "**1.13**", "of 1.26 and of taking turns"
    assert best_of([], "short") is None and not co_runner_rows(LINES[:1])


def test_the_price_of_a_budget_beside_that_of_nothing() -> None:
    line = {"record": "case", "case": "vgg16/b16/nothing", "way": "nothing", "plain_us": {"p50": 100.0}, "steps": 3,
            "lc_us": {"p50": 103.0, "p99": 105.06}, "price": 1.03, "again": {"lc_p50": 1.001, "lc_p99": 0.998},
            "plain_steps": 4, "sm_budget": "ctas=31"}  # fmt: skip
    one, mean = budget_rows([line])
    assert one[:7] == ["vgg16/b16", "100.0", "103.0", "1.030", "1.020", "1.001", "0.998"]
    assert mean[3] == "**1.030** (1.030)" and not budget_rows([])


def test_the_first_query() -> None:
    line = {"record": "case", "case": "vgg16/b1/first/ffma/none", "way": "first", "us": [200.0, 110.0, 105.0],
            "usual_us": 104.0, "first_over_usual": 1.923, "second_over_usual": 1.058, "host_us": 250.2, "blocked": 1,
            "trials": 5}  # fmt: skip
    assert first_query_rows([line]) == [
        ["vgg16/b1", "ffma", "none", "200.0", "110.0", "104.0", "1.92", "1.06", "250", "1 of 5"]
    ]
    assert not co_runner_rows([line])


def test_stops() -> None:
    us = [float(x) for x in range(1, 101)]
    (made,) = stop_rows([row_of("ffma/b1/128/host", Trials(us, us, 5, 9.0))])
    assert made[1] == "9.0" and made[4] == "**50.0**" and made[6] == "**99.0**" and made[-3:] == ["100", "5", "0"]


def test_stops_of_roles() -> None:
    us = [float(x) for x in range(1, 101)]
    found = RoleTrials(us, us, [2.25] * 100, 0, 5, 10.0)
    (made,) = role_stop_rows([role_row_of("role/ffma/b16/vgg16-conv3x3-64-224", found, {"lc_us": 100.21})])
    assert made[:3] == ["ffma/b16/vgg16-conv3x3-64-224", "100.2", "2.0"] and made[-4:] == ["100", "5", "0", "2.2"]


def test_what_only_stays() -> None:
    alone = {"record": "case", "case": "vgg16/b1/presence/none", "way": "presence", "dependent_us": 100.0,
             "independent_us": 120.0}  # fmt: skip
    naps = {**alone, "case": "vgg16/b1/presence/naps128", "dependent_ratio": 1.02, "independent_ratio": 1.01}
    blocks = {"record": "case", "case": "vgg16/b1/presence/other", "way": "presence", "failed": "not done after 5 s"}
    step = {"record": "case", "case": "vgg16/b1/step/1-k", "way": "step"}
    found = presence_rows([alone, naps, blocks, step])
    assert found[0] == ["vgg16/b1", "none", "100.0", "", "120.0", ""]
    assert found[1] == ["vgg16/b1", "naps128", "100.0", "1.020", "120.0", "1.010"]
    assert found[2][2] == "waits for its end: not done after 5 s" and len(found) == 3


def test_networks_beside_models() -> None:
    def of(way: str, us: float, work: float, **more: Any) -> dict[str, Any]:
        made = network_row(NetworkWay.of(way), sample(us, work), sample(100.0), sample(98.0), 500.0)
        return {"record": "case", "case": f"resnet50/b1/bert_base/8/{way}", "commit": "c", **made, **more}

    base = {"record": "case", "case": "resnet50/b1/bert_base/8/nothing", "way": "nothing", "lc_us": {"p50": 100.0},
            "price": 1.0204, "inference_us": 500.2, "sm_clock_mhz": 1980, "watts": 300.0}  # fmt: skip
    declined = {"record": "case", "case": "resnet50/b1/bert_base/8/stages-duty25", "way": "stages", "declined": "no"}
    lines: list[dict[str, Any]] = [
        base, declined, of("stages-ctas1", 110.0, 11.0, stop_us=150), of("stages", 150.0, 6.0, stop_us=240.0),
        of("green20", 110.0, 4.4), of("green36", 120.0, 12.0), of("priority", 300.0, 60.0),
    ]  # fmt: skip
    (found,) = network_rows(lines)
    assert found[:4] == ["resnet50/b1/bert_base/8", "100.0", "1.020", "500"]
    assert found[4:8] == ["1.50 1.50 0.10 0.77", "declined", "1.10 1.10 0.25 1.16", ""]
    assert found[8:] == ["3.06 3.06 0.50 0.83", "1.22 1.22 0.25 1.07 (green36)", "", "240", "0, 0"]
    assert not network_rows(lines[1:])
