"""Pooling to a given size: global and adaptive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.fission.pool import avg_pool, max_pool, power, root
from weft.fission.rule import extent, full, mean, narrow, not_float, table, widen
from weft.ir.attrs import GatherAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def _spatial(b: GraphBuilder, x: NodeId, operator: str) -> tuple[int, ...] | Declined:
    rank = b.type_of(x).rank
    if rank < 3:
        return Declined(f"{operator} of rank {rank}")
    axes = tuple(range(2, rank))
    return axes if extent(b, x, axes) else Declined(f"{operator} of an empty tensor")


def global_avg_pool(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """global_avg_pool(x) → mean(x) over the spatial axes.

    Shapes: x (N, C, *S) gives (N, C, 1, …).
    Conditions: floats; f32 sum for 16-bit x.
    Source: ONNX GlobalAveragePool.
    """
    if problem := not_float(b, "global_avg_pool", x):
        return problem
    axes = _spatial(b, x, "global_avg_pool")
    return axes if isinstance(axes, Declined) else narrow(b, mean(b, widen(b, x), axes), x)


def global_max_pool(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """global_max_pool(x) → max(x) over the spatial axes.

    Shapes: x (N, C, *S) gives (N, C, 1, …).
    Conditions: not bool.
    Source: ONNX GlobalMaxPool.
    """
    axes = _spatial(b, x, "global_max_pool")
    return axes if isinstance(axes, Declined) else b.reduce(Prim.REDUCE_MAX, x, axes)


def global_lp_pool(b: GraphBuilder, x: NodeId, *, p: int = 2) -> NodeId | Declined:
    """global_lp_pool(x) → sum(|x|^p)^(1/p) over the spatial axes.

    Shapes: x (N, C, *S) gives (N, C, 1, …).
    Conditions: floats; p ≥ 1.
    Source: ONNX GlobalLpPool.
    """
    if problem := not_float(b, "global_lp_pool", x):
        return problem
    axes = _spatial(b, x, "global_lp_pool")
    if isinstance(axes, Declined):
        return axes
    powered = power(b, widen(b, x), p)
    if isinstance(powered, Declined):
        return powered
    return narrow(b, root(b, b.reduce(Prim.REDUCE_SUM, powered, axes), p), x)


def adaptive_avg_pool(b: GraphBuilder, x: NodeId, *, output_size: Sequence[int]) -> NodeId | Declined:
    """adaptive_avg_pool(x) → avg_pool where O divides S, mean where O is 1, else per axis sum(select(inside, x[i], 0)).

    Shapes: x (…, *S) gives (…, *O); output i joins the elements ⌊i·S/O⌋ … ⌈(i + 1)·S/O⌉ − 1.
    Conditions: floats; non-empty S and O.
    Source: `aten.adaptive_avg_pool2d`.
    """
    if problem := not_float(b, "adaptive_avg_pool", x):
        return problem
    sizes = _sizes(b, x, output_size)
    if isinstance(sizes, Declined):
        return sizes
    if all(o == 1 for o in output_size):
        rank = b.type_of(x).rank
        return narrow(b, mean(b, widen(b, x), range(rank - len(sizes), rank)), x)
    if all(s % o == 0 for s, o in zip(sizes, output_size, strict=True)):
        kernel = tuple(s // o for s, o in zip(sizes, output_size, strict=True))
        zero = (0,) * len(kernel)
        return avg_pool(b, x, kernel=kernel, strides=kernel, pads_lo=zero, pads_hi=zero)
    y = widen(b, x)
    inverse = np.ones((), np.float64)
    for k, (size, out) in enumerate(zip(sizes, output_size, strict=True)):
        axis = b.type_of(x).rank - len(sizes) + k
        at, inside = _windows(size, out)
        gathered = _gathered(b, y, axis, at)
        trailing = (1,) * (b.type_of(gathered).rank - axis - 2)
        mask = b.constant(inside.reshape(*inside.shape, *trailing))
        gathered = b.apply(Prim.SELECT, mask, gathered, full(b, 0.0, b.type_of(y).dtype))
        y = _joined(b, Prim.REDUCE_SUM, gathered, axis)
        inverse = np.multiply.outer(inverse, 1.0 / inside.sum(1))
    return narrow(b, b.apply(Prim.MUL, y, table(b, inverse, b.type_of(y).dtype)), x)


def adaptive_max_pool(b: GraphBuilder, x: NodeId, *, output_size: Sequence[int]) -> NodeId | Declined:
    """adaptive_max_pool(x) → max_pool where O divides S, else per axis max(x[i]) over a table of indices.

    Shapes: as adaptive_avg_pool; a short window repeats its last index.
    Conditions: not bool; non-empty S and O.
    Source: `aten.adaptive_max_pool2d`, its first result.
    """
    if b.type_of(x).dtype is DType.BOOL:
        return Declined("adaptive_max_pool of bool")
    sizes = _sizes(b, x, output_size)
    if isinstance(sizes, Declined):
        return sizes
    if all(o == 1 for o in output_size):
        rank = b.type_of(x).rank
        return b.reduce(Prim.REDUCE_MAX, x, range(rank - len(sizes), rank))
    if all(s % o == 0 for s, o in zip(sizes, output_size, strict=True)):
        kernel = tuple(s // o for s, o in zip(sizes, output_size, strict=True))
        zero = (0,) * len(kernel)
        return max_pool(b, x, kernel=kernel, strides=kernel, pads_lo=zero, pads_hi=zero)
    y = x
    for k, (size, out) in enumerate(zip(sizes, output_size, strict=True)):
        axis = b.type_of(x).rank - len(sizes) + k
        y = _joined(b, Prim.REDUCE_MAX, _gathered(b, y, axis, _windows(size, out)[0]), axis)
    return y


def _sizes(b: GraphBuilder, x: NodeId, output_size: Sequence[int]) -> tuple[int, ...] | Declined:
    shape = b.type_of(x).shape
    n = len(output_size)
    if not 1 <= n <= len(shape) or min(output_size) < 1 or min(shape[-n:]) < 1:
        return Declined(f"adaptive pooling of {b.type_of(x)} to {tuple(output_size)}")
    return shape[-n:]


def _windows(size: int, out: int) -> tuple[np.ndarray[tuple[int, int]], np.ndarray[tuple[int, int]]]:
    """(O, widest) indices, clamped to the window's end, and which of them lie inside the window."""
    i = np.arange(out)
    first, end = i * size // out, -((i + 1) * -size // out)
    at = first[:, None] + np.arange((end - first).max())[None, :]
    return np.minimum(at, end[:, None] - 1), at < end[:, None]


def _gathered(b: GraphBuilder, x: NodeId, axis: int, at: np.ndarray[tuple[int, int]]) -> NodeId:
    return b.add(Prim.GATHER, x, b.constant(at.astype(np.int64)), attrs=GatherAttrs(axis))


def _joined(b: GraphBuilder, prim: Prim, x: NodeId, axis: int) -> NodeId:
    y = b.reduce(prim, x, (axis + 1,))
    shape = b.type_of(y).shape
    return b.reshape(y, shape[: axis + 1] + shape[axis + 2 :])
