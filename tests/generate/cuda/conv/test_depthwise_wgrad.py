"""Gradients of the weights of depthwise convolutions: exact on integers in the emulation, infinities, offers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.generate.cuda.conv.test_depthwise_training import LAYERS, first, offered
from tests.generate.cuda.depthwise import weight_gradient
from tests.generate.cuda.products import BF16, F16, F32, ROW
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact, emitted, run, small_integers
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.fission.conv_gradient import conv_weight_gradient
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.conv.depthwise_wgrad import kernel as wgrad
from weft.generate.cuda.conv.depthwise_wgrad.kernel import WgradConfig
from weft.generate.cuda.conv.depthwise_wgrad.match import WeightGradient
from weft.generate.cuda.conv.depthwise_wgrad.match import weight_gradient as sizes_of
from weft.generate.cuda.predict import predicted_us
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

CASES: dict[str, tuple[Problem, WgradConfig]] = {
    "whole strips": (weight_gradient((2, 24, 8, 8), 3, 1, 1), WgradConfig(8, 4, 3, 3, 8, 3)),
    "ends of rows": (weight_gradient((2, 16, 9, 11), 3, 1, 1, dtype=F16), WgradConfig(8, 4, 3, 2, 6, 2)),
    "strided": (weight_gradient((3, 16, 9, 12), 3, 2, 1), WgradConfig(4, 2, 3, 4, 5, 4)),
    "strided, odd size": (weight_gradient((1, 8, 11, 9), 3, 2, 1), WgradConfig(4, 7, 3, 2, 3, 1)),
    "5x5, rows of the window apart": (weight_gradient((1, 12, 8, 7), 5, 1, 2), WgradConfig(4, 2, 3, 3, 4, 2)),
    "7x7": (weight_gradient((1, 6, 9, 8), 7, 1, 3), WgradConfig(2, 8, 4, 3, 4, 2)),
    "odd channels": (weight_gradient((2, 9, 7, 8), 3, 1, 1), WgradConfig(1, 4, 3, 4, 8, 2)),
    "dilated f32": (weight_gradient((1, 12, 9, 9), 3, 1, 2, 2, dtype=F32), WgradConfig(4, 4, 3, 2, 4, 3)),
    "no padding": (weight_gradient((1, 8, 8, 9), 3), WgradConfig(8, 1, 3, 1, 32, 2)),
    "more parts than strips": (weight_gradient((1, 8, 3, 3), 3, 1, 1), WgradConfig(8, 4, 3, 1, 32, 5)),
    "many parts": (weight_gradient((4, 8, 12, 12), 3, 1, 1), WgradConfig(8, 4, 1, 1, 4, 36)),
}


BESIDE = ("ends of rows", "strided", "many parts")


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return emitted(CASES)


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources, *BESIDE))


@pytest.mark.parametrize("name", few(CASES, 7))
def test_sums_of_integers_are_exact(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, CASES[name][0], sources[name])


@pytest.mark.parametrize("order", [1, 2])
def test_warps_may_be_far_ahead(order: int, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES["many parts"][0]
    inputs = small_integers(problem)
    exact = evaluate(problem.graph, inputs, precise=True)
    got = run(kernels, problem, sources["many parts"], inputs, order=order)
    np.testing.assert_array_equal(got[0], exact[0])


@pytest.mark.parametrize("name", BESIDE)
def test_values_that_are_not_finite_stay_where_they_belong(
    name: str, sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    """What fills a strip behind the end of a row is multiplied with nothing."""
    problem = CASES[name][0]
    inputs = [np.array(x) for x in small_integers(problem)]
    rng = np.random.default_rng(0)
    for x in inputs:
        x[:, 0, -1, -1] = np.inf
        x[:, 1, 0, 0] = np.nan
        x.reshape(-1)[rng.integers(0, x.size, 2)] = -np.inf
    with np.errstate(all="ignore"):
        (exact,) = evaluate(problem.graph, inputs, precise=True)
    (got,) = run(kernels, problem, sources[name], inputs)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(exact))
    assert np.isfinite(got).any()


def test_equal_inputs_give_equal_bits(sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem, name = CASES["many parts"][0], "many parts"
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal(problem.graph.type_of(i).shape).astype(np.float32) for i in problem.graph.inputs]
    first, second = (run(kernels, problem, sources[name], inputs, order=order)[0] for order in (1, 2))
    np.testing.assert_array_equal(first, second)


def problems(dtype: DType = BF16) -> list[Problem]:
    """Of MobileNetV2's layers at batch 128."""
    return [weight_gradient((128, c, size, size), 3, stride, 1, dtype=dtype) for c, size, stride in LAYERS]


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
def test_every_layer_of_a_network_is_offered_several_widths(facts: GpuFacts) -> None:
    for problem in problems():
        found = list(offered(problem, facts))
        assert {s.param("template") for s in found} == {"depthwise_wgrad"}
        assert len({s.param("width") for s in found[:3]}) == 3
        assert all(0 < (predicted_us(problem, s, facts) or 0) < 400 for s in found)


def test_a_layer_fills_the_machine_once() -> None:
    """A CTA goes over its strips in steps: more CTAs than there is room for would only leave more to add up."""
    for problem in problems():
        m = sizes_of(problem)
        assert isinstance(m, WeightGradient)
        for _, s in wgrad.shapes(m, H200):
            w = wgrad._work(m, s)
            ctas = w.across * w.down * s.splits
            assert ctas <= H200.sms * wgrad._resident(m, s, w, H200)
            assert ctas > 0.9 * H200.sms
            assert s.threads <= 256


def test_the_result_may_have_the_shape_of_the_weight() -> None:
    """What turns a column for each tap into a window is no primitive of its own."""
    problem = weight_gradient((1, 16, 8, 8), 3, 1, 1)
    assert problem.graph.type_of(problem.graph.outputs[0]).shape == (16, 9, 1, 1)
    b = GraphBuilder()
    dy, x = (b.input(TensorType(BF16, (1, 16, 8, 8))) for _ in range(2))
    two = {"strides": (1, 1), "pads": (1, 1), "dilations": (1, 1)}
    made = conv_weight_gradient(b, dy, x, kernel=(3, 3), groups=16, **two)  # type: ignore[arg-type]
    assert not isinstance(made, Declined)
    window = replace(problem, graph=b.build([made]), origin_operand_nodes=(dy, x))
    found, wanted = sizes_of(window), sizes_of(problem)
    assert isinstance(wanted, WeightGradient)
    assert found == replace(wanted, dy=0, x=1)


def test_what_the_template_leaves_to_others() -> None:
    """Images in rows, sums that are no operator, one channel, several channels of a group, old machines."""
    generator = CudaGenerator()
    rows = weight_gradient((1, 16, 8, 8), 3, 1, 1, lies=ROW)
    plain = replace(weight_gradient((1, 16, 8, 8), 3, 1, 1), origin_rule="")
    for problem in (rows, plain):
        assert isinstance(sizes_of(problem), Declined)
        assert "template" not in dict(offered(problem)[0].params), "fused loops"
    one = weight_gradient((1, 1, 8, 8), 3, 1, 1)
    assert isinstance(sizes_of(one), Declined)
    params = tuple((k, 8 if k == "groups" else v) for k, v in plain.origin_params)
    assert isinstance(sizes_of(replace(plain, origin_rule="conv_weight_gradient", origin_params=params)), Declined)
    views = replace(plain, origin_rule="conv_weight_gradient", origin_operand_nodes=(0, -1))
    assert isinstance(sizes_of(views), Declined)
    old = generator.schedules(weight_gradient((1, 16, 8, 8), 3, 1, 1), GpuFacts(capability=75))
    assert isinstance(old, Declined)
    assert "7.5" in old.reason
    odd = generator.emit(weight_gradient((1, 9, 8, 8), 3, 1, 1), WgradConfig(8, 4, 3, 1, 32, 1).schedule())
    assert isinstance(odd, Declined)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_of_layers_compile_without_spills(arch: str) -> None:
    facts = H200 if arch == "sm_90a" else A100
    wide = weight_gradient((8, 96, 28, 28), 5, 2, 2)
    compiled_well([x for p in (*problems()[2:4], wide) for x in first(p, facts, 3)], arch, facts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=lambda d: d.value)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_all_that_is_offered_compiles_without_spills(arch: str, dtype: DType) -> None:
    facts = H200 if arch == "sm_90a" else A100
    compiled_well([x for p in problems(dtype) for x in first(p, facts, 5)], arch, facts)
