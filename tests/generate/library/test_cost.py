"""What library calls take besides their arithmetic."""

from __future__ import annotations

import itertools
import random
from typing import cast

import pytest
import torch

from weft import fission
from weft.device.cuda.facts import GpuFacts
from weft.generate.library import LibraryGenerator
from weft.generate.library.cost import overhead_us, viewed
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind, Problem
from weft.kernels.formats import Format
from weft.kernels.source import LibraryCall, Schedule

SHAPES = [(2, 3, 4, 5), (6, 4, 5), (2, 60), (24, 5), (2, 3, 20), (120,), (1, 2, 3, 1, 20), (2, 1, 12, 5), (4, 6, 5)]


@pytest.mark.parametrize("seed", range(8))
def test_a_shape_is_seen_without_a_copy_where_torch_sees_it(seed: int) -> None:
    draw = random.Random(seed)
    met = set()
    for shape, wanted in itertools.product(SHAPES, SHAPES):
        order = list(range(len(shape)))
        draw.shuffle(order)
        base = torch.empty([shape[k] for k in order])
        x = base.permute([order.index(k) for k in range(len(shape))])
        try:
            want = x.view(wanted).stride()
        except RuntimeError:
            want = None
        got = viewed(shape, x.stride(), wanted)
        assert (got is None) is (want is None), (shape, x.stride(), wanted)
        met.add(want is None)
        if want is not None and got is not None:
            assert [s for s, n in zip(got, wanted, strict=True) if n > 1] == [
                s for s, n in zip(want, wanted, strict=True) if n > 1
            ]
    assert met == {True, False}


def call_of(problem: Problem, form: str) -> LibraryCall:
    call = LibraryGenerator().emit(problem, Schedule("library", (("form", form),)))
    assert isinstance(call, LibraryCall), call
    return call


def price(graph: Graph, form: str, ins: tuple[Format, ...], out: Format, kind: Kind = Kind.CALL) -> float:
    problem = Problem(graph, "p", ins, (out,))
    return overhead_us(problem, call_of(problem, form), kind, GpuFacts())


def convolution(dtype: DType) -> Graph:
    b = GraphBuilder()
    x, w = b.input(TensorType(dtype, (2, 16, 32, 32))), b.input(TensorType(dtype, (8, 16, 3, 3)), is_weight=True)
    return b.build([b.add(Prim.CONV, x, w, attrs=a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1)))])


def test_convolutions_of_halves_turn_row_major_images() -> None:
    def turned(dtype: DType) -> float:
        row, last = ((f, Format.ROW) for f in (Format.ROW, Format.LAST))
        graph = convolution(dtype)
        return price(graph, "cudnn", row, Format.ROW) - price(graph, "cudnn", last, Format.LAST)

    assert turned(DType.F16) > 0.0
    assert turned(DType.F32) == 0.0


def test_a_pad_that_the_framework_makes_row_major_costs_two_turns_channels_last() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F16, (2, 16, 32, 32)))
    graph = b.build([b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 0, 1, 1), (0, 0, 1, 1), "reflect"))])
    row = price(graph, "primitives", (Format.ROW,), Format.ROW)
    into = price(graph, "primitives", (Format.ROW,), Format.LAST)
    last = price(graph, "primitives", (Format.LAST,), Format.LAST)
    assert row < into < last


def tokens(last: bool) -> Graph:
    """Rows of channels, or one row for each channel, seen as an image that is scaled up."""
    b = GraphBuilder()
    rows = b.input(TensorType(DType.F16, (2, 64, 16) if last else (2, 16, 64)))
    x = b.reshape(b.transpose(rows, (0, 2, 1)) if last else rows, (2, 16, 8, 8))
    found = fission.apply(b, "resize_linear", [x], {"sizes": (2, 16, 16, 16), "coordinate_mode": "half_pixel"})
    return b.build(cast("list[int]", found))


def test_rows_of_channels_are_a_channels_last_image() -> None:
    from weft.orchestrate.enumerate import enumerate_candidates
    from weft.orchestrate.extract import extract
    from weft.orchestrate.legality import EnumerationLimits

    graph = tokens(last=True)
    found = enumerate_candidates(graph, EnumerationLimits(library_calls=True)).candidates
    prices = {}
    for out in Format:
        for c in found:
            if c.outputs == graph.outputs and c.kind is Kind.CALL:
                cut = extract(graph, c, (Format.ROW,), (out,)).problem
                if cut.origin_rule:
                    prices[out] = overhead_us(cut, call_of(cut, "operator"), Kind.CALL, GpuFacts())
    assert prices[Format.LAST] < prices[Format.ROW]


def test_a_change_of_format_costs_more_than_what_keeps_it() -> None:
    b = GraphBuilder()
    graph = b.build([b.input(TensorType(DType.F16, (2, 16, 32, 32)))])
    convert = price(graph, "primitives", (Format.ROW,), Format.LAST, Kind.CONVERT)
    b = GraphBuilder()
    graph = b.build([b.apply(Prim.EXP, b.input(TensorType(DType.F16, (2, 16, 32, 32))))])
    assert price(graph, "primitives", (Format.LAST,), Format.LAST) < convert


def test_heads_that_are_no_batch_of_their_own_are_copied() -> None:
    """Batched products take one dimension of batches: heads of several images are copied, those of one are not."""

    def heads(batch: int) -> float:
        b = GraphBuilder()
        x = b.reshape(b.input(TensorType(DType.F16, (batch, 8, 4, 16))), (batch, 8, 4, 16))
        q = b.transpose(x, (0, 2, 1, 3))
        graph = b.build([b.add(Prim.MATMUL, q, b.input(TensorType(DType.F16, (batch, 4, 16, 8))))])
        return price(graph, "primitives", (Format.ROW, Format.ROW), Format.ROW)

    assert heads(2) > heads(1) + 1.0
