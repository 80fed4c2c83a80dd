"""The fault injection without a GPU: every text compiles, and the tally tells harm from none."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.gpu_faults import KINDS, MULTIPLY, SOUND, Tally, is_good, known, line, source, summary, table, trial
from benchmarks.harness.record import Record

from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.kernels.measurement import Measurement, Verdict


@pytest.mark.parametrize("name", list(KINDS))
def test_every_fault_has_its_own_text_that_compiles(name: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    texts = {source(name, n, KINDS[name].body(n)).text for n in range(50)}
    assert len(texts) == 50
    for n in (0, 1, 2, 3, 4, 5):
        made = nvrtc.compile(source(name, n, KINDS[name].body(n)).text, arch="sm_90a", cache_dir=tmp_path)
        assert Path(made.path).stat().st_size > 0


def found(name: str, verdict: Verdict, sound: Verdict = Verdict.OK, broken_us: float = 1.0) -> list[Measurement]:
    broken = source(name, 0, KINDS[name].body(0)).schedule
    times = {Verdict.OK: (broken_us,) * 5}
    return [
        Measurement("p", broken, verdict, times.get(verdict, ())),
        Measurement("p", MULTIPLY.schedule, Verdict.OK, (4.0,) * 5),
        Measurement("p", source("sound", 0, SOUND).schedule, sound, (3.0,) * 5 if sound is Verdict.OK else ()),
    ]


def test_a_trial_has_the_sound_kernel_behind_the_broken_ones() -> None:
    names = [dict(s.params).get("name", s.generator) for s, _, _ in trial("wrong result", [3, 4]).kernels]
    assert names == ["wrong result", "wrong result", "library", "sound"]


@pytest.mark.parametrize(
    ("measured", "good"),
    [
        (found("illegal access", Verdict.CRASH), True),
        (found("illegal access", Verdict.HANG), False),
        (found("illegal access", Verdict.OK), False),
        (found("illegal access", Verdict.OK, broken_us=9.0), False),
        (found("illegal access", Verdict.CRASH, Verdict.WRONG), False),
        (found("illegal access", Verdict.CRASH)[:2], False),
        (found("illegal access", Verdict.CRASH)[1:], False),
        (found("wrong result", Verdict.PRECISION), True),
    ],
)
def test_the_tally(measured: list[Measurement], good: bool) -> None:
    name = str(dict(measured[0].schedule.params).get("name", "illegal access"))
    tally = Tally()
    tally.take(name, measured, 1)
    assert is_good(tally) is good, tally
    assert f"{name}  " in table({name: tally})


def test_a_slower_neighbour_or_a_dead_tuner_is_harm(tmp_path: Path) -> None:
    assert is_good(Tally(slower=1.1)) and not is_good(Tally(slower=1.5)) and not is_good(Tally(deaths=1))
    tally = Tally(slower=1.125, workers=3, seconds=2.5)
    tally.take("illegal access", found("illegal access", Verdict.CRASH), 1)
    first = Record("", "gpu-faults", path=tmp_path / "faults.jsonl")
    assert known(first.cases) == {}
    first.add(line("illegal access", tally))
    first.fail("no", case="infinite loop")
    again = Record("", "gpu-faults", path=tmp_path / "faults.jsonl")
    assert known(again.cases) == {"illegal access": tally}
    assert summary(known(again.cases))["total"] == 1
