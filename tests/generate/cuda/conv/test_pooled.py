"""Convolutions with pools in one kernel: exact on integers in the emulation; ranking; what is declined, and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.generate.cuda.products import BF16, F32, ROW, pooled_convolution
from tests.generate.cuda.tensor_emulator import Emulated, rounded, run, small_integers, written
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few
from tests.typed import assert_allclose

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.conv.pooled import choose as pooled_choose
from weft.generate.cuda.conv.pooled import kernel as pooled
from weft.generate.cuda.conv.pooled.kernel import Geometry, PooledConfig
from weft.generate.cuda.conv.pooled.match import Pooled
from weft.generate.cuda.conv.pooled.match import pooled as matched
from weft.generate.cuda.predict import predicted_us
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

EARLY = PooledConfig(2, 3, 16, 16, 16, 16, 1, 1, 1, True)
LATE = replace(EARLY, early=False)
WIDE = pooled_convolution(1, 128, 7, 7, 32, 3, 1, 1)
CASES: dict[str, tuple[Problem, PooledConfig]] = {
    "2x2": (pooled_convolution(1, 16, 8, 12, 24, 3, 1, 1), replace(EARLY, bn=32)),
    "2x2, late": (pooled_convolution(1, 16, 8, 12, 24, 3, 1, 1), replace(LATE, bn=32)),
    "odd sizes": (pooled_convolution(2, 16, 9, 11, 16, 3, 1, 1), EARLY),
    "odd sizes, ceil": (pooled_convolution(2, 16, 9, 11, 16, 3, 1, 1, ceil=True), EARLY),
    "odd sizes, ceil, late": (pooled_convolution(2, 16, 9, 11, 16, 3, 1, 1, ceil=True), LATE),
    "3x3 strided": (pooled_convolution(1, 32, 13, 13, 40, 3, pool=(3, 2, 0)), replace(EARLY, bn=64, bc=32)),
    "3x3 strided, late": (pooled_convolution(1, 32, 13, 13, 40, 3, pool=(3, 2, 0)), replace(LATE, bn=64, bc=32, wk=2)),
    "padded": (pooled_convolution(1, 16, 9, 9, 16, 3, 1, 1, pool=(3, 2, 1), relu=False), EARLY),
    "padded, convolution without": (pooled_convolution(1, 16, 9, 9, 16, 3, pool=(3, 2, 1), relu=False), EARLY),
    "mean": (pooled_convolution(1, 16, 8, 12, 24, 3, 1, 1, mean=True), replace(EARLY, bn=32)),
    "mean, padded": (pooled_convolution(1, 16, 9, 9, 16, 3, 1, 1, pool=(3, 2, 1), mean=True), EARLY),
    "mean, padded, late, bf16": (
        pooled_convolution(1, 16, 9, 9, 16, 3, 1, 1, pool=(3, 2, 1), mean=True, dtype=BF16),
        LATE,
    ),
    "stem": (
        pooled_convolution(1, 3, 29, 27, 24, 7, 2, 3, pool=(3, 2, 1), fin=ROW),
        PooledConfig(3, 3, 32, 4, 16, 32, 1, 1, 1, True),
    ),
    "stem, late, row-major": (
        pooled_convolution(1, 3, 29, 27, 24, 7, 2, 3, pool=(3, 2, 1), fout=ROW),
        PooledConfig(2, 3, 32, 4, 16, 16, 2, 1, 1, False),
    ),
    "ring": (pooled_convolution(1, 80, 8, 8, 40, 3, 1, 1), PooledConfig(2, 2, 64, 16, 16, 32, 1, 2, 1, True)),
    "warps share a sum": (
        pooled_convolution(2, 64, 9, 9, 40, 3, 1, 1),
        PooledConfig(2, 2, 32, 32, 16, 32, 2, 2, 1, False),
    ),
    "cluster": (WIDE, PooledConfig(3, 3, 32, 32, 16, 16, 2, 1, 4, False)),
    "cluster, padded": (
        pooled_convolution(1, 64, 7, 7, 32, 3, 1, 1, pool=(3, 2, 1)),
        PooledConfig(2, 2, 32, 32, 16, 16, 1, 1, 2, False),
    ),
    "something behind": (pooled_convolution(1, 16, 9, 9, 24, 3, 1, 1, behind=True), replace(EARLY, bn=32)),
    "a residual": (
        pooled_convolution(1, 16, 9, 9, 24, 3, 1, 1, pool=(3, 2, 1), residual=True),
        replace(EARLY, bn=32),
    ),
    "a residual, late": (
        pooled_convolution(1, 16, 9, 9, 24, 3, 1, 1, pool=(3, 2, 1), residual=True),
        replace(LATE, bn=32),
    ),
    "odd channels": (pooled_convolution(1, 5, 7, 9, 11, 3, 1, 1), EARLY),
    "odd channels, late": (pooled_convolution(1, 5, 7, 9, 11, 3, 1, 1, relu=False), LATE),
    "dilated": (pooled_convolution(1, 16, 11, 9, 16, 3, 1, 2, 2, pool_dilation=2), EARLY),
    "strides over windows": (pooled_convolution(1, 16, 11, 12, 16, 3, 1, 1, pool=(2, 3, 0)), EARLY),
    "long kernel": (pooled_convolution(1, 16, 8, 8, 16, (1, 5), 1, 2), EARLY),
    "large window": (pooled_convolution(1, 16, 7, 7, 16, 3, 1, 1, pool=(7, 7, 0)), replace(EARLY, ph=1, pw=1)),
    "tf32": (pooled_convolution(1, 16, 8, 9, 24, 3, 1, 1, dtype=F32), replace(EARLY, bn=32, bc=32)),
    "tf32, late, mean": (
        pooled_convolution(1, 16, 8, 9, 24, 3, 1, 1, pool=(3, 2, 1), mean=True, dtype=F32),
        replace(LATE, bn=32, bc=32, wk=2),
    ),
}


def match(problem: Problem) -> Pooled:
    found = matched(problem, tf32=True)
    assert isinstance(found, Pooled), found
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return written(CASES, lambda problem, shape, entry: pooled.emit(match(problem), shape.schedule(), entry))


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources, "padded", "2x2", "2x2, late", "mean"))


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", few(CASES, 3))
def test_windows_of_integers_are_exact(
    name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    problem = CASES[name][0]
    inputs = small_integers(problem, most=1 if "mean" in name else 2)
    exact = evaluate(problem.graph, inputs, precise=True)
    got = run(kernels, problem, sources[name], inputs, defer=defer)
    for x, y, node in zip(got, exact, problem.graph.outputs, strict=True):
        dtype = problem.graph.type_of(node).dtype
        if "mean" in name:  # the inverse of a count is rounded
            assert_allclose(x, y, rtol=8e-3 if dtype is BF16 else 1e-3)
        else:
            np.testing.assert_array_equal(x, rounded(y, dtype))


def test_nothing_beside_the_image_reaches_a_window(sources: dict[str, CudaSource], kernels: Emulated) -> None:
    """Places that pad a window are no zeros: the greatest of negative results is negative."""
    problem = CASES["padded"][0]
    inputs = small_integers(problem)
    inputs[1][:], inputs[2][:] = 0, -3
    got = run(kernels, problem, sources["padded"], inputs)[0]
    np.testing.assert_array_equal(got, np.full_like(got, -3))


def test_a_value_that_is_no_number_wins(sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES["2x2"][0]
    inputs = small_integers(problem)
    inputs[0][0, 0, 0, 0] = np.nan
    for name in ("2x2", "2x2, late"):
        got = run(kernels, problem, sources[name], inputs)[0]
        assert np.isnan(got[0, :, 0, 0]).all()
        assert np.isfinite(got[0, :, 1:, 1:]).all()


def test_sums_are_of_rounded_results(kernels: Emulated, sources: dict[str, CudaSource]) -> None:
    """2049 is 2048 in f16 before it is added, as the convolution's own kernel stores it."""
    problem = CASES["mean"][0]
    inputs = small_integers(problem)
    inputs[0][:], inputs[1][:], inputs[2][:] = 0, 0, 0
    inputs[0][0, 0, :, ::2] = 2048
    inputs[0][0, 1] = 1
    inputs[1][:, 0, 1, 1] = inputs[1][:, 1, 1, 1] = 1  # 2049 and 1
    got = run(kernels, problem, sources["mean"], inputs)[0]
    np.testing.assert_array_equal(got, np.full_like(got, np.float16((2048 + 1) / 2)))


@pytest.mark.parametrize("facts", [H200, A100], ids=["sm_90a", "sm_80"])
def test_schedules_come_from_the_template(facts: GpuFacts) -> None:
    problem = pooled_convolution(1, 3, 224, 224, 64, 7, 2, 3, pool=(3, 2, 1))
    found = templates.schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    assert {s.param("template") for s in found} == {"pooled"}
    assert all((predicted_us(problem, s, facts) or 0) > 0 for s in found)
    sources = [templates.emit(problem, s) for s in found]
    assert len({s.entry for s in sources if isinstance(s, CudaSource)}) == len(found) > 2


@pytest.mark.parametrize("facts", [H200, A100], ids=["sm_90a", "sm_80"])
def test_shapes_fit_the_device(facts: GpuFacts) -> None:
    for problem in (CASES["stem"][0], pooled_convolution(1, 64, 56, 56, 64, 3, 1, 1)):
        p = match(problem)
        found = pooled_choose.shapes(p, facts)
        assert not isinstance(found, Declined), found.reason
        for _, s in found:
            g = Geometry.of(p, s)
            assert g.shared <= facts.shared_per_block
            assert g.repeated <= pooled_choose.REPEATED
            assert facts.capability >= 90 or s.split == 1


def test_two_kernels_are_left_where_the_copy_engine_feeds_the_convolution() -> None:
    """As measured: on a GPU without such kernels the one is worth measuring."""
    problem = pooled_convolution(16, 128, 112, 112, 128, 3, 1, 1)
    refused = templates.schedules(problem, H200)
    assert isinstance(refused, Declined)
    assert "one kernel is modelled to take" in refused.reason
    assert not isinstance(templates.schedules(problem, A100), Declined)


def test_windows_that_do_not_overlap_compute_nothing_twice() -> None:
    p = match(pooled_convolution(1, 64, 56, 56, 64, 3, 1, 1))
    assert Geometry.of(p, replace(EARLY, ph=4, pw=7)).repeated == 1.0
    over = match(pooled_convolution(1, 3, 224, 224, 64, 7, 2, 3, pool=(3, 2, 1)))
    assert Geometry.of(over, replace(EARLY, ph=8, pw=8, bc=4)).repeated == pytest.approx((17 / 16) ** 2)


def test_more_repetition_is_modelled_to_cost_more() -> None:
    p = match(pooled_convolution(16, 32, 147, 147, 64, 3, pool=(3, 2, 0)))
    per_window = [
        pooled_choose.cycles(
            p, PooledConfig(n, n, 64, 32, 16, 64, 1, 1, 1, True), H200
        )  # blocks fill the device either way
        for n in (1, 3, 5)
    ]
    assert per_window == sorted(per_window, reverse=True)


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (pooled_convolution(1, 64, 9, 9, 64, 3, 1, 1, groups=4), "groups"),
        (pooled_convolution(1, 64, 9, 9, 64, 1), "no convolution that reads a halo"),
        (pooled_convolution(1, 64, 9, 9, 64, 3, 1, 1, shared=True), "others read"),
        (pooled_convolution(1, 16, 20, 20, 16, 3, 1, 1, pool=(13, 1, 6)), "4.8 times"),
        (pooled_convolution(1, 64, 9, 9, 64, 3, 1, 1, dtype=F32), "f32"),
        (pooled_convolution(1, 520, 9, 9, 16, 3, fin=ROW), "many channels"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, part: str) -> None:
    refused = templates.schedules(problem, replace(H200, tf32=False))
    assert isinstance(refused, Declined)
    assert part in refused.reason


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        (replace(EARLY, bc=4), "16 channels"),
        (replace(LATE, wk=2), "split K"),
        (PooledConfig(2, 2, 16, 32, 16, 16, 2, 1, 1, True), "an epilogue in registers"),
    ],
)
def test_shapes_that_do_not_fit_are_declined(shape: PooledConfig, part: str) -> None:
    refused = pooled.emit(match(pooled_convolution(1, 16, 9, 9, 16, 3, 1, 1)), shape.schedule(), "k")
    assert isinstance(refused, Declined)
    assert part in refused.reason


def test_a_sample_compiles_without_spills() -> None:
    vgg, stem = (
        pooled_convolution(1, 64, 224, 224, 64, 3, 1, 1),
        pooled_convolution(1, 3, 224, 224, 64, 7, 2, 3, pool=(3, 2, 1)),
    )
    for arch, facts, problems in (("sm_90a", H200, [vgg, stem]), ("sm_80", A100, [stem, CASES["mean"][0]])):
        sources = []
        for problem in problems:
            found = pooled_choose.shapes(match(problem), facts)
            assert not isinstance(found, Declined), found.reason
            source = templates.emit(problem, found[0][1].schedule())
            assert isinstance(source, CudaSource)
            sources.append(source)
        compiled_well(sources, arch, facts)
