"""The gradient of an embedding table: a problem as sizes, by the one call in it, and what is elementwise behind that.

Behind the call an optimizer may update the table and its moments: then these are written, and no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.generate.contraction.values import Expr, NotStridedError, Reader, View
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
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
class Operand:
    """An input that an update reads beside the gradient."""

    position: int
    """Among the problem's inputs."""
    dtype: DType


@dataclass(frozen=True, slots=True)
class Update:
    """What is computed of each element of the gradient and of the elements in its place: an optimizer's update."""

    results: tuple[Expr, ...]
    """By output; the gradient, rounded as the call would, is the leaf `product`."""
    tables: tuple[Operand, ...]
    """Of the table's shape, row-major."""
    scalars: tuple[Operand, ...]
    """Of one element."""

    @property
    def itemsize(self) -> int:
        """Of the widest element that is read or written."""
        return max(t.itemsize for t in (*(x.dtype for x in self.results), *(x.dtype for x in self.tables)))


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
    update: Update | None = None
    """None: the gradient itself is written."""

    @property
    def itemsize(self) -> int:
        """Of the widest element of rows."""
        return max(self.dtype.itemsize, self.update.itemsize if self.update is not None else 0)

    @property
    def written_bytes(self) -> int:
        """Of an element of the table."""
        return sum(x.dtype.itemsize for x in self.update.results) if self.update is not None else self.dtype.itemsize

    @property
    def read_bytes(self) -> int:
        """Of an element of the table, beside its gradients."""
        return sum(x.dtype.itemsize for x in self.update.tables) if self.update is not None else 0


def embedding_gradient(problem: Problem) -> EmbeddingGradient | Declined:
    """The sizes, or why the template does not take the problem."""
    graph = problem.graph
    calls = [i for i, n in enumerate(graph.nodes) if n.prim is Prim.OPAQUE]
    if len(calls) != 1:
        return Declined("not one call")
    call = graph.nodes[calls[0]]
    found = embedding_table(call.attrs)
    if found is None:
        return Declined("no gradient of an embedding table")
    if {*problem.input_formats, *problem.output_formats} != {Format.ROW}:
        return Declined("the gradient of an embedding table in another order")
    nodes = [call.inputs[k] for k in (found.dy, found.index)]
    dy, index = (graph.type_of(n) for n in nodes)
    reader = Reader(problem, {})
    try:
        read = [reader.read(n) for n in nodes]
    except NotStridedError as no:
        return Declined(no.reason)
    plain = (View(t.shape, Format.ROW.strides(t.shape)) for t in (dy, index))
    if any(x.kind != "input" or x.view != view for x, view in zip(read, plain, strict=True)):
        return Declined("the gradient of an embedding table of operands that are computed or lie otherwise")
    if dy.dtype not in _TYPES or call.type.dtype is not dy.dtype or index.dtype is not DType.I64:
        return Declined(f"the gradient of an embedding table as {call.type} of {dy} by {index}")
    if not 0 < index.size <= MOST_INDICES or not dy.size or max(dy.size, call.type.size) >= _LIMIT:
        return Declined(f"the gradient of an embedding table of {index.size} indices")
    update = None if _is_gradient(problem, calls[0]) else _update(problem, calls[0])
    if isinstance(update, Declined):
        return update
    return EmbeddingGradient(
        dtype=dy.dtype,
        count=index.size,
        rows=found.rows,
        width=dy.shape[-1],
        padding=found.padding if 0 <= found.padding < found.rows else -1,
        dy=read[0].index,
        index=read[1].index,
        update=update,
    )


def _is_gradient(problem: Problem, call: NodeId) -> bool:
    """Whether the call's result is all that is asked for."""
    graph = problem.graph
    if len(graph.outputs) != 1:
        return False
    end = graph.nodes[graph.outputs[0]]
    return end is graph.nodes[call] or (end.prim is Prim.RESHAPE and end.inputs[0] == call)


def _update(problem: Problem, call: NodeId) -> Update | Declined:
    """What stands behind the call, where each element of it depends on elements in its own place and on scalars."""
    graph = problem.graph
    of = graph.type_of(call)
    if len(set(graph.outputs)) != len(graph.outputs):
        return Declined("an update of an embedding table that is written twice")
    gradient = Expr("product", of.dtype, View(of.shape, Format.ROW.strides(of.shape)))
    reader = Reader(problem, {call: gradient})
    try:
        results = tuple(reader.read(o) for o in graph.outputs)
    except NotStridedError as no:
        return Declined(f"an update of an embedding table: {no.reason}")
    for node, result in zip(graph.outputs, results, strict=True):
        if graph.type_of(node).size != of.size or result.dtype not in _TYPES:
            return Declined(f"an update of an embedding table that gives {graph.type_of(node)}")
    tables: dict[int, Operand] = {}
    scalars: dict[int, Operand] = {}
    for leaf in (x for result in results for x in result.leaves):
        in_place, view = _is_in_place(leaf, of.size), leaf.view
        assert view is not None
        if leaf.kind == "product" and in_place:
            continue
        if leaf.kind != "input" or leaf.dtype.is_float8 or (in_place and leaf.dtype not in _TYPES):
            return Declined(f"an update of an embedding table that reads {leaf.kind} of {leaf.dtype}")
        if not in_place and (any(view.strides) or view.offset):
            return Declined("an update of an embedding table that reads in another order")
        (tables if in_place else scalars)[leaf.index] = Operand(leaf.index, leaf.dtype)
    if tables.keys() & scalars.keys():
        return Declined("an update of an embedding table of an operand in two forms")
    return Update(results, tuple(tables[k] for k in sorted(tables)), tuple(scalars[k] for k in sorted(scalars)))


def _is_in_place(leaf: Expr, size: int) -> bool:
    """Whether a leaf of as many elements as the table is read in their order."""
    view = leaf.view
    if view is None or math.prod(view.shape) != size or view.offset:
        return False
    rows = Format.ROW.strides(view.shape)
    return all(n == 1 or s == row for n, s, row in zip(view.shape, view.strides, rows, strict=True))
