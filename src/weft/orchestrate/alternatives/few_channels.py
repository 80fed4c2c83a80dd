"""Convolutions of an image's few channels with weights that change, as what libraries are fast at.

The first layer of a network that is trained: a library's convolution of three channels takes many times what its bytes
would, and kernels that read them as they are want constant weights.

Windows that overlap, as those of a network of convolutions, are written side by side, with whole vectors of elements
in a row; the weight's gradient may read the same matrix.

Windows that lie side by side, as those of a vision transformer: y[n, o, i, j] = sum over c, p, q of
x[n, c, s i + p, t j + q] w[o, c, p, q] is a product of patches in rows and a weight's taps in columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.work import node_flops
from weft.orchestrate.alternatives.padded import CHUNK
from weft.orchestrate.alternatives.pixels import image_of
from weft.orchestrate.alternatives.union import Maker
from weft.orchestrate.alternatives.windows import Windows

CHANNELS = CHUNK // 2
"""A vector of 16 bits: with so many, a library's convolution reads whole ones."""
HALF = 2
"""Bytes of elements whose products are on the fast units."""
LEAST_FLOPS = 1 << 30
"""Of a convolution that is worth a matrix of its windows."""


def multiply_patches(m: Maker) -> None:
    """conv(x, w) → patches(x) @ w, elements of a patch by row, column and channel, as they lie channels-last.

    Conditions: strides are the window's size, of more than one element; one group, no padding, no dilation; few
    channels; a weight that is no constant: kernels of constant ones read the image themselves.
    """
    for i, node in enumerate(m.graph.nodes):
        c = node.attrs
        if isinstance(c, a.ConvAttrs) and not c.transposed and m.room and node.type.size and _side_by_side(m, i, c):
            m.stands_for(_product(m, *node.inputs), i)


def multiply_windows(m: Maker) -> None:
    """conv(x, w) → windows(x) @ w, see `windows`.

    Conditions: images of 16 bits, windows that overlap; one group, few channels, a large convolution, a weight that is
    no constant.
    """
    for i, node in enumerate(m.graph.nodes):
        c = node.attrs
        if not isinstance(c, a.ConvAttrs) or c.transposed or c.groups > 1 or not m.room or len(c.strides) != 2:
            continue
        x, w = node.inputs
        channels, taps = m.graph.type_of(x).shape[1], m.graph.type_of(w).shape[2:]
        changing = m.graph.nodes[w].prim is not Prim.CONSTANT and math.prod(taps) > 1 and c.strides != taps
        few = channels < CHANNELS and node.type.dtype.itemsize == HALF
        if changing and few and node_flops(node, m.graph) >= LEAST_FLOPS:
            rows, _, *counts = node.type.shape
            windows = Windows(channels, *(_two(n) for n in (taps, c.strides, c.pads_lo, c.dilations, counts)))
            right, matrix = m.b.transpose(windows.weights(m.b, w), (1, 0)), windows.rows(m.b, x)
            product = m.b.add(Prim.MATMUL, matrix, right)
            spread = m.b.reshape(product, (rows, *counts, node.type.shape[1]))
            m.stands_for(image_of(m.b, spread), i, ends=True)
            _gradient_by_windows(m, x, windows, matrix)


def _gradient_by_windows(m: Maker, x: NodeId, windows: Windows, matrix: NodeId) -> None:
    """dy @ windows(x) of the weight's gradient → dy @ matrix, whose columns are picked.

    The matrix has whole vectors in its rows, and is there already where the forward pass has made it.
    """
    for i, node in enumerate(m.graph.nodes):
        if node.prim is Prim.MATMUL and node.type.rank == 2 and windows.are_columns(m.graph, node.inputs[1], x):
            product = m.b.add(Prim.MATMUL, node.inputs[0], matrix)
            picked = m.b.add(Prim.GATHER, product, m.b.constant(windows.places()), attrs=a.GatherAttrs(1))
            m.stands_for(picked, i)


def _two(sizes: Sequence[int]) -> tuple[int, int]:
    high, wide = sizes
    return high, wide


def _side_by_side(m: Maker, i: NodeId, c: a.ConvAttrs) -> bool:
    x, w = m.graph.nodes[i].inputs
    image, taps = m.graph.type_of(x).shape, m.graph.type_of(w).shape[2:]
    whole = all(n == k * r for n, k, r in zip(image[2:], taps, m.graph.type_of(i).shape[2:], strict=True))
    plain = c.groups == 1 and max(c.dilations) == 1 and not any(c.pads_lo + c.pads_hi)
    few = image[1] <= CHANNELS and m.graph.nodes[w].prim is not Prim.CONSTANT
    return c.strides == taps and math.prod(taps) > 1 and whole and plain and few


def _product(m: Maker, x: NodeId, w: NodeId) -> NodeId:
    (rows, channels, *sizes), (results, _, *taps) = m.graph.type_of(x).shape, m.graph.type_of(w).shape
    counts, spatial = [n // k for n, k in zip(sizes, taps, strict=True)], len(taps)
    apart = m.b.reshape(x, (rows, channels, *(n for pair in zip(counts, taps, strict=True) for n in pair)))
    where, within = (tuple(2 + 2 * d + e for d in range(spatial)) for e in (0, 1))
    patches = m.b.transpose(apart, (0, *where, *within, 1))
    left = m.b.reshape(patches, (rows * math.prod(counts), math.prod(taps) * channels))
    order = m.b.transpose(w, (*range(2, 2 + spatial), 1, 0))
    right = m.b.reshape(order, (math.prod(taps) * channels, results))
    product = m.b.reshape(m.b.add(Prim.MATMUL, left, right), (rows, *counts, results))
    return image_of(m.b, product)
