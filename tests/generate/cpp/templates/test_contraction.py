"""Convolutions and matrix products in numbers: shapes, strides, padding, groups, formats, epilogues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.generate.cpp.templates.harness import LAST, ROW, Facts, check, conv, f32, problem
from tests.slow import few
from tests.typed import narrow

from weft.generate.cpp import templates
from weft.generate.cpp.templates import depthwise
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.formats import Format


def image(c: int, h: int, w: int, n: int = 1) -> Any:
    b = GraphBuilder()
    return b, b.input(f32(n, c, h, w))


SHAPES = [
    # n, c, h, w, oc, kernel, strides, lo, hi, dilations, groups
    (1, 1, 5, 7, 1, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1),
    (1, 3, 17, 19, 16, (7, 7), (2, 2), (3, 3), (3, 3), (1, 1), 1),
    (2, 5, 9, 11, 17, (3, 3), (2, 1), (1, 0), (0, 2), (1, 2), 1),
    (1, 17, 13, 13, 80, (1, 1), (1, 1), (0, 0), (0, 0), (1, 1), 1),
    (1, 80, 8, 8, 85, (1, 1), (1, 1), (0, 0), (0, 0), (1, 1), 1),
    (2, 16, 9, 10, 40, (1, 1), (2, 2), (0, 0), (0, 0), (1, 1), 1),
    (1, 64, 14, 14, 64, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1),
    (1, 24, 7, 7, 96, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1),
    (1, 8, 35, 33, 24, (5, 3), (3, 3), (2, 1), (2, 1), (1, 1), 1),
    (1, 12, 11, 11, 20, (3, 3), (1, 1), (2, 2), (2, 2), (2, 2), 1),
    (1, 16, 9, 9, 32, (1, 7), (1, 1), (0, 3), (0, 3), (1, 1), 1),
    (1, 16, 9, 9, 32, (7, 1), (1, 1), (3, 0), (3, 0), (1, 1), 1),
    (2, 12, 9, 8, 18, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 3),
    (1, 64, 10, 10, 64, (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 4),
    (1, 6, 9, 9, 12, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 6),
    (1, 4, 6, 5, 9, (2, 2), (1, 1), (0, 0), (0, 0), (1, 1), 1),
    (1, 5, 3, 3, 7, (3, 3), (1, 1), (0, 0), (0, 0), (1, 1), 1),
    (1, 16, 12, 12, 16, (1, 1), (1, 1), (1, 1), (1, 1), (1, 1), 1),
    (1, 200, 6, 6, 136, (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 1),
]


@pytest.mark.parametrize("case", few(SHAPES, 4), ids=str)
def test_convolution(
    case: tuple[Any, ...],
) -> None:
    n, c, h, w, oc, k, s, lo, hi, d, g = case
    b, x = image(c, h, w, n)
    y = conv(b, x, oc, k, strides=s, lo=lo, hi=hi, dilations=d, groups=g)
    check(problem(b, [y], [LAST, ROW], [LAST]))


@pytest.mark.parametrize("fin", [ROW, LAST])
@pytest.mark.parametrize("fout", [ROW, LAST])
@pytest.mark.parametrize(("c", "oc", "k", "p"), few([(3, 20, 3, 1), (24, 5, 1, 0), (20, 33, 3, 0)], 1, unpack=True))
def test_every_pair_of_formats(fin: Format, fout: Format, c: int, oc: int, k: int, p: int) -> None:
    b, x = image(c, 9, 11)
    y = b.apply(Prim.MAX, conv(b, x, oc, (k, k), lo=(p, p)), 0.0)
    check(problem(b, [y], [fin, ROW], [fout]), most=1)


@pytest.mark.parametrize("simd", [16, 32])
def test_narrower_vectors(simd: int) -> None:
    b, x = image(19, 9, 11)
    y = conv(b, x, 21, (3, 3), lo=(1, 1))
    check(problem(b, [y], [LAST, ROW], [LAST]), facts=Facts(simd, 2))
    b, x = image(21, 9, 11)
    y = conv(b, x, 21, (3, 3), lo=(1, 1), groups=21)
    check(problem(b, [y], [LAST, ROW], [LAST]), facts=Facts(simd, 2))


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_numbers_of_threads(threads: int) -> None:
    b, x = image(32, 10, 10)
    y = conv(b, x, 48, (3, 3), lo=(1, 1))
    check(problem(b, [y], [LAST, ROW], [LAST]), facts=Facts(64, threads))


def test_every_schedule_is_right() -> None:
    b, x = image(33, 15, 14)
    y = b.apply(Prim.MAX, conv(b, x, 70, (3, 3), lo=(1, 1)), 0.0)
    found = check(problem(b, [y], [LAST, ROW], [LAST]), most=99)
    assert 4 <= len(found) <= 12


DEPTHWISE = [
    # c, h, w, kernel, stride, pad, dilation
    (16, 13, 13, 3, 1, 1, 1),
    (40, 14, 9, 3, 2, 1, 1),
    (21, 11, 12, 5, 1, 2, 1),
    (5, 9, 9, 3, 1, 2, 2),
    (64, 7, 7, 7, 1, 3, 1),
    (32, 6, 6, 3, 1, 0, 1),
    (17, 3, 2, 3, 1, 1, 1),
    (16, 15, 15, 5, 3, 2, 1),
]


@pytest.mark.parametrize("case", few(DEPTHWISE, 3), ids=str)
def test_depthwise(case: tuple[int, ...]) -> None:
    c, h, w, k, s, p, d = case
    b, x = image(c, h, w, 2)
    y = conv(b, x, c, (k, k), strides=(s, s), lo=(p, p), dilations=(d, d), groups=c)
    bias = b.input(f32(c), is_weight=True)
    y = b.apply(Prim.ADD, y, b.reshape(bias, (c, 1, 1)))
    found = check(problem(b, [y], [LAST, ROW, ROW], [LAST]))
    assert found[0].param("template") == "depthwise"


@pytest.mark.parametrize("case", few([*DEPTHWISE, (20, 12, 9, 11, 1, 5, 1)], 4), ids=str)
def test_depthwise_rolled_up(case: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "LONG", 0)
    c, h, w, k, s, p, d = case
    b, x = image(c, h, w, 2)
    y = conv(b, x, c, (k, k), strides=(s, s), lo=(p, p), dilations=(d, d), groups=c)
    found = check(problem(b, [y], [LAST, ROW], [LAST]))
    assert found[0].param("rolled") is True


def test_long_texts_are_rolled_up_first_and_measured_unrolled_too() -> None:
    def rolled(kernel: int) -> list[bool]:
        b, x = image(40, 56, 56)
        y = conv(b, x, 40, (kernel, kernel), lo=(kernel // 2, kernel // 2), groups=40)
        found = templates.schedules(problem(b, [y], [LAST, ROW], [LAST]), Facts(64, 2))
        assert not isinstance(found, Declined)
        return ["rolled" in dict(s.params) for s in found]

    assert rolled(7)[0] and not all(rolled(7)) and not any(rolled(3))


@pytest.mark.parametrize("mode", ["reflect", "edge", "constant"])
@pytest.mark.parametrize("fin", [ROW, LAST])
def test_padding_before_the_convolution(mode: a.PadMode, fin: Format) -> None:
    b, x = image(5, 9, 8)
    y = conv(b, b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 0, 4, 3), (0, 0, 4, 2), mode)), 12, (9, 5), strides=(2, 1))
    check(problem(b, [y], [fin, ROW], [LAST]), most=1)


@pytest.mark.parametrize("pad", [False, True])
def test_nearest_upsampling_before_the_convolution(pad: bool) -> None:
    b, x = image(16, 6, 7)
    for axis, size in ((2, 12), (3, 14)):
        index = b.constant((np.arange(size) // 2).astype(np.int64))
        x = b.add(Prim.GATHER, x, index, attrs=a.GatherAttrs(axis))
    if pad:
        x = b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), "reflect"))
    y = conv(b, x, 20, (3, 3), lo=(0, 0) if pad else (1, 1))
    check(problem(b, [y], [LAST, ROW], [LAST]), most=1)


def test_tables_of_indices_that_are_reshaped_or_counted() -> None:
    b, x = image(16, 6, 7)
    pairs = b.broadcast(b.constant(np.arange(6).reshape(6, 1)), (6, 2))
    x = b.add(Prim.GATHER, x, b.reshape(pairs, (12,)), attrs=a.GatherAttrs(2))
    x = b.add(Prim.GATHER, x, b.iota((5,), 0, DType.I64), attrs=a.GatherAttrs(3))
    check(problem(b, [conv(b, x, 20, (3, 3), lo=(1, 1))], [LAST, ROW], [LAST]), most=1)


def test_cropped_input() -> None:
    b, x = image(8, 12, 12)
    x = b.slice(x, (0, 0, 1, 2), (1, 8, 9, 8), (1, 1, 1, 1))
    check(problem(b, [conv(b, x, 16, (3, 3), lo=(1, 1))], [LAST, ROW], [LAST]), most=1)


def test_one_dimension() -> None:
    b = GraphBuilder()
    x = b.input(f32(2, 6, 21))
    y = conv(b, x, 20, (3,), strides=(2,), lo=(1,), dilations=(1,))
    check(problem(b, [y]))


def sigmoid(b: Any, y: Any) -> Any:
    return b.apply(
        Prim.DIV, b.scalar(1.0, b.type_of(y).dtype), b.apply(Prim.ADD, b.apply(Prim.EXP, b.apply(Prim.NEG, y)), 1.0)
    )


ACTIVATIONS = {
    "relu": lambda b, y: b.apply(Prim.MAX, y, 0.0),
    "leaky": lambda b, y: b.add(Prim.SELECT, b.apply(Prim.GT, y, 0.0), y, b.apply(Prim.MUL, y, 0.1)),
    "clip": lambda b, y: b.apply(Prim.MIN, b.apply(Prim.MAX, y, 0.0), 6.0),
    "silu": lambda b, y: b.apply(Prim.MUL, y, sigmoid(b, y)),
    "hard_swish": lambda b, y: b.apply(
        Prim.MUL, y, b.apply(Prim.DIV, b.apply(Prim.MIN, b.apply(Prim.MAX, b.apply(Prim.ADD, y, 3.0), 0.0), 6.0), 6.0)
    ),
    "mish": lambda b, y: b.apply(Prim.MUL, y, b.apply(Prim.TANH, b.apply(Prim.LOG1P, b.apply(Prim.EXP, y)))),
    "gelu": lambda b, y: b.apply(
        Prim.MUL, b.apply(Prim.MUL, y, 0.5), b.apply(Prim.ADD, b.apply(Prim.ERF, b.apply(Prim.MUL, y, 0.70710678)), 1.0)
    ),
}


@pytest.mark.parametrize("activation", few(ACTIVATIONS, 3))
@pytest.mark.parametrize("out", [ROW, LAST])
def test_epilogue(activation: str, out: Format) -> None:
    """Affine batch norm, residual, activation, gate; channels with a tail."""
    b, x = image(12, 9, 7, 2)
    y = conv(b, x, 21, (3, 3), lo=(1, 1))
    scale, bias = (b.reshape(b.input(f32(21), is_weight=True), (21, 1, 1)) for _ in range(2))
    residual, gate = b.input(f32(2, 21, 9, 7)), b.input(f32(2, 21, 1, 1))
    y = b.apply(Prim.ADD, b.apply(Prim.MUL, y, scale), bias)
    y = ACTIVATIONS[activation](b, b.apply(Prim.ADD, y, residual))
    y = b.apply(Prim.MUL, y, gate)
    p = problem(b, [y], [LAST, ROW, ROW, ROW, out, ROW], [out])
    check(p, most=1, gain=6.0)


def test_operands_in_other_formats_than_the_output() -> None:
    b, x = image(8, 6, 6)
    y = conv(b, x, 18, (1, 1))
    y = b.apply(Prim.ADD, y, b.input(f32(1, 18, 6, 6)))
    y = b.apply(Prim.MUL, y, b.input(f32(1, 1, 6, 6)))
    check(problem(b, [y], [LAST, ROW, ROW, ROW], [LAST]), most=1, gain=4.0)


def test_several_outputs() -> None:
    b, x = image(8, 6, 6)
    y = conv(b, x, 18, (3, 3), lo=(1, 1))
    check(problem(b, [b.apply(Prim.MAX, y, 0.0), y], [LAST, ROW], [LAST, ROW]), most=1)


def test_constants_by_value() -> None:
    b, x = image(4, 6, 6)
    rng = np.random.default_rng(3)
    w = b.constant(rng.standard_normal((5, 4, 3, 3)).astype(np.float32))
    bias = b.constant(rng.standard_normal((5, 1, 1)).astype(np.float32))
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1)))
    check(problem(b, [b.apply(Prim.ADD, y, bias)], [LAST], [LAST]), most=1)


def test_result_seen_through_a_reshape() -> None:
    b, x = image(6, 5, 4)
    y = b.reshape(conv(b, x, 20, (1, 1)), (1, 20, 20))
    check(problem(b, [b.apply(Prim.MAX, y, 0.0)], [LAST, ROW], [ROW]), most=1)


MATMULS = [(1, 300, 257), (1, 64, 16), (3, 17, 5), (49, 64, 96), (13, 1, 40), (64, 33, 1), (100, 48, 200), (2, 513, 33)]


@pytest.mark.parametrize("case", few(MATMULS, 3), ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_linear(case: tuple[int, ...], transposed: bool) -> None:
    m, k, n = case
    b = GraphBuilder()
    x = b.input(f32(m, k))
    w = b.input(f32(n, k) if transposed else f32(k, n), is_weight=True)
    y = b.add(Prim.MATMUL, x, b.transpose(w, (1, 0)) if transposed else w)
    y = b.apply(Prim.ADD, y, b.input(f32(n), is_weight=True))
    check(problem(b, [y]))


def test_linear_of_a_batch_is_one_product() -> None:
    b = GraphBuilder()
    x, w = b.input(f32(2, 9, 24)), b.input(f32(24, 40), is_weight=True)
    y = b.add(Prim.MATMUL, x, w)
    y = b.apply(Prim.ADD, y, b.input(f32(2, 9, 40)))
    (found,) = check(problem(b, [y]), most=1)
    assert narrow(int, found.param("tw")) * narrow(int, found.param("th")) > 1


@pytest.mark.parametrize("heads_last", [False, True])
def test_attention(heads_last: bool) -> None:
    """Scores with scale and mask, from (batch, sequence, heads * depth) without a copy."""
    n, h, s, d = 2, 3, 20, 24
    b = GraphBuilder()
    q, k = b.input(f32(n, s, h * d)), b.input(f32(n, s, h * d))
    mask = b.input(f32(n, 1, 1, s))
    q4 = b.transpose(b.reshape(q, (n, s, h, d)), (0, 2, 1, 3))
    k4 = b.transpose(b.reshape(k, (n, s, h, d)), (0, 2, 3, 1))
    y = b.apply(Prim.ADD, b.apply(Prim.MUL, b.add(Prim.MATMUL, q4, k4), 0.125), mask)
    check(problem(b, [y]))
    b = GraphBuilder()
    p, v = b.input(f32(n, h, s, s)), b.input(f32(n, s, h * d))
    y = b.add(Prim.MATMUL, p, b.transpose(b.reshape(v, (n, s, h, d)), (0, 2, 1, 3)))
    if heads_last:
        y = b.reshape(b.transpose(y, (0, 2, 1, 3)), (n, s, h * d))
    check(problem(b, [y]))


def test_slices_of_one_projection() -> None:
    """q, k of a packed projection: offsets and row strides."""
    n, s, h, d = 1, 10, 2, 16
    b = GraphBuilder()
    qkv = b.input(f32(n, s, 3 * h * d))
    parts = [b.slice(qkv, (0, 0, i * h * d), (n, s, h * d), (1, 1, 1)) for i in range(2)]
    q = b.transpose(b.reshape(parts[0], (n, s, h, d)), (0, 2, 1, 3))
    k = b.transpose(b.reshape(parts[1], (n, s, h, d)), (0, 2, 3, 1))
    check(problem(b, [b.add(Prim.MATMUL, q, k)]))


def test_broadcast_batches() -> None:
    b = GraphBuilder()
    x, w = b.input(f32(2, 1, 7, 33)), b.input(f32(3, 33, 21))
    check(problem(b, [b.add(Prim.MATMUL, x, w)]))


def test_transposed_left_operand() -> None:
    b = GraphBuilder()
    x, w = b.input(f32(31, 19)), b.input(f32(31, 21), is_weight=True)
    check(problem(b, [b.add(Prim.MATMUL, b.transpose(x, (1, 0)), w)]))


@pytest.mark.parametrize("out", [ROW, LAST])
@pytest.mark.parametrize(
    "case", few([(32, 3, 9, 4, 1), (20, 7, 1, 0, 1), (5, 1, 5, 2, 1), (17, 4, 3, 2, 2)], 1), ids=str
)
def test_lanes_along_the_sum(case: tuple[int, ...], out: Format) -> None:
    """Few output channels."""
    c, oc, k, pad, d = case
    b, x = image(c, 13, 11, 2)
    y = conv(b, x, oc, (k, k), lo=(pad, pad), dilations=(d, d))
    y = b.apply(Prim.ADD, y, b.reshape(b.input(f32(oc), is_weight=True), (oc, 1, 1)))
    p = problem(b, [b.apply(Prim.MAX, y, 0.0)], [LAST, ROW, ROW], [out])
    found = check(p, most=5)
    assert oc > 4 or any(s.param("dot") for s in found)
