"""Writing by index: each place asks which of the values is its own, or sums those that are.

Gradients of what reads by index are such sums, in one order of addition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from weft.fission.rule import as_index, axis_of, full, narrow, shape_of, widen
from weft.ir.attrs import GatherAttrs, ScanAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType


def scatter_one(
    b: GraphBuilder, x: NodeId, idx: NodeId, src: NodeId, *, axis: int, add: bool = False
) -> NodeId | Declined:
    """scatter_one(x, i, s) → select(iota = i, s, x); with `add` x + select(iota = i, s, 0).

    Shapes: i and s have the shape of x but for `axis`, where they have 1.
    Conditions: one type, no bool to be added; integer indices in [0, n). One outside writes nothing.
    Source: `aten.scatter`, `aten.scatter_add`.
    """
    shape = shape_of(b, x)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined):
        return k
    one = tuple(1 if d == k else n for d, n in enumerate(shape))
    if not shape or shape_of(b, idx) != one or shape_of(b, src) != one or not b.type_of(idx).dtype.is_integer:
        return Declined(f"scatter of more than one element of a row of {b.type_of(x)}")
    if b.type_of(src).dtype is not b.type_of(x).dtype or (add and b.type_of(x).dtype is DType.BOOL):
        return Declined(f"scatter of {b.type_of(src)} into {b.type_of(x)}")
    place = b.apply(Prim.EQ, b.iota(shape, k, DType.I64), b.cast(idx, DType.I64))
    if not add:
        return b.apply(Prim.SELECT, place, src, x)
    return b.apply(Prim.ADD, x, b.apply(Prim.SELECT, place, src, b.scalar(0, b.type_of(x).dtype)))


FEW = 1 << 12
"""Comparisons of places with indices that are no matter, however small the tensor is."""
MOST_LAYERS = 4
"""Values that known indices may add into one place."""
MOST_ADDED = 16
"""Values that indices known at run time may add: each place looks at all of them."""


def put(b: GraphBuilder, x: NodeId, idx: NodeId, values: NodeId, *, axis: int, add: bool = False) -> NodeId | Declined:
    """put(x, i, v) → select(j ≥ 0, gather(v, j), x), j the last place in i of each position; with `add` x + Σ select.

    Shapes: x (*A, n, *B), i (m,), v (*A, m, *B) give (*A, n, *B).
    Conditions: one type, no bool to be added; integer indices. Constant ones lie in [−n, n), and no place is added to
    more than 4 times; of others n·m is at most the size of x, and at most 16 are added. One outside writes nothing.
    Source: `aten.index_put`; ONNX ScatterND.
    """
    shape, t = shape_of(b, x), b.type_of(x)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined):
        return k
    at = b.type_of(idx)
    if not shape or at.rank != 1 or not at.dtype.is_integer or t.size == 0:
        return Declined(f"put of {at} along axis {axis} of {t}")
    n, m = shape[k], at.size
    if b.type_of(values) != TensorType(t.dtype, (*shape[:k], m, *shape[k + 1 :])):
        return Declined(f"put of {b.type_of(values)} into {t}")
    if add and t.dtype is DType.BOOL:
        return Declined("put adds bool")
    if m == 0:
        return x
    at_places = as_index(b, idx, n)
    known = b.constant_value(at_places)
    if known is not None:
        return _put_known(b, x, np.asarray(known).astype(np.int64), values, k, add=add)
    column = (n, *(1,) * (len(shape) - k - 1))
    hit = b.apply(Prim.EQ, b.reshape(at_places, (1, m)), b.iota((n, m), 0, DType.I64))
    if add:
        return Declined(f"put adds {m} values") if m > MOST_ADDED else _put_added(b, x, hit, values, k)
    if n * m > max(FEW, t.size):
        return Declined(f"put of {m} values among {n} places")
    order = b.apply(Prim.SELECT, hit, b.iota((n, m), 1, DType.I64), full(b, -1, DType.I64))
    last = b.reshape(b.reduce(Prim.REDUCE_MAX, order, (1,)), (n,))
    zero = full(b, 0, DType.I64)
    picked = b.add(Prim.GATHER, values, b.apply(Prim.MAX, last, zero), attrs=GatherAttrs(k))
    return b.apply(Prim.SELECT, b.reshape(b.apply(Prim.GE, last, zero), column), picked, x)


def _put_added(b: GraphBuilder, x: NodeId, hit: NodeId, values: NodeId, k: int) -> NodeId:
    """x plus the sum of the values that are hit."""
    n, m = shape_of(b, hit)
    shape = shape_of(b, x)
    wide = widen(b, values)
    every = b.reshape(wide, (*shape[:k], 1, m, *shape[k + 1 :]))
    mask = b.reshape(hit, (n, m, *(1,) * (len(shape) - k - 1)))
    terms = b.apply(Prim.SELECT, mask, every, _zero(b, b.type_of(wide).dtype))
    total = b.reshape(b.reduce(Prim.REDUCE_SUM, terms, (k + 1,)), shape)
    return narrow(b, b.apply(Prim.ADD, widen(b, x), total), x)


def _put_known(
    b: GraphBuilder, x: NodeId, known: npt.NDArray[np.int64], values: NodeId, k: int, *, add: bool
) -> NodeId | Declined:
    """By tables of which value each place takes."""
    shape = shape_of(b, x)
    if ((known < 0) | (known >= shape[k])).any():
        return Declined("put outside of the tensor")
    if add and np.bincount(known).max() > MOST_LAYERS:
        return Declined(f"put adds more than {MOST_LAYERS} values into one place")
    y = widen(b, x) if add else x
    for table in _layers(known, shape[k], add=add):
        written = b.constant((table >= 0).reshape(-1, *(1,) * (len(shape) - k - 1)))
        picked = b.add(Prim.GATHER, values, b.constant(np.maximum(table, 0)), attrs=GatherAttrs(k))
        if add:
            term = b.apply(Prim.SELECT, written, widen(b, picked), _zero(b, b.type_of(y).dtype))
            y = b.apply(Prim.ADD, y, term)
        else:
            y = b.apply(Prim.SELECT, written, picked, y)
    return narrow(b, y, x)


def _layers(known: npt.NDArray[np.int64], n: int, *, add: bool) -> Iterator[npt.NDArray[np.int64]]:
    """Tables (n,) of positions among the indices, or -1; without `add` one, of the last of each place."""
    if not add:
        table = np.full(n, -1, np.int64)
        table[known] = np.arange(len(known))
        yield table
        return
    left = np.arange(len(known))
    while len(left):
        table = np.full(n, -1, np.int64)
        table[known[left][::-1]] = left[::-1]
        yield table
        left = left[table[known[left]] != left]


def masked_put(b: GraphBuilder, x: NodeId, mask: NodeId, values: NodeId) -> NodeId | Declined:
    """masked_put(x, c, v) → select(c, gather(v, scan(c) − 1), x): the values in order where the mask is set.

    Shapes: x and the mask alike; v of any shape, read in row-major order, with as many elements as are set or more.
    Conditions: one type; a bool mask. Where there are too few values, the last one is repeated.
    Source: `aten.masked_scatter`.
    """
    t, m = b.type_of(x), b.type_of(values)
    if b.type_of(mask) != TensorType(DType.BOOL, t.shape) or m.dtype is not t.dtype or 0 in (t.size, m.size):
        return Declined(f"masked_put of {m} into {t} by {b.type_of(mask)}")
    counted = b.cast(b.reshape(mask, (t.size,)), DType.I64)
    if t.size > 1:
        counted = b.add(Prim.SCAN, counted, attrs=ScanAttrs(0, "sum", False, False))
    before = b.apply(Prim.SUB, counted, full(b, 1, DType.I64))
    held = b.apply(Prim.MIN, b.apply(Prim.MAX, before, full(b, 0, DType.I64)), full(b, m.size - 1, DType.I64))
    picked = b.add(Prim.GATHER, b.reshape(values, (m.size,)), held, attrs=GatherAttrs(0))
    return b.apply(Prim.SELECT, mask, b.reshape(picked, t.shape), x)


def _zero(b: GraphBuilder, dtype: DType) -> NodeId:
    return full(b, 0.0 if dtype.is_float else 0, dtype)


FEW_PLACES, MOST_LOOKS = 64, 1 << 26
"""Places, or writes, among which each place looks for its own; how often all look."""


def scatter_sum(b: GraphBuilder, src: NodeId, idx: NodeId, *, size: int, axis: int = 0) -> NodeId | Declined:
    """scatter_sum(s, i) → Σ_k select(i_k = iota, s_k, 0) along `axis`, in the order of k.

    Shapes: i has the shape of s, or (k,) for the k slices of s along `axis`; the result that of s with `size` there.
    Conditions: numbers; integer indices in [0, size), any other writes nothing; at most 64 places, or 64 indices of a
    row, and 2²⁶ comparisons. f32 inside for 16 bits, rounded once.
    Source: the gradients of `aten.gather`, `aten.index` and `aten.embedding`.
    """
    shape, at = shape_of(b, src), shape_of(b, idx)
    k = axis_of(axis, len(shape))
    if isinstance(k, Declined):
        return k
    if not shape or at not in (shape, shape[k : k + 1]) or not b.type_of(idx).dtype.is_integer:
        return Declined(f"scatter_sum of {b.type_of(src)} by {b.type_of(idx)}")
    if b.type_of(src).dtype is DType.BOOL or size < 1 or 0 in shape:
        return Declined(f"scatter_sum of {b.type_of(src)} into {size} places")
    if min(size, shape[k]) > FEW_PLACES or size * math.prod(shape) > MOST_LOOKS:
        return Declined(f"scatter_sum of {shape[k]} into {size} places")
    wide = b.reshape(widen(b, src), (*shape[:k], 1, *shape[k:]))
    behind = len(shape) - k - 1
    own = (*shape[:k], 1, *shape[k:]) if at == shape else (1, shape[k], *(1,) * behind)
    places = b.iota((size, *(1,) * (behind + 1)), 0, DType.I64)
    hit = b.apply(Prim.EQ, b.reshape(b.cast(idx, DType.I64), own), places)
    added = b.apply(Prim.SELECT, hit, wide, b.scalar(0, b.type_of(wide).dtype))
    total = b.reduce(Prim.REDUCE_SUM, added, (k + 1,))
    return narrow(b, b.reshape(total, (*shape[:k], size, *shape[k + 1 :])), src)
