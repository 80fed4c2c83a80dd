"""Winograd convolution: numbers, precision, edges, and what it declines."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from tests.generate.cpp.templates.harness import LAST, ROW, Facts, check, conv, f32, problem, random_inputs, run
from tests.slow import few
from tests.typed import numbers

from weft.generate.cpp import templates
from weft.generate.cpp.templates.winograd import matrices
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.kernels.formats import Format
from weft.kernels.source import KernelSource


@pytest.mark.parametrize("m", [2, 4])
def test_the_matrices_are_exact(m: int) -> None:
    at, g, bt = (np.array(x, dtype=object) for x in matrices(m))
    d = np.array([Fraction(i * i + 3 * i + 1, 7) for i in range(m + 2)], dtype=object)
    w = np.array([Fraction(2), Fraction(-3, 5), Fraction(1, 3)], dtype=object)
    got = at @ ((g @ w) * (bt @ d))
    assert list(got) == [sum(d[i + k] * w[k] for k in range(3)) for i in range(m)]


@pytest.mark.parametrize("algorithm", ["winograd2", "winograd4"])
@pytest.mark.parametrize(
    ("n", "h", "w", "oc"), few([(1, 14, 14, 64), (2, 9, 7, 32), (1, 5, 23, 96), (1, 3, 3, 16)], 1, unpack=True)
)
def test_numbers(algorithm: str, n: int, h: int, w: int, oc: int) -> None:
    b = GraphBuilder()
    x = b.input(f32(n, 64, h, w))
    y = conv(b, x, oc, (3, 3), lo=(1, 1))
    check(problem(b, [y], [LAST, ROW], [LAST]), only=algorithm, most=3)


@pytest.mark.parametrize("algorithm", ["winograd2", "winograd4"])
def test_epilogue_padding_and_clipping(algorithm: str) -> None:
    b = GraphBuilder()
    x = b.input(f32(1, 64, 10, 9))
    padded = b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), "reflect"))
    y = conv(b, padded, 32, (3, 3))
    y = b.apply(Prim.ADD, y, b.reshape(b.input(f32(32), is_weight=True), (32, 1, 1)))
    y = b.apply(Prim.ADD, y, b.input(f32(1, 32, 10, 9)))
    y = b.apply(Prim.MAX, y, 0.0)
    check(problem(b, [y], [LAST, ROW, ROW, LAST], [LAST]), only=algorithm, most=2)


def test_without_padding_and_with_asymmetric_padding() -> None:
    for lo, hi in (((0, 0), (0, 0)), ((1, 0), (2, 1))):
        b = GraphBuilder()
        x = b.input(f32(1, 64, 11, 8))
        check(problem(b, [conv(b, x, 32, (3, 3), lo=lo, hi=hi)], [LAST, ROW], [LAST]), only="winograd4", most=1)


@pytest.mark.parametrize("simd", [16, 32])
def test_narrower_vectors(simd: int) -> None:
    b = GraphBuilder()
    x = b.input(f32(1, 64, 9, 9))
    p = problem(b, [conv(b, x, 64, (3, 3), lo=(1, 1))], [LAST, ROW], [LAST])
    check(p, only="winograd4", most=1, facts=Facts(simd, 1))


@pytest.mark.parametrize(
    ("c", "kwargs", "formats"),
    [
        (20, {"lo": (1, 1)}, (LAST, LAST)),
        (64, {"strides": (2, 2)}, (LAST, LAST)),
        (64, {"dilations": (2, 2)}, (LAST, LAST)),
        (64, {"groups": 2}, (LAST, LAST)),
        (64, {"lo": (1, 1)}, (LAST, ROW)),
    ],
    ids=str,
)
def test_not_offered(c: int, kwargs: dict[str, Any], formats: tuple[Format, Format]) -> None:
    b = GraphBuilder()
    x = b.input(f32(1, c, 12, 12))
    found = templates.schedules(
        problem(b, [conv(b, x, 64, (3, 3), **kwargs)], [formats[0], ROW], [formats[1]]), Facts()
    )
    assert not isinstance(found, Declined)
    assert {s.param("algorithm") for s in found} == {"direct"}


def test_few_channels_have_no_large_tiles() -> None:
    b = GraphBuilder()
    x = b.input(f32(1, 32, 12, 12))
    found = templates.schedules(problem(b, [conv(b, x, 64, (3, 3), lo=(1, 1))], [LAST, ROW], [LAST]), Facts())
    assert not isinstance(found, Declined)
    assert {s.param("algorithm") for s in found} == {"direct", "winograd2"}


@pytest.mark.parametrize("algorithm", ["winograd2", "winograd4"])
@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, 2e38])
def test_what_is_not_finite_stays_where_it_belongs(algorithm: str, special: float) -> None:
    b = GraphBuilder()
    x = b.input(f32(1, 64, 13, 9))
    p = problem(b, [conv(b, x, 32, (3, 3), lo=(1, 1))], [LAST, ROW], [LAST])
    found = templates.schedules(p, Facts())
    assert not isinstance(found, Declined)
    source = templates.emit(p, next(s for s in found if s.param("algorithm") == algorithm))
    assert isinstance(source, KernelSource)
    image, weights = random_inputs(p.graph)
    image[0, 5, 6, 4] = special
    (got,) = run(p, source, [image, weights])
    with np.errstate(all="ignore"):
        (want,) = evaluate(p.graph, [image, weights])
    assert (np.isnan(got) == np.isnan(want)).all()
    assert (np.isposinf(got) == np.isposinf(numbers(want))).all()
    far = np.isfinite(want) & (np.abs(want) < 1e6)
    assert 0.5 < far.mean() < 1
    assert np.abs(got[far] - want[far]).max() < 1e-3
