"""What a primitive costs in the abstract: operations and bytes, for rooflines and reports.

A multiply-add counts as two operations. A transcendental counts as one, and is counted apart as well, since its price
depends on the device. Comparing, selecting, rounding and converting count as one each; moving data counts as none.
Bytes are those that an operator by itself must read and write once: a lower bound that fusion exists to beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Graph, Node
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import TensorType

Operands = tuple[TensorType, ...]
Count = Callable[[Operands, a.Attrs, TensorType], int]
"""(operand types, attributes, result type) -> a number of operations."""

TRANSCENDENTAL = frozenset(
    {
        Prim.EXP, Prim.EXPM1, Prim.LOG, Prim.LOG1P, Prim.SQRT, Prim.RSQRT, Prim.RECIPROCAL, Prim.ERF, Prim.TANH,
        Prim.SIN, Prim.COS, Prim.TAN, Prim.ASIN, Prim.ACOS, Prim.ATAN, Prim.SINH, Prim.COSH, Prim.ASINH, Prim.ACOSH,
        Prim.ATANH, Prim.DIV, Prim.POW, Prim.MOD, Prim.FMOD, Prim.ATAN2,
    }
)  # fmt: skip
"""Elementwise primitives that are no single fast instruction on common hardware."""


def _none(*_: object) -> int:
    return 0


def _per_result(_: Operands, _attrs: a.Attrs, result: TensorType) -> int:
    return result.size


def _per_operand_element(operands: Operands, _: a.Attrs, _result: TensorType) -> int:
    return operands[0].size


def _per_window_element(_: Operands, attrs: a.Attrs, result: TensorType) -> int:
    return result.size * math.prod(cast("a.WindowAttrs", attrs).kernel)


def _per_scanned_element(operands: Operands, _: a.Attrs, result: TensorType) -> int:
    return len(operands) * result.size


def _matmul(operands: Operands, _: a.Attrs, result: TensorType) -> int:
    return 2 * result.size * operands[0].shape[-1]


def _conv(operands: Operands, attrs: a.Attrs, result: TensorType) -> int:
    """Products with padding count, as they do in every published figure."""
    x, w = operands
    if cast("a.ConvAttrs", attrs).transposed:
        return 2 * x.size * math.prod(w.shape[1:])  # every input element meets its group's outputs and the kernel
    return 2 * result.size * math.prod(w.shape[1:])


_BY_CATEGORY: Mapping[Category, Count] = {
    Category.SOURCE: _none,
    Category.ELEMENTWISE: _per_result,
    Category.BROADCAST: _none,
    Category.VIEW: _none,
    Category.LAYOUT: _none,
    Category.REDUCE: _per_operand_element,
    Category.WINDOW: _per_window_element,
    Category.SCAN: _per_scanned_element,
    # unknown: a report counts opaque nodes apart
    Category.OPAQUE: _none,
}

FLOPS: Mapping[Prim, Count] = {
    Prim.MATMUL: _matmul,
    Prim.CONV: _conv,
    **{p: _BY_CATEGORY[CATEGORY[p]] for p in Prim if CATEGORY[p] is not Category.LINEAR},
}
"""Executed arithmetic operations. Total."""

TRANSCENDENTALS: Mapping[Prim, Count] = {p: _per_result if p in TRANSCENDENTAL else _none for p in Prim}
"""Those of them that are transcendental. Total."""


def _operands_whole(operands: Operands, _: a.Attrs, _result: TensorType) -> int:
    return sum(t.nbytes for t in operands)


def _result_whole(_: Operands, _attrs: a.Attrs, result: TensorType) -> int:
    return result.nbytes


def _operands_touched(operands: Operands, _: a.Attrs, result: TensorType) -> int:
    """A slice or a gather reads at most as many elements as it yields, and its indices."""
    data, *indices = operands
    return min(data.nbytes, result.nbytes) + sum(t.nbytes for t in indices)


READ_BYTES: Mapping[Prim, Count] = {
    **dict.fromkeys(Prim, _operands_whole),
    **dict.fromkeys((Prim.SLICE, Prim.GATHER, Prim.TAKE_ALONG), _operands_touched),
    Prim.RESHAPE: _none,
}
"""Bytes an operator of this one primitive reads. Total."""

WRITTEN_BYTES: Mapping[Prim, Count] = {
    p: _none if CATEGORY[p] in (Category.SOURCE, Category.VIEW) else _result_whole for p in Prim
}
"""Bytes an operator of this one primitive writes; a reshape is a view. Total."""


def _count(table: Mapping[Prim, Count], node: Node, graph: Graph) -> int:
    return table[node.prim](tuple(graph.type_of(i) for i in node.inputs), node.attrs, node.type)


def node_flops(node: Node, graph: Graph) -> int:
    """Arithmetic operations of one node; 0 for an opaque one, whose work is unknown."""
    return _count(FLOPS, node, graph)


def node_transcendentals(node: Node, graph: Graph) -> int:
    """Transcendental operations of one node; they are part of its flops too."""
    return _count(TRANSCENDENTALS, node, graph)


def node_bytes(node: Node, graph: Graph) -> tuple[int, int]:
    """(read, written) bytes if the node ran by itself."""
    return _count(READ_BYTES, node, graph), _count(WRITTEN_BYTES, node, graph)


def flops(graph: Graph) -> int:
    """Arithmetic operations of a whole graph, dead nodes included."""
    return sum(node_flops(node, graph) for node in graph.nodes)


def transcendentals(graph: Graph) -> int:
    """Transcendental operations of a whole graph, dead nodes included."""
    return sum(node_transcendentals(node, graph) for node in graph.nodes)
