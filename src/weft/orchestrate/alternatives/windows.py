"""Windows of images as the rows of a matrix, of which a convolution is a product.

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
        """(N·P·Q, columns) of (N, C, H, W); where a line is longer than its taps zeros, whatever an image has there."""
        n, c, h, w = b.type_of(x).shape
        (high, wide), (p, q) = self.kernel, self.counts
        places = [
            s * np.arange(k)[:, None] + d * np.arange(t)
            for s, k, d, t in zip(self.strides, self.counts, self.dilations, self.kernel, strict=True)
        ]
        above, before = self.pads
        lines = b.reshape(b.transpose(x, (0, 2, 3, 1)), (n, h, w * c))
        below, after = max(int(places[0].max()) + 1 - above - h, 0), max(int(places[1].max()) + 1 - before - w, 0)
        lines = _padded(b, lines, (0, above, before * c), (0, below, after * c))
        lines = b.add(Prim.GATHER, lines, b.constant(places[0].astype(np.int64)), attrs=GatherAttrs(1))
        read = (places[1][:, :, None] * c + np.arange(c)).reshape(q, wide * c)
        found = b.add(Prim.GATHER, lines, b.constant(read.astype(np.int64)), attrs=GatherAttrs(3))
        found = _padded(b, found, (0,) * 5, (0, 0, 0, 0, (self.width - wide) * c))
        found = b.transpose(found, (0, 1, 3, 2, 4))
        return self._whole(b, b.reshape(found, (n * p * q, high * self.width * c)))

    def weights(self, b: GraphBuilder, w: NodeId) -> NodeId:
        """(O, columns) of (O, C, *kernel), with zeros where a row has elements that count for nothing."""
        turned = _padded(b, b.transpose(w, (0, 2, 3, 1)), (0,) * 4, (0, 0, self.width - self.kernel[1], 0))
        return self._whole(b, b.reshape(turned, (b.type_of(w).shape[0], self.kernel[0] * self.width * self.channels)))

    def _whole(self, b: GraphBuilder, matrix: NodeId) -> NodeId:
        return _padded(b, matrix, (0, 0), (0, self.columns - b.type_of(matrix).shape[1]))


def _padded(b: GraphBuilder, x: NodeId, lo: Sequence[int], hi: Sequence[int]) -> NodeId:
    """With zeros around it; itself where there are none."""
    return b.add(Prim.PAD, x, attrs=PadAttrs(tuple(lo), tuple(hi), "constant", 0.0)) if any((*lo, *hi)) else x
