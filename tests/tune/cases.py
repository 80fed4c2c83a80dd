"""One small graph per primitive and element type it takes, and problems made of graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import ARITY, CATEGORY, Category, Prim
from weft.ir.shapes import ShapeError, infer
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

S = (3, 4, 5)
_CONV = a.ConvAttrs((2, 1), (1, 0), (0, 2), (1, 2), groups=2)
_CONV_T = a.ConvAttrs((2, 3), (1, 0), (0, 2), (1, 2), groups=2, transposed=True, output_padding=(1, 2))
_WINDOW = a.WindowAttrs((2, 3), (1, 2), (1, 0), (0, 1), (1, 2))

# prim -> [(operand shapes, attributes)]
OTHERS: dict[Prim, list[tuple[tuple[tuple[int, ...], ...], a.Attrs]]] = {
    Prim.CAST: [((S,), a.CastAttrs(d)) for d in DType],
    Prim.SELECT: [((S, S, S), a.NO_ATTRS)],
    Prim.BROADCAST: [(((1, 5),), a.BroadcastAttrs((2, 4, 5))), (((),), a.BroadcastAttrs((3,)))],
    Prim.RESHAPE: [((S,), a.ReshapeAttrs((5, 12))), (((1, 1),), a.ReshapeAttrs(()))],
    Prim.TRANSPOSE: [((S,), a.TransposeAttrs((2, 0, 1)))],
    Prim.SLICE: [
        ((S,), a.SliceAttrs((2, 0, 4), (2, 2, 3), (-1, 3, -2))),
        ((S,), a.SliceAttrs((0, 0, 0), (3, 0, 5), (1, 1, 1))),
    ],
    Prim.CONCAT: [((S, (3, 1, 5), S), a.ConcatAttrs(1))],
    Prim.PAD: [
        ((S,), a.PadAttrs((1, 0, 2), (0, 1, 3), "constant", 2.5)),
        ((S,), a.PadAttrs((1, 0, 2), (0, 1, 3), "reflect")),
        ((S,), a.PadAttrs((1, 0, 2), (0, 1, 7), "edge")),
    ],
    Prim.GATHER: [((S, (2, 3)), a.GatherAttrs(1)), ((S, ()), a.GatherAttrs(2))],
    Prim.TAKE_ALONG: [((S, (3, 7, 5)), a.GatherAttrs(1))],
    Prim.IOTA: [((), a.IotaAttrs(S, 1, d)) for d in DType if d is not DType.BOOL],
    **{
        p: [((S,), a.ReduceAttrs((0, 2))), (((2, 0, 3),), a.ReduceAttrs((1,))), ((S,), a.ReduceAttrs((0, 1, 2)))]
        for p in (Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.REDUCE_MIN)
    },
    Prim.ARGMAX: [((S,), a.ArgAttrs(1))],
    Prim.ARGMIN: [((S,), a.ArgAttrs(2))],
    Prim.WINDOW_SUM: [(((2, 5, 7),), _WINDOW)],
    Prim.WINDOW_MAX: [(((2, 5, 7),), _WINDOW)],
    Prim.SCAN: [
        ((S,), a.ScanAttrs(1, "sum")),
        ((S,), a.ScanAttrs(2, "prod", exclusive=True)),
        ((S, S), a.ScanAttrs(1, "linear")),
        ((S, S), a.ScanAttrs(0, "linear", exclusive=True, reverse=True)),
        (((2, 0, 3),), a.ScanAttrs(1, "sum", reverse=True)),
    ],
    Prim.MATMUL: [(((2, 1, 3, 4), (5, 4, 6)), a.NO_ATTRS), (((3, 0), (0, 2)), a.NO_ATTRS)],
    Prim.CONV: [
        (((2, 4, 7, 9), (6, 2, 3, 2)), _CONV),
        (((2, 4, 5, 4), (4, 3, 3, 2)), _CONV_T),
        (((1, 2, 9), (3, 2, 3)), a.ConvAttrs((1,), (1,), (1,), (1,))),
        (((1, 2, 4, 4, 4), (3, 2, 2, 2, 2)), a.ConvAttrs((1, 1, 1), (0, 0, 0), (0, 0, 0), (1, 1, 1))),
    ],
}  # fmt: skip


def single_graphs(prim: Prim) -> Iterator[Graph]:
    """Every graph of one primitive over its inputs, for all element types that it takes."""
    if CATEGORY[prim] is Category.ELEMENTWISE and prim not in OTHERS:
        yield from in_every_type(prim, [((S,) * (ARITY[prim] or 0), a.NO_ATTRS)])
    else:
        yield from in_every_type(prim, OTHERS[prim])


def in_every_type(prim: Prim, cases: Iterable[tuple[Sequence[tuple[int, ...]], Any]]) -> Iterator[Graph]:
    """One graph of a primitive for each case (operands' shapes, attributes) and element type that it takes."""
    for shapes, attrs in cases:
        for dtype in DType if shapes else (DType.F32,):
            types = [TensorType(dtype, s) for s in shapes]
            if prim is Prim.SELECT:
                types[0] = TensorType(DType.BOOL, shapes[0])
            if prim in (Prim.GATHER, Prim.TAKE_ALONG):
                types[1] = TensorType(DType.I64, shapes[1])
            try:
                infer(prim, tuple(types), attrs)
            except ShapeError:
                continue  # a type that the primitive does not take
            b = GraphBuilder()
            yield b.build([b.add(prim, *(b.input(t) for t in types), attrs=attrs)])


def problem(graph: Graph, input_format: Format = Format.ROW, output_format: Format = Format.ROW) -> Problem:
    """A stand-alone problem whose key is its text."""

    def of(node: int, format: Format) -> Format:
        return format if graph.type_of(node).rank == 4 else Format.ROW

    ins = tuple(of(i, input_format) for i in graph.inputs)
    outs = tuple(of(i, output_format) for i in graph.outputs)
    key = f"{graph}\n{[f.value for f in ins]} -> {[f.value for f in outs]}"
    return Problem(graph, key, ins, outs)
