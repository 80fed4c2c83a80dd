"""Gradients of a convolution with respect to its input, its weight and its bias."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.fission.conv import conv, conv_transpose
from weft.fission.rule import narrow, not_float, shape_of, widen
from weft.ir.attrs import ConcatAttrs, GatherAttrs, PadAttrs
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


def conv_weight_gradient(
    b: GraphBuilder,
    dy: NodeId,
    x: NodeId,
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    groups: int = 1,
    transposed: bool = False,
) -> NodeId | Declined:
    """conv_weight_gradient(dy, x) → for each tap matmul(dy as (O, N·P), x shifted by the tap as (N·P, C)).

    Both are laid on one grid of positions with zeros behind the rows of dy, so that each tap is a range of the rows of
    one matrix; with strides there is a matrix for each phase. One channel a group → reduce_sum(dy · x at the tap).
    Fewer than eight, or windows that do not overlap → one matmul with the windows of x as columns.

    Shapes: dy (N, O, *T), x (N, C, *S), `kernel` *K give (O, C/groups, *K); transposed (C, O/groups, *K).
    Conditions: floats of one type; pads ≥ 0; at most 49 taps, as columns 2²⁸ numbers. A value that is not finite may
    make NaN of other taps.
    Source: `aten.convolution_backward`, its second result.
    """
    if problem := not_float(b, "conv_weight_gradient", dy, x):
        return problem
    small, large = (x, dy) if transposed else (dy, x)
    given, of, rank = shape_of(b, small), shape_of(b, large), len(kernel)
    text = f"conv_weight_gradient of {b.type_of(dy)} and {b.type_of(x)} for windows {tuple(kernel)}"
    if not 1 <= rank == len(given) - 2 == len(of) - 2 == len(strides) == len(pads) == len(dilations):
        return Declined(text)
    if b.type_of(dy).dtype is not b.type_of(x).dtype or given[0] != of[0] or 0 in (*given, *of, *kernel):
        return Declined(text)
    taps = [_Taps(*t) for t in zip(kernel, strides, pads, dilations, given[2:], of[2:], strict=True)]
    if given[1] % groups or of[1] % groups or min(pads) < 0 or not all(t.fits for t in taps):
        return Declined(text)
    columns = of[1] // groups
    apart = all(t.stride > t.dilation * (t.kernel - 1) for t in taps)
    few = math.prod(kernel) > 1 and (columns < FEW_CHANNELS or apart)
    if math.prod(kernel) > MOST_TAPS and (not few or given[1] == of[1] == groups):
        return Declined(f"{text}: more than {MOST_TAPS} taps")
    if given[1] == of[1] == groups:
        found = _by_sums(b, small, large, taps)
    elif few and math.prod((of[0] * of[1], *given[2:], *kernel)) > MOST_COLUMNS:
        return Declined(f"{text}: more than {MOST_COLUMNS} numbers in windows")
    elif few:
        found = _by_windows(b, small, large, taps, groups)
    else:
        found = _by_ranges(b, small, large, taps, groups)
    return b.reshape(found, (given[1], columns, *kernel))


MOST_TAPS, FEW_CHANNELS, MOST_COLUMNS = 49, 8, 1 << 28


@dataclass(frozen=True, slots=True)
class _Taps:
    """One dimension of a convolution: window k reads `size` at stride·p + dilation·k − pad for p in [0, count)."""

    kernel: int
    stride: int
    pad: int
    dilation: int
    count: int
    size: int

    @property
    def fits(self) -> bool:
        """Whether there are so many windows; behind the last one are less than `stride` elements."""
        return (self.size + 2 * self.pad - self.dilation * (self.kernel - 1) - 1) // self.stride + 1 == self.count

    def at(self, k: int) -> tuple[int, int]:
        """Of tap k: which of the phases of the stride it reads, and from which position on."""
        return self.dilation * k % self.stride, self.dilation * k // self.stride

    @property
    def grid(self) -> int:
        """Positions of a phase that some tap reads."""
        return self.count + self.at(self.kernel - 1)[1]

    @property
    def end(self) -> int:
        """Behind the last element, counted from −pad, of all phases on the grid."""
        return self.stride * (self.grid - 1) + max(self.at(k)[0] for k in range(self.kernel)) + 1

    @property
    def read(self) -> int:
        """Behind the last element, counted from −pad, of all windows."""
        return self.stride * (self.count - 1) + self.dilation * (self.kernel - 1) + 1


def _padded(b: GraphBuilder, x: NodeId, taps: Sequence[_Taps], sizes: Sequence[int]) -> NodeId:
    """The large operand from −pad on, in these sizes, with zeros outside."""
    lead = (0, 0)
    behind = [n - t.pad - t.size for n, t in zip(sizes, taps, strict=True)]
    if any(t.pad for t in taps) or max(behind) > 0:
        attrs = PadAttrs((*lead, *(t.pad for t in taps)), (*lead, *(max(n, 0) for n in behind)), "constant", 0.0)
        x = b.add(Prim.PAD, x, attrs=attrs)
    shape = shape_of(b, x)
    return b.slice(x, (0,) * len(shape), (*shape[:2], *sizes), (1,) * len(shape))


def _by_sums(b: GraphBuilder, small: NodeId, large: NodeId, taps: Sequence[_Taps]) -> NodeId:
    """(C, 1, taps): both operands have one channel a group."""
    shape = shape_of(b, small)
    rank, channels, axes = len(shape), shape[1], (0, *range(2, len(shape)))
    wide = widen(b, small)
    over = widen(b, _padded(b, large, taps, [t.read for t in taps]))
    found = []
    for tap in itertools.product(*(range(t.kernel) for t in taps)):
        starts = (0, 0, *(t.dilation * k for t, k in zip(taps, tap, strict=True)))
        part = b.slice(over, starts, shape, (1, 1, *(t.stride for t in taps)))
        total = b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, wide, part), axes)
        found.append(b.reshape(total, (channels, *(1,) * (rank - 1))))
    return narrow(b, _joined(b, found, 1), small)


def _by_windows(b: GraphBuilder, small: NodeId, large: NodeId, taps: Sequence[_Taps], groups: int) -> NodeId:
    """(groups, O/groups, C/groups · taps): one product, of the windows of the large operand written side by side."""
    shape, of, rank = shape_of(b, small), shape_of(b, large), len(taps)
    x = _padded(b, large, taps, [t.read for t in taps])
    for k, t in enumerate(taps):
        at = t.stride * np.arange(t.count)[None, :] + t.dilation * np.arange(t.kernel)[:, None]
        x = b.add(Prim.GATHER, x, b.constant(at.astype(np.int64)), attrs=GatherAttrs(2 + 2 * k))
    x = b.reshape(x, (of[0], groups, of[1] // groups, *shape_of(b, x)[2:]))
    places = [4 + 2 * k for k in range(rank)]
    x = b.transpose(x, (1, 0, *places, 2, *(p - 1 for p in places)))
    rows = math.prod((shape[0], *shape[2:]))
    right = b.reshape(x, (groups, rows, of[1] // groups * math.prod(t.kernel for t in taps)))
    return _product(b, _columns(b, small, groups), right)


def _by_ranges(b: GraphBuilder, small: NodeId, large: NodeId, taps: Sequence[_Taps], groups: int) -> NodeId:
    """(O, C/groups, taps): a product for each tap, of ranges of rows."""
    shape, of = shape_of(b, small), shape_of(b, large)
    grid = [t.grid for t in taps]
    behind = (0, 0, *(n - t.count for n, t in zip(grid, taps, strict=True)))
    if any(behind):
        small = b.add(Prim.PAD, small, attrs=PadAttrs((0,) * len(shape), behind, "constant", 0.0))
    left = _columns(b, small, groups)
    over = _padded(b, large, taps, [t.end for t in taps])
    steps = [math.prod(grid[k + 1 :]) for k in range(len(grid))]
    rows = shape_of(b, left)[-1] - sum(n * s for n, s in zip(behind[2:], steps, strict=True))
    left = b.slice(left, (0, 0, 0), (*shape_of(b, left)[:2], rows), (1, 1, 1))
    phases: dict[tuple[int, ...], NodeId] = {}
    found = []
    for tap in itertools.product(*(range(t.kernel) for t in taps)):
        phase, first = zip(*(t.at(k) for t, k in zip(taps, tap, strict=True)), strict=True)
        if phase not in phases:
            own = b.slice(over, (0, 0, *phase), (*of[:2], *grid), (1, 1, *(t.stride for t in taps)))
            phases[phase] = b.transpose(_columns(b, own, groups), (0, 2, 1))
        start = sum(n * s for n, s in zip(first, steps, strict=True))
        right = b.slice(phases[phase], (0, start, 0), (groups, rows, of[1] // groups), (1, 1, 1))
        found.append(b.reshape(_product(b, left, right), (shape[1], of[1] // groups, 1)))
    return _joined(b, found, 2)


def _columns(b: GraphBuilder, x: NodeId, groups: int) -> NodeId:
    """(N, C, *P) → (groups, C/groups, N·P)."""
    shape = shape_of(b, x)
    x = b.reshape(x, (shape[0], groups, shape[1] // groups, *shape[2:]))
    x = b.transpose(x, (1, 2, 0, *range(3, len(shape) + 1)))
    return b.reshape(x, (groups, shape[1] // groups, shape[0] * math.prod(shape[2:])))


def _product(b: GraphBuilder, left: NodeId, right: NodeId) -> NodeId:
    """Of (g, m, k) and (g, k, n); one group without its dimension."""
    if shape_of(b, left)[0] == 1:
        left, right = (b.reshape(x, shape_of(b, x)[1:]) for x in (left, right))
    return b.add(Prim.MATMUL, left, right)


def _joined(b: GraphBuilder, parts: Sequence[NodeId], axis: int) -> NodeId:
    return parts[0] if len(parts) == 1 else b.add(Prim.CONCAT, *parts, attrs=ConcatAttrs(axis))


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
