"""Convolutions of one tap with weights that change, as products of pixels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.orchestrate.test_enumerate import prims_of
from tests.typed import assert_allclose

from weft.device.cuda.facts import profile
from weft.generate.cuda import CudaGenerator
from weft.ir.attrs import ConvAttrs
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.alternatives.union import Alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices


def convolved(stride: int = 1, *, transposed: bool = False, taps: int = 1, extra: int = 0, pad: int = 0) -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 16, 6, 8)))
    w = b.input(TensorType(DType.F32, (16, 24, taps, taps) if transposed else (24, 16, taps, taps)))
    more = (extra,) * 2 if transposed else ()
    attrs = ConvAttrs((stride,) * 2, (pad,) * 2, (pad,) * 2, (1, 1), 1, transposed, more)
    return b.build([b.add(Prim.CONV, x, w, attrs=attrs)])


def instead(found: Alternatives, original: NodeId) -> list[NodeId]:
    return [extra for extra, of in found.classes.items() if of == original]


@pytest.mark.parametrize(
    "graph",
    [
        convolved(),
        convolved(2),
        convolved(transposed=True),
        convolved(2, transposed=True, extra=1),
        convolved(3, transposed=True, extra=1),
        convolved(3, transposed=True),
    ],
)
def test_the_product_is_the_convolution(graph: Graph) -> None:
    found = find_alternatives(graph, on_gpu=True)
    (extra,) = instead(found, graph.outputs[0])
    assert any(n.prim is Prim.MATMUL for n in found.graph.nodes)
    rng = np.random.default_rng(3)
    values = [rng.standard_normal(graph.type_of(i).shape).astype(np.float32) for i in graph.inputs]
    (expected,) = evaluate(graph, values)
    (result,) = evaluate(replace(found.graph, outputs=(extra,)), values)
    assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_others_are_left_as_they_are() -> None:
    for graph in (convolved(taps=3, pad=1), convolved(pad=1)):
        found = find_alternatives(graph, on_gpu=True)
        assert not any(n.prim is Prim.MATMUL for n in found.graph.nodes)
    assert not find_alternatives(convolved()).classes  # a processor's libraries convolve as fast
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (2, 16, 6, 8)))
    w = b.constant(np.ones((24, 16, 1, 1), np.float32))
    constant = b.build([b.add(Prim.CONV, x, w, attrs=ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1)))])
    assert not any(n.prim is Prim.MATMUL for n in find_alternatives(constant, on_gpu=True).graph.nodes)


@pytest.mark.parametrize("transposed", [False, True])
def test_where_images_lie_channels_last_a_kernel_of_a_product_is_offered(transposed: bool) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (8, 64, 28, 28)))
    w = b.input(TensorType(DType.BF16, (64, 256, 1, 1) if transposed else (256, 64, 1, 1)))
    attrs = ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1, transposed, (0, 0) if transposed else ())
    found = find_alternatives(b.build([b.add(Prim.CONV, x, w, attrs=attrs)]), on_gpu=True)
    whole = [
        c
        for c in enumerate_candidates(found.graph, alternatives=found).candidates
        if prims_of(found.graph, c)[Prim.MATMUL] and found.classes.get(c.outputs[0]) is not None
    ]
    assert whole
    last = [(c, f) for c in whole for f in format_choices(found.graph, c) if set(f.outputs) == {Format.LAST}]
    problems = [extract(found.graph, c, f.inputs, f.outputs, found).problem for c, f in last]
    assert any(not isinstance(CudaGenerator().schedules(p, profile("h200")), Declined) for p in problems)
