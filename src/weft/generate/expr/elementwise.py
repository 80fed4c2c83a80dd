"""One elementwise primitive, or a tree of them, as text.

The table `ELEMENTWISE` is total over the elementwise primitives. An entry gets its operands as `Value`s that are
already all scalars or all vectors, and returns an expression that is valid for both: operators where C++ has them with
the meaning of `weft.ir.prims`, functions of the runtime header elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.generate.expr.ctype import c_type, literal, register_kind, splat, vector_type
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType


@dataclass(frozen=True, slots=True)
class Value:
    """A named value in the generated text."""

    name: str
    """An identifier or a literal: cheap to repeat."""
    dtype: DType
    vector: bool = False
    """True: one value per lane. bool vectors are masks of 0 and -1, scalars are C++ bools."""
    constant: float | None = None
    """The value, when it is a known number."""

    @property
    def c_type(self) -> str:
        """Type of the variable that holds it."""
        return vector_type(self.dtype) if self.vector else c_type(self.dtype)


Printer = Callable[[Sequence[Value], DType], str]
"""(operands, element type of the result) -> expression."""


def _call(name: str) -> Printer:
    def printer(x: Sequence[Value], _: DType) -> str:
        return f"w_{name}({', '.join(v.name for v in x)})"

    return printer


def _arithmetic(name: str, operator: str) -> Printer:
    def printer(x: Sequence[Value], dtype: DType) -> str:
        # signed overflow is undefined in C++, so integers go through unsigned ones in the header
        if dtype.is_float:
            return f"({x[0].name} {operator} {x[1].name})"
        return f"w_{name}({x[0].name}, {x[1].name})"

    return printer


def _neg(x: Sequence[Value], dtype: DType) -> str:
    return f"(-{x[0].name})" if dtype.is_float else f"w_neg({x[0].name})"


def _reciprocal(x: Sequence[Value], dtype: DType) -> str:
    return f"({literal(1.0, dtype)} / {x[0].name})"


def _rsqrt(x: Sequence[Value], dtype: DType) -> str:
    return f"({literal(1.0, dtype)} / w_sqrt({x[0].name}))"


def _div(x: Sequence[Value], dtype: DType) -> str:
    if not dtype.is_float:
        return f"w_idiv({x[0].name}, {x[1].name})"
    c = x[1].constant
    if c is not None and math.isfinite(c) and c != 0 and math.frexp(c)[0] in (0.5, -0.5) and 1e-30 < abs(c) < 1e30:
        return f"({x[0].name} * {literal(1.0 / c, dtype)})"  # exact: a power of two
    return f"({x[0].name} / {x[1].name})"


def _pow(x: Sequence[Value], dtype: DType) -> str:
    base, exponent = x[0].name, x[1].constant
    if dtype.is_float:
        match exponent:
            case 1.0:
                return base
            case 2.0:
                return f"({base} * {base})"
            case -1.0:
                return f"({literal(1.0, dtype)} / {base})"
            case 0.5:  # pow(-0, .5) is +0 and pow(-inf, .5) is +inf
                return f"w_pow_half({base})"
            case _:
                return f"w_pow({base}, {x[1].name})"
    return f"w_ipow({base}, {x[1].name})"


def _mod(x: Sequence[Value], dtype: DType) -> str:
    return f"w_{'f' if dtype.is_float else 'i'}mod_floor({x[0].name}, {x[1].name})"


def _fmod(x: Sequence[Value], dtype: DType) -> str:
    return f"w_{'f' if dtype.is_float else 'i'}mod_trunc({x[0].name}, {x[1].name})"


def _extremum(name: str) -> Printer:
    def printer(x: Sequence[Value], dtype: DType) -> str:
        if dtype is DType.BOOL:
            return f"({x[0].name} {'|' if name == 'max' else '&'} {x[1].name})"
        for k in (0, 1):
            c = x[k].constant
            if c is not None and not math.isnan(c):
                # one machine instruction: a constant is never NaN, so the other operand's NaN is all to keep
                return f"w_{name}_const({x[1 - k].name}, {x[k].name})"
        return f"w_{name}({x[0].name}, {x[1].name})"

    return printer


def _bitwise(operator: str) -> Printer:
    def printer(x: Sequence[Value], dtype: DType) -> str:
        inner = f"({x[0].name} {operator} {x[1].name})"
        return inner if x[0].vector or dtype is not DType.BOOL else f"(bool){inner}"

    return printer


def _not(x: Sequence[Value], dtype: DType) -> str:
    if dtype is DType.BOOL and not x[0].vector:
        return f"(!{x[0].name})"
    return f"({x[0].c_type})(~{x[0].name})"


_BOOL_COMPARISON = {
    "==": "({n0} ^ {1})",
    "!=": "({0} ^ {1})",
    "<": "({n0} & {1})",
    "<=": "({n0} | {1})",
    ">": "({0} & {n1})",
    ">=": "({0} | {n1})",
}


def _comparison(operator: str) -> Printer:
    def printer(x: Sequence[Value], _: DType) -> str:
        if x[0].dtype is DType.BOOL:  # a mask's true is -1, so the order of integers would be upside down
            names = [v.name for v in x]
            negated = [f"(~{v.name})" if v.vector else f"(!{v.name})" for v in x]
            text = _BOOL_COMPARISON[operator].format(*names, n0=negated[0], n1=negated[1])
            return text if x[0].vector else f"(bool){text}"
        inner = f"({x[0].name} {operator} {x[1].name})"
        return f"w_mask{inner}" if x[0].vector else inner

    return printer


def _cast(x: Sequence[Value], dtype: DType) -> str:
    value = x[0]
    source, target = register_kind(value.dtype), register_kind(dtype)
    if value.dtype is dtype:
        return value.name
    if dtype is DType.BOOL:
        zero = literal(0, value.dtype)
        zero = splat(zero, value.dtype) if value.vector else zero
        return f"w_mask({value.name} != {zero})" if value.vector else f"({value.name} != {zero})"
    text = value.name
    if source != target:
        suffix = "v" if value.vector else ""
        text = f"w_from_bool_{target}{suffix}({text})" if source == "bool" else f"w_to_{target}{suffix}({text})"
    if dtype.is_float and dtype.itemsize < 4 and value.dtype is not DType.BOOL:
        # a cast is the one place where the model asked for this rounding by name
        return f"w_round_{dtype.value}({text})"
    return text


ELEMENTWISE: Mapping[Prim, Printer] = {
    Prim.NEG: _neg,
    Prim.ABS: _call("abs"),
    Prim.SIGN: _call("sign"),
    Prim.EXP: _call("exp"),
    Prim.EXPM1: _call("expm1"),
    Prim.LOG: _call("log"),
    Prim.LOG1P: _call("log1p"),
    Prim.SQRT: _call("sqrt"),
    Prim.RSQRT: _rsqrt,
    Prim.RECIPROCAL: _reciprocal,
    Prim.ERF: _call("erf"),
    Prim.TANH: _call("tanh"),
    Prim.SIN: _call("sin"),
    Prim.COS: _call("cos"),
    Prim.TAN: _call("tan"),
    Prim.ASIN: _call("asin"),
    Prim.ACOS: _call("acos"),
    Prim.ATAN: _call("atan"),
    Prim.SINH: _call("sinh"),
    Prim.COSH: _call("cosh"),
    Prim.ASINH: _call("asinh"),
    Prim.ACOSH: _call("acosh"),
    Prim.ATANH: _call("atanh"),
    Prim.FLOOR: _call("floor"),
    Prim.CEIL: _call("ceil"),
    Prim.TRUNC: _call("trunc"),
    Prim.ROUND: _call("round"),
    Prim.ISNAN: _call("isnan"),
    Prim.ISINF: _call("isinf"),
    Prim.NOT: _not,
    Prim.CAST: _cast,
    Prim.ADD: _arithmetic("add", "+"),
    Prim.SUB: _arithmetic("sub", "-"),
    Prim.MUL: _arithmetic("mul", "*"),
    Prim.DIV: _div,
    Prim.POW: _pow,
    Prim.MOD: _mod,
    Prim.FMOD: _fmod,
    Prim.ATAN2: _call("atan2"),
    Prim.MAX: _extremum("max"),
    Prim.MIN: _extremum("min"),
    Prim.AND: _bitwise("&"),
    Prim.OR: _bitwise("|"),
    Prim.XOR: _bitwise("^"),
    Prim.SHL: _call("shl"),
    Prim.SHR: _call("shr"),
    Prim.EQ: _comparison("=="),
    Prim.NE: _comparison("!="),
    Prim.LT: _comparison("<"),
    Prim.LE: _comparison("<="),
    Prim.GT: _comparison(">"),
    Prim.GE: _comparison(">="),
    Prim.SELECT: _call("select"),
}


def elementwise(prim: Prim, operands: Sequence[Value], dtype: DType) -> tuple[str, bool]:
    """Print one primitive with result type `dtype`: (expression, whether it is a vector).

    Operands may mix scalars and vectors; scalars are splat where needed. KeyError for any other primitive.
    """
    vector = any(v.vector for v in operands)
    if vector:
        operands = [v if v.vector else replace(v, name=splat(v.name, v.dtype), vector=True) for v in operands]
    return ELEMENTWISE[prim](operands, dtype), vector


@dataclass(frozen=True, slots=True)
class Emitted:
    """Straight-line code and the value it leaves."""

    statements: tuple[str, ...]
    result: Value


def emit_expression(graph: Graph, node: NodeId, load: Callable[[NodeId], Value], prefix: str = "e") -> Emitted:
    """The tree of elementwise primitives above `node`, each printed once.

    `load` is asked for every node that is not elementwise, and first for every node: it returns the value that
    stands for it at the current element (a name with its type), or raises KeyError for one that is to be printed.
    Rank-0 (and other one-element) constants are literals without asking. Names are `<prefix><node>`.
    """
    printer = _Printer(graph, load, prefix)
    result = printer.visit(node)
    return Emitted(tuple(printer.statements), result)


@dataclass(slots=True)
class _Printer:
    """See `emit_expression`."""

    graph: Graph
    load: Callable[[NodeId], Value]
    prefix: str
    done: dict[NodeId, Value] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)

    def visit(self, n: NodeId) -> Value:
        """The value of a node, printed if it was not."""
        if n in self.done:
            return self.done[n]
        graph = self.graph
        record = graph.nodes[n]
        if record.prim is Prim.CONSTANT and record.type.size == 1:
            number = graph.constant(n).reshape(()).item()
            value = Value(literal(number, record.type.dtype), record.type.dtype, constant=float(number))
        elif CATEGORY[record.prim] is not Category.ELEMENTWISE:
            inner = record.inputs[0] if record.prim in (Prim.BROADCAST, Prim.RESHAPE) else -1
            one = inner >= 0 and graph.type_of(inner).size == 1 and graph.nodes[inner].prim is Prim.CONSTANT
            value = self.visit(inner) if one else self.load(n)
        else:
            try:
                value = self.load(n)
            except KeyError:
                operands = [self.visit(i) for i in record.inputs]
                dtype = record.type.dtype
                text, vector = elementwise(record.prim, operands, dtype)
                value = Value(f"{self.prefix}{n}", dtype, vector)
                self.statements.append(f"const {value.c_type} {value.name} = {text};")
        self.done[n] = value
        return value
