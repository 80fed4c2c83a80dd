from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.co_runner.units import USUAL
from benchmarks.gpu_stop import RAISE, Case, Trials, cases, exact, main, row_of

from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.kernels.colocation import WorkCounter


def test_a_row_has_the_distribution() -> None:
    us = [float(x) for x in range(1, 1001)]
    made = row_of("ffma/b1/128/host", Trials(us, [2 * x for x in us], 77, 9.125))
    assert (made["p50_us"], made["p99_us"], made["host_p99_us"]) == (500.0, 990.0, 1980.0)
    quantiles = made["quantiles_us"]
    assert isinstance(quantiles, dict) and quantiles["1"] == 1000.0 and made["trials"] == 1000 and made["blocks"] == 77


def test_cases_by_parts_of_their_names() -> None:
    assert cases(["histogram/b16/64/graph"]) == [Case("histogram", 16, 64, "graph")]
    assert len(cases([])) == len(USUAL) * 2 * 3 * 2 and len(cases(["b1"])) == 6 * len(USUAL) and not cases(["b2"])


def test_the_counter_after_a_stop() -> None:
    before = WorkCounter(end=1000, ticket=10, finished=10)
    assert exact(before, replace(before, ticket=40, finished=40)) == ""
    assert exact(before, replace(before, ticket=1003, finished=1000)) == "", "draws in vain"
    assert "40 blocks were drawn, 39 have ended" in exact(before, replace(before, ticket=40, finished=39))
    assert "40 blocks were drawn, 41 have ended" in exact(before, replace(before, ticket=40, finished=41))
    assert "5 blocks have ended, 10 had before" in exact(before, replace(before, ticket=5, finished=5))


def test_stop_lies_where_it_is_written() -> None:
    calm, stopped = WorkCounter().pack(), WorkCounter(stop=1).pack()
    assert [i for i, (a, b) in enumerate(zip(calm, stopped, strict=True)) if a != b] == [WorkCounter.offset("stop")]


def test_what_raises_stop_compiles() -> None:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    assert nvrtc.compile(RAISE, arch="sm_90a").of("raise_stop").spill_stores == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "tensor"], "no case is named so"),
        (["--trials", "0"], "at least 1"),
        (["--beside", "resnet50/b1"], "needs --plans"),
        (["--beside", "resnet18/b1", "--plans", "x"], "a model and a batch"),
        (["--sm-budget", "ctas=0"], "ctas is 0"),
    ],
)
def test_arguments_that_are_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err
