"""Mean and variance as they stand in a graph: a sum, and the squares about the mean that follows from it.

Both are had in one pass over memory, though the second is written as if it waited for the first.
"""

from __future__ import annotations

from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

TOLERANCE = 1e-5
"""How far a factor may be from 1 / n to count as that of a mean."""


def centred(graph: Graph, node: NodeId) -> NodeId | None:
    """The sum behind the mean if a node is Σ (x - mean)² over the rows of that mean, else None."""
    square = graph.nodes[graph.nodes[node].inputs[0]]
    if graph.nodes[node].prim is not Prim.REDUCE_SUM or square.prim is not Prim.MUL or len(set(square.inputs)) > 1:
        return None
    difference = graph.nodes[square.inputs[0]]
    if difference.prim is not Prim.SUB or graph.nodes[difference.inputs[1]].prim is not Prim.BROADCAST:
        return None
    mean = graph.nodes[graph.nodes[difference.inputs[1]].inputs[0]]
    if mean.prim not in (Prim.MUL, Prim.DIV):
        return None
    total, factor = mean.inputs
    if mean.prim is Prim.MUL and graph.nodes[total].prim is not Prim.REDUCE_SUM:
        total, factor = factor, total
    value = _scalar(graph, factor)
    record = graph.nodes[total]
    if record.prim is not Prim.REDUCE_SUM or record.attrs != graph.nodes[node].attrs or value is None:
        return None
    if record.inputs[0] != difference.inputs[0] or mean.type != record.type:
        return None
    if difference.type.dtype not in (DType.F32, DType.F64):
        return None  # the mean would be rounded to the type of the elements
    count = graph.type_of(record.inputs[0]).size // max(1, graph.type_of(node).size)
    share = value * count if mean.prim is Prim.MUL else value / count
    return total if abs(share - 1) < TOLERANCE else None


def _scalar(graph: Graph, node: NodeId) -> float | None:
    while graph.nodes[node].prim in (Prim.BROADCAST, Prim.RESHAPE):
        node = graph.nodes[node].inputs[0]
    if graph.nodes[node].prim is not Prim.CONSTANT or graph.type_of(node).size != 1:
        return None
    return float(graph.constant(node).reshape(-1)[0])
