"""Problems that are a call of this project's attention: the results of one call of `weft::attention`."""

from __future__ import annotations

import json

from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format


def called_attention_problem(
    rows: int,
    positions: int,
    heads: int,
    width: int,
    *,
    keys: int = 0,
    dtype: DType = DType.BF16,
    causal: bool = False,
    scale: float = 0.125,
    results: tuple[int, ...] = (0, 1),
    packed: bool = False,
    flat: bool = False,
) -> Problem:
    """As a plan cuts the call out of a training step; `results`: 0 the output, 1 the logarithms of the sums.

    `packed`: Q, K and V are slices of one tensor. `flat`: heads and their elements are one dimension around the call.
    """
    b = GraphBuilder()
    of_q = TensorType(dtype, (rows, positions, heads, width))
    of_k = TensorType(dtype, (rows, keys or positions, heads, width))
    q, k, v = slices(b, of_q) if packed else (operand(b, x, flat=flat) for x in (of_q, of_k, of_k))
    payload = json.dumps({
        "args": [*({"tensor": i} for i in range(3)), causal, scale],
        "inputs": [dtype.value] * 3, "kwargs": {}, "op": "weft::attention", "overload": "",
    }, sort_keys=True)  # fmt: skip
    types = (of_q, TensorType(DType.F32, (rows, heads, positions)))
    nodes = [
        b.add(Prim.OPAQUE, q, k, v, attrs=a.OpaqueAttrs("aten", "weft.attention.default", payload, result, types))
        for result in results
    ]
    if flat:
        flattened = rows, positions, heads * width
        nodes = [n if r else b.reshape(n, flattened) for n, r in zip(nodes, results, strict=True)]
    graph = b.build(nodes)
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,) * len(nodes))


def operand(b: GraphBuilder, of: TensorType, *, flat: bool) -> NodeId:
    """An input; `flat`: its heads and their elements are one dimension."""
    apart = TensorType(of.dtype, (*of.shape[:2], of.shape[2] * of.shape[3]))
    return b.reshape(b.input(apart), of.shape) if flat else b.input(of)


def slices(b: GraphBuilder, of: TensorType) -> list[NodeId]:
    """Q, K and V as slices of the one tensor that a product gives."""
    rows, positions, heads, width = of.shape
    together = b.input(TensorType(of.dtype, (rows, positions, 3 * heads * width)))
    size = rows, positions, heads * width
    return [b.reshape(b.slice(together, (0, 0, i * heads * width), size, (1, 1, 1)), of.shape) for i in range(3)]
