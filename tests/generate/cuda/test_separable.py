"""Depthwise and 1x1 convolutions in one kernel: exact on integers in the emulation; what is declined, and why."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.generate.cuda.products import BF16, F16, F32, LAST, ROW
from tests.generate.cuda.tensor_emulator import Emulated, rounded, run, small_integers
from tests.generate.cuda.test_templates import A100, H200, compiled_well

from weft.generate.cuda import templates
from weft.generate.cuda.templates import separable
from weft.generate.cuda.templates.separable import Shape
from weft.generate.cuda.templates.separable_match import Separable
from weft.generate.cuda.templates.separable_match import separable as matched
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource


def pair(
    n: int,
    c: int,
    h: int,
    w: int,
    oc: int,
    k: int = 3,
    stride: int = 1,
    pad: int = 1,
    *,
    dtype: DType = F16,
    fin: Format = LAST,
    fout: Format = LAST,
    residual: bool = False,
    second: int = 1,
    shared: bool = False,
    middle: Callable[[GraphBuilder, NodeId], NodeId] = lambda b, y: b.apply(Prim.MAX, y, 0.0),
) -> Problem:
    """relu(conv1x1(relu(depthwise(x) + bias)) + bias + residual); `shared`: the value between is returned too."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (n, c, h, w)))
    one = b.input(TensorType(dtype, (c, 1, k, k)), is_weight=True)
    y = b.add(Prim.CONV, x, one, attrs=a.ConvAttrs((stride, stride), (pad, pad), (pad, pad), (1, 1), c))
    y = b.apply(Prim.ADD, y, b.reshape(b.input(TensorType(dtype, (c,)), is_weight=True), (c, 1, 1)))
    y = between = middle(b, y)
    two = b.input(TensorType(dtype, (oc, c, second, second)), is_weight=True)
    y = b.add(Prim.CONV, y, two, attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1))
    y = b.apply(Prim.ADD, y, b.reshape(b.input(TensorType(dtype, (oc,)), is_weight=True), (oc, 1, 1)))
    formats = [fin, ROW, ROW, ROW, ROW]
    if residual:
        y = b.apply(Prim.ADD, y, b.input(b.type_of(y)))
        formats.append(fout)
    outputs = [b.apply(Prim.MAX, y, 0.0), *([between] if shared else [])]
    graph: Graph = b.build(outputs)
    return Problem(graph, f"{graph}", tuple(formats), (fout,) * len(outputs))


CASES: dict[str, tuple[Problem, Shape]] = {
    "one block of channels": (pair(1, 32, 9, 9, 24), Shape(16, 32, 32, 16, 16, 2, 1, False)),
    "cluster": (pair(1, 72, 7, 7, 40, residual=True), Shape(32, 48, 48, 16, 16, 1, 2, True)),
    "workspace": (pair(2, 64, 7, 5, 40), Shape(16, 48, 16, 16, 16, 1, 4, False)),
    "strided 5x5 bf16": (pair(1, 16, 13, 9, 24, 5, 2, 2, dtype=BF16), Shape(16, 16, 16, 16, 16, 1, 1, False)),
    "no padding": (pair(1, 16, 8, 8, 16, pad=0, residual=True), Shape(32, 16, 16, 32, 16, 1, 1, False)),
    "row-major result": (pair(1, 48, 6, 6, 24, fout=ROW), Shape(16, 32, 48, 16, 32, 1, 1, False)),
}


def match(problem: Problem) -> Separable:
    found = matched(problem)
    assert isinstance(found, Separable), found
    return found


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    found = {}
    for i, (name, (problem, shape)) in enumerate(CASES.items()):
        source = separable.emit(match(problem), shape.schedule(), f"k{i}")
        assert isinstance(source, CudaSource), source
        found[name] = source
    return found


@pytest.fixture(scope="module")
def kernels(sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(list(sources.values()))


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", list(CASES))
def test_sums_of_integers_are_exact(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated):
    problem = CASES[name][0]
    inputs = small_integers(problem, most=1)  # the value between stays a small integer
    exact = evaluate(problem.graph, inputs, precise=True)
    got = run(kernels, problem, sources[name], inputs, defer=defer)
    for x, y, node in zip(got, exact, problem.graph.outputs, strict=True):
        np.testing.assert_array_equal(x, rounded(y, problem.graph.type_of(node).dtype))


def test_schedules_come_from_the_template():
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
        (pair(1, 16, 9, 9, 16, fin=ROW), "16 bytes"),
        (pair(1, 12, 9, 9, 16), "16 bytes"),
        (pair(1, 16, 9, 9, 16, second=3), "not 1x1"),
        (pair(1, 16, 9, 9, 16, shared=True), "others read"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, part: str):
    refused = templates.schedules(problem, H200)
    assert isinstance(refused, Declined)
    assert part in refused.reason


def test_a_shape_that_does_not_fit_is_declined():
    p = match(pair(1, 32, 9, 9, 24))
    refused = separable.emit(p, Shape(16, 32, 16, 16, 16, 1, 1, False).schedule(), "k")
    assert isinstance(refused, Declined)
    assert "steps" in refused.reason


def test_a_sample_compiles_without_spills():
    for arch, facts, problem in (
        ("sm_90a", H200, pair(1, 768, 7, 7, 256, 5, 1, 2)),
        ("sm_80", A100, CASES["cluster"][0]),
    ):
        found = templates.schedules(problem, facts)
        assert not isinstance(found, Declined), found.reason
        sources = [s for x in found[:1] if isinstance(s := templates.emit(problem, x), CudaSource)]
        assert sources
        compiled_well(sources, arch, facts)
