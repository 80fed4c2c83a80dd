"""A convolution and a 1x1 convolution of it in one kernel: exact on integers in the emulation; what is declined."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.generate.cuda.products import BF16, F32, ROW, pair
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact, written
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.conv.separable.match import Separable
from weft.generate.cuda.conv.separable.match import stacked as matched
from weft.generate.cuda.conv.stacked import kernel as stacked
from weft.generate.cuda.conv.stacked.kernel import Geometry, StackedConfig
from weft.generate.cuda.predict import predicted_us
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

PLAIN = StackedConfig(4, 4, 16, 16, 16, 1, 32, 16, 16, 1)
CASES: dict[str, tuple[Problem, StackedConfig]] = {
    "one part": (pair(1, 16, 8, 8, 24, between=32), PLAIN),
    "parts at once": (pair(1, 16, 8, 8, 72, between=32, residual=True), replace(PLAIN, ring=3)),
    "ring": (pair(1, 16, 8, 8, 120, between=32, residual=True), replace(PLAIN, ring=2)),
    "odd sizes": (pair(2, 16, 9, 7, 40, between=32, residual=True), replace(PLAIN, th=3, tw=5, ring=2)),
    "other warps": (
        pair(1, 48, 9, 9, 64, between=48),
        StackedConfig(8, 4, 32, 16, 48, 2, 32, 16, 32, 2),
    ),
    "strided 5x5 bf16": (pair(1, 16, 13, 9, 24, 5, 2, 2, between=16, dtype=BF16), replace(PLAIN, wn=16, bn=16, ring=2)),
    "no padding": (pair(1, 16, 8, 8, 16, pad=0, between=32), replace(PLAIN, bn=32)),
    "short vectors in the text": (pair(1, 16, 6, 7, 16, between=32, texts=True), PLAIN),
    "row-major result": (pair(1, 16, 6, 6, 24, between=32, fout=ROW), PLAIN),
    "few channels": (pair(1, 3, 17, 19, 24, 7, 2, 3, between=32, fin=ROW), replace(PLAIN, bc=4)),
    "odd channels": (pair(1, 5, 7, 9, 11, between=32), PLAIN),
    "ring in front": (pair(1, 80, 8, 8, 40, between=32), replace(PLAIN, stages=2, ring=2)),
}


def match(problem: Problem) -> Separable:
    found = matched(problem)
    assert isinstance(found, Separable), found
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return written(CASES, lambda problem, shape, entry: stacked.emit(match(problem), shape.schedule(), entry))


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources))


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", few(CASES, 3))
def test_sums_of_integers_are_exact(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, CASES[name][0], sources[name], most=1, defer=defer)


LARGE = (pair(16, 64, 56, 56, 256, between=64, residual=True), pair(16, 128, 28, 28, 512, between=128))


def test_schedules_come_from_the_template() -> None:
    for problem in LARGE:
        found = templates.schedules(problem, A100)
        assert not isinstance(found, Declined), found.reason
        assert {s.param("template") for s in found} == {"stacked"}
        assert all((predicted_us(problem, s, A100) or 0) > 0 for s in found)
        sources = [templates.emit(problem, s) for s in found]
        assert len({s.entry for s in sources if isinstance(s, CudaSource)}) == len(found) > 1


@pytest.mark.parametrize("facts", [H200, A100], ids=["sm_90a", "sm_80"])
def test_shapes_fit_the_device(facts: GpuFacts) -> None:
    for problem in LARGE:
        p = match(problem)
        w = halo.window(p.first)
        assert isinstance(w, halo.Window)
        found = stacked.shapes(p, facts)
        assert not isinstance(found, Declined), found.reason
        assert all(Geometry.of(p, w, s).shared <= facts.shared_per_block for _, s in found)


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (pair(1, 16, 9, 9, 16, between=32, dtype=F32), "f32"),
        (pair(1, 16, 9, 9, 16, between=24), "24 channels"),
        (pair(1, 16, 9, 9, 16, between=144), "144 channels"),
        (pair(1, 128, 28, 28, 512, between=128), "two kernels keep more"),
        (LARGE[0], "one kernel is modelled to take"),  # as measured
        (pair(1, 16, 9, 9, 16, between=32, second=3), "not 1x1"),
        (pair(1, 16, 9, 9, 16, between=32, shared=True), "others read"),
        (pair(1, 16, 9, 9, 16, 1, 1, 0, between=32), "no convolution that reads a halo"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, part: str) -> None:
    refused = templates.schedules(problem, H200)
    assert isinstance(refused, Declined)
    assert part in refused.reason


def test_groups_are_declined() -> None:
    for found in (matched(pair(1, 32, 9, 9, 16, between=32, groups=4)), matched(pair(1, 32, 9, 9, 16))):
        assert isinstance(found, Declined)
        assert "groups" in found.reason


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        (replace(PLAIN, vn=32), "as many warps"),
        (replace(PLAIN, bc=4), "16 channels"),
        (replace(PLAIN, ring=2), "ring of two"),
        (replace(PLAIN, wm=16, wn=64, vm=16, vn=32), "divide"),
    ],
)
def test_shapes_that_do_not_fit_are_declined(shape: StackedConfig, part: str) -> None:
    refused = stacked.emit(match(CASES["one part"][0]), shape.schedule(), "k")
    assert isinstance(refused, Declined)
    assert part in refused.reason


def test_a_sample_compiles_without_spills() -> None:
    for arch, facts, problems in (
        ("sm_90a", H200, [pair(16, 64, 56, 56, 256, between=64, residual=True)]),
        ("sm_80", A100, [pair(16, 64, 28, 28, 120, between=96)]),
    ):
        sources = []
        for problem in problems:
            found = stacked.shapes(match(problem), facts)
            assert not isinstance(found, Declined), found.reason
            source = templates.emit(problem, found[0][1].schedule())
            assert isinstance(source, CudaSource)
            sources.append(source)
        compiled_well(sources, arch, facts)
