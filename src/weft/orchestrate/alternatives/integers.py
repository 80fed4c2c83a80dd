"""Products of quantised numbers as products of their bytes: exact sums in i32, scaled once."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import Array, DType
from weft.orchestrate.alternatives.union import Maker

BYTES = frozenset({DType.I8, DType.U8})
_LARGEST = 255 * 255
"""Of a product of two bytes."""
_SMALL = 1 << 18
"""Elements of weights that the clean-up multiplies out."""


class _Quantised(NamedTuple):
    """(x - zero) * scale."""

    x: NodeId
    """The bytes."""
    scale: Array
    """Of one value, or one per channel."""
    zero: int
    moves: tuple[NodeId, ...]
    """What stands between the value and the product: nodes that move elements, from the value on."""
    stored: Array | None
    """The bytes of a constant."""


def multiply_bytes(m: Maker) -> None:
    """(x - z)·s @ w·t → (x @ w - z·sum(w))·(s·t), sums in i32; convolutions likewise, where z = 0 or nothing is padded.

    That is what DequantizeLinear in front of a product makes of it. Of small weights the clean-up has multiplied them
    out: they count where bytes and scales are found whose products they are, every bit.
    Conditions: f32; x and w in 8 bits, w constant without a zero point; s, t and z constants, s and z of one value, t
    of one or of one per output channel; sums that i32 holds. Exact sums are rounded once and scaled once, where the
    original rounds every operand and every sum.
    Source: Jacob et al. 2018, quantization and training for integer-arithmetic-only inference, section 2.
    """
    for i, node in enumerate(m.graph.nodes):
        if node.prim in (Prim.MATMUL, Prim.CONV) and node.type.dtype is DType.F32 and m.room:
            _try(m, i)


def _try(m: Maker, product: NodeId) -> None:
    graph, b = m.graph, m.b
    node = graph.nodes[product]
    attrs, is_conv = node.attrs, node.prim is Prim.CONV
    if isinstance(attrs, a.ConvAttrs) and attrs.transposed:
        return
    weight = graph.type_of(node.inputs[1])
    left, across = _quantised(m, node.inputs[0], -1), 0 if is_conv else weight.rank - 1
    if left is None or (not is_conv and weight.rank != 2):
        return
    right = _quantised(m, node.inputs[1], across) or _multiplied_out(m, node.inputs[1], across)
    if right is None or right.zero or any(_prim(m, v) is not Prim.TRANSPOSE for v in right.moves):
        return
    if right.stored is None:
        return
    padded = isinstance(attrs, a.ConvAttrs) and any((*attrs.pads_lo, *attrs.pads_hi))
    if left.zero and padded:
        return
    count = math.prod(weight.shape[1:]) if is_conv else weight.shape[0]
    if count * _LARGEST >= 1 << 31:
        return
    wide = [_moved(m, b.cast(v.x, DType.I32), v.moves) for v in (left, right)]
    total = b.add(node.prim, *wide, attrs=attrs)
    axis = 1 if is_conv else node.type.rank - 1
    if left.zero:
        stored = right.stored
        for v in right.moves:
            moved = graph.nodes[v].attrs
            assert isinstance(moved, a.TransposeAttrs)
            stored = stored.transpose(moved.perm)
        sums = stored.astype(np.int64).sum(axis=tuple(range(1, stored.ndim)) if is_conv else 0)
        total = b.apply(Prim.SUB, total, _along(m, (sums * left.zero).astype(np.int32), node.type.rank, axis))
    scale = (left.scale.astype(np.float64) * right.scale.astype(np.float64)).astype(np.float32)
    if np.isfinite(scale).all():
        m.stands_for(b.apply(Prim.MUL, b.cast(total, DType.F32), _along(m, scale, node.type.rank, axis)), product)


def _multiplied_out(m: Maker, value: NodeId, axis: int) -> _Quantised | None:
    """A constant as bytes and a scale for each channel along `axis`, if that is what it is to the last bit.

    The largest of a channel is taken for 127 or 128 steps, or the largest of all; a scale that was rounded is tried
    with its neighbours.
    """
    graph = m.graph
    if _prim(m, value) is not Prim.CONSTANT or not 0 < graph.type_of(value).size <= _SMALL:
        return None
    data = graph.constant(value).astype(np.float32)
    rows = np.moveaxis(data, axis, 0).reshape(data.shape[axis], -1)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    if not np.isfinite(largest).all() or not largest.any():
        return None
    for most in (np.where(largest > 0, largest, largest.max()), np.full_like(largest, largest.max())):
        for steps in (127.0, 128.0):
            found = _in_steps(rows, np.divide(most, steps, dtype=np.float32))
            if found is not None:
                q, scale = found
                shaped = np.moveaxis(q.reshape(np.moveaxis(data, axis, 0).shape), 0, axis)
                return _Quantised(m.b.constant(np.ascontiguousarray(shaped)), scale.reshape(-1), 0, (), shaped)
    return None


def _in_steps(
    rows: npt.NDArray[np.float32], scale: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]] | None:
    """Rows as bytes times a scale each, exactly; None where a row is none."""
    best, right = scale.copy(), np.zeros(len(rows), bool)
    q = np.zeros(rows.shape, np.int8)
    for ulps in (0, 1, -1, 2, -2):
        tried = (scale.view(np.int32) + ulps).view(np.float32)
        whole = np.rint(rows / tried)
        fits = (np.abs(whole) <= 127).all(axis=1) | ((whole >= -128) & (whole <= 127)).all(axis=1)
        same = fits & (whole.astype(np.float32) * tried == rows).all(axis=1) & ~right
        q[same], best[same] = whole[same].astype(np.int8), tried[same]
        right |= same
        if right.all():
            break
    return (q, best) if right.all() else None


def _prim(m: Maker, v: NodeId) -> Prim:
    return m.graph.nodes[v].prim


def _along(m: Maker, values: Array, rank: int, axis: int) -> NodeId:
    """Values along one axis, ready to be broadcast; one value as it is."""
    constant = m.b.constant(np.ascontiguousarray(values.reshape(-1)))
    if values.size == 1:
        return m.b.reshape(constant, ())
    return m.b.reshape(constant, (values.size, *(1,) * (rank - 1 - axis)))


def _moved(m: Maker, x: NodeId, moves: tuple[NodeId, ...]) -> NodeId:
    """The same moves of other elements."""
    for v in moves:
        node = m.graph.nodes[v]
        if isinstance(node.attrs, a.TransposeAttrs):
            x = m.b.transpose(x, node.attrs.perm)
        else:
            x = m.b.reshape(x, node.type.shape)
    return x


def _quantised(m: Maker, value: NodeId, axis: int) -> _Quantised | None:
    """What a value is as scaled bytes, if its scale lies along `axis` of it, or is one number; -1: is one number."""
    graph, moves = m.graph, []
    while graph.nodes[value].prim in (Prim.RESHAPE, Prim.TRANSPOSE):
        moves.append(value)
        attrs = graph.nodes[value].attrs
        if isinstance(attrs, a.TransposeAttrs) and axis >= 0:
            axis = attrs.perm[axis]
        elif axis >= 0:
            return None
        value = graph.nodes[value].inputs[0]
    node = graph.nodes[value]
    if node.prim is not Prim.MUL:
        return None
    for x, other in (node.inputs, node.inputs[::-1]):
        scale = m.factor(other, node.type.rank, max(axis, 0))
        found = _bytes(m, x)
        if scale is not None and found is not None and (scale.size == 1 or axis >= 0):
            stored = graph.constant(found[0]) if _prim(m, found[0]) is Prim.CONSTANT else None
            return _Quantised(found[0], scale, found[1], tuple(reversed(moves)), stored)
    return None


def _bytes(m: Maker, x: NodeId) -> tuple[NodeId, int] | None:
    """(bytes, zero point) of what is widened to f32."""
    graph = m.graph
    node = graph.nodes[x]
    if node.prim is not Prim.CAST:
        return None
    x, zero = node.inputs[0], 0
    if graph.nodes[x].prim is Prim.SUB:
        wide, z = graph.nodes[x].inputs
        value = m.factor(z, graph.type_of(x).rank, 0)
        if graph.nodes[wide].prim is not Prim.CAST or value is None or value.size != 1:
            return None
        if graph.type_of(wide).dtype is not DType.I32:  # in others the difference may wrap or be rounded
            return None
        x, zero = graph.nodes[wide].inputs[0], int(value[0])
        if graph.type_of(x).dtype in BYTES and not -128 <= zero <= 255:  # what a sum's bound takes it to be
            return None
    return (x, zero) if graph.type_of(x).dtype in BYTES else None
