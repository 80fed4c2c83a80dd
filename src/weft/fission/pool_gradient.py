"""Gradients of pooling: each element gathers from the windows that hold it, so that no two write to one place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.fission.pool import counts, max_pool_positions, reach, spans, tap_number, tap_type, window_of
from weft.fission.rule import full, narrow, not_float, shape_of, table, widen
from weft.ir.attrs import PadAttrs, WindowAttrs
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import Array, DType


def max_pool_gradient(
    b: GraphBuilder,
    dy: NodeId,
    indices: NodeId,
    *,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int] = (),
    ceil: bool = False,
) -> NodeId | Declined:
    """max_pool_gradient(dy, i) → Σ over windows of select(i = position, dy, 0).

    Shapes: dy and i (…, *T); `sizes` is *S of the result (…, *S). i are row-major positions in *S.
    Conditions: floats; sums in f32 for 16-bit dy, rounded once.
    Source: `aten.max_pool2d_with_indices_backward`.
    """
    if problem := not_float(b, "max_pool_gradient", dy):
        return problem
    window = _window(b, dy, sizes, kernel, strides, pads, dilations, ceil=ceil)
    if isinstance(window, Declined):
        return window
    shape = (*shape_of(b, dy)[: -len(kernel)], *sizes)
    position = full(b, 0, DType.I64, shape)
    for k, n in enumerate(sizes):
        axis = len(shape) - len(sizes) + k
        position = b.apply(Prim.MUL, position, full(b, n, DType.I64))
        position = b.apply(Prim.ADD, position, b.iota(shape, axis, DType.I64))
    at = _spread(b, b.cast(indices, DType.I64), -1.0, window, sizes)
    return _gathered(b, dy, window, sizes, at, position)


def max_pool_taps_gradient(
    b: GraphBuilder,
    dy: NodeId,
    taps: NodeId,
    *,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int] = (),
    ceil: bool = False,
) -> NodeId | Declined:
    """max_pool_taps_gradient(dy, t) → Σ over windows of select(t - k = n, dy, 0).

    n is the element's own number in the last window that holds it, n + k that in another.

    Shapes: dy and t (…, *T); `sizes` is *S of the result (…, *S).
    Conditions: floats; t as `max_pool_taps` gives them; sums in f32 for 16-bit dy, rounded once.
    Source: `aten.max_pool2d_with_indices_backward`, its positions taken apart.
    """
    if problem := not_float(b, "max_pool_taps_gradient", dy):
        return problem
    window = _window(b, dy, sizes, kernel, strides, pads, dilations, ceil=ceil)
    if isinstance(window, Declined):
        return window
    kind, shape = tap_type(window), (*shape_of(b, dy)[: -len(kernel)], *sizes)
    if b.type_of(taps).dtype is not kind:
        return Declined(f"tap numbers of {b.type_of(taps).dtype.value}")
    first: Array = np.zeros((), np.int64)
    for n, span, s, lo in zip(sizes, spans(window), window.strides, window.pads_lo, strict=True):
        first = np.add.outer(first * span, (np.arange(n) + lo) % s)
    last = b.broadcast(table(b, first, kind), shape)
    places = _spread(b, taps, math.prod(spans(window)), window, sizes)
    for k, term in enumerate(_terms(window)):  # in the windows before, its number is so much greater
        further = tap_number(window, [t * s for t, s in zip(term, window.strides, strict=True)])
        places[k] = b.apply(Prim.SUB, places[k], full(b, further, kind)) if further else places[k]
    return _gathered(b, dy, window, sizes, places, last)


def taps_behind(b: GraphBuilder, indices: NodeId, **how: Any) -> NodeId | None:
    """The tap numbers of which `indices` are the positions in these very windows; None if they come from elsewhere.

    `how` are keywords of `max_pool_positions`.
    """
    waiting, seen = [indices], set[NodeId]()
    while waiting:
        node = waiting.pop()
        seen.add(node)
        if b.type_of(node).dtype in (DType.U8, DType.I32):
            same = max_pool_positions(b, node, **how) == indices  # equal nodes are one
            return node if same else None
        waiting += [x for x in b.node(node).inputs if x not in seen and b.node(node).prim in _OF_POSITIONS]
    return None


_OF_POSITIONS = frozenset({Prim.ADD, Prim.MUL, Prim.MOD, Prim.DIV, Prim.CAST, Prim.BROADCAST})
"""What `max_pool_positions` is made of."""


def _gathered(
    b: GraphBuilder,
    dy: NodeId,
    window: WindowAttrs,
    sizes: Sequence[int],
    places: Sequence[NodeId],
    own: NodeId,
) -> NodeId:
    """Σ over `_terms` of what dy has for the window, where that window's place is the element's own."""
    total = None
    for found, place in zip(_spread(b, widen(b, dy), 0.0, window, sizes), places, strict=True):
        part = b.apply(Prim.SELECT, b.apply(Prim.EQ, place, own), found, 0.0)
        total = part if total is None else b.apply(Prim.ADD, total, part)
    assert total is not None, "a window holds something"
    return narrow(b, total, dy)


def avg_pool_gradient(
    b: GraphBuilder,
    dy: NodeId,
    *,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    count_include_pad: bool = True,
    divisor: int = 0,
    ceil: bool = False,
) -> NodeId | Declined:
    """avg_pool_gradient(dy) → Σ over windows of dy / count, where the window holds the element.

    Shapes: dy (…, *T); `sizes` is *S of the result (…, *S).
    Conditions: floats; counts as in avg_pool.
    Source: `aten.avg_pool2d_backward`.
    """
    if problem := not_float(b, "avg_pool_gradient", dy):
        return problem
    window = _window(b, dy, sizes, kernel, strides, pads, (), ceil=ceil)
    if isinstance(window, Declined):
        return window
    wide, out = widen(b, dy), shape_of(b, dy)[-len(kernel) :]
    if divisor:
        scaled = b.apply(Prim.DIV, wide, float(divisor))
    else:
        found = counts(sizes, out, window, pads, pads, count_include_pad=count_include_pad)
        scaled = b.apply(Prim.DIV, wide, table(b, np.maximum(found, 1), b.type_of(wide).dtype))
    total = None
    for offsets, part in zip(_terms(window), _spread(b, scaled, 0.0, window, sizes), strict=True):
        held = _held(window, sizes, offsets)
        if not held.all():
            part = b.apply(Prim.SELECT, b.broadcast(b.constant(held), shape_of(b, part)), part, 0.0)
        total = part if total is None else b.apply(Prim.ADD, total, part)
    assert total is not None, "a window holds something"
    return narrow(b, total, dy)


def adaptive_avg_pool_gradient(b: GraphBuilder, dy: NodeId, *, sizes: Sequence[int]) -> NodeId | Declined:
    """adaptive_avg_pool_gradient(dy) → A (dy / count) B, where constant tables A and B say which window holds what.

    Shapes: dy (…, h, w); `sizes` is (H, W) of the result (…, H, W).
    Conditions: floats, two spatial dimensions. Where windows tile the image, dy is scaled and repeated instead.
    Source: `aten._adaptive_avg_pool2d_backward`.
    """
    if problem := not_float(b, "adaptive_avg_pool_gradient", dy):
        return problem
    shape = shape_of(b, dy)
    if len(sizes) != 2 or len(shape) < 3 or 0 in (*shape, *sizes):
        return Declined(f"adaptive_avg_pool_gradient of {b.type_of(dy)} for sizes {tuple(sizes)}")
    wide, windows = widen(b, dy), shape[-2:]
    if all(n % m == 0 for n, m in zip(sizes, windows, strict=True)):
        steps = [n // m for n, m in zip(sizes, windows, strict=True)]
        scaled = b.apply(Prim.DIV, wide, float(steps[0] * steps[1]))
        return narrow(b, _repeated(b, scaled, steps), dy)
    held: list[Array] = []
    for n, m in zip(sizes, windows, strict=True):
        lo, hi = np.arange(m) * n // m, -(-(np.arange(m) + 1) * n // m)
        held.append((np.arange(n)[None, :] >= lo[:, None]) & (np.arange(n)[None, :] < hi[:, None]))
    kind = b.type_of(wide).dtype
    rows, columns = (table(b, x, kind) for x in (held[0].T, held[1]))
    scaled = b.apply(Prim.DIV, wide, table(b, np.multiply.outer(held[0].sum(1), held[1].sum(1)), kind))
    wide = b.add(Prim.MATMUL, rows, b.add(Prim.MATMUL, scaled, columns))
    return narrow(b, wide, dy)


def _window(
    b: GraphBuilder,
    dy: NodeId,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    *,
    ceil: bool,
) -> WindowAttrs | Declined:
    """The forward windows, if dy is one value for each."""
    given = shape_of(b, dy)
    if len(given) < len(kernel) or len(sizes) != len(kernel) or 0 in (*given, *sizes):
        return Declined(f"gradient of a pool from {b.type_of(dy)} for sizes {tuple(sizes)}")
    window = window_of((*given[: -len(kernel)], *sizes), kernel, strides, pads, pads, dilations, ceil=ceil)
    if isinstance(window, Declined):
        return window
    for n, m, k, s, lo, hi, d in zip(
        sizes, given[-len(kernel) :], kernel, window.strides, window.pads_lo, window.pads_hi, window.dilations,
        strict=True,
    ):  # fmt: skip
        if (n + lo + hi - (k - 1) * d - 1) // s + 1 != m:
            return Declined(f"gradient of a pool from {b.type_of(dy)} for sizes {tuple(sizes)}")
    return window


def _terms(window: WindowAttrs) -> list[tuple[int, ...]]:
    """Windows that may hold an element: how far each is before the last one that begins at or before it.

    In the order of the windows, in which the framework adds them, too.
    """
    return list(itertools.product(*(range(n)[::-1] for n in reach(window))))


def _spread(b: GraphBuilder, y: NodeId, outside: float, window: WindowAttrs, sizes: Sequence[int]) -> list[NodeId]:
    """For each of `_terms` what y has for that window, at every element; `outside` where there is no such window."""
    shape = shape_of(b, y)
    first = len(shape) - len(sizes)
    near = reach(window)
    last = [(n - 1 + lo) // s for n, lo, s in zip(sizes, window.pads_lo, window.strides, strict=True)]
    above = [max(0, k - m + 1) for k, m in zip(last, shape[first:], strict=True)]
    lead = (0,) * first
    if any(r > 1 for r in near) or any(above):
        attrs = PadAttrs((*lead, *(r - 1 for r in near)), (*lead, *above), "constant", outside)
        y = b.add(Prim.PAD, y, attrs=attrs)
    y = _repeated(b, y, window.strides)
    found = []
    for term in _terms(window):
        starts = [lo + (r - 1 - t) * s for lo, r, t, s in zip(window.pads_lo, near, term, window.strides, strict=True)]
        found.append(b.slice(y, (*lead, *starts), (*shape[:first], *sizes), (1,) * len(shape)))
    return found


def _repeated(b: GraphBuilder, y: NodeId, steps: Sequence[int]) -> NodeId:
    """Every element `steps` times along the last dimensions."""
    shape = shape_of(b, y)
    first = len(shape) - len(steps)
    apart = [n for k in range(len(steps)) for n in (shape[first + k], 1)]
    wide = [n for k in range(len(steps)) for n in (shape[first + k], steps[k])]
    lead = shape[:first]
    repeated = b.broadcast(b.reshape(y, (*lead, *apart)), (*lead, *wide))
    return b.reshape(repeated, (*lead, *(n * s for n, s in zip(shape[first:], steps, strict=True))))


def _held(window: WindowAttrs, sizes: Sequence[int], term: Sequence[int]) -> Array:
    """Whether the window of a term holds each element."""
    held: Array = np.ones((), np.bool_)
    for n, k, s, lo, t in zip(sizes, window.kernel, window.strides, window.pads_lo, term, strict=True):
        inside = (np.arange(n) + lo) % s + t * s < k
        held = np.logical_and.outer(held, inside)
    return held
