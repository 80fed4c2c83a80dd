"""Windows of images as the rows of a matrix, of which a convolution and its weight's gradient are products.

An element of a row is a tap and a channel, channels fastest: what a window reads of one line of an image that lies
channels-last is one piece of memory, and a piece of the row. Rows end in zeros, so that they are whole vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.ir.attrs import GatherAttrs, PadAttrs
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim

LANES = 8
"""Halves of a vector."""
MOST_WIDER = 1.25
"""How much longer lines of taps may become; else rows as a whole do."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Of images (N, C, H, W): (kernel, stride, padding before, dilation, windows) of both dimensions."""

    channels: int
    kernel: tuple[int, int]
    strides: tuple[int, int]
    pads: tuple[int, int]
    dilations: tuple[int, int]
    counts: tuple[int, int]

    @property
    def width(self) -> int:
        """Taps of a line, those included that only make it longer."""
        high, wide = self.kernel
        width = next(w for w in range(wide, wide + LANES) if high * w * self.channels % LANES == 0)
        return width if width <= MOST_WIDER * wide else wide

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return -(-self.kernel[0] * self.width * self.channels // LANES) * LANES

    def rows(self, b: GraphBuilder, x: NodeId) -> NodeId:
        """(N·P·Q, columns) of (N, C, H, W)."""
        n, c, h, w = b.type_of(x).shape
        (high, _), (p, q) = self.kernel, self.counts
        lines = b.reshape(b.transpose(x, (0, 2, 3, 1)), (n, h, w * c))
        ends = [s * (k - 1) + d * (t - 1) + 1 for s, k, d, t in
                zip(self.strides, self.counts, self.dilations, (high, self.width), strict=True)]  # fmt: skip
        above, before = self.pads
        behind = max(ends[0] - above - h, 0), max(ends[1] - before - w, 0) * c
        if any((above, before, *behind)):
            lines = b.add(Prim.PAD, lines, attrs=PadAttrs((0, above, before * c), (0, *behind), "constant", 0.0))
        read = self.strides[0] * np.arange(p)[:, None] + self.dilations[0] * np.arange(high)
        lines = b.add(Prim.GATHER, lines, b.constant(read.astype(np.int64)), attrs=GatherAttrs(1))
        taps = (self.dilations[1] * np.arange(self.width)[:, None] * c + np.arange(c)).reshape(-1)
        read = self.strides[1] * c * np.arange(q)[:, None] + taps
        found = b.add(Prim.GATHER, lines, b.constant(read.astype(np.int64)), attrs=GatherAttrs(3))
        found = b.transpose(found, (0, 1, 3, 2, 4))
        return self._whole(b, b.reshape(found, (n * p * q, high * self.width * c)))

    def weights(self, b: GraphBuilder, w: NodeId) -> NodeId:
        """(O, columns) of (O, C, *kernel), with zeros where a row has elements that count for nothing."""
        turned = b.transpose(w, (0, 2, 3, 1))
        more = self.width - self.kernel[1]
        if more:
            turned = b.add(Prim.PAD, turned, attrs=PadAttrs((0,) * 4, (0, 0, more, 0), "constant", 0.0))
        return self._whole(b, b.reshape(turned, (b.type_of(w).shape[0], self.kernel[0] * self.width * self.channels)))

    def back(self, b: GraphBuilder, matrix: NodeId) -> NodeId:
        """(O, C, *kernel) of (O, columns): what `weights` is made of."""
        results, (high, wide) = b.type_of(matrix).shape[0], self.kernel
        size = high * self.width * self.channels
        taps = b.reshape(_first(b, matrix, (results, size)), (results, high, self.width, self.channels))
        return b.transpose(_first(b, taps, (results, high, wide, self.channels)), (0, 3, 1, 2))

    def _whole(self, b: GraphBuilder, matrix: NodeId) -> NodeId:
        more = self.columns - b.type_of(matrix).shape[1]
        return b.add(Prim.PAD, matrix, attrs=PadAttrs((0, 0), (0, more), "constant", 0.0)) if more else matrix


def _first(b: GraphBuilder, x: NodeId, sizes: Sequence[int]) -> NodeId:
    """The first elements along each dimension."""
    return b.slice(x, (0,) * len(sizes), tuple(sizes), (1,) * len(sizes))
