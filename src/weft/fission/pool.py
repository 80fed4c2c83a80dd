"""Sliding-window pooling: maximum, average and p-norm.

Where the positions of maxima are asked for, a *tap number* stands for each: how far the maximum lies from the first
element of its window, padding included, row-major in a grid of `reach` strides per dimension. So it is one byte where a
position is eight, and it is the same for every window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from weft.fission.rule import full, narrow, not_float, shape_of, table, widen
from weft.ir.attrs import PadAttrs, WindowAttrs
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


MOST_TAPS = 25
"""Elements of a window beyond which the places of maxima are left to the framework: each is a chain of primitives."""


def max_pool_taps(
    b: GraphBuilder,
    x: NodeId,
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int] = (),
    ceil: bool = False,
) -> tuple[NodeId, NodeId] | Declined:
    """max_pool_taps(x) → m = x[t0], t = t0; for each further tap k: t = select(x[k] > m or isnan(x[k]), k, t), m = max.

    Shapes: x (…, *S) gives (…, *O) twice: maxima, and tap numbers as u8, or i32 where there are more.
    Conditions: floats; windows of up to 25 elements. The first maximum wins, and the last NaN. t0 is the first element
    inside the image, so that padding is never the place of a maximum, though it counts as −∞.
    Source: `aten.max_pool2d_with_indices`.
    """
    if problem := not_float(b, "max_pool_taps", x):
        return problem
    if b.type_of(x).dtype.is_float8:
        return Declined("max_pool_taps of floats of 8 bits")
    shape, n = shape_of(b, x), len(kernel)
    window = window_of(shape, kernel, strides, pads, pads, dilations, ceil=ceil)
    if isinstance(window, Declined):
        return window
    if math.prod(window.kernel) > MOST_TAPS:
        return Declined(f"the places of maxima in windows of {math.prod(window.kernel)} elements")
    lead = (0,) * (len(shape) - n)
    if any((*window.pads_lo, *window.pads_hi)):
        attrs = PadAttrs((*lead, *window.pads_lo), (*lead, *window.pads_hi), "constant", -math.inf)
        x = b.add(Prim.PAD, x, attrs=attrs)
    out, kind = windows_of(window, shape[-n:]), tap_type(window)
    taps = [range(0, k * d, d) for k, d in zip(window.kernel, window.dilations, strict=True)]
    values = {
        offsets: b.slice(x, (*lead, *offsets), (*shape[:-n], *out), (*(1,) * len(lead), *window.strides))
        for offsets in itertools.product(*taps)
    }
    best = values.pop((0,) * n)
    at = b.broadcast(table(b, _first_inside(window, out), kind), shape_of(b, best))
    for offsets, value in values.items():
        found = b.apply(Prim.OR, b.apply(Prim.GT, value, best), b.add(Prim.ISNAN, value))
        at = b.apply(Prim.SELECT, found, full(b, tap_number(window, offsets), kind), at)
        best = b.apply(Prim.MAX, best, value)
    return best, at


def max_pool_positions(
    b: GraphBuilder,
    taps: NodeId,
    *,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int] = (),
    ceil: bool = False,
) -> NodeId | Declined:
    """max_pool_positions(t) → Σ per dimension (stride · window − pad + offset in t) · elements of those inside it.

    Shapes: t (…, *O), of windows over `sizes` (*S); gives i64 row-major positions in *S.
    Conditions: t as `max_pool_taps` gives them.
    Source: `aten.max_pool2d_with_indices`, its second result.
    """
    shape, n = shape_of(b, taps), len(kernel)
    window = window_of((*shape[:-n], *sizes), kernel, strides, pads, pads, dilations, ceil=ceil)
    if isinstance(window, Declined):
        return window
    if b.type_of(taps).dtype is not tap_type(window) or windows_of(window, sizes) != shape[-n:]:
        return Declined(f"positions of {b.type_of(taps)} for sizes {tuple(sizes)}")
    first: Array = np.zeros((), np.int64)
    for m, size, s, lo in zip(shape[-n:], sizes, window.strides, window.pads_lo, strict=True):
        first = np.add.outer(first * size, np.arange(m) * s - lo)
    found = table(b, first, DType.I64)
    left, inside = b.cast(taps, DType.I64), 1
    for k, span in reversed(list(enumerate(spans(window)))):
        offset = b.apply(Prim.MOD, left, full(b, span, DType.I64)) if k else left
        found = b.apply(Prim.ADD, found, b.apply(Prim.MUL, offset, full(b, inside, DType.I64)))
        left = b.apply(Prim.DIV, left, full(b, span, DType.I64)) if k else left
        inside *= sizes[k]
    return found


def spans(window: WindowAttrs) -> list[int]:
    """How many offsets tap numbers tell apart, per dimension: a multiple of the stride."""
    return [n * s for n, s in zip(reach(window), window.strides, strict=True)]


def reach(window: WindowAttrs) -> list[int]:
    """How many windows an element may be in, per dimension."""
    return [-(-((k - 1) * d + 1) // s) for k, d, s in zip(window.kernel, window.dilations, window.strides, strict=True)]


def tap_number(window: WindowAttrs, offsets: Sequence[int]) -> int:
    """Of an element so far from the first of its window."""
    found = 0
    for offset, span in zip(offsets, spans(window), strict=True):
        found = found * span + offset
    return found


def tap_type(window: WindowAttrs) -> DType:
    """The smallest type that holds every tap number, and one more for what is no tap."""
    return DType.U8 if math.prod(spans(window)) < 256 else DType.I32


def windows_of(window: WindowAttrs, sizes: Sequence[int]) -> tuple[int, ...]:
    """How many windows there are per dimension, padding of `window` included."""
    return tuple(
        window_size(*of)
        for of in zip(
            sizes, window.kernel, window.strides, window.pads_lo, window.pads_hi, window.dilations, strict=True
        )
    )


def _first_inside(window: WindowAttrs, out: Sequence[int]) -> Array:
    """For each window the number of its first tap that is no padding."""
    found: Array = np.zeros((), np.int64)
    for m, span, s, lo, d in zip(out, spans(window), window.strides, window.pads_lo, window.dilations, strict=True):
        before = np.maximum(lo - np.arange(m) * s, 0)
        found = np.add.outer(found * span, -(-before // d) * d)
    return found


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
