"""Reading by index: gather in its forms, embedding, one-hot, and indices from a condition."""

from __future__ import annotations

import math

import numpy as np

from weft.fission.rule import ABSENT, as_index, axis_of, dtype_of, full, shape_of
from weft.ir.attrs import GatherAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def gather(b: GraphBuilder, x: NodeId, idx: NodeId, *, axis: int = 0) -> NodeId | Declined:
    """gather(x, i) → gather(x, select(i < 0, i + n, i)).

    Shapes: x (*A, n, *B), i (*I) give (*A, *I, *B).
    Conditions: integer indices. One outside [−n, n) is clamped, never followed.
    Source: `torch.index_select`; ONNX Gather.
    """
    k = axis_of(axis, b.type_of(x).rank)
    if isinstance(k, Declined) or not b.type_of(x).rank or not dtype_of(b, idx).is_integer:
        return Declined(f"gather along axis {axis} of {b.type_of(x)} by {b.type_of(idx)}")
    return b.add(Prim.GATHER, x, as_index(b, idx, shape_of(b, x)[k]), attrs=GatherAttrs(k))


def gather_elements(b: GraphBuilder, x: NodeId, idx: NodeId, *, axis: int = 0) -> NodeId | Declined:
    """gather_elements(x, i) → take_along(slice(x), select(i < 0, i + n, i)).

    Shapes: i has the rank of x and is no larger outside `axis`; the result has the shape of i.
    Conditions: integer indices; one outside [−n, n) is clamped.
    Source: `torch.gather`; ONNX GatherElements.
    """
    rank = b.type_of(x).rank
    k = axis_of(axis, rank)
    if isinstance(k, Declined) or b.type_of(idx).rank != rank or not dtype_of(b, idx).is_integer:
        return Declined(f"gather_elements along axis {axis} of {b.type_of(x)} by {b.type_of(idx)}")
    if rank == 0:
        return x
    n = shape_of(b, x)[k]
    sizes = tuple(n if i == k else m for i, m in enumerate(shape_of(b, idx)))
    data = b.slice(x, (0,) * rank, sizes, (1,) * rank)
    return b.add(Prim.TAKE_ALONG, data, as_index(b, idx, n), attrs=GatherAttrs(k))


def gather_nd(b: GraphBuilder, x: NodeId, idx: NodeId, *, batch_dims: int = 0) -> NodeId | Declined:
    """gather_nd(x, i) → gather(reshape(x), Σ i[…, k]·stride[k] + batch offset).

    Shapes: x (*B, *D, *R), i (*B, *I, q) with q = rank of D give (*B, *I, *R).
    Conditions: integer indices, each within its dimension after counting from the end.
    Source: ONNX GatherND.
    """
    shape, at = shape_of(b, x), shape_of(b, idx)
    if not at or not dtype_of(b, idx).is_integer or not 0 <= batch_dims < len(at):
        return Declined(f"gather_nd of {b.type_of(x)} by {b.type_of(idx)}")
    q, batch = at[-1], shape[:batch_dims]
    if batch_dims + q > len(shape) or batch != at[:batch_dims]:
        return Declined(f"gather_nd of {b.type_of(x)} by {b.type_of(idx)} with {batch_dims} batch dimensions")
    indexed, rest = shape[batch_dims : batch_dims + q], shape[batch_dims + q :]
    points = at[:-1]
    flat = full(b, 0, DType.I64, points)
    for k, n in enumerate(indexed):
        part = b.slice(idx, (*(0,) * len(points), k), (*points, 1), (1,) * len(at))
        part = as_index(b, b.reshape(part, points), n)
        stride = math.prod(indexed[k + 1 :])
        if stride != 1:
            part = b.apply(Prim.MUL, part, full(b, stride, DType.I64))
        flat = part if k == 0 else b.apply(Prim.ADD, flat, part)
    if batch_dims:
        offset = np.arange(math.prod(batch)) * math.prod(indexed)
        column = b.constant(offset.reshape(*batch, *(1,) * (len(points) - batch_dims)).astype(np.int64))
        flat = b.apply(Prim.ADD, flat, column)
    rows = b.reshape(x, (math.prod(batch) * math.prod(indexed), *rest))
    return b.add(Prim.GATHER, rows, flat, attrs=GatherAttrs(0))


def embedding(b: GraphBuilder, w: NodeId, idx: NodeId) -> NodeId | Declined:
    """embedding(w, i) → gather(w, i).

    Shapes: w (V, D), i (*I) give (*I, D).
    Conditions: integer indices in [0, V).
    Source: `aten.embedding`.
    """
    if b.type_of(w).rank != 2 or not dtype_of(b, idx).is_integer:
        return Declined(f"embedding of {b.type_of(idx)} in {b.type_of(w)}")
    return b.add(Prim.GATHER, w, b.cast(idx, DType.I64), attrs=GatherAttrs(0))


def one_hot(
    b: GraphBuilder, idx: NodeId, values: NodeId = ABSENT, *, depth: int, axis: int = -1, dtype: str = "i64"
) -> NodeId | Declined:
    """one_hot(i, [off, on]) → select(i = iota, on, off); without values 0 and 1 of `dtype`.

    Shapes: i (*A, *B) gives (*A, depth, *B), the new axis standing at `axis` of the result; values (2,).
    Conditions: depth ≥ 0. An index outside [−depth, depth) gives a row of `off`.
    Source: `torch.nn.functional.one_hot`; ONNX OneHot.
    """
    t = b.type_of(idx)
    k = axis_of(axis, t.rank + 1)
    if isinstance(k, Declined) or t.dtype is DType.BOOL or depth < 0:
        return Declined(f"one_hot of {t} with depth {depth} at axis {axis}")
    shape = (*t.shape[:k], depth, *t.shape[k:])
    at = b.reshape(as_index(b, b.cast(idx, DType.I64), depth), (*t.shape[:k], 1, *t.shape[k:]))
    hot = b.apply(Prim.EQ, at, b.iota(shape, k, DType.I64))
    if values == ABSENT:
        return b.cast(hot, DType(dtype))
    if shape_of(b, values) != (2,):
        return Declined(f"one_hot with values {b.type_of(values)}")
    off, on = (b.reshape(b.slice(values, (i,), (1,), (1,)), ()) for i in (0, 1))
    return b.apply(Prim.SELECT, hot, on, off)
