"""Gradients of a convolution with respect to its input, its weight and its bias."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.fission.conv import conv, conv_transpose
from weft.fission.rule import narrow, not_float, shape_of, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim


def conv_data_gradient(
    b: GraphBuilder,
    dy: NodeId,
    w: NodeId,
    *,
    sizes: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
    transposed: bool = False,
) -> NodeId | Declined:
    """conv_data_gradient(dy, w) → transposed conv(dy, w); of a transposed convolution conv(dy, w).

    Shapes: dy (N, O, *T), w (O, C/groups, *K), transposed (C, O/groups, *K); `sizes` is *S of the result (N, C, *S).
    Conditions: floats of one type; pads ≥ 0, the same on both sides.
    Source: `aten.convolution_backward`, its first result.
    """
    if problem := not_float(b, "conv_data_gradient", dy, w):
        return problem
    ranks = {len(x) for x in (strides, pads, dilations, shape_of(b, w)[2:], shape_of(b, dy)[2:])}
    if ranks != {len(sizes)}:
        return Declined(f"conv_data_gradient of size {tuple(sizes)} from {b.type_of(dy)} and {b.type_of(w)}")
    shared: dict[str, Any] = {"strides": strides, "pads_lo": pads, "pads_hi": pads, "dilations": dilations}
    if transposed:
        y = conv(b, dy, w, **shared, groups=groups)
    else:
        windows, kernel = shape_of(b, dy)[2:], shape_of(b, w)[2:]
        plain = [
            (m - 1) * s - 2 * p + d * (k - 1) + 1
            for m, s, p, d, k in zip(windows, strides, pads, dilations, kernel, strict=True)
        ]
        extra = tuple(n - m for n, m in zip(sizes, plain, strict=True))
        if any(not 0 <= e < s for e, s in zip(extra, strides, strict=True)):
            return Declined(f"conv_data_gradient of size {tuple(sizes)} from windows {windows}")
        y = conv_transpose(b, dy, w, **shared, groups=groups, output_padding=extra)
    if not isinstance(y, Declined) and shape_of(b, y)[2:] != tuple(sizes):
        return Declined(f"conv_data_gradient of size {tuple(sizes)} from {b.type_of(dy)}")
    return y


def conv_weight_gradient(b: GraphBuilder, dy: NodeId, x: NodeId) -> NodeId | Declined:
    """conv_weight_gradient(dy, x) → matmul(dy as (O, N·P), x as (N·P, C)), of a convolution with windows of one pixel.

    Shapes: dy (N, O, *S), x (N, C, *S) give (O, C, 1, …, 1).
    Conditions: floats of one type; strides of one, no padding, one group, so that the pixels P of both are the same.
    Source: `aten.convolution_backward`, its second result.
    """
    if problem := not_float(b, "conv_weight_gradient", dy, x):
        return problem
    given, of = shape_of(b, dy), shape_of(b, x)
    if (
        len(given) < 3
        or (*given[:1], *given[2:]) != (*of[:1], *of[2:])
        or b.type_of(dy).dtype is not b.type_of(x).dtype
    ):
        return Declined(f"conv_weight_gradient of {b.type_of(dy)} and {b.type_of(x)}")
    rank, rows = len(given), given[0] * math.prod(given[2:])
    left = b.reshape(b.transpose(dy, (1, 0, *range(2, rank))), (given[1], rows))
    right = b.reshape(b.transpose(x, (0, *range(2, rank), 1)), (rows, of[1]))
    return b.reshape(b.add(Prim.MATMUL, left, right), (given[1], of[1], *(1,) * (rank - 2)))


def conv_bias_gradient(b: GraphBuilder, dy: NodeId) -> NodeId | Declined:
    """conv_bias_gradient(dy) → reduce_sum(dy) over images and pixels.

    Shapes: dy (N, O, *S) gives (O,).
    Conditions: floats.
    Source: `aten.convolution_backward`, its third result.
    """
    if problem := not_float(b, "conv_bias_gradient", dy):
        return problem
    shape = shape_of(b, dy)
    if len(shape) < 2:
        return Declined(f"conv_bias_gradient of {b.type_of(dy)}")
    axes = tuple(k for k in range(len(shape)) if k != 1)
    return narrow(b, b.reshape(b.reduce(Prim.REDUCE_SUM, widen(b, dy), axes), (shape[1],)), dy)
