"""Products of quantised numbers as products of their bytes: near the original, and what is none stays as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.orchestrate.graphs import normal
from tests.typed import numbers

from weft.device.cuda.facts import GpuFacts
from weft.fission.conv import conv
from weft.fission.linear import matmul
from weft.fission.quantize import dequantize_linear, quantize_linear
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.product import Product, product
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import Array, DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.estimate_cuda import gpu_estimate_us
from weft.orchestrate.extract import extract, format_choices
from weft.orchestrate.legality import EnumerationLimits
from weft.orchestrate.select import Priced, select

I8, U8, I32, F32 = DType.I8, DType.U8, DType.I32, DType.F32
STEP = 0.02
"""Of the numbers that are quantised on the way in."""


class Net:
    """Networks between QuantizeLinear and DequantizeLinear."""

    def __init__(self) -> None:
        self.b = GraphBuilder()

    def number(self, value: Any, kind: type = np.float32) -> NodeId:
        return self.b.constant(np.array(value, kind))

    def through(self, x: NodeId, scale: float, zero: int, kind: type = np.int8) -> NodeId:
        """Quantised and dequantised."""
        s, z = self.number(scale), self.number(zero, kind)
        q = quantize_linear(self.b, x, s, z)
        assert not isinstance(q, Declined)
        return self.wide(q, s, z)

    def wide(self, q: NodeId, s: NodeId, z: NodeId, axis: int = 1) -> NodeId:
        y = dequantize_linear(self.b, q, s, z, axis=axis)
        assert not isinstance(y, Declined)
        return y

    def weight(self, *shape: int, axis: int, zero: int = 0, each: bool = True) -> NodeId:
        rng = np.random.default_rng((len(self.b), *shape))
        numbers = rng.integers(-127, 128, shape).astype(np.int8)
        numbers[(0, slice(None)) if axis == 1 else (slice(None), 0)] = 127  # the largest of a channel
        q = self.b.constant(numbers)
        n = shape[axis]
        s = self.number(rng.uniform(0.001, 0.01, n) if each else 0.003)
        z = self.number(np.full(n, zero) if each else zero, np.int8)
        return self.wide(q, s, z, axis)

    def done(self, y: NodeId | Declined) -> Graph:
        assert not isinstance(y, Declined), y
        return clean_up(self.b.build([self.through(y, 0.5, 0)]), strict=False).graph


def linear(
    zero: int = 0, kind: type = np.int8, *, each: bool = True, rank: int = 2, of_weight: int = 0, wide: int = 640
) -> Graph:
    net = Net()
    x = net.b.input(TensorType(F32, (64, 512) if rank == 2 else (2, 32, 512)))
    w = net.weight(512, wide, axis=1, each=each, zero=of_weight)
    return net.done(matmul(net.b, net.through(x, STEP, zero, kind), w))


def turned() -> Graph:
    net = Net()
    x = net.b.input(TensorType(F32, (64, 512)))
    w = net.b.transpose(net.weight(640, 512, axis=0), (1, 0))
    return net.done(matmul(net.b, net.through(x, STEP, 5, np.uint8), w))


def convolution(zero: int, pad: int, wide: int = 256) -> Graph:
    net = Net()
    x = net.b.input(TensorType(F32, (1, 128, 9, 9)))
    w = net.weight(wide, 128, 3, 3, axis=0)
    how: dict[str, Any] = {"strides": (1, 1), "pads_lo": (pad, pad), "pads_hi": (pad, pad), "dilations": (1, 1)}
    return net.done(conv(net.b, net.through(x, STEP, zero, np.uint8), w, **how))


CASES = {
    "symmetric": linear(),
    "a zero point": linear(7, np.uint8),
    "one scale": linear(each=False),
    "rows of two dimensions": linear(3, np.uint8, rank=3),
    "a turned weight": turned(),
    "a small weight": linear(wide=48),
    "a small weight of one scale": linear(9, np.uint8, wide=48, each=False),
    "a small convolution": convolution(0, 1, 16),
    "a convolution": convolution(0, 1),
    "a convolution with a zero point": convolution(9, 0),
}


def not_quantised() -> Graph:
    net = Net()
    x = net.b.input(TensorType(F32, (64, 512)))
    w = net.b.constant(normal(net.b, 512, 48).astype(np.float32))
    return net.done(matmul(net.b, net.through(x, STEP, 0), w))


def shifted(kind: DType, zero: float) -> Graph:
    """Bytes less a number, the difference in a type of its own."""
    net = Net()
    x = net.b.input(TensorType(U8, (64, 512)))
    away = net.b.apply(Prim.SUB, net.b.cast(x, kind), float(zero))
    left = net.b.apply(Prim.MUL, net.b.cast(away, F32), 0.02)
    return net.done(matmul(net.b, left, net.weight(512, 256, axis=1)))


OTHERS = {
    "a zero point between two numbers": shifted(DType.F16, 127.5),
    "bytes that wrap": shifted(I8, 3),
    "a zero point that is no byte": shifted(I32, 30_000_000),
    "a weight that is no bytes": not_quantised(),
    "a small weight with a zero point": linear(wide=48, of_weight=100),
    "a zero point of the weight": linear(of_weight=2),
    "padding that is no zero": convolution(9, 1),
}


def integers(found: Alternatives) -> list[tuple[NodeId, NodeId]]:
    """(original, extra) of the products."""
    old = [i for i, n in enumerate(found.graph.nodes) if n.prim in (Prim.MATMUL, Prim.CONV) and n.type.dtype is F32]
    return [(o, x) for x, o in found.classes.items() if o in old and _reads_integers(found.graph, x)]


def _reads_integers(graph: Graph, extra: NodeId) -> bool:
    """Whether it is the scaled cast of i32."""
    node = graph.nodes[extra]
    casts = [graph.nodes[i] for i in node.inputs if graph.nodes[i].prim is Prim.CAST]
    return node.prim is Prim.MUL and any(graph.type_of(c.inputs[0]).dtype is DType.I32 for c in casts)


def between_no_bytes(shape: tuple[int, ...]) -> Array:
    """Numbers that f32 and f64 quantise alike: those half-way between two bytes are drawn again."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    while (tied := half_way(x)).any():
        x[tied] = rng.standard_normal(tied.sum())
    return x


def half_way(x: Array) -> Array:
    """Where a number is so near to a half of steps that a type's rounding decides which byte it is."""
    return np.abs(np.abs(x.astype(np.float64) / STEP % 1.0) - 0.5) < 1e-4


def test_numbers_that_are_half_way_are_drawn_again() -> None:
    assert half_way(np.array([0.5, 1.49999, -2.5, 100.5], np.float32) * np.float32(STEP)).all()
    assert not half_way(np.array([0.0, 0.49, -2.51, 100.0], np.float32) * np.float32(STEP)).any()
    assert half_way(np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)).any()
    assert not half_way(between_no_bytes((64, 512))).any()


@pytest.mark.parametrize("name", list(CASES))
def test_the_product_of_bytes_is_near_the_original(name: str) -> None:
    found = find_alternatives(CASES[name], on_gpu=True)
    pairs = integers(found)
    assert pairs
    original, extra = pairs[0]
    both = replace(found.graph, outputs=(original, extra), output_names=())
    x = between_no_bytes(both.type_of(both.inputs[0]).shape)
    near = evaluate(both, [x], precise=True)[0]
    _, got = evaluate(both, [x])
    assert np.abs(numbers(got) - numbers(near)).max() <= 1e-6 * np.abs(numbers(near)).max()


@pytest.mark.parametrize("name", list(OTHERS))
def test_what_bytes_cannot_say_stays(name: str) -> None:
    assert integers(find_alternatives(OTHERS[name], on_gpu=True)) == []


def test_not_on_a_cpu_and_not_where_sums_must_stay() -> None:
    assert integers(find_alternatives(CASES["symmetric"])) == []
    assert integers(find_alternatives(CASES["symmetric"], on_gpu=True, strict=True)) == []


def test_between_two_products_bytes_are_read_and_written() -> None:
    net = Net()
    x = net.b.input(TensorType(F32, (256, 512)))
    first = matmul(net.b, net.through(x, STEP, 0), net.weight(512, 640, axis=1))
    assert not isinstance(first, Declined)
    hidden = net.through(net.b.apply(Prim.MAX, first, 0.0), 0.05, 0, np.uint8)
    found = find_alternatives(net.done(matmul(net.b, hidden, net.weight(640, 768, axis=1))), on_gpu=True)
    types = found.graph.type_of
    candidates = enumerate_candidates(found.graph, EnumerationLimits(attention=True), found).candidates
    pairs = [({types(i).dtype for i in c.inputs}, [types(i).dtype for i in c.outputs]) for c in candidates]
    assert any(ins >= {I8} and I32 not in ins and outs == [U8] for ins, outs in pairs)
    assert any(ins >= {I8, U8} and I32 not in ins and outs == [F32] for ins, outs in pairs)


def test_kernels_take_the_bytes_and_what_follows() -> None:
    from tests.generate.cuda.test_templates import H200

    found = find_alternatives(CASES["a zero point"], on_gpu=True)
    assert integers(found)
    candidates = enumerate_candidates(found.graph, EnumerationLimits(attention=True), found).candidates
    with_bytes = [c for c in candidates if {U8, I8} <= {found.graph.type_of(i).dtype for i in c.inputs}]
    assert with_bytes
    whole = max(with_bytes, key=lambda c: c.members.bit_count())
    ins, outs = ((Format.ROW,) * len(x) for x in (whole.inputs, whole.outputs))
    problem = extract(found.graph, whole, ins, outs, found).problem
    p = product(problem)
    assert isinstance(p, Product)
    assert p.integers
    schedules = templates.schedules(problem, H200)
    assert not isinstance(schedules, Declined)
    assert "tma" in {s.param("template") for s in schedules}


def test_products_of_bytes_are_priced_as_such() -> None:
    def matrices(dtype: DType, wide: DType) -> Graph:
        b = GraphBuilder()
        x, w = b.input(TensorType(dtype, (2048, 1024))), b.input(TensorType(dtype, (1024, 1024)))
        y = b.add(Prim.MATMUL, b.cast(x, wide), b.cast(w, wide))
        return b.build([b.cast(y, DType.F16)])

    us = [
        gpu_estimate_us(Problem(g, str(g), (Format.ROW, Format.ROW), (Format.ROW,)), GpuFacts())
        for g in (matrices(I8, I32), matrices(DType.F8E4M3, F32), matrices(DType.F16, DType.F16))
    ]
    assert us[0] == us[1] < us[2]


def test_a_plan_has_bytes_in_memory_and_three_kernels() -> None:
    net = Net()
    x = net.b.input(TensorType(F32, (4096, 1024)))
    first = matmul(net.b, net.through(x, STEP, 0), net.weight(1024, 1024, axis=1))
    assert not isinstance(first, Declined)
    hidden = net.through(net.b.apply(Prim.MAX, first, 0.0), 0.05, 0, np.uint8)
    found = find_alternatives(net.done(matmul(net.b, hidden, net.weight(1024, 1024, axis=1))), on_gpu=True)
    graph, offers = found.graph, []
    for c in enumerate_candidates(graph, EnumerationLimits(attention=True), found).candidates:
        for f in format_choices(graph, c):
            problem = extract(graph, c, f.inputs, f.outputs, found).problem
            offers.append(Priced(c, f.inputs, f.outputs, gpu_estimate_us(problem, GpuFacts())))
    chosen = [offers[k].candidate for k in select(graph, offers, alternatives=found, plans=1)[0].chosen]
    assert [[graph.type_of(i).dtype for i in c.outputs] for c in chosen] == [[I8], [U8], [F32]]
