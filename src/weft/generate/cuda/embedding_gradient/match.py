"""The gradient of an embedding table: a problem as sizes, by the one call that it is."""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.contraction.values import NotStridedError, Reader, View
from weft.ir.declined import Declined
from weft.ir.opaque import embedding_table
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

MOST_INDICES = 1 << 14
"""Whose keys lie in the shared memory of a CTA, and each of which is compared with all others."""
_TYPES = (DType.F32, DType.F16, DType.BF16)
_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class EmbeddingGradient:
    """dw[r, :] = sum over n with index[n] = r of dy[n, :], in the order of n; of the row `padding` nothing.

    All lie row-major: dy as (count, width) and dw as (rows, width), of `dtype`, the indices as (count,) of i64.
    """

    dtype: DType
    count: int
    """Indices."""
    rows: int
    """Of the table."""
    width: int
    """Elements of a row."""
    padding: int
    """A row that has no gradient; -1: none is."""
    dy: int
    """Position of the gradient of what was read among the problem's inputs."""
    index: int
    """Position of the indices."""


def embedding_gradient(problem: Problem) -> EmbeddingGradient | Declined:
    """The sizes, or why the template does not take the problem."""
    graph = problem.graph
    calls = [n for n in graph.nodes if n.prim is Prim.OPAQUE]
    if len(calls) != 1 or len(graph.outputs) != 1:
        return Declined("not one call")
    found = embedding_table(calls[0].attrs)
    if found is None:
        return Declined("no gradient of an embedding table")
    if {*problem.input_formats, *problem.output_formats} != {Format.ROW}:
        return Declined("the gradient of an embedding table in another order")
    end = graph.nodes[graph.outputs[0]]
    if end is not calls[0] and (end.prim is not Prim.RESHAPE or graph.nodes[end.inputs[0]] is not calls[0]):
        return Declined("the gradient of an embedding table with something behind it")
    nodes = [calls[0].inputs[k] for k in (found.dy, found.index)]
    dy, index, out = (graph.type_of(n) for n in (*nodes, graph.outputs[0]))
    reader = Reader(problem, {})
    try:
        read = [reader.read(n) for n in nodes]
    except NotStridedError as no:
        return Declined(no.reason)
    plain = (View(t.shape, Format.ROW.strides(t.shape)) for t in (dy, index))
    if any(x.kind != "input" or x.view != view for x, view in zip(read, plain, strict=True)):
        return Declined("the gradient of an embedding table of operands that are computed or lie otherwise")
    if dy.dtype not in _TYPES or calls[0].type.dtype is not dy.dtype or index.dtype is not DType.I64:
        return Declined(f"the gradient of an embedding table as {out} of {dy} by {index}")
    if not 0 < index.size <= MOST_INDICES or not dy.size or max(dy.size, out.size) >= _LIMIT:
        return Declined(f"the gradient of an embedding table of {index.size} indices")
    return EmbeddingGradient(
        dtype=dy.dtype,
        count=index.size,
        rows=found.rows,
        width=dy.shape[-1],
        padding=found.padding if 0 <= found.padding < found.rows else -1,
        dy=read[0].index,
        index=read[1].index,
    )
