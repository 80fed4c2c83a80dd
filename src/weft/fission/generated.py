"""Tensors that come from positions: ranges, identity matrices, triangles, one-hot maxima, reversed sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weft.fission.rule import axis_of, full, shape_of, table
from weft.ir.attrs import ArgAttrs, GatherAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def filled(b: GraphBuilder, *, shape: Sequence[int], value: float, dtype: str) -> NodeId | Declined:
    """filled() → broadcast(value).

    Shapes: `shape`.
    Conditions: an integral value for integers.
    Source: `torch.full`; ONNX ConstantOfShape.
    """
    kind = DType(dtype)
    if min(shape, default=0) < 0:
        return Declined(f"filled in shape {tuple(shape)}")
    if kind.is_integer and not float(value).is_integer():
        return Declined(f"filled with {value} as {dtype}")
    return full(b, int(value) if kind.is_integer else value, kind, tuple(shape))


def arange(b: GraphBuilder, *, size: int, start: float = 0, step: float = 1, dtype: str = "i64") -> NodeId | Declined:
    """arange() → iota·step + start; a constant where start or step is no integer.

    Shapes: (size,).
    Conditions: size ≥ 0; not bool.
    Source: `torch.arange`; ONNX Range.
    """
    kind = DType(dtype)
    whole = float(start).is_integer() and float(step).is_integer()
    finite = math.isfinite(start) and math.isfinite(step)
    if kind is DType.BOOL or size < 0 or not finite or (kind.is_integer and not whole):
        return Declined(f"arange of {size} from {start} by {step} as {dtype}")
    if not whole or (kind.is_float and kind.itemsize < 4):
        # i·step in f64, rounded once: 16-bit floats count exactly to 2048 or 256 only
        return table(b, start + step * np.arange(size, dtype=np.float64), kind)
    y = b.iota((size,), 0, kind)
    if step != 1:
        y = b.apply(Prim.MUL, y, full(b, int(step) if kind.is_integer else float(step), kind))
    if start != 0:
        y = b.apply(Prim.ADD, y, full(b, int(start) if kind.is_integer else float(start), kind))
    return y


def eye(b: GraphBuilder, *, rows: int, cols: int, k: int = 0, dtype: str = "f32") -> NodeId | Declined:
    """eye() → cast(iota₀ + k = iota₁).

    Shapes: (rows, cols), ones on diagonal k.
    Conditions: none.
    Source: `torch.eye`; ONNX EyeLike.
    """
    if min(rows, cols) < 0:
        return Declined(f"eye of {rows} by {cols}")
    i, j = _row_and_column(b, (rows, cols), k)
    return b.cast(b.apply(Prim.EQ, i, j), DType(dtype))


def _row_and_column(b: GraphBuilder, shape: tuple[int, ...], k: int) -> tuple[NodeId, NodeId]:
    """Row number + k and column number of the last two axes."""
    row, column = b.iota(shape, 0, DType.I64), b.iota(shape, 1, DType.I64)
    return (b.apply(Prim.ADD, row, full(b, k, DType.I64)) if k else row), column


def _triangle(b: GraphBuilder, x: NodeId, prim: Prim, k: int) -> NodeId | Declined:
    t = b.type_of(x)
    if t.rank < 2:
        return Declined(f"triangle of rank {t.rank}")
    row, column = _row_and_column(b, t.shape[-2:], k)
    return b.apply(Prim.SELECT, b.apply(prim, column, row), x, full(b, 0.0, t.dtype))


def tril(b: GraphBuilder, x: NodeId, *, k: int = 0) -> NodeId | Declined:
    """tril(x) → select(column ≤ row + k, x, 0).

    Shapes: x (…, m, n), unchanged.
    Conditions: rank ≥ 2.
    Source: `torch.tril`.
    """
    return _triangle(b, x, Prim.LE, k)


def triu(b: GraphBuilder, x: NodeId, *, k: int = 0) -> NodeId | Declined:
    """triu(x) → select(column ≥ row + k, x, 0).

    Shapes: x (…, m, n), unchanged.
    Conditions: rank ≥ 2.
    Source: `torch.triu`.
    """
    return _triangle(b, x, Prim.GE, k)


def trilu(b: GraphBuilder, x: NodeId, *, upper: bool = True, k: int = 0) -> NodeId | Declined:
    """trilu(x) → triu(x) or tril(x).

    Shapes: x (…, m, n), unchanged.
    Conditions: rank ≥ 2.
    Source: ONNX Trilu.
    """
    return triu(b, x, k=k) if upper else tril(b, x, k=k)


def hardmax(b: GraphBuilder, x: NodeId, *, axis: int = -1) -> NodeId | Declined:
    """hardmax(x) → cast(iota = argmax(x)).

    Shapes: unchanged; 1 at the first maximum along `axis`, 0 elsewhere.
    Conditions: a non-empty axis, rank ≥ 1.
    Source: ONNX Hardmax.
    """
    t = b.type_of(x)
    k = axis_of(axis, t.rank)
    if isinstance(k, Declined) or not t.rank or not t.shape[k]:
        return Declined(f"hardmax of {t} along axis {axis}")
    at = b.add(Prim.ARGMAX, x, attrs=ArgAttrs(k))
    return b.cast(b.apply(Prim.EQ, b.iota(t.shape, k, DType.I64), at), t.dtype)


def reverse_sequence(
    b: GraphBuilder, x: NodeId, lengths: NodeId, *, batch_axis: int = 1, time_axis: int = 0
) -> NodeId | Declined:
    """reverse_sequence(x, l) → take_along(x, select(t < l, l − 1 − t, t)), t the position in time.

    Shapes: x with a batch and a time axis, l (batch,).
    Conditions: integer lengths between 0 and the size of the time axis.
    Source: ONNX ReverseSequence.
    """
    shape = shape_of(b, x)
    i, k = axis_of(batch_axis, len(shape)), axis_of(time_axis, len(shape))
    if isinstance(i, Declined) or isinstance(k, Declined) or i == k or len(shape) < 2:
        return Declined(f"reverse_sequence of {b.type_of(x)} along {batch_axis} and {time_axis}")
    if shape_of(b, lengths) != (shape[i],) or not b.type_of(lengths).dtype.is_integer or not shape[k]:
        return Declined(f"reverse_sequence of {b.type_of(x)} by lengths {b.type_of(lengths)}")
    length = b.reshape(b.cast(lengths, DType.I64), tuple(n if d == i else 1 for d, n in enumerate(shape)))
    t = b.iota(shape, k, DType.I64)
    last = b.apply(Prim.SUB, length, full(b, 1, DType.I64))
    index = b.apply(Prim.SELECT, b.apply(Prim.LT, t, length), b.apply(Prim.SUB, last, t), t)
    return b.add(Prim.TAKE_ALONG, x, index, attrs=GatherAttrs(k))
