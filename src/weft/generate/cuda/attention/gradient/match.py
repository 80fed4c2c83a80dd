"""The gradients of attention: a problem as sizes, by the one call that its members are results of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.opaque import LARGEST_SCORES
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

OPERATOR = "weft::attention_backward"
"""See `generate.library.trained_attention`: its operands and results, which this writes kernels of."""
OPERANDS = 6
HEADS = (64, 128)
"""Elements of a head: whole rows of eight chunks of 16 bytes, so that chunks can change places within them."""
_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class AttentionGradient:
    """dQ, dK and dV of softmax(scale · Q Kᵀ) V, of its result, its gradient and the logarithms of its sums.

    All lie row-major: (rows, positions, heads, elements), the logarithms (rows, heads, positions) in f32.
    """

    dtype: DType
    rows: int
    heads: int
    positions: int
    """Of Q, its gradient and the result."""
    keys: int
    """Positions of K and V."""
    width: int
    """Elements of a head."""
    causal: bool
    scale: float
    operands: tuple[int, ...]
    """Positions among the problem's inputs: gradient of the result, Q, K, V, result, logarithms."""
    results: tuple[int, ...]
    """Per output of the problem which gradient it is: 0 of Q, 1 of K, 2 of V."""


def attention_gradient(problem: Problem) -> AttentionGradient | Declined:
    """The sizes, or why the template does not take the problem."""
    graph = problem.graph
    calls = [n for n in graph.nodes if n.prim is Prim.OPAQUE]
    if not calls or len({n.inputs for n in calls}) > 1:
        return Declined("not one call")
    attrs = [n.attrs for n in calls if isinstance(n.attrs, a.OpaqueAttrs)]
    if len({(x.framework, x.payload) for x in attrs}) > 1 or attrs[0].framework != "aten":
        return Declined("not one call")
    told = _call(attrs[0].payload)
    if told is None:
        return Declined("not the gradients of attention")
    order, causal, scale = told
    ends = [_seen(graph, o) for o in graph.outputs]
    if any(graph.nodes[o].prim is not Prim.OPAQUE for o in ends) or len(calls) != len(ends):
        return Declined("the gradients of attention with something else")
    nodes = [calls[0].inputs[k] for k in order]
    if any(graph.nodes[_seen(graph, n)].prim is not Prim.INPUT for n in nodes):
        return Declined("the gradients of attention of operands that are computed")
    if {*problem.input_formats, *problem.output_formats} != {Format.ROW}:
        return Declined("the gradients of attention in another order")
    gradient, query, key, value, result, sums = (graph.type_of(n) for n in nodes)
    if query.rank != 4 or query.dtype not in (DType.F16, DType.BF16) or sums.dtype is not DType.F32:
        return Declined(f"the gradients of attention of {query}")
    rows, positions, heads, width = query.shape
    if width not in HEADS:
        return Declined(f"{width} elements of a head")
    alike = gradient == query == result and key == value and key.dtype is query.dtype
    alike = alike and key.shape == (rows, key.shape[1], heads, width) and sums.shape == (rows, heads, positions)
    if not alike or (causal and key.shape[1] != positions) or max(query.size, key.size) >= _LIMIT:
        return Declined(f"the gradients of attention of {query} and {key}")
    if rows * heads * positions * key.shape[1] > LARGEST_SCORES:
        return Declined("more scores than kernels are held to float64 with")
    inputs = list(graph.inputs)
    results = [graph.nodes[o].attrs for o in ends]
    return AttentionGradient(
        dtype=query.dtype,
        rows=rows,
        heads=heads,
        positions=positions,
        keys=key.shape[1],
        width=width,
        causal=causal,
        scale=scale,
        operands=tuple(inputs.index(_seen(graph, n)) for n in nodes),
        results=tuple(x.result for x in results if isinstance(x, a.OpaqueAttrs)),
    )


def _seen(graph: Graph, node: NodeId) -> NodeId:
    """What a value is another shape of."""
    while graph.nodes[node].prim is Prim.RESHAPE:
        node = graph.nodes[node].inputs[0]
    return node


def _call(payload: str) -> tuple[list[int], bool, float] | None:
    """Which of a call's operands its arguments are, and what follows them; None for other calls."""
    call: dict[str, Any] = json.loads(payload)
    if call.get("op") != OPERATOR or call.get("kwargs"):
        return None
    given = call.get("args", [])
    tensors = [x["tensor"] for x in given[:OPERANDS] if isinstance(x, dict) and isinstance(x.get("tensor"), int)]
    if len(tensors) != OPERANDS or len(given) != OPERANDS + 2:
        return None
    causal, scale = given[OPERANDS:]
    return (tensors, causal, float(scale)) if isinstance(causal, bool) and isinstance(scale, float) else None
