"""ATen calls that pick elements by index tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from weft.frontends.torch.call import ABSENT, Call, Handler, NotTakenError
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
    shape = c.shape(x)
    where = [k for k, i in enumerate(given) if i != ABSENT]
    if any(c.type(given[k]).dtype not in (DType.I64, DType.I32) for k in where):
        c.decline("a mask decides the size of the result")
    if not where or c.out.size == 0:
        return b.broadcast(b.scalar(0, c.out.dtype), c.out.shape) if where else x
    if len(where) == 1:
        return c.one("gather", x, given[where[0]], axis=where[0])
    order, first, common, flat = _joined(c, given)
    moved = [shape[k] for k in order]
    before, indexed, behind = moved[:first], moved[first : first + len(where)], moved[first + len(where) :]
    joined = b.reshape(b.transpose(x, order), (*before, math.prod(indexed), *behind))
    return b.add(Prim.GATHER, joined, b.reshape(flat, common), attrs=a.GatherAttrs(first))


def _known(
    c: Call, given: Sequence[NodeId], sizes: Sequence[int], common: tuple[int, ...]
) -> npt.NDArray[np.int64] | None:
    """The flat places of constant indices; None where one is not constant."""
    flat: npt.NDArray[np.int64] = np.zeros(common, np.int64)
    for node, n in zip(given, sizes, strict=True):
        value = c.b.constant_value(node)
        if value is None:
            return None
        at = np.asarray(value).astype(np.int64)
        if ((at < -n) | (at >= n)).any():
            c.decline("an index outside of the tensor")
        flat = flat * n + np.where(at < 0, at + n, at)
    return flat


def _joined(c: Call, given: Sequence[NodeId]) -> tuple[list[int], int, tuple[int, ...], NodeId]:
    """The order of dimensions with the indexed ones together, where these begin, and the indices, as one, flat.

    Shape and node of the latter; index tensors of integers alone.
    """
    b, shape = c.b, c.shape(c.ref("self"))
    where = [k for k, i in enumerate(given) if i != ABSENT]
    together = where == list(range(where[0], where[-1] + 1))
    first = where[0] if together else 0
    rest = [k for k in range(len(shape)) if k not in where]
    common: tuple[int, ...] = ()
    for k in where:
        common = broadcast_shapes(common, c.shape(given[k]))
    order, size = [*rest[:first], *where, *rest[first:]], math.prod(common)
    if (known := _known(c, [given[k] for k in where], [shape[k] for k in where], common)) is not None:
        return order, first, common, b.constant(known.reshape(size))
    made = b.broadcast(b.scalar(0, DType.I64), common)
    for k in where:
        at = b.cast(given[k], DType.I64)
        wrapped = b.apply(Prim.ADD, at, b.scalar(shape[k], DType.I64))
        index = b.apply(Prim.SELECT, b.apply(Prim.LT, at, b.scalar(0, DType.I64)), wrapped, at)
        made = b.apply(Prim.ADD, b.apply(Prim.MUL, made, b.scalar(shape[k], DType.I64)), index)
    return order, first, common, b.reshape(made, (size,))


def index_put(c: Call) -> NodeId:
    """x with values written, or added, at x[i, j, ...]; a mask chooses where it is the only index."""
    b, x, add = c.b, c.ref("self"), c.flag("accumulate")
    given = c.optional_refs("indices")
    where = [k for k, i in enumerate(given) if i != ABSENT]
    values = b.cast(c.ref("values"), c.out.dtype)
    if not where or c.out.size == 0:
        c.decline("nothing is indexed")
    if len(where) == 1 and c.type(given[where[0]]).dtype is DType.BOOL:
        return _put_by_mask(c, x, given[where[0]], where[0], values, add=add)
    if any(c.type(given[k]).dtype not in (DType.I64, DType.I32) for k in where):
        c.decline("a mask decides how many values are written")
    order, first, common, flat = _joined(c, given)
    moved = [c.shape(x)[k] for k in order]
    before, behind = moved[:first], moved[first + len(where) :]
    places = math.prod(moved[first : first + len(where)])
    back = [order.index(k) for k in range(len(order))]
    every = b.broadcast(values, (*before, *common, *behind))
    wanted = b.reshape(every, (*before, math.prod(common), *behind))
    if add:
        try:
            total = c.one("scatter_sum", wanted, flat, size=places, axis=first)
        except NotTakenError:
            pass  # known indices, or a few among many places
        else:
            return added(c, x, b.transpose(b.reshape(total, moved), back))
    turned = b.reshape(b.transpose(x, order), (*before, places, *behind))
    made = b.reshape(c.one("put", turned, flat, wanted, axis=first, add=add), moved)
    return b.transpose(made, back)


def _put_by_mask(c: Call, x: NodeId, mask: NodeId, first: int, values: NodeId, *, add: bool) -> NodeId:
    """Values that are the same wherever the mask is set."""
    b, shape, covered = c.b, c.shape(x), c.rank(mask)
    rest = shape[first + covered :]
    wide = (1,) * (first + 1 + len(rest) - c.rank(values)) + c.shape(values)
    if len(wide) != first + 1 + len(rest) or wide[first] != 1:
        c.decline("a mask decides how many values are written")
    spread = b.reshape(values, (*wide[:first], *(1,) * covered, *wide[first + 1 :]))
    chosen = b.reshape(mask, (*c.shape(mask), *(1,) * len(rest)))
    if add:
        spread = b.apply(Prim.ADD, x, spread)
    return b.apply(Prim.SELECT, b.broadcast(chosen, shape), spread, x)


def masked_scatter(c: Call) -> NodeId:
    """The values in order where a mask is set."""
    x, mask = c.ref("self"), c.ref("mask")
    x, mask = c.b.broadcast(x, c.out.shape), c.b.broadcast(mask, c.out.shape)
    return c.one("masked_put", x, mask, c.ref("source"))


def added(c: Call, x: NodeId, total: NodeId) -> NodeId:
    """x + total, which is total where x is zeros."""
    at = x
    while c.b.node(at).prim in (Prim.BROADCAST, Prim.RESHAPE, Prim.CAST):
        (at,) = c.b.node(at).inputs
    value = c.b.constant_value(at)
    total = c.b.cast(total, c.out.dtype)
    return total if value is not None and not value.any() else c.b.apply(Prim.ADD, x, total)


TABLE: Mapping[str, Handler] = {
    "aten.embedding.default": embedding,
    "aten.index_select.default": index_select,
    "aten.gather.default": gather,
    "aten.index.Tensor": index_tensor,
    "aten._unsafe_index.Tensor": index_tensor,
    "aten.index_put.default": index_put,
    "aten.masked_scatter.default": masked_scatter,
}
"""Handlers by overload."""
