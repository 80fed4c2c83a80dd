"""Whether the rows of a batch know nothing of each other: then queries of several callers may share one run of a plan.

Followed through the graph is where the rows of the inputs' first axis are: `Rows(axis, outer, inner)` says that an axis
has the size `outer * batch * inner`, as a view makes it of three axes. What mixes rows, or would treat a row by its
place in the batch, is declined by name; so is whatever cannot be looked into. What depends on no input has no rows
(None).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, Node, NodeId
from weft.ir.prims import CATEGORY, Category, Prim


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a value are."""

    axis: int
    outer: int = 1
    """How often the batch stands on the axis, one behind the other."""
    inner: int = 1
    """Neighbours on the axis that belong to one row."""

    def on(self, axis: int) -> Rows:
        """The same on another axis."""
        return Rows(axis, self.outer, self.inner)


State = Rows | None
_Rule = Callable[["_Walk", Node], Rows | Declined]


def batch_of(graph: Graph) -> int | Declined:
    """The size of the first axis that all inputs and outputs have."""
    types = [graph.type_of(n) for n in (*graph.inputs, *graph.outputs)]
    sizes = {t.shape[0] if t.shape else 0 for t in types}
    if len(sizes) != 1 or not graph.inputs:
        return Declined("inputs and outputs have no first axis in common")
    (size,) = sizes
    return size or Declined("a batch of no rows")


def independent(graph: Graph) -> Declined | None:
    """None where every row of every output follows from that row of the inputs alone; else why it may not.

    Conditions: a batch of two rows or more. With one, what mixes rows cannot be told from what does not.
    """
    batch = batch_of(graph)
    if isinstance(batch, Declined):
        return batch
    if batch < 2:
        return Declined("a batch of one row")
    walk = _Walk(graph, batch)
    for i, node in enumerate(graph.nodes):
        found = walk.state(node)
        if isinstance(found, Declined):
            return Declined(f"%{i} = {node.prim.value}: {found.reason}")
        walk.states.append(found)
    for n in graph.outputs:
        if walk.states[n] != Rows(0):
            return Declined(f"output %{n} does not have its rows on the first axis")
    return None


class _Walk:
    """A graph that is gone through once."""

    def __init__(self, graph: Graph, batch: int) -> None:
        self.graph, self.batch = graph, batch
        self.states: list[State] = []

    def state(self, node: Node) -> State | Declined:
        if node.prim is Prim.INPUT:
            return Rows(0)
        if node.prim is Prim.OPAQUE:
            return Declined(f"{cast('a.OpaqueAttrs', node.attrs).op} cannot be looked into")
        if all(self.states[n] is None for n in node.inputs):
            return None
        if CATEGORY[node.prim] is Category.ELEMENTWISE:
            return self.together(node)
        return _RULES[node.prim](self, node)

    def shape(self, n: NodeId) -> tuple[int, ...]:
        return self.graph.type_of(n).shape

    def together(self, node: Node) -> Rows | Declined:
        """Operands of one shape, element by element."""
        found = {s for n in node.inputs if (s := self.states[n]) is not None}
        if len(found) > 1:
            return Declined("its operands have rows at different places")
        (rows,) = found
        for n in node.inputs:
            if self.states[n] is None and not self.uniform(n, rows):
                return Declined(f"%{n} has other values for each place in the batch")
        return rows

    def uniform(self, n: NodeId, rows: Rows) -> bool:
        """Whether what depends on no input is the same for every row, were rows at this place."""
        node, shape = self.graph.nodes[n], self.shape(n)
        if rows.axis < 0 or shape[rows.axis] == 1:
            return True
        if node.prim is Prim.CONSTANT:
            data = self.graph.constant(n)
            parts = (rows.outer, self.batch, rows.inner)
            split = data.reshape(*shape[: rows.axis], *parts, *shape[rows.axis + 1 :])
            first = np.take(split, [0], axis=rows.axis + 1)
            return bool(np.array_equal(split, np.broadcast_to(first, split.shape)))
        if node.prim is Prim.IOTA:
            return cast("a.IotaAttrs", node.attrs).axis != rows.axis
        if node.prim is Prim.BROADCAST:
            (x,) = node.inputs
            axis = rows.axis - (len(shape) - len(self.shape(x)))
            return axis < 0 or self.shape(x)[axis] == 1 or self.uniform(x, rows.on(axis))
        if node.prim is Prim.TRANSPOSE:
            perm = cast("a.TransposeAttrs", node.attrs).perm
            return self.uniform(node.inputs[0], rows.on(perm[rows.axis]))
        if CATEGORY[node.prim] is Category.ELEMENTWISE:
            return all(self.uniform(x, rows) for x in node.inputs)
        return False

    def one(self, node: Node) -> Rows:
        found = self.states[node.inputs[0]]
        assert found is not None  # the only operand
        return found


def _broadcast(walk: _Walk, node: Node) -> Rows | Declined:
    rows = walk.one(node)
    axis = rows.axis + len(node.type.shape) - len(walk.shape(node.inputs[0]))
    return rows.on(axis)


def _reshape(walk: _Walk, node: Node) -> Rows | Declined:
    rows, shape = walk.one(node), node.type.shape
    before = math.prod(walk.shape(node.inputs[0])[: rows.axis]) * rows.outer
    for axis, size in enumerate(shape):
        outer, rest = divmod(before, math.prod(shape[:axis]) or 1)
        if rest == 0 and outer and size and size % (outer * walk.batch) == 0:
            return Rows(axis, outer, size // (outer * walk.batch))
    return Declined("it puts parts of several rows into one index")


def _transpose(walk: _Walk, node: Node) -> Rows | Declined:
    rows = walk.one(node)
    return rows.on(cast("a.TransposeAttrs", node.attrs).perm.index(rows.axis))


def _slice(walk: _Walk, node: Node) -> Rows | Declined:
    rows, attrs = walk.one(node), cast("a.SliceAttrs", node.attrs)
    size = walk.shape(node.inputs[0])[rows.axis]
    whole = (attrs.starts[rows.axis], attrs.steps[rows.axis], attrs.sizes[rows.axis]) == (0, 1, size)
    return rows if whole else Declined("it takes some of the rows")


def _concat(walk: _Walk, node: Node) -> Rows | Declined:
    rows = walk.together(node)
    if isinstance(rows, Rows) and cast("a.ConcatAttrs", node.attrs).axis == rows.axis:
        return Declined("it joins batches")
    return rows


def _pad(walk: _Walk, node: Node) -> Rows | Declined:
    rows, attrs = walk.one(node), cast("a.PadAttrs", node.attrs)
    return Declined("it adds rows") if attrs.lo[rows.axis] or attrs.hi[rows.axis] else rows


def _gather(walk: _Walk, node: Node) -> Rows | Declined:
    data, indices = (walk.states[n] for n in node.inputs)
    axis = cast("a.GatherAttrs", node.attrs).axis
    if data is not None and indices is not None:
        return Declined("rows of one batch are looked up by another")
    if indices is not None:
        return indices.on(axis + indices.axis)
    assert data is not None  # one of them has rows
    if data.axis == axis:
        return Declined("it picks among the rows")
    moved = 0 if data.axis < axis else len(walk.shape(node.inputs[1])) - 1
    return data.on(data.axis + moved)


def _take_along(walk: _Walk, node: Node) -> Rows | Declined:
    rows = walk.together(node)
    if isinstance(rows, Rows) and cast("a.GatherAttrs", node.attrs).axis == rows.axis:
        return Declined("it picks among the rows")
    return rows


def _reduce(walk: _Walk, node: Node) -> Rows | Declined:
    rows, attrs = walk.one(node), node.attrs
    axes = (attrs.axis,) if isinstance(attrs, a.ArgAttrs) else cast("a.ReduceAttrs", attrs).axes
    return Declined("it reduces over the rows") if rows.axis in axes else rows


def _window(walk: _Walk, node: Node) -> Rows | Declined:
    rows = walk.one(node)
    windows = len(cast("a.WindowAttrs", node.attrs).kernel)
    return Declined("its windows reach over rows") if rows.axis >= len(node.type.shape) - windows else rows


def _scan(walk: _Walk, node: Node) -> Rows | Declined:
    rows = walk.together(node)
    if isinstance(rows, Rows) and cast("a.ScanAttrs", node.attrs).axis == rows.axis:
        return Declined("it scans over the rows")
    return rows


def _matmul(walk: _Walk, node: Node) -> Rows | Declined:
    rank = len(node.type.shape)
    placed: list[State] = []
    for n, summed in zip(node.inputs, (1, 2), strict=True):
        rows, own = walk.states[n], len(walk.shape(n))
        if rows is not None and rows.axis == own - summed:
            return Declined("it sums over the rows")
        placed.append(None if rows is None else rows.on(rows.axis + rank - own))
    found = {p for p in placed if p is not None}
    if len(found) > 1:
        return Declined("its operands have rows at different places")
    (rows,) = found
    if all(p is not None for p in placed):
        return rows if rows.axis < rank - 2 else Declined("it multiplies rows with each other")
    if rows.axis < rank - 2:  # the weight has the axis of the batch, too
        (other,) = (n for n, p in zip(node.inputs, placed, strict=True) if p is None)
        axis = rows.axis - rank + len(walk.shape(other))
        if axis >= 0 and not walk.uniform(other, rows.on(axis)):
            return Declined(f"%{other} has other values for each place in the batch")
    return rows


def _conv(walk: _Walk, node: Node) -> Rows | Declined:
    x, weight = (walk.states[n] for n in node.inputs)
    if weight is not None or x is None:
        return Declined("its weights depend on an input")
    return x if x.axis == 0 else Declined("its windows or channels reach over rows")


_REDUCED = (Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.REDUCE_MIN, Prim.ARGMAX, Prim.ARGMIN)
_RULES: Mapping[Prim, _Rule] = {
    Prim.BROADCAST: _broadcast, Prim.RESHAPE: _reshape, Prim.TRANSPOSE: _transpose, Prim.SLICE: _slice,
    Prim.CONCAT: _concat, Prim.PAD: _pad, Prim.GATHER: _gather, Prim.TAKE_ALONG: _take_along,
    **dict.fromkeys(_REDUCED, _reduce), Prim.WINDOW_SUM: _window, Prim.WINDOW_MAX: _window, Prim.SCAN: _scan,
    Prim.MATMUL: _matmul,
    Prim.CONV: _conv,
}  # fmt: skip
"""What is neither a source, nor elementwise, nor opaque."""
