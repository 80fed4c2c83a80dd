"""ATen calls that pick elements by index tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from weft.frontends.torch.call import ABSENT, Call, Handler
from weft.frontends.torch.shaping import take_slice
from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.shapes import broadcast_shapes
from weft.ir.types import DType


def embedding(c: Call) -> NodeId:
    """Rows of a table."""
    return c.one("embedding", c.ref("weight"), c.ref("indices"))


def index_select(c: Call) -> NodeId:
    """Slices along one dimension; a scalar index gives one slice."""
    x, index = c.ref("self"), c.ref("index")
    if c.rank(x) == 0:
        return x
    index = c.b.reshape(index, (c.type(index).size,))
    return c.b.reshape(c.one("gather", x, index, axis=c.axis(c.integer("dim"), c.rank(x))), c.out.shape)


def gather(c: Call) -> NodeId:
    """One element per index along a dimension; the others may be shorter than the data's."""
    x, index = c.ref("self"), c.ref("index")
    if c.out.size == 0:
        return c.b.broadcast(c.b.scalar(0, c.out.dtype), c.out.shape)
    if c.rank(x) == 0 or c.rank(index) == 0:
        return c.b.reshape(x, c.out.shape) if c.type(x).size == 1 else c.decline("scalar index of a vector")
    axis = c.axis(c.integer("dim"), c.rank(x))
    for k, n in enumerate(c.shape(index)):
        if k != axis and n < c.shape(x)[k]:
            x = take_slice(c, x, k, 0, n)
    return c.one("gather_elements", x, index, axis=axis)


def index_tensor(c: Call) -> NodeId:
    """x[i, j, ...] with integer tensors: the indexed dimensions are made one and gathered from."""
    b = c.b
    x = c.ref("self")
    given = c.optional_refs("indices")
    shape, rank = c.shape(x), c.rank(x)
    where = [k for k, i in enumerate(given) if i != ABSENT]
    if any(c.type(given[k]).dtype not in (DType.I64, DType.I32) for k in where):
        c.decline("a mask decides the size of the result")
    if not where or c.out.size == 0:
        return b.broadcast(b.scalar(0, c.out.dtype), c.out.shape) if where else x
    if len(where) == 1:
        return c.one("gather", x, given[where[0]], axis=where[0])
    together = where == list(range(where[0], where[-1] + 1))
    first = where[0] if together else 0
    rest = [k for k in range(rank) if k not in where]
    x = b.transpose(x, [*rest[:first], *where, *rest[first:]])
    sizes = [shape[k] for k in where]
    flat = flat_index(c, [given[k] for k in where], sizes)
    kept = [shape[k] for k in rest]
    joined = b.reshape(x, (*kept[:first], math.prod(sizes), *kept[first:]))
    return b.add(Prim.GATHER, joined, flat, attrs=a.GatherAttrs(first))


def flat_index(c: Call, given: Sequence[NodeId], sizes: Sequence[int]) -> NodeId:
    """Positions in dimensions that were made one, of an index in each; negative ones count from the end."""
    b = c.b
    common: tuple[int, ...] = ()
    for index in given:
        common = broadcast_shapes(common, c.shape(index))
    flat = b.broadcast(b.scalar(0, DType.I64), common)
    for own, size in zip(given, sizes, strict=True):
        index = b.broadcast(b.cast(own, DType.I64), common)
        wrapped = b.apply(Prim.ADD, index, b.scalar(size, DType.I64))
        index = b.apply(Prim.SELECT, b.apply(Prim.LT, index, b.scalar(0, DType.I64)), wrapped, index)
        flat = b.apply(Prim.ADD, b.apply(Prim.MUL, flat, b.scalar(size, DType.I64)), index)
    return flat


TABLE: Mapping[str, Handler] = {
    "aten.embedding.default": embedding,
    "aten.index_select.default": index_select,
    "aten.gather.default": gather,
    "aten.index.Tensor": index_tensor,
    "aten._unsafe_index.Tensor": index_tensor,
}
"""Handlers by overload."""
