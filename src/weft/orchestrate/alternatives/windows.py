"""Windows of images as the rows of a matrix, of which a convolution is a product.

An element of a row is a tap and a channel, channels fastest: what a window reads of one line of an image that lies
channels-last is one piece of memory, and a piece of the row. Rows end in zeros, so that they are whole vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.ir.attrs import GatherAttrs, PadAttrs, TransposeAttrs
from weft.ir.graph import Graph, GraphBuilder, NodeId
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

    def places(self) -> npt.NDArray[np.int64]:
        """(C·kernel,) columns of `rows`, in the order of a weight (O, C, *kernel)."""
        lines, taps = (np.arange(k, dtype=np.int64) for k in self.kernel)
        channels = np.arange(self.channels, dtype=np.int64)[:, None, None]
        return ((lines[:, None] * self.width + taps) * self.channels + channels).reshape(-1)

    def are_columns(self, graph: Graph, matrix: NodeId, x: NodeId) -> bool:
        """Whether `matrix` is (N·P·Q, C·kernel) of these windows, as the rule of a weight's gradient writes them."""
        n, c = graph.type_of(x).shape[:2]
        (high, wide), (p, q) = self.kernel, self.counts
        node = graph.nodes[_unreshaped(graph, matrix)]
        if node.attrs != TransposeAttrs((1, 0, 4, 6, 2, 3, 5)):
            return False
        if graph.type_of(node.inputs[0]).shape != (n, 1, c, high, p, wide, q):
            return False
        at = _unreshaped(graph, node.inputs[0])
        for axis, k in ((4, 1), (2, 0)):
            node = graph.nodes[at]
            if node.attrs != GatherAttrs(axis) or graph.nodes[node.inputs[1]].prim is not Prim.CONSTANT:
                return False
            taps, windows = self.dilations[k] * np.arange(self.kernel[k]), self.strides[k] * np.arange(self.counts[k])
            if not np.array_equal(graph.constant(node.inputs[1]), taps[:, None] + windows):
                return False
            at = node.inputs[0]
        padding = graph.nodes[at].attrs
        if isinstance(padding, PadAttrs) and at != x:
            plain = padding.mode == "constant" and padding.value == 0.0 and padding.lo == (0, 0, *self.pads)
            return plain and graph.nodes[at].inputs[0] == x
        return at == x and not any(self.pads)

    def weights(self, b: GraphBuilder, w: NodeId) -> NodeId:
        """(O, columns) of (O, C, *kernel), with zeros where a row has elements that count for nothing."""
        turned = _padded(b, b.transpose(w, (0, 2, 3, 1)), (0,) * 4, (0, 0, self.width - self.kernel[1], 0))
        return self._whole(b, b.reshape(turned, (b.type_of(w).shape[0], self.kernel[0] * self.width * self.channels)))

    def _whole(self, b: GraphBuilder, matrix: NodeId) -> NodeId:
        return _padded(b, matrix, (0, 0), (0, self.columns - b.type_of(matrix).shape[1]))


def _unreshaped(graph: Graph, node: NodeId) -> NodeId:
    while graph.nodes[node].prim is Prim.RESHAPE:
        (node,) = graph.nodes[node].inputs
    return node


def _padded(b: GraphBuilder, x: NodeId, lo: Sequence[int], hi: Sequence[int]) -> NodeId:
    """With zeros around it; itself where there are none."""
    return b.add(Prim.PAD, x, attrs=PadAttrs(tuple(lo), tuple(hi), "constant", 0.0)) if any((*lo, *hi)) else x
