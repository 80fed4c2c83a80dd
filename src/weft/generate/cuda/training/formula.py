"""Activations that are any expression of one number: as nodes of a graph, as C text, and their derivatives.

A formula is a sequence of elementwise primitives in float32 (and bool, for choices). The derivative is taken forwards,
step by step, in the same primitives; where a maximum or minimum has two equal operands it is that of the second one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from weft.generate.cuda.intrinsics.approx import FUNCTIONS, JUMPS
from weft.generate.expr.ctype import c_type, literal
from weft.generate.expr.elementwise import Value, elementwise
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.passes import clean_up
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType

F32 = DType.F32
_LONGEST = 400
"""Steps."""
_PROBED = 16.0
"""A formula that is to be differentiated is finite up to this argument, either way, and so is its derivative."""


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive; an operand is a number, or 0 for x and i + 1 for step i."""

    prim: Prim
    dtype: DType
    operands: tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class Formula:
    """The last step is the result."""

    steps: tuple[Step, ...]

    @staticmethod
    def of(graph: Graph) -> Formula | Declined:
        """Of a graph of one float32 input and one result of its shape, all elementwise."""
        if len(graph.inputs) != 1 or len(graph.outputs) != 1:
            return Declined("an expression of several values")
        x, out = graph.inputs[0], graph.outputs[0]
        if graph.type_of(out) != graph.type_of(x):
            return Declined("an expression whose result has another shape or type")
        found: dict[NodeId, int | float] = {x: 0}
        steps: list[Step] = []
        for node, record in enumerate(graph.nodes):
            if node == x:
                continue
            if record.prim is Prim.CONSTANT and record.type.size == 1:
                found[node] = float(np.asarray(graph.constant(node)).reshape(()))
            elif record.prim is Prim.BROADCAST and isinstance(found.get(record.inputs[0]), float):
                found[node] = found[record.inputs[0]]
            elif CATEGORY[record.prim] is Category.ELEMENTWISE and all(i in found for i in record.inputs):
                if record.type.dtype not in (F32, DType.BOOL):
                    return Declined(f"{record.prim.value} in {record.type.dtype.value}")
                steps.append(Step(record.prim, record.type.dtype, tuple(found[i] for i in record.inputs)))
                found[node] = len(steps)
            else:
                return Declined(f"{record.prim.value}, which is not elementwise")
        if found[out] != len(steps) or not steps:  # a number, or the value itself
            steps.append(Step(Prim.ADD, F32, (found[out], 0.0)))
        if len(steps) > _LONGEST:
            return Declined(f"an expression of {len(steps)} steps")
        return Formula(tuple(steps))

    def apply(self, b: GraphBuilder, x: NodeId) -> NodeId:
        """Of a value of floats, computed in float32."""
        values = self._nodes(b, b.cast(x, F32))
        return b.cast(values[-1], b.type_of(x).dtype)

    def _nodes(self, b: GraphBuilder, x: NodeId) -> list[NodeId]:
        """x, and the value of each step."""
        found = [x]
        shape = b.type_of(x).shape
        for step in self.steps:
            operands = [self._operand(b, step, i, found, shape) for i in range(len(step.operands))]
            attrs = a.CastAttrs(step.dtype) if step.prim is Prim.CAST else a.NO_ATTRS
            found.append(b.add(step.prim, *operands, attrs=attrs))
        return found

    def _operand(self, b: GraphBuilder, step: Step, at: int, found: Sequence[NodeId], shape: tuple[int, ...]) -> NodeId:
        x = step.operands[at]
        if isinstance(x, int):
            return found[x]
        return b.broadcast(b.scalar(x, self.type_of_number(step, at)), shape)

    def type_of_number(self, step: Step, at: int) -> DType:
        """Of an operand that is a number."""
        others = [self.dtype_of(x) for x in step.operands if isinstance(x, int)]
        if step.prim is Prim.SELECT:
            return DType.BOOL if at == 0 else step.dtype
        return others[0] if others else step.dtype

    def dtype_of(self, value: int) -> DType:
        """Of x (0) or a step (from 1)."""
        return self.steps[value - 1].dtype if value else F32

    def derivative(self) -> Formula | Declined:
        """With respect to x."""
        return _derivative(self)

    def smooth(self) -> Declined | None:
        """Why gradients are left to torch: the expression or its derivative is infinite, or none, where it may be."""
        return _smooth(self)

    def at(self, x: np.ndarray) -> np.ndarray:
        """In float32, number by number; for tests and probes."""
        b = GraphBuilder()
        given = b.input(TensorType(F32, x.shape))
        graph = b.build([self.apply(b, given)])
        with np.errstate(all="ignore"):
            return np.asarray(evaluate(graph, [x.astype(np.float32)])[0])

    def text(self, x: str, kind: str) -> tuple[list[str], str]:
        """(statements, result) in C; `kind`: the 16-bit type of what comes of it.

        The machine's own functions are used where no step makes much of a small error.
        """
        exact = any(s.prim in JUMPS - {Prim.SIN, Prim.COS} for s in self.steps)
        own = {Prim.SIN: "w_mlp_sin({0})", Prim.COS: "w_mlp_cos({0})"}
        if not exact:
            own |= {p: f for p, f in FUNCTIONS.items() if p is not Prim.ERF}
            own[Prim.TANH] = f"w_mlp_tanh_{kind}({{0}})"
        values = [Value(x, F32)]
        lines = []
        for number, step in enumerate(self.steps):
            operands = []
            for at, operand in enumerate(step.operands):
                if isinstance(operand, int):
                    operands.append(values[operand])
                    continue
                dtype = self.type_of_number(step, at)
                number_ = bool(operand) if dtype is DType.BOOL else float(np.float32(operand))
                operands.append(Value(literal(number_, dtype), dtype, constant=float(operand)))
            constant = step.prim is Prim.DIV and isinstance(step.operands[1], float)
            if step.prim in own and not constant:
                text = own[step.prim].format(*(v.name for v in operands))
            else:
                text = elementwise(step.prim, operands, step.dtype)[0]
            lines.append(f"const {c_type(step.dtype)} t{number} = {text};")
            values.append(Value(f"t{number}", step.dtype))
        return lines, values[-1].name


IDENTITY = Formula((Step(Prim.ADD, F32, (0, 0.0)),))
_Rule = Callable[[GraphBuilder, NodeId, NodeId], NodeId]
"""(builder, operand, result) -> factor of the operand's derivative."""


def _inverse_root(b: GraphBuilder, x: NodeId, sign: float, first: float) -> NodeId:
    """1 / sqrt(first + sign x^2)."""
    square = b.apply(Prim.MUL, x, x)
    return b.apply(Prim.RSQRT, b.apply(Prim.ADD, square if sign > 0 else b.apply(Prim.NEG, square), first))


def _square(b: GraphBuilder, x: NodeId, sign: float = 1.0, first: float = 0.0) -> NodeId:
    square = b.apply(Prim.MUL, x, x)
    square = square if sign > 0 else b.apply(Prim.NEG, square)
    return b.apply(Prim.ADD, square, first) if first else square


_RULES: dict[Prim, _Rule] = {
    Prim.NEG: lambda b, x, y: b.broadcast(b.scalar(-1.0, F32), b.type_of(y).shape),
    Prim.ABS: lambda b, x, y: b.apply(Prim.SIGN, x),
    Prim.EXP: lambda b, x, y: y,
    Prim.EXPM1: lambda b, x, y: b.apply(Prim.ADD, y, 1.0),
    Prim.LOG: lambda b, x, y: b.apply(Prim.RECIPROCAL, x),
    Prim.LOG1P: lambda b, x, y: b.apply(Prim.RECIPROCAL, b.apply(Prim.ADD, x, 1.0)),
    Prim.SQRT: lambda b, x, y: b.apply(Prim.DIV, b.broadcast(b.scalar(0.5, F32), b.type_of(y).shape), y),
    Prim.RSQRT: lambda b, x, y: b.apply(Prim.MUL, b.apply(Prim.MUL, b.apply(Prim.MUL, y, y), y), -0.5),
    Prim.RECIPROCAL: lambda b, x, y: _square(b, y, -1.0),
    Prim.ERF: lambda b, x, y: b.apply(Prim.MUL, b.apply(Prim.EXP, _square(b, x, -1.0)), 2 / math.sqrt(math.pi)),
    Prim.TANH: lambda b, x, y: _square(b, y, -1.0, 1.0),
    Prim.SIN: lambda b, x, y: b.apply(Prim.COS, x),
    Prim.COS: lambda b, x, y: b.apply(Prim.NEG, b.apply(Prim.SIN, x)),
    Prim.TAN: lambda b, x, y: _square(b, y, 1.0, 1.0),
    Prim.ASIN: lambda b, x, y: _inverse_root(b, x, -1.0, 1.0),
    Prim.ACOS: lambda b, x, y: b.apply(Prim.NEG, _inverse_root(b, x, -1.0, 1.0)),
    Prim.ATAN: lambda b, x, y: b.apply(Prim.RECIPROCAL, _square(b, x, 1.0, 1.0)),
    Prim.SINH: lambda b, x, y: b.apply(Prim.COSH, x),
    Prim.COSH: lambda b, x, y: b.apply(Prim.SINH, x),
    Prim.ASINH: lambda b, x, y: _inverse_root(b, x, 1.0, 1.0),
    Prim.ACOSH: lambda b, x, y: _inverse_root(b, x, 1.0, -1.0),
    Prim.ATANH: lambda b, x, y: b.apply(Prim.RECIPROCAL, _square(b, x, -1.0, 1.0)),
}  # fmt: skip
_FLAT = frozenset({Prim.SIGN, Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND})


class _UnknownError(Exception):
    pass


@lru_cache(maxsize=256)
def _derivative(f: Formula) -> Formula | Declined:
    b = GraphBuilder()
    x = b.input(TensorType(F32, (4,)))
    values = f._nodes(b, x)
    slopes: list[NodeId | None] = [b.broadcast(b.scalar(1.0, F32), (4,))]
    try:
        for number, step in enumerate(f.steps, start=1):
            slopes.append(_slope(b, f, step, values, slopes, values[number]))
    except _UnknownError as unknown:
        return Declined(f"no derivative of {unknown}")
    last = slopes[-1]
    if last is None:
        last = b.broadcast(b.scalar(0.0, F32), (4,))
    return formula(b.build([last]))


def _slope(
    b: GraphBuilder, f: Formula, step: Step, values: Sequence[NodeId], slopes: Sequence[NodeId | None], y: NodeId
) -> NodeId | None:
    """The derivative of a step; None where it is zero."""
    if step.dtype is not F32 or step.prim in _FLAT:
        return None
    shape = b.type_of(y).shape
    x = [f._operand(b, step, i, values, shape) for i in range(len(step.operands))]
    d = [slopes[i] if isinstance(i, int) else None for i in step.operands]
    if all(s is None for s in d):
        return None

    def times(factor: NodeId, slope: NodeId | None) -> NodeId | None:
        return None if slope is None else b.apply(Prim.MUL, factor, slope)

    def plus(one: NodeId | None, other: NodeId | None) -> NodeId | None:
        return other if one is None else one if other is None else b.apply(Prim.ADD, one, other)

    def known(slope: NodeId | None) -> NodeId:
        return b.broadcast(b.scalar(0.0, F32), shape) if slope is None else slope

    def less(slope: NodeId | None) -> NodeId | None:
        return None if slope is None else b.apply(Prim.NEG, slope)

    match step.prim:
        case Prim.CAST:
            return d[0]
        case Prim.ADD:
            return plus(d[0], d[1])
        case Prim.SUB:
            return plus(d[0], less(d[1]))
        case Prim.MUL:
            return plus(times(x[1], d[0]), times(x[0], d[1]))
        case Prim.DIV:
            top = plus(d[0], less(times(y, d[1])))
            return None if top is None else b.apply(Prim.DIV, top, x[1])
        case Prim.POW:
            first = None
            if d[0] is not None:
                lower = b.apply(Prim.POW, x[0], b.apply(Prim.SUB, x[1], 1.0))
                if isinstance(step.operands[1], float):
                    lower = b.apply(Prim.POW, x[0], b.broadcast(b.scalar(step.operands[1] - 1.0, F32), shape))
                first = times(b.apply(Prim.MUL, x[1], lower), d[0])
            return plus(first, times(b.apply(Prim.MUL, y, b.apply(Prim.LOG, x[0])), d[1]) if d[1] is not None else None)
        case Prim.MAX | Prim.MIN:
            chosen = b.apply(Prim.GT if step.prim is Prim.MAX else Prim.LT, x[0], x[1])
            return b.apply(Prim.SELECT, chosen, known(d[0]), known(d[1]))
        case Prim.SELECT:
            return b.apply(Prim.SELECT, x[0], known(d[1]), known(d[2]))
        case Prim.MOD | Prim.FMOD if d[1] is None:
            return d[0]
        case Prim.ATAN2:
            size = b.apply(Prim.ADD, _square(b, x[0]), _square(b, x[1]))
            top = plus(times(x[1], d[0]), less(times(x[0], d[1])))
            return None if top is None else b.apply(Prim.DIV, top, size)
    if step.prim not in _RULES:
        raise _UnknownError(step.prim.value)
    return times(_RULES[step.prim](b, x[0], y), d[0])


@lru_cache(maxsize=256)
def _smooth(f: Formula) -> Declined | None:
    derivative = f.derivative()
    if isinstance(derivative, Declined):
        return derivative
    x = np.concatenate([np.linspace(-_PROBED, _PROBED, 4097), [0.0, -0.0, 1e-6, -1e-6]]).astype(np.float32)
    if np.isfinite(f.at(x)).all() and np.isfinite(derivative.at(x)).all():
        return None
    return Declined("an activation that is not finite everywhere, or whose slope is not")


def formula(graph: Graph) -> Formula | Declined:
    """Of an imported graph, simplified."""
    return Formula.of(clean_up(graph, strict=True).graph)
