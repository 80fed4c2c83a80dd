"""Sliding-window pooling: maximum, average and p-norm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.fission.rule import narrow, not_float, table, widen
from weft.ir.attrs import WindowAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.shapes import window_size
from weft.ir.types import Array, DType


def max_pool(
    b: GraphBuilder,
    x: NodeId,
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads_lo: Sequence[int],
    pads_hi: Sequence[int],
    dilations: Sequence[int] = (),
    ceil: bool = False,
) -> NodeId | Declined:
    """max_pool(x) → window_max(x).

    Shapes: x (…, *S) gives (…, *O), one window dimension per entry of `kernel`.
    Conditions: not bool. Padding counts as −∞ and NaN wins. With `ceil` a last partial window counts if it starts
    inside the input or the left padding.
    Source: `aten.max_pool2d`; ONNX MaxPool.
    """
    if b.type_of(x).dtype is DType.BOOL:
        return Declined("max_pool of bool")
    window = window_of(b.type_of(x).shape, kernel, strides, pads_lo, pads_hi, dilations, ceil=ceil)
    return window if isinstance(window, Declined) else b.add(Prim.WINDOW_MAX, x, attrs=window)


def avg_pool(
    b: GraphBuilder,
    x: NodeId,
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads_lo: Sequence[int],
    pads_hi: Sequence[int],
    count_include_pad: bool = False,
    divisor: int = 0,
    ceil: bool = False,
    dilations: Sequence[int] = (),
) -> NodeId | Declined:
    """avg_pool(x) → window_sum(x)·(1/count), the counts being a constant table.

    Shapes: as max_pool.
    Conditions: floats. A window counts the elements it has inside the input, or inside the padded input with
    `count_include_pad`; what `ceil` adds beyond the padding never counts. A divisor other than 0 replaces the count.
    Source: `aten.avg_pool2d`; ONNX AveragePool.
    """
    if problem := not_float(b, "avg_pool", x):
        return problem
    shape = b.type_of(x).shape
    window = window_of(shape, kernel, strides, pads_lo, pads_hi, dilations, ceil=ceil)
    if isinstance(window, Declined):
        return window
    wide = widen(b, x)
    total = b.add(Prim.WINDOW_SUM, wide, attrs=window)
    if divisor:
        return narrow(b, b.apply(Prim.MUL, total, 1.0 / divisor), x)
    out = b.type_of(total).shape[-len(window.kernel) :]
    held = counts(shape[-len(out) :], out, window, pads_lo, pads_hi, count_include_pad=count_include_pad)
    inverse = 1.0 / np.maximum(held, 1)
    if inverse.size and (inverse == inverse.flat[0]).all():
        inverse = np.asarray(inverse.flat[0])  # one scalar where every window is full
    return narrow(b, b.apply(Prim.MUL, total, table(b, inverse, b.type_of(wide).dtype)), x)


def counts(
    sizes: Sequence[int],
    out: Sequence[int],
    window: WindowAttrs,
    pads_lo: Sequence[int],
    pads_hi: Sequence[int],
    *,
    count_include_pad: bool,
) -> Array:
    """The number of elements that each of the windows `out` averages; what `ceil` adds never counts."""
    found: Array = np.ones((), np.int64)
    for k, (size, windows) in enumerate(zip(sizes, out, strict=True)):
        first, end = (-pads_lo[k], size + pads_hi[k]) if count_include_pad else (0, size)
        at = np.arange(windows)[:, None] * window.strides[k] - pads_lo[k]
        at = at + np.arange(window.kernel[k])[None, :] * window.dilations[k]
        found = np.multiply.outer(found, ((at >= first) & (at < end)).sum(1))
    return found


def lp_pool(
    b: GraphBuilder,
    x: NodeId,
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads_lo: Sequence[int],
    pads_hi: Sequence[int],
    p: int = 2,
    ceil: bool = False,
    dilations: Sequence[int] = (),
) -> NodeId | Declined:
    """lp_pool(x) → window_sum(|x|^p)^(1/p).

    Shapes: as max_pool.
    Conditions: floats; p ≥ 1. Padding counts as 0.
    Source: ONNX LpPool.
    """
    if problem := not_float(b, "lp_pool", x):
        return problem
    window = window_of(b.type_of(x).shape, kernel, strides, pads_lo, pads_hi, dilations, ceil=ceil)
    if isinstance(window, Declined):
        return window
    powered = power(b, widen(b, x), p)
    if isinstance(powered, Declined):
        return powered
    return narrow(b, root(b, b.add(Prim.WINDOW_SUM, powered, attrs=window), p), x)


def power(b: GraphBuilder, x: NodeId, p: float) -> NodeId | Declined:
    """|x|^p, by multiplication where p is 2."""
    if p < 1:
        return Declined(f"norm of order {p}")
    if p == 2:
        return b.apply(Prim.MUL, x, x)
    size = b.apply(Prim.ABS, x)
    return size if p == 1 else b.apply(Prim.POW, size, float(p))


def root(b: GraphBuilder, x: NodeId, p: float) -> NodeId:
    """x^(1/p) of a non-negative x."""
    if p == 1:
        return x
    return b.apply(Prim.SQRT, x) if p == 2 else b.apply(Prim.POW, x, 1.0 / p)


def window_of(
    shape: tuple[int, ...],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads_lo: Sequence[int],
    pads_hi: Sequence[int],
    dilations: Sequence[int],
    *,
    ceil: bool,
) -> WindowAttrs | Declined:
    """Window attributes over the last `len(kernel)` dimensions, with the high padding that `ceil` asks for."""
    n = len(kernel)
    strides, dilations = tuple(strides) or tuple(kernel), tuple(dilations) or (1,) * n
    if not 1 <= n <= len(shape) or {len(strides), len(pads_lo), len(pads_hi), len(dilations)} != {n}:
        return Declined(f"window {tuple(kernel)} on shape {shape}")
    if min((*kernel, *strides, *dilations)) < 1 or min((*pads_lo, *pads_hi)) < 0:
        return Declined("a window with a size below 1 or a negative pad")
    hi = list(pads_hi)
    for k, (size, *w) in enumerate(zip(shape[-n:], kernel, strides, pads_lo, pads_hi, dilations, strict=True)):
        width, stride, lo, _, dilation = w
        if ceil:
            out = -(((width - 1) * dilation + 1 - size - lo - hi[k]) // stride) + 1
            if (out - 1) * stride >= size + lo:
                out -= 1  # the last window must start inside the input or the left padding
            hi[k] = max((out - 1) * stride + (width - 1) * dilation + 1 - size - lo, 0)
        if window_size(size, width, stride, lo, hi[k], dilation) < 1:
            return Declined(f"window {tuple(kernel)} is larger than the padded input {shape}")
    return WindowAttrs(tuple(kernel), strides, tuple(pads_lo), tuple(hi), dilations)
