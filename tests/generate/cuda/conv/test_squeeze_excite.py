"""Squeeze-excite in one kernel: near the reference in the emulation, for every cluster; what is declined, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.generate.cuda.products import BF16, F16, F32, LAST, ROW
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.generate.cuda.test_templates import A100, H200, compiled_well
from tests.slow import asked, few
from tests.typed import numbers

from weft.generate.cuda import templates
from weft.generate.cuda.conv.squeeze_excite import kernel
from weft.generate.cuda.conv.squeeze_excite.kernel import Places, SqueezeConfig
from weft.generate.cuda.conv.squeeze_excite.match import SqueezeExcite, is_squeeze, squeeze_excite
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource


def squeezed(
    n: int,
    c: int,
    h: int,
    w: int,
    hidden: int,
    *,
    dtype: DType = F16,
    act: str = "relu",
    gate: str = "sigmoid",
    axes: tuple[int, ...] = (2, 3),
    formats: tuple[Format, Format] = (LAST, LAST),
    constants: bool = False,
    texts: bool = False,
    groups: int = 1,
    inside: DType | None = None,
) -> Problem:
    """x * gate(W2 act(W1 mean(x) + b1) + b2), as RegNetY and EfficientNet have it.

    `constants`: weights are constants of the graph; `texts`: vectors are. `inside`: the type of both products.
    """
    b = GraphBuilder()
    outside, dtype = dtype, inside or dtype
    ins = [formats[0]]

    def weight(*shape: int) -> NodeId:
        if constants or (texts and len(shape) == 1):
            return b.constant(np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(dtype.numpy))
        ins.append(ROW)
        return b.input(TensorType(dtype, shape), is_weight=True)

    def sigmoid(v: NodeId) -> NodeId:
        wide = b.cast(v, F32)
        return b.cast(b.apply(Prim.DIV, 1.0, b.apply(Prim.ADD, b.apply(Prim.EXP, b.apply(Prim.NEG, wide)), 1.0)), dtype)

    x = b.input(TensorType(outside, (n, c, h, w)))
    total = b.add(Prim.REDUCE_SUM, b.cast(x, F32), attrs=a.ReduceAttrs(axes))
    y = b.cast(b.apply(Prim.MUL, total, 1 / (h * w)), dtype)
    one = a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), groups)
    y = b.add(Prim.CONV, y, weight(hidden, c // groups, 1, 1), attrs=one)
    y = b.apply(Prim.ADD, y, b.reshape(weight(hidden), (1, hidden, 1, 1)))
    y = b.apply(Prim.MAX, y, 0.0) if act == "relu" else b.apply(Prim.MUL, y, sigmoid(y))
    y = b.add(Prim.CONV, y, weight(c, hidden, 1, 1), attrs=replace(one, groups=1))
    y = b.apply(Prim.ADD, y, b.reshape(weight(c), (1, c, 1, 1)))
    if gate == "sigmoid":
        y = sigmoid(y)
    else:
        y = b.apply(Prim.DIV, b.apply(Prim.MIN, b.apply(Prim.MAX, b.apply(Prim.ADD, y, 3.0), 0.0), 6.0), 6.0)
    graph = b.build([b.apply(Prim.MUL, x, b.cast(y, outside))])
    return Problem(graph, f"{graph}", tuple(ins), (formats[1],))


CASES: dict[str, tuple[Problem, SqueezeConfig]] = {
    "regnet": (squeezed(1, 72, 5, 6, 9), SqueezeConfig(4, 256, True)),
    "one CTA": (squeezed(2, 48, 5, 6, 8, dtype=BF16), SqueezeConfig(1, 256, True)),
    "image read twice": (squeezed(1, 48, 7, 3, 12), SqueezeConfig(2, 256, False)),
    "efficientnet, two images": (squeezed(2, 96, 3, 5, 10, act="silu"), SqueezeConfig(2, 256, True)),
    "clusters of eight": (squeezed(1, 120, 4, 4, 30, gate="hard"), SqueezeConfig(8, 256, True)),
    "as many channels as threads": (squeezed(1, 2048, 2, 2, 4), SqueezeConfig(1, 256, True)),
    "vectors in the text": (squeezed(2, 16, 3, 3, 6, texts=True), SqueezeConfig(2, 256, True)),
    "one hidden value": (squeezed(1, 16, 3, 3, 1, act="silu"), SqueezeConfig(1, 256, True)),
}


def matched(problem: Problem) -> SqueezeExcite:
    m = squeeze_excite(problem)
    assert isinstance(m, SqueezeExcite), m
    return m


def written(problem: Problem, shape: SqueezeConfig, entry: str) -> CudaSource:
    source = kernel.emit(matched(problem), shape.schedule(), entry)
    assert isinstance(source, CudaSource), source
    return source


def inputs_of(problem: Problem) -> list[np.ndarray]:
    """Numbers of its types near 1, weights scaled by the length of their sum."""
    rng = np.random.default_rng(7)
    found = []
    for i in problem.graph.inputs:
        t = problem.graph.type_of(i)
        scale = 1.0 if i == 0 or t.rank < 4 else t.shape[1] ** -0.5
        x = (rng.standard_normal(t.shape) + (0.5 if i == 0 else 0.0)) * scale
        found.append(x.astype(np.float16) if t.dtype is F16 else halved(x))
    return found


def halved(x: np.ndarray) -> np.ndarray:
    """Rounded down to 8 bits."""
    return (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def near(problem: Problem, got: np.ndarray, inputs: list[np.ndarray]) -> None:
    """Within the roundings that the graph itself has: of the mean, of both products, of the gate and of the result."""
    exact = numbers(evaluate(problem.graph, inputs, precise=True)[0])
    unit = 2.0**-8 if problem.graph.type_of(0).dtype is BF16 else 2.0**-11
    error = np.abs(got.astype(np.float64) - exact)
    assert (error <= 4 * unit * np.abs(exact) + unit * 1e-2).all(), float(error.max())


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: written(*case, f"k{i}") for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources, "efficientnet, two images"))


@pytest.mark.parametrize("name", few(CASES, 3))
def test_the_scaled_image_is_near_the_reference(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES[name][0]
    inputs = inputs_of(problem)
    for order in (0, 1, 2):
        (got,) = run(kernels, problem, sources[name], inputs, order=order)
        near(problem, got, inputs)


def test_an_infinity_spoils_its_image_alone(sources: dict[str, CudaSource], kernels: Emulated) -> None:
    """The mean of a channel with an infinity is one, and with it all gates of the image; of the other image none."""
    problem = CASES["efficientnet, two images"][0]
    inputs = inputs_of(problem)
    inputs[0][0, 3, 1, 1] = np.inf
    (got,) = run(kernels, problem, sources["efficientnet, two images"], inputs)
    exact = numbers(evaluate(problem.graph, inputs, precise=True)[0])
    assert np.array_equal(np.isnan(got[0]), np.isnan(exact[0])) and np.isnan(got[0]).any()
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"c": 20}, "16-byte vectors"),
        ({"dtype": F32}, "16-byte vectors"),
        ({"formats": (ROW, LAST)}, "side by side"),
        ({"formats": (LAST, ROW)}, "side by side"),
        ({"constants": True}, "weights in memory"),
        ({"groups": 2, "hidden": 8}, "two 1x1 convolutions"),
        ({"inside": BF16}, "weights of another type"),
    ],
    ids=str,
)
def test_what_is_declined_says_why(change: dict[str, Any], part: str) -> None:
    given: dict[str, Any] = {"c": 32, "hidden": 9, **change}
    problem = squeezed(1, given.pop("c"), 5, 5, given.pop("hidden"), **given)
    assert is_squeeze(problem.graph)
    refused = squeeze_excite(problem)
    assert isinstance(refused, Declined) and part in refused.reason
    assert templates.schedules(problem, H200) == refused


def test_means_of_other_axes_are_declined() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(F16, (1, 16, 4, 1)))
    total = b.add(Prim.REDUCE_SUM, x, attrs=a.ReduceAttrs((2,)))
    one, two = (b.input(TensorType(F16, s), is_weight=True) for s in ((8, 16, 1, 1), (16, 8, 1, 1)))
    attrs = a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1)
    y = b.add(Prim.CONV, b.add(Prim.CONV, total, one, attrs=attrs), two, attrs=attrs)
    graph = b.build([b.apply(Prim.MUL, x, y)])
    refused = squeeze_excite(Problem(graph, f"{graph}", (LAST, ROW, ROW), (LAST,)))
    assert isinstance(refused, Declined) and "means" in refused.reason


def test_more_than_what_is_elementwise_is_declined() -> None:
    """A gate that is stored as well, and an image that is added behind."""
    for more in (0, 1):
        b = GraphBuilder()
        x = b.input(TensorType(F16, (1, 16, 4, 4)))
        other = b.input(TensorType(F16, (1, 16, 4, 4))) if more else x
        y = b.add(Prim.REDUCE_SUM, x, attrs=a.ReduceAttrs((2, 3)))
        attrs = a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1)
        for shape in ((8, 16, 1, 1), (16, 8, 1, 1)):
            y = b.add(Prim.CONV, y, b.input(TensorType(F16, shape), is_weight=True), attrs=attrs)
        out = b.apply(Prim.ADD, b.apply(Prim.MUL, x, y), other) if more else b.apply(Prim.MUL, x, y)
        graph = b.build([out] if more else [out, y])
        ins = (LAST, LAST, ROW, ROW) if more else (LAST, ROW, ROW)
        refused = squeeze_excite(Problem(graph, f"{graph}", ins, (LAST,) * len(graph.outputs)))
        assert isinstance(refused, Declined) and "several images" in refused.reason


REAL = {
    "regnet at 14": squeezed(1, 336, 14, 14, 84),
    "regnet at 7, 16 images": squeezed(16, 888, 7, 7, 222),
    "regnet at 56": squeezed(1, 48, 56, 56, 8),
    "efficientnet at 7": squeezed(1, 1152, 7, 7, 48, act="silu", dtype=BF16),
}


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("name", REAL)
def test_schedules_fit_the_device(name: str, facts: Any) -> None:
    found = templates.schedules(REAL[name], facts)
    if isinstance(found, Declined):
        assert facts is A100 and "do not fit shared memory" in found.reason  # both weights of 888 x 222 in one CTA
        return
    assert {s.param("template") for s in found} == {"squeeze_excite"}
    for s in found:
        shape = SqueezeConfig.of(s)
        assert Places(matched(REAL[name]), shape).shared <= facts.shared_per_block
        assert facts.capability >= 90 or shape.ctas == 1


def test_more_ctas_than_vectors_are_declined() -> None:
    m = matched(squeezed(1, 16, 3, 3, 1))
    for shape in (SqueezeConfig(4, 256, True), SqueezeConfig(2, 256, True)):
        refused = kernel.emit(m, shape.schedule(), "k")
        assert isinstance(refused, Declined) and "CTAs of 256 threads" in refused.reason


@pytest.mark.parametrize(("arch", "facts"), [("sm_90a", H200), ("sm_80", A100)])
def test_a_sample_compiles_without_spills(arch: str, facts: Any) -> None:
    problems = [REAL["regnet at 14"], *([REAL["efficientnet at 7"]] if facts is H200 else [])]
    shapes = [(x, kernel.shapes(matched(x), facts)[0][1]) for x in problems]
    compiled_well([written(x, s, f"k{i}") for i, (x, s) in enumerate(shapes)], arch, facts)
