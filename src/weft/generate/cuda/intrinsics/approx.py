"""Where the last bits of f32 are lost anyway: graphs whose results all have 16 bits may use the GPU's own functions.

Those err by a few units in the last place of f32 (the exponential by up to 2⁻¹⁷ at its limits), far below half a unit
of a 16-bit result; correctly rounded division and roots cost ten instructions and a branch each.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np

from weft.generate.expr import literal
from weft.generate.loopnest.plan import live_nodes
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

FUNCTIONS = {
    Prim.EXP: "w_rough_exp({0})",
    Prim.DIV: "w_rough_div({0}, {1})",
    Prim.RECIPROCAL: "w_rough_div(1.0f, {0})",
    Prim.SQRT: "w_rough_sqrt({0})",
    Prim.RSQRT: "w_rough_rsqrt({0})",
    Prim.ERF: "w_rough_erf({0})",
}
NARROW = frozenset({DType.F16, DType.BF16})
LEAST_BESIDE = 0.5
JUMPS = frozenset(
    {
        Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND, Prim.MOD, Prim.FMOD, Prim.SIGN, Prim.EQ, Prim.NE, Prim.LT,
        Prim.LE, Prim.GT, Prim.GE, Prim.ARGMAX, Prim.ARGMIN, Prim.POW, Prim.TAN, Prim.SIN, Prim.COS,
    }
)  # fmt: skip
"""Primitives that may turn a small error into a large one."""


@cache
def approx_header() -> str:
    """Text of weft_cuda_rough.h."""
    return Path(__file__).with_name("weft_cuda_rough.h").read_text()


def times_inverse(value: str, divisor: float) -> str | None:
    """Text of a value over a constant as a product, off by a unit of f32; None where that leaves the normal numbers."""
    if not (math.isfinite(divisor) and 1e-30 < abs(divisor) < 1e30):
        return None
    return f"({value} * {literal(float(np.float32(1.0 / divisor)), DType.F32)})"


def is_approximated(graph: Graph, node: NodeId) -> bool:
    """Whether a primitive of a graph that may be rough has a function here.

    The error function has in sums with constants, such as 1 + erf(x): its error is small beside 1, not beside itself.
    """
    if graph.nodes[node].prim is not Prim.ERF:
        return graph.nodes[node].prim in FUNCTIONS
    if node in graph.outputs:
        return False
    return all(
        graph.nodes[u].prim is Prim.ADD and any(_is_large_constant(graph, i) for i in graph.nodes[u].inputs)
        for u in graph.users()[node]
    )


def _is_large_constant(graph: Graph, node: NodeId) -> bool:
    while graph.nodes[node].prim is Prim.BROADCAST:
        node = graph.nodes[node].inputs[0]
    return graph.nodes[node].prim is Prim.CONSTANT and bool((abs(graph.constant(node)) >= LEAST_BESIDE).all())


def may_approximate(graph: Graph) -> bool:
    """Whether all results have 16 bits and nothing in between magnifies an error."""
    if any(graph.type_of(n).dtype not in NARROW for n in graph.outputs):
        return False
    touched: set[int] = set()
    for n in live_nodes(graph):
        record = graph.nodes[n]
        if touched & set(record.inputs):
            if record.prim in JUMPS:
                return False
            if isinstance(record.attrs, a.CastAttrs) and not record.attrs.dtype.is_float:
                return False
            touched.add(n)
        elif record.prim in FUNCTIONS:
            touched.add(n)
    return True
