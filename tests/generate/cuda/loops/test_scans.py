"""Kernels around a scan, on the emulated machine and through the compiler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.generate.cuda.emulate import FACTS, build, check, run, trial, trials
from tests.generate.scans import CASES, S, drawn, plain, selective, surrounded

from weft.device.cuda.nvrtc import find_nvrtc
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.loops.scan import ScanForm
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource

LONG = {
    "long": lambda: plain((2, 300), S(1, "sum")),
    "long linear": lambda: plain((1, 513), S(0 + 1, "linear")),
    "long exclusive": lambda: plain((2, 256), S(1, "linear", exclusive=True, reverse=True)),
}


@pytest.mark.parametrize("name", [*CASES, *LONG])
def test_every_schedule(name: str) -> None:
    problem = {**CASES, **LONG}[name]()
    found = trials(problem, drawn(problem))
    assert len({t.source.text.replace(t.source.entry, "") for t in found}) > 1
    check(found)


def test_an_infinity_reaches_nothing_before_it() -> None:
    problem = plain((2, 300), S(1, "sum"))
    (x,) = drawn(problem)
    x[0, 17], x[1, 200] = np.inf, -np.inf
    for one in trials(problem, [x]):
        (found,) = run(one, build([one]))
        assert np.isfinite(found[0, :17]).all() and (found[0, 17:] == np.inf).all()
        assert np.isfinite(found[1, :200]).all() and (found[1, 200:] == -np.inf).all()


def test_the_first_factor_is_never_used() -> None:
    problem = plain((3, 130), S(1, "linear"))
    factor, term = drawn(problem)
    factor[:, 0] = [np.nan, np.inf, -np.inf]
    for one in trials(problem, [factor, term]):
        (found,) = run(one, build([one]))
        assert np.isfinite(found).all()


def test_forms_follow_the_shape() -> None:
    def first(shape: tuple[int, ...], axis: int) -> ScanForm:
        schedules = CudaGenerator().schedules(plain(shape, S(axis, "sum")), FACTS)
        assert not isinstance(schedules, Declined)
        return ScanForm.of(schedules[0])

    assert first((1000, 1 << 17), 0).warps == 0  # rows side by side fill the machine
    assert first((4, 4096), 1).warps == 8  # a block has one long row
    assert first((1 << 12, 100), 1).warps == 1


def test_what_is_declined() -> None:
    found = CudaGenerator().schedules(selective(1, 2, 3, 40), FACTS)
    assert isinstance(found, Declined) and "40 states" in found.reason
    found = CudaGenerator().schedules(plain((4, 1), S(1, "sum")), FACTS)
    assert isinstance(found, Declined) and "carries nothing" in found.reason


COMPILED = {
    "selective": lambda: selective(1, 512, 64, 16, DType.F16),
    "rows": lambda: plain((512, 2048), S(1, "sum"), DType.F16),
    "few rows": lambda: plain((8, 4096), S(1, "linear")),
    "wide": lambda: plain((64, 333), S(1, "prod"), DType.F64),
    "surrounded": lambda: surrounded((64, 20, 7), 0, kind="linear"),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_spills(arch: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    for name, make in COMPILED.items():
        problem = make()
        schedules = CudaGenerator().schedules(problem, FACTS)
        assert not isinstance(schedules, Declined), name
        for schedule in schedules:
            source = trial(problem, schedule, []).source
            assert isinstance(source, CudaSource)
            for _, used in nvrtc.compile(source.text, arch=arch, cache_dir=tmp_path).resources:
                assert used.spill_stores == used.spill_loads == used.stack_bytes == 0, (name, schedule)
                assert used.registers <= 128, (name, schedule)


SHOWN = [(CASES["selective f16"](), 0), (plain((8, 512), S(1, "linear")), 8)]
"""For golden texts: a problem, and the warps of a row."""
