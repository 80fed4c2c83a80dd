"""Predicted against measured: invented times with a known truth, a device of the host's own, an invented meter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.colocate.fake_device import FakeDevice, FakeJob, query
from tests.colocate.recorded import constant, samples

from benchmarks import colocate_predictors as b
from tools import colocate_tables
from weft.colocate.arrivals import poisson
from weft.colocate.gpu_machine import Form, GpuMachine, Lane
from weft.colocate.live import LiveBackend, run
from weft.colocate.operating import Prepared, prepare
from weft.colocate.outcome import Outcome
from weft.colocate.policies import make
from weft.kernels.scheduling import PairModel, SoloModel

STEADY = samples(constant(100.0), launch_us=5.0, stop_us=10.0)


def test_points_that_are_predicted_fit_nothing() -> None:
    fitted, held_out = b.halves([(float(n), 1.0) for n in (5, 1, 3, 2, 4, 6)])
    assert fitted == [(1.0, 1.0), (3.0, 1.0), (5.0, 1.0), (6.0, 1.0)] and held_out == [(2.0, 1.0), (4.0, 1.0)]
    assert b.sizes(1200) == [100 * k for k in range(1, 13)] and b.sizes(3) == [1, 2, 3]


def test_held_out_sizes_of_kernels_alone_and_fused() -> None:
    alone, fused = SoloModel(4.0, 9.0, 264, False, 0.0), PairModel(50.0, 8.0, 30.0, 0.6, 0.0)
    row: Any = b.solo_row("net", alone.us, b.sizes(4000), 264)
    assert row["mean_error"] == pytest.approx(0.0, abs=1e-5) and row["reached"] is True and row["held_out"] == 5
    row = b.fused_row("net", lambda n: (n / 100, fused.us(n / 100)), [0, *b.sizes(120)])
    assert row["mean_error"] < 0.01 and row["case"] == "net/fused"


def test_what_no_model_fits_is_not_reached() -> None:
    row: Any = b.solo_row("net", lambda n: 100.0 if (n // 100) % 2 else 160.0, b.sizes(1200), 132)
    assert row["reached"] is False and row["mean_error"] > 0.1


def test_variants_and_another_clock() -> None:
    rng = np.random.default_rng(1)

    def phase(mhz: int) -> tuple[list[float], list[int]]:
        return [float(x) for x in 100.0 * 1980 / mhz * rng.normal(1, 0.01, 400)], [mhz] * 400

    first: Any
    clock: Any
    first, clock, still = b.variant_rows("net/alone", 100.0, 5.0, 1980, [phase(1980), phase(1500), phase(1980)])
    assert first["kind"] == "variant" and first["mean_error"] < 0.01 and first["held_out"] == 20
    assert clock["case"] == "net/alone/1500MHz/clock" and clock["reached"] is True
    assert clock["first_error"] < 0.02, "by the clock alone, before a query was seen there"
    assert still["declined"] == "the clock stayed within 75 MHz"
    slow = [200.0] * 400, [1500] * 400
    wrong: Any
    _, wrong = b.variant_rows("net", 100.0, 5.0, 1980, [phase(1980), slow])
    assert wrong["first_error"] > 0.3, "no change of clock explains it"


def carried_out(p: Prepared) -> Outcome:
    device = FakeDevice(look_ns=200)
    resident = Form(2, device.persistent)
    lanes = [Lane(1, query(device, 1, x.lc.at(0.5)), None if x.variant.number == 0 else resident) for x in p.points]
    if p.job is None:
        machine = GpuMachine(device, {"net": lanes[:1]}, copies=3)
    else:
        machine = GpuMachine(device, {"net": lanes}, copies=3, job=FakeJob(device), idle=resident)
    policy = make(p.policy, p.setting)
    return run(policy, LiveBackend(machine, [(p, poisson(4000.0, 300, seed=1))], policy=policy))


@pytest.mark.parametrize("policy", ["exclusive", "weft"])
def test_work_to_a_joule(policy: str) -> None:
    meter = iter((100.0, 160.0))
    p = prepare(STEADY, policy, "net", "" if policy == "exclusive" else "work", 500_000)
    row: Any = b.power_row("net/work", p, carried_out, lambda: next(meter))
    assert row["joules"] == 60.0 and row["queries_per_joule"] == 5.0 and row["clock_mhz"] == 1980
    assert (row["be_ms_per_joule"] > 0) == (policy == "weft")
    assert row["work_ms_per_joule"] >= 300 * 0.1 / 60
    assert "does not say" in str(b.power_row("net", p, carried_out, lambda: 0.0)["declined"])


def test_the_table_has_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setattr(colocate_tables, "records", lambda *_: [])
        assert "not measured yet" in colocate_tables.predictors()
    rows: list[dict[str, object]] = [
        b.row_of("solo", "net/work", [(1.0, 1.0)]), b.row_of("fused", "net/work", [(2.0, 1.0)]),
        {"record": "case", "case": "net/clock", "kind": "clock", "declined": "the clock stayed"},
        b.power_row("net", prepare(STEADY, "exclusive", "net", "", 500_000), carried_out, iter((0.0, 30.0)).__next__),
    ]  # fmt: skip
    head: dict[str, object] = {"record": "head", "device": "NVIDIA H200", "driver": "1", "commit": "0", "command": "x"}

    def lines(folder: str, suite: str) -> Sequence[dict[str, object]]:
        assert (folder, suite) == ("nvidia-h200", "colocate-predictors")
        return [head, *rows]

    monkeypatch.setattr(colocate_tables, "records", lines)
    monkeypatch.setattr(colocate_tables, "good", lambda x: [y for y in x if y["record"] == "case"])
    monkeypatch.setattr(colocate_tables, "note", lambda *_: "")
    monkeypatch.setattr(colocate_tables, "failed", lambda *_: [])
    text = colocate_tables.predictors()
    assert (
        "| net/work/solo | 1 | 0.00% |" in text and "**100.00%**" in text and "not measured: the clock stayed" in text
    )
    assert "| net/exclusive/power |" in text


def test_the_command_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    b.main(["--dry"])
    assert capsys.readouterr().out == "resnet50/b1/mriq\n"
    for arguments, says in (
        (["--only", "nothing"], "no pair"), (["--clocks", "1500"], "needs --set-clock"), ([], "--plans DIR"),
        (["--clocks", "1500", "--set-clock", "set"], "with {mhz} in it"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            b.main(arguments)
        assert says in capsys.readouterr().err
