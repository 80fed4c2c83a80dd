"""Depthwise and 1x1 convolutions in one kernel: exact on integers in the emulation; what is declined, and why."""

from __future__ import annotations

import pytest
from tests.generate.cuda.products import BF16, F32, ROW, pair
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact, written
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few

from weft.generate.cuda import templates
from weft.generate.cuda.conv.separable import kernel as separable
from weft.generate.cuda.conv.separable.kernel import SeparableConfig
from weft.generate.cuda.conv.separable.match import Separable
from weft.generate.cuda.conv.separable.match import separable as matched
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

CASES: dict[str, tuple[Problem, SeparableConfig]] = {
    "one block of channels": (pair(1, 32, 9, 9, 24), SeparableConfig(16, 32, 32, 16, 16, 2, 1, False)),
    "cluster": (pair(1, 72, 7, 7, 40, residual=True), SeparableConfig(32, 48, 48, 16, 16, 1, 2, True)),
    "workspace": (pair(2, 64, 7, 5, 40), SeparableConfig(16, 48, 16, 16, 16, 1, 4, False)),
    "strided 5x5 bf16": (pair(1, 16, 13, 9, 24, 5, 2, 2, dtype=BF16), SeparableConfig(16, 16, 16, 16, 16, 1, 1, False)),
    "no padding": (pair(1, 16, 8, 8, 16, pad=0, residual=True), SeparableConfig(32, 16, 16, 32, 16, 1, 1, False)),
    "short vectors in the text": (
        pair(1, 16, 6, 7, 16, texts=True),
        SeparableConfig(16, 16, 16, 16, 16, 1, 1, False),
    ),
    "row-major result": (pair(1, 48, 6, 6, 24, fout=ROW), SeparableConfig(16, 32, 48, 16, 32, 1, 1, False)),
}


def match(problem: Problem) -> Separable:
    found = matched(problem)
    assert isinstance(found, Separable), found
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return written(CASES, lambda problem, shape, entry: separable.emit(match(problem), shape.schedule(), entry))


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources))


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", few(CASES, 3))
def test_sums_of_integers_are_exact(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    # the value between stays a small integer
    assert_exact(kernels, CASES[name][0], sources[name], most=1, defer=defer)


def test_schedules_come_from_the_template() -> None:
    problem = pair(1, 384, 14, 14, 128)
    found = templates.schedules(problem, H200)
    assert not isinstance(found, Declined), found.reason
    assert found
    assert {s.param("template") for s in found} == {"separable"}
    sources = [templates.emit(problem, s) for s in found]
    assert len({s.entry for s in sources if isinstance(s, CudaSource)}) == len(found)


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (pair(1, 16, 9, 9, 16, dtype=F32), "f32"),
        (pair(1, 16, 9, 9, 16, fin=ROW), "16-byte"),
        (pair(1, 12, 9, 9, 16), "16-byte"),
        (pair(1, 16, 9, 9, 16, second=3), "not 1x1"),
        (pair(1, 16, 9, 9, 16, shared=True), "others read"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, part: str) -> None:
    refused = templates.schedules(problem, H200)
    assert isinstance(refused, Declined)
    assert part in refused.reason


def test_a_shape_that_does_not_fit_is_declined() -> None:
    p = match(pair(1, 32, 9, 9, 24))
    refused = separable.emit(p, SeparableConfig(16, 32, 16, 16, 16, 1, 1, False).schedule(), "k")
    assert isinstance(refused, Declined)
    assert "steps" in refused.reason


def test_a_sample_compiles_without_spills() -> None:
    for arch, facts, problem in (
        ("sm_90a", H200, pair(1, 768, 7, 7, 256, 5, 1, 2)),
        ("sm_80", A100, CASES["cluster"][0]),
    ):
        found = templates.schedules(problem, facts)
        assert not isinstance(found, Declined), found.reason
        sources = [s for x in found[:1] if isinstance(s := templates.emit(problem, x), CudaSource)]
        assert sources
        compiled_well(sources, arch, facts)
