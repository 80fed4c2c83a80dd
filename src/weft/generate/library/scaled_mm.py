"""A product of 8-bit floats with one scale as one call of the framework, which cuBLASLt answers on a GPU."""

from __future__ import annotations

from typing import cast

from weft.generate.library.fused import is_weight
from weft.generate.library.translate import Program
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import LibraryCall, Ref, Schedule

_OUT = (DType.BF16, DType.F16, DType.F32)
_MULTIPLE = 16
"""Of the sum and of the columns."""


def of_float8(graph: Graph) -> bool:
    """Whether a graph has a product whose operands are widened from 8-bit floats."""
    products = (n for n in graph.nodes if n.prim is Prim.MATMUL)
    return any(all(_narrow(graph, i) is not None for i in n.inputs) for n in products)


def scaled_mm(problem: Problem, schedule: Schedule) -> LibraryCall | Declined:
    """cast(MATMUL(cast x, cast w) * scale) as `_scaled_mm`, without fast accumulation."""
    graph = problem.graph
    products = [i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL]
    if len(products) != 1 or len(graph.outputs) != 1 or graph.type_of(products[0]).rank != 2:
        return Declined("not one product of matrices with one result")
    n = graph.nodes[products[0]]
    x, w = (_narrow(graph, i) for i in n.inputs)
    if x is None or w is None or graph.type_of(n.inputs[0]).dtype is not DType.F32:
        return Declined("operands that are not widened from 8-bit floats")
    if graph.type_of(x[0]).dtype is graph.type_of(w[0]).dtype is DType.F8E5M2:
        return Declined("cuBLASLt has no product of two e5m2")
    k, columns = graph.type_of(n.inputs[1]).shape
    if k % _MULTIPLE or columns % _MULTIPLE or 0 in n.type.shape:
        return Declined(f"a sum or columns that are no multiple of {_MULTIPLE}")
    if (x[1] and not is_weight(graph, x[0])) or (not w[1] and not is_weight(graph, w[0])):
        return Declined("an operand that does not lie along the sum")
    found = _scale(graph, products[0])
    if isinstance(found, Declined):
        return found
    p = Program(graph)
    left, right = p.value(x[0]), p.value(w[0])
    if x[1]:
        transposed = p.call("aten.permute.default", left, (1, 0))
        left = p.call("aten.clone.default", transposed, memory_format="format:contiguous")
    if not w[1]:  # the library wants columns one after the other
        transposed = p.call("aten.permute.default", right, (1, 0))
        right = p.call("aten.clone.default", transposed, memory_format="format:contiguous")
    right = p.call("aten.permute.default", right, (1, 0))
    one = p.tensor((1.0,), DType.F32, ())
    scale = one if found == -1 else _scalar(p, graph, found)
    dtype = graph.type_of(graph.outputs[0]).dtype
    out = p.call("aten._scaled_mm.default", left, right, scale, one, out_dtype=f"dtype:{dtype.value}")
    p.bind(graph.outputs[0], out)
    return p.finish(schedule)


def _scalar(p: Program, graph: Graph, node: NodeId) -> Ref:
    value = p.value(node)
    return value if graph.type_of(node).rank == 0 else p.call("aten.reshape.default", value, ())


def _narrow(graph: Graph, operand: NodeId) -> tuple[NodeId, bool] | None:
    """The 8-bit floats that an operand is widened from, and whether it is their transpose."""
    transposed, node = False, graph.nodes[operand]
    at = operand
    while node.prim in (Prim.CAST, Prim.TRANSPOSE):
        if node.prim is Prim.TRANSPOSE:
            if node.type.rank != 2:
                return None
            transposed = transposed != (cast("a.TransposeAttrs", node.attrs).perm == (1, 0))
        at = node.inputs[0]
        node = graph.nodes[at]
    return (at, transposed) if node.type.dtype.is_float8 and at != operand else None


def _scale(graph: Graph, product: NodeId) -> NodeId | Declined:
    """The one number that the product is multiplied by before it is the output, or -1 for none."""
    users, at, scale = graph.users(), product, -1
    while at != graph.outputs[0]:
        if len(users[at]) != 1:
            return Declined("the product is read more than once")
        (after,) = users[at]
        n = graph.nodes[after]
        if n.prim is Prim.MUL and scale == -1:
            other = n.inputs[1] if n.inputs[0] == at else n.inputs[0]
            while graph.nodes[other].prim is Prim.BROADCAST:
                other = graph.nodes[other].inputs[0]
            if graph.type_of(other).size != 1 or graph.type_of(other).dtype is not DType.F32:
                return Declined("another factor than one number in f32")
            scale = other
        elif not (n.prim is Prim.CAST and after == graph.outputs[0]):
            return Declined(f"{n.prim.value} behind the product")
        at = after
    if graph.type_of(at).dtype not in _OUT:
        return Declined(f"a result of {graph.type_of(at).dtype.value}")
    return scale
