"""Convolutions of one tap as products of pixels: y[n, o, p] = sum over c of x[n, c, s p] w[o, c].

Where images lie channels-last, a pixel is a row, and a convolution of one tap, or the gradient of its input, is a plain
product of two matrices. Weights that are trained are no constants, so that no kernel of a convolution takes them; a
library's convolution takes up to two and a half times what its product does (64 x 64 x 56 x 56 to 256 channels on an
NVIDIA H200: 89 and 36 us).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.orchestrate.alternatives.union import Maker


def multiply_pixels(m: Maker) -> None:
    """conv(x, w) → pixels(x) @ w; with strides, of the pixels that it reads, or with zeros between those it writes.

    Conditions: one tap, one group, no padding, a weight that is no constant.
    """
    for i, node in enumerate(m.graph.nodes):
        c = node.attrs
        if isinstance(c, a.ConvAttrs) and m.room and node.type.size and is_product(m, i, c):
            m.stands_for(_product(m, i, c), i, ends=not c.transposed or max(c.strides) == 1)


def is_product(m: Maker, i: NodeId, c: a.ConvAttrs) -> bool:
    """Whether a convolution with a changing weight has one tap, which reads no padding."""
    w = m.graph.nodes[i].inputs[1]
    plain = c.groups == 1 and not any(c.pads_lo + c.pads_hi) and math.prod(m.graph.type_of(w).shape[2:]) == 1
    return plain and m.graph.nodes[w].prim is not Prim.CONSTANT


def _product(m: Maker, i: NodeId, c: a.ConvAttrs) -> NodeId:
    b, (x, w), result = m.b, m.graph.nodes[i].inputs, m.graph.type_of(i).shape
    shape, rank = m.graph.type_of(x).shape, len(result)
    if max(c.strides) > 1 and not c.transposed:
        shape = (*shape[:2], *result[2:])
        x = b.slice(x, (0,) * rank, shape, (1, 1, *c.strides))
    rows, channels, *sizes = shape
    pixels = b.reshape(b.transpose(x, (0, *range(2, rank), 1)), (rows * math.prod(sizes), channels))
    matrix = b.reshape(w, m.graph.type_of(w).shape[:2])
    product = b.add(Prim.MATMUL, pixels, matrix if c.transposed else b.transpose(matrix, (1, 0)))
    spread = b.reshape(product, (rows, *sizes, result[1]))
    if max(c.strides) > 1 and c.transposed:
        spread = _apart(m, spread, c.strides, (rows, *result[2:], result[1]))
    return image_of(b, spread)


def image_of(b: GraphBuilder, pixels: NodeId) -> NodeId:
    """(N, C, *S) of (N, *S, C): nothing moves where images lie channels-last."""
    rank = b.type_of(pixels).rank
    return b.transpose(pixels, (0, rank - 1, *range(1, rank - 1)))


def _apart(m: Maker, x: NodeId, strides: Sequence[int], sizes: tuple[int, ...]) -> NodeId:
    """Pixels, channels last, with zeros between them and behind the last, as far as there is room."""
    rows, *counts, channels = m.b.type_of(x).shape
    ones = [n for count in counts for n in (count, 1)]
    behind = (0, *(n for s in strides for n in (0, s - 1)), 0)
    opened = m.b.reshape(x, (rows, *ones, channels))
    filled = m.b.add(Prim.PAD, opened, attrs=a.PadAttrs((0,) * len(behind), behind, "constant", 0.0))
    whole = (rows, *(n * s for n, s in zip(counts, strides, strict=True)), channels)
    return m.b.slice(m.b.reshape(filled, whole), (0,) * len(whole), sizes, (1,) * len(whole))
