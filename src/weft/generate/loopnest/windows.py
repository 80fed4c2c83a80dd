"""Large windows as two passes: a graph-to-graph step before planning."""

from __future__ import annotations

from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim

SEPARABLE_TAPS = 16
"""From this many taps on, two passes of k taps beat one of k*k."""


def separate_windows(graph: Graph, live: list[NodeId]) -> Graph:
    """window(x, (k, l)) → window(pad(window(x, (k, 1))), (1, l)), for windows of stride 1 with many taps.

    Maxima and sums over a box are those of the columns' maxima and sums; the second pass reads a padded copy, so its
    loop has no edges. Floats only: -inf has no counterpart that a pad of integers could name.
    """
    large = [n for n in live if _is_large(graph, n)]
    if not large:
        return graph
    b = GraphBuilder()
    moved: dict[NodeId, NodeId] = {}
    for n in graph.inputs:
        attrs = cast("a.InputAttrs", graph.nodes[n].attrs)
        moved[n] = b.input(graph.type_of(n), is_weight=attrs.is_weight)
    for n in live:
        record = graph.nodes[n]
        if n in moved:
            continue
        if record.prim is Prim.CONSTANT:
            moved[n] = b.constant(graph.constant(n), record.type.dtype)
        elif n in large:
            moved[n] = _two_passes(b, record.prim, moved[record.inputs[0]], cast("a.WindowAttrs", record.attrs))
        else:
            moved[n] = b.add(record.prim, *(moved[i] for i in record.inputs), attrs=record.attrs)
    return b.build([moved[o] for o in graph.outputs])


def _is_large(graph: Graph, node: NodeId) -> bool:
    record = graph.nodes[node]
    if not isinstance(record.attrs, a.WindowAttrs) or not record.type.dtype.is_float or record.type.size == 0:
        return False
    w = record.attrs
    if len(w.kernel) != 2 or w.strides != (1, 1) or min(w.kernel) == 1:
        return False
    return w.kernel[0] * w.kernel[1] >= SEPARABLE_TAPS


def _two_passes(b: GraphBuilder, prim: Prim, x: NodeId, w: a.WindowAttrs) -> NodeId:
    (k, m), (lo, left), (hi, right), (dk, dm) = w.kernel, w.pads_lo, w.pads_hi, w.dilations
    columns = b.add(prim, x, attrs=a.WindowAttrs((k, 1), (1, 1), (lo, 0), (hi, 0), (dk, 1)))
    rank = b.type_of(x).rank
    zeros = (0,) * (rank - 1)
    value = float("-inf") if prim is Prim.WINDOW_MAX else 0.0
    padded = b.add(Prim.PAD, columns, attrs=a.PadAttrs((*zeros, left), (*zeros, right), "constant", value))
    return b.add(prim, padded, attrs=a.WindowAttrs((1, m), (1, 1), (0, 0), (0, 0), (1, dm)))
