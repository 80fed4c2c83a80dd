"""Arithmetic that does nothing, or the same more cheaply: every rule is exact, bit for bit, NaN and -0 included."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, Node, NodeId
from weft.ir.passes.protocol import PassResult
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.rewrite import rewrite
from weft.ir.types import DType

_Inputs = tuple[NodeId, ...]
_Rule = Callable[[GraphBuilder, Node, _Inputs], NodeId | None]

_LOOK_AT = 65_536
"""Larger constants are not searched for being uniform: they are weights."""

_NEVER_MINUS_ZERO = frozenset({Prim.EXP, Prim.ABS, Prim.COSH, Prim.IOTA})


def uniform_value(b: GraphBuilder, node: NodeId) -> float | int | bool | None:
    """The one value of a constant (perhaps broadcast or reshaped) whose elements are all the same; None otherwise.

    -0.0 and 0.0 are different values here.
    """
    while b.node(node).prim in (Prim.BROADCAST, Prim.RESHAPE):
        node = b.node(node).inputs[0]
    data = b.constant_value(node)
    if data is None or not 0 < data.size <= _LOOK_AT:
        return None
    elements: Any = data.reshape(-1)
    first = elements[0].item()
    if not np.all(elements == elements[0]) or (first == 0 and np.any(np.signbit(elements.astype(np.float64)))):
        same_zero = first == 0 and bool(np.all(elements == 0) and np.all(np.signbit(elements)))
        return -0.0 if same_zero else None
    return cast("float | int | bool", first)


def _is(value: float | None, wanted: float) -> bool:
    """Equal, and of the same sign where it is zero."""
    return value is not None and value == wanted and math.copysign(1.0, value) == math.copysign(1.0, wanted)


def _add(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    for x, other in (inputs, inputs[::-1]):
        value = uniform_value(b, other)
        # x + 0.0 turns -0.0 into 0.0, x + -0.0 is x
        harmless = not node.type.dtype.is_float or b.node(x).prim in _NEVER_MINUS_ZERO
        if _is(value, -0.0) or (harmless and value == 0):
            return x
    return None


def _sub(b: GraphBuilder, _: Node, inputs: _Inputs) -> NodeId | None:
    # x - 0.0 is x, -0.0 included
    return inputs[0] if _is(uniform_value(b, inputs[1]), 0.0) else None


def _mul(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    for x, other in (inputs, inputs[::-1]):
        value = uniform_value(b, other)
        if value == 1:
            return x
        if value == 0 and node.type.dtype.is_integer:
            return other  # floats keep NaN, infinity and the sign of zero
    return None


def _div(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    value = uniform_value(b, inputs[1])
    if value == 1:
        return inputs[0]
    if value is None or not node.type.dtype.is_float or not math.isfinite(value) or value == 0:
        return None
    mantissa, exponent = math.frexp(value)
    # half the range of f16: neither the divisor nor its reciprocal may be subnormal in any type
    if abs(mantissa) != 0.5 or abs(exponent) > 13:
        return None
    factor = b.broadcast(b.scalar(1 / value, node.type.dtype), node.type.shape)
    return b.add(Prim.MUL, inputs[0], factor)


def _pow(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    x, value = inputs[0], uniform_value(b, inputs[1])
    if value == 1:
        return x
    if value == 2:
        return b.add(Prim.MUL, x, x)
    return b.add(Prim.RECIPROCAL, x) if value == -1 and node.type.dtype.is_float else None


def _extreme(sign: float) -> _Rule:
    def rule(b: GraphBuilder, _: Node, inputs: _Inputs) -> NodeId | None:
        if inputs[0] == inputs[1]:
            return inputs[0]
        for x, other in (inputs, inputs[::-1]):
            if uniform_value(b, other) == sign * math.inf:
                return x
        return None

    return rule


def _and_or(neutral: bool) -> _Rule:
    def rule(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
        if inputs[0] == inputs[1]:
            return inputs[0]
        for x, other in (inputs, inputs[::-1]):
            value = uniform_value(b, other)
            if node.type.dtype is DType.BOOL and value is not None:
                return x if value == neutral else other
        return None

    return rule


def _inverse_of_itself(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    inner = b.node(inputs[0])
    return inner.inputs[0] if inner.prim is node.prim else None


def _abs(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    inner = b.node(inputs[0])
    if inner.prim is Prim.ABS or (inner.prim is Prim.EXP and node.type.dtype.is_float):
        return inputs[0]
    return b.add(Prim.ABS, inner.inputs[0]) if inner.prim is Prim.NEG else None


def _already_done(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    return inputs[0] if b.node(inputs[0]).prim is node.prim else None


def _select(b: GraphBuilder, _: Node, inputs: _Inputs) -> NodeId | None:
    condition, x, y = inputs
    if x == y:
        return x
    value = uniform_value(b, condition)
    if value is not None:
        return x if value else y
    inner = b.node(condition)
    return b.add(Prim.SELECT, inner.inputs[0], y, x) if inner.prim is Prim.NOT else None


def _reduce(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    """A reduction over dimensions of size 1, or over none."""
    return inputs[0] if b.type_of(inputs[0]) == node.type else None


def _window(_: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    w = cast("a.WindowAttrs", node.attrs)
    trivial = max(w.kernel + w.strides) == 1 and max(w.pads_lo + w.pads_hi) == 0
    return inputs[0] if trivial else None


_RULES: Mapping[Prim, _Rule] = {
    Prim.ADD: _add,
    Prim.SUB: _sub,
    Prim.MUL: _mul,
    Prim.DIV: _div,
    Prim.POW: _pow,
    Prim.MAX: _extreme(-1.0),
    Prim.MIN: _extreme(1.0),
    Prim.AND: _and_or(neutral=True),
    Prim.OR: _and_or(neutral=False),
    Prim.NEG: _inverse_of_itself,
    Prim.NOT: _inverse_of_itself,
    Prim.ABS: _abs,
    **dict.fromkeys((Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND, Prim.SIGN), _already_done),
    Prim.SELECT: _select,
    **dict.fromkeys((Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.REDUCE_MIN), _reduce),
    Prim.WINDOW_SUM: _window,
    Prim.WINDOW_MAX: _window,
}


def _visit(b: GraphBuilder, node: Node, inputs: _Inputs) -> NodeId | None:
    rule = _RULES.get(node.prim)
    return None if rule is None else rule(b, node, inputs)


@dataclass(frozen=True, slots=True)
class SimplifyArithmeticPass:
    """x·1, x/1, x - 0, x + (-0), max(x, x), -(-x), |-x|, where(true, x, y), … → x; x/2ⁿ → x·2⁻ⁿ; x² → x·x."""

    name: ClassVar[str] = "simplify-arithmetic"

    def requires(self, graph: Graph) -> Declined | None:
        """Some computation."""
        sources = (Category.SOURCE, Category.LINEAR, Category.OPAQUE)
        computes = any(CATEGORY[node.prim] not in sources for node in graph.nodes)
        return None if computes else Declined("no arithmetic")

    def run(self, graph: Graph) -> PassResult:
        """Exact."""
        return PassResult(*rewrite(graph, _visit))
