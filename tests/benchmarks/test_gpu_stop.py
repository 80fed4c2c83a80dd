from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.co_runner.role_stops import LCS, NOW, ROOM_BYTES, RoleCase, RoleTrials, latency_us, launches_of
from benchmarks.co_runner.rows import exact
from benchmarks.co_runner.units import USUAL, role_unit, unit_of
from benchmarks.gpu_stop import RAISE, Case, Trials, cases, main, role_cases, role_row_of, row_of
from tests.generate.cuda.role.test_persistent import ptx
from tests.slow import few

from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.fused import control_bytes, shared_of, stages_of
from weft.ir.declined import Declined
from weft.kernels.colocation import WorkCounter


def test_a_row_has_the_distribution() -> None:
    us = [float(x) for x in range(1, 1001)]
    made = row_of("ffma/b1/128/host", Trials(us, [2 * x for x in us], 77, 9.125))
    assert (made["p50_us"], made["p99_us"], made["host_p99_us"]) == (500.0, 990.0, 1980.0)
    quantiles = made["quantiles_us"]
    assert isinstance(quantiles, dict) and quantiles["1"] == 1000.0 and made["trials"] == 1000 and made["blocks"] == 77


def test_a_row_of_roles_has_what_was_measured() -> None:
    found = RoleTrials([0.0, 4.0, 8.0], [20.0, 24.0, 28.0], [2.0, 2.5, 2.25], 3, 600, 1500.0)
    made = role_row_of("role/ffma/b1/128x3072x768", found, {"lc_us": 4.5})
    assert (made["what"], made["missed"], made["clock_us"], made["lc_us"]) == ("role", 3, 2.5, 4.5)
    assert (made["p50_us"], made["p99_us"], made["blocks"], made["block_us"], made["trials"]) == (4.0, 8.0, 600, 2.5, 3)


@pytest.mark.parametrize(
    ("ended", "now", "gap", "latency"),
    [(1_050_000, 1_000_000, 40.0, 10.0), (1_050_000, 1_000_000, 60.0, 0.0), (1_000_500, 1_000_000, 0.25, 0.25)],
)
def test_a_latency_by_two_clocks(ended: int, now: int, gap: float, latency: float) -> None:
    """Blocks end 50 µs after the kernel that ties the clocks; `stop` is written 40, or 60, after it."""
    assert latency_us(ended, now, gap) == latency


def test_a_chain_lasts_long_enough_to_be_stopped() -> None:
    assert [launches_of(us) for us in (1.0, 4.9, 100.0, 900.0)] == [128, 52, 3, 1]


def test_cases_of_roles() -> None:
    assert len(role_cases([])) == len(USUAL) * sum(map(len, LCS.values()))
    assert role_cases(["histogram/b16/vgg16-conv3x3-64-224"]) == [RoleCase("histogram", 16, "vgg16/conv3x3-64-224")]
    assert {c.batch for c in role_cases(["b1"])} == {1} and not role_cases(["128"])


@pytest.mark.parametrize("kind", few(USUAL, 2))
def test_blocks_of_roles_tell_when_they_ended(kind: str) -> None:
    """And those of co-runners do not."""
    whole, unit = unit_of(kind, 128, 16), role_unit(kind, 16)
    assert unit.stamped and 4 * unit.turns == whole.turns and role_unit(kind, 1).turns < unit.turns
    source = unit.role().source
    stages = stages_of([source])
    assert not isinstance(stages, Declined) and shared_of(stages)[0] + control_bytes(1) <= ROOM_BYTES
    assert ptx(solo(source, "be").text).count("%globaltimer") == 1
    assert ptx(solo(whole.role().source, "be").text).count("%globaltimer") == 0


def test_what_ties_the_clocks_compiles() -> None:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    assert nvrtc.compile(NOW, arch="sm_90a").of("now").spill_stores == 0


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
        (["--what", "role", "--only", "graph"], "no case is named so"),
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
