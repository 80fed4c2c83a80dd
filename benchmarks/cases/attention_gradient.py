"""Problems that are the gradients of attention: the results of one call of `weft::attention_backward`."""

from __future__ import annotations

import json

from benchmarks.cases.called_attention import operand, slices
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format


def gradient_problem(
    rows: int,
    positions: int,
    heads: int,
    width: int,
    *,
    keys: int = 0,
    dtype: DType = DType.BF16,
    causal: bool = False,
    scale: float = 0.125,
    results: tuple[int, ...] = (0, 1, 2),
    one: bool = False,
    packed: bool = False,
    joined: bool = False,
    flat: bool = False,
) -> Problem:
    """As a plan cuts the call out of a training step; `results`: of Q, K and V, in that order.

    `one`: Q, K and V are the same tensor; `packed`: slices of one; `joined`: results side by side in one. `flat`: heads
    and their elements are one dimension around the call.
    """
    b = GraphBuilder()
    of_q = TensorType(dtype, (rows, positions, heads, width))
    of_k = TensorType(dtype, (rows, keys or positions, heads, width))

    gradient = operand(b, of_q, flat=flat)
    if packed:
        q, k, v = slices(b, of_q)
    else:
        q = operand(b, of_q, flat=flat)
        k, v = (q, q) if one else (operand(b, of_k, flat=flat), operand(b, of_k, flat=flat))
    result, sums = operand(b, of_q, flat=flat), b.input(TensorType(DType.F32, (rows, heads, positions)))
    payload = json.dumps({
        "args": [*({"tensor": i} for i in range(6)), causal, scale],
        "inputs": [dtype.value] * 5 + ["f32"], "kwargs": {}, "op": "weft::attention_backward", "overload": "",
    }, sort_keys=True)  # fmt: skip
    types = (of_q, of_k, of_k)
    nodes = [
        b.add(
            Prim.OPAQUE, gradient, q, k, v, result, sums,
            attrs=a.OpaqueAttrs("aten", "weft.attention_backward.default", payload, k_, types),
        )
        for k_ in results
    ]  # fmt: skip
    if flat or joined:
        nodes = [b.reshape(n, (*b.type_of(n).shape[:2], heads * width)) for n in nodes]
    nodes = [b.add(Prim.CONCAT, *nodes, attrs=a.ConcatAttrs(2))] if joined else nodes
    graph = b.build(nodes)
    return Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,) * len(nodes))
