"""What the templates refuse, with reasons; what a schedule carries; the text of three kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests import goldens
from tests.generate.cpp.templates.harness import LAST, ROW, Facts, conv, f32, problem
from tests.typed import narrow

from weft.generate.contraction.views import View
from weft.generate.cpp import templates
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.source import KernelSource


def refused(p: Any) -> str:
    found = templates.schedules(p, Facts())
    assert isinstance(found, Declined)
    return found.reason


def test_other_element_types() -> None:
    for dtype in (DType.F64, DType.F16, DType.BF16, DType.I32):
        b = GraphBuilder()
        x, w = b.input(TensorType(dtype, (4, 8))), b.input(TensorType(dtype, (8, 5)), is_weight=True)
        assert dtype.value in refused(problem(b, [b.add(Prim.MATMUL, x, w)]))


def test_no_contraction_and_two() -> None:
    b = GraphBuilder()
    x = b.input(f32(4, 4))
    assert "0 contractions" in refused(problem(b, [b.apply(Prim.EXP, x)]))
    b = GraphBuilder()
    x, w, v = b.input(f32(4, 4)), b.input(f32(4, 4), is_weight=True), b.input(f32(4, 4), is_weight=True)
    assert "2 contractions" in refused(problem(b, [b.add(Prim.MATMUL, b.add(Prim.MATMUL, x, w), v)]))


def test_a_reduction_behind() -> None:
    b = GraphBuilder()
    x, w = b.input(f32(4, 8)), b.input(f32(8, 5), is_weight=True)
    y = b.reduce(Prim.REDUCE_MAX, b.add(Prim.MATMUL, x, w), (1,))
    assert "reduce_max after" in refused(problem(b, [y]))


def test_a_slice_behind() -> None:
    b = GraphBuilder()
    x, w = b.input(f32(4, 8)), b.input(f32(8, 6), is_weight=True)
    y = b.slice(b.add(Prim.MATMUL, x, w), (0, 0), (4, 3), (1, 1))
    assert "slice after" in refused(problem(b, [y]))


def test_a_computed_filter() -> None:
    b = GraphBuilder()
    x, w = b.input(f32(1, 4, 6, 6)), b.input(f32(5, 4, 3, 3))
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1)))
    assert "no constant" in refused(problem(b, [y]))


def test_three_dimensions() -> None:
    b = GraphBuilder()
    x, w = b.input(f32(1, 4, 6, 6, 6)), b.input(f32(5, 4, 3, 3, 3), is_weight=True)
    y = b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1,) * 3, (0,) * 3, (0,) * 3, (1,) * 3))
    assert "3-d" in refused(problem(b, [y]))


def test_padding_with_another_value_or_of_channels() -> None:
    for attrs in (
        a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), "constant", 1.0),
        a.PadAttrs((0, 1, 0, 0), (0, 1, 0, 0)),
    ):
        b = GraphBuilder()
        x = b.add(Prim.PAD, b.input(f32(1, 4, 6, 6)), attrs=attrs)
        assert "padding" in refused(problem(b, [conv(b, x, 8, (3, 3))], [LAST, ROW], [LAST]))


def test_a_result_that_is_read_twice_at_different_positions() -> None:
    b = GraphBuilder()
    x, w = b.input(f32(6, 8)), b.input(f32(8, 6), is_weight=True)
    y = b.add(Prim.MATMUL, x, w)
    assert "other positions" in refused(problem(b, [b.apply(Prim.ADD, y, b.transpose(y, (1, 0)))]))


def test_an_output_of_another_type() -> None:
    b = GraphBuilder()
    x, w = b.input(f32(6, 8)), b.input(f32(8, 6), is_weight=True)
    assert "bool" in refused(problem(b, [b.apply(Prim.GT, b.add(Prim.MATMUL, x, w), 0.0)]))


def test_a_gather_of_channels_and_with_computed_indices() -> None:
    b = GraphBuilder()
    x = b.input(f32(1, 4, 6, 6))
    y = b.add(Prim.GATHER, x, b.constant(np.array([1, 0, 2, 3])), attrs=a.GatherAttrs(1))
    assert "channels" in refused(problem(b, [conv(b, y, 8, (1, 1))], [LAST, ROW], [LAST]))
    b = GraphBuilder()
    x, index = b.input(f32(1, 4, 6, 6)), b.input(TensorType(DType.I64, (3,)))
    y = b.add(Prim.GATHER, x, index, attrs=a.GatherAttrs(2))
    assert "computed indices" in refused(problem(b, [conv(b, y, 8, (1, 1))], [LAST, ROW, ROW], [LAST]))


def test_empty_tensors() -> None:
    b = GraphBuilder()
    x, w = b.input(f32(0, 8)), b.input(f32(8, 6), is_weight=True)
    assert refused(problem(b, [b.add(Prim.MATMUL, x, w)])) == "empty result"
    b = GraphBuilder()
    x, w = b.input(f32(3, 0)), b.input(f32(0, 6), is_weight=True)
    assert refused(problem(b, [b.add(Prim.MATMUL, x, w)])) == "empty sum"


def test_emit_depends_on_its_arguments_only_and_names_are_its_own() -> None:
    b = GraphBuilder()
    x = b.input(f32(1, 16, 9, 9), 'x; system("rm")')
    p = problem(b, [conv(b, x, 32, (3, 3), lo=(1, 1))], [LAST, ROW], [LAST])
    found = templates.schedules(p, Facts())
    assert not isinstance(found, Declined)
    assert len(set(found)) == len(found)
    sources = [narrow(KernelSource, templates.emit(p, s)) for s in found]
    assert sources == [templates.emit(p, s) for s in found]
    assert len({s.entry for s in sources}) == len(found)
    for s in sources:
        assert re.fullmatch(r"k[0-9a-f]{16}", s.entry)
        assert "rm" not in s.text.split(s.entry)[-1]
        assert s.replaces_weights == (1,)
        assert all(list(x.params) == sorted(x.params) for x in found)


def test_threads_and_lanes_of_the_facts() -> None:
    b = GraphBuilder()
    x = b.input(f32(1, 64, 56, 56))
    p = problem(b, [conv(b, x, 64, (3, 3), lo=(1, 1))], [LAST, ROW], [LAST])
    for simd, threads in ((16, 1), (32, 3), (64, 8)):
        found = templates.schedules(p, Facts(simd, threads))
        assert not isinstance(found, Declined)
        assert {s.param("lanes") for s in found} == {simd // 4}
        assert {s.param("threads") for s in found} == {threads}


@pytest.mark.parametrize(
    ("shape", "strides", "new", "want"),
    [
        ((4, 6), (6, 1), (2, 2, 6), (12, 6, 1)),
        ((4, 6), (6, 1), (24,), (1,)),
        ((4, 6), (1, 4), (24,), None),
        ((4, 6), (1, 4), (2, 2, 3, 2), (2, 1, 8, 4)),
        ((4, 1, 6), (6, 99, 1), (24,), (1,)),
        ((3, 5), (0, 1), (15,), None),
        ((3, 5), (0, 0), (15,), (0,)),
        ((4, 6), (6, 1), (3, 8), (8, 1)),
        ((4, 6), (12, 1), (3, 8), None),
    ],
)
def test_views_reshape(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    new: tuple[int, ...],
    want: tuple[int, ...] | None,
) -> None:
    got = View(shape, strides).reshape(new)
    assert (None if got is None else got.strides) == want


def golden_problems() -> Iterator[Any]:
    b = GraphBuilder()
    x = b.input(f32(1, 3, 8, 8))
    y = conv(b, x, 16, (3, 3), strides=(2, 2), lo=(1, 1))
    y = b.apply(Prim.MAX, b.apply(Prim.ADD, y, b.reshape(b.input(f32(16), is_weight=True), (16, 1, 1))), 0.0)
    yield "conv", problem(b, [y], [ROW, ROW, ROW], [LAST])
    b = GraphBuilder()
    x = b.input(f32(1, 16, 6, 6))
    yield "depthwise", problem(b, [conv(b, x, 16, (3, 3), lo=(1, 1), groups=16)], [LAST, ROW], [LAST])
    b = GraphBuilder()
    q, k = b.input(f32(2, 8, 16)), b.input(f32(2, 8, 16))
    y = b.apply(Prim.MUL, b.add(Prim.MATMUL, q, b.transpose(k, (0, 2, 1))), 0.25)
    yield "matmul", problem(b, [y])


@pytest.mark.parametrize(("name", "p"), list(golden_problems()), ids=lambda x: x if isinstance(x, str) else "")
def test_text_of_the_first_schedule(name: str, p: Problem) -> None:
    found = templates.schedules(p, Facts(64, 1))
    assert not isinstance(found, Declined)
    source = templates.emit(p, found[0])
    assert isinstance(source, KernelSource)
    text = source.text[source.text.index("typedef w_f32v vf;") :].replace(source.entry, "ENTRY")
    goldens.check(f"templates/{name}.txt", text)
