"""Elementwise arithmetic with NumPy broadcasting, and the operators that are a few such steps."""

from __future__ import annotations

import math

from weft.fission.rule import ABSENT, common_shape, dtype_of, full, narrow, not_float, widen
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

BINARY = {
    p.value: p
    for p in (
        Prim.ADD, Prim.SUB, Prim.MUL, Prim.DIV, Prim.MOD, Prim.FMOD, Prim.ATAN2, Prim.MAX, Prim.MIN, Prim.AND, Prim.OR,
        Prim.XOR, Prim.SHL, Prim.SHR, Prim.EQ, Prim.NE, Prim.LT, Prim.LE, Prim.GT, Prim.GE, Prim.POW,
    )
}  # fmt: skip
"""What `binary` takes as `op`."""

UNARY = {
    p.value: p
    for p in (
        Prim.NEG, Prim.ABS, Prim.SIGN, Prim.EXP, Prim.EXPM1, Prim.LOG, Prim.LOG1P, Prim.SQRT, Prim.RSQRT,
        Prim.RECIPROCAL, Prim.ERF, Prim.TANH, Prim.SIN, Prim.COS, Prim.TAN, Prim.ASIN, Prim.ACOS, Prim.ATAN, Prim.SINH,
        Prim.COSH, Prim.ASINH, Prim.ACOSH, Prim.ATANH, Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND, Prim.ISNAN,
        Prim.ISINF, Prim.NOT,
    )
}  # fmt: skip
"""What `unary` takes as `op`."""

_FLOAT_ONLY = frozenset(UNARY.values()) - {Prim.NEG, Prim.ABS, Prim.SIGN, Prim.NOT}
_INTEGER_IDENTITY = frozenset({Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND})
_LOGICAL = frozenset({Prim.AND, Prim.OR, Prim.XOR})
_ORDER = frozenset({Prim.EQ, Prim.NE, Prim.LT, Prim.LE, Prim.GT, Prim.GE, Prim.MAX, Prim.MIN})


def unary(b: GraphBuilder, x: NodeId, *, op: str) -> NodeId | Declined:
    """unary(x) → one primitive; rounding of integers → x.

    Shapes: any.
    Conditions: `op` is a key of `UNARY`; floats for the transcendental ones, bool and integers for `not`.
    Source: weft.ir.prims.
    """
    dtype = dtype_of(b, x)
    prim = UNARY.get(op)
    if prim is None:
        return Declined(f"no unary primitive {op!r}")
    if prim in _INTEGER_IDENTITY and dtype.is_integer:
        return x
    if (prim in _FLOAT_ONLY and not dtype.is_float) or (prim is Prim.NOT and dtype.is_float):
        return Declined(f"{op} of {dtype.value}")
    if dtype is DType.BOOL and prim is not Prim.NOT:
        return Declined(f"{op} of bool")
    if dtype is DType.U8 and prim is Prim.ABS:
        return x
    return b.apply(prim, x)


def tanh(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """tanh(x) → tanh(x); a primitive, since (1 − e)/(1 + e) cancels near 0 and is ∞/∞ far from it.

    Shapes: any.
    Conditions: floats.
    Source: `torch.tanh`; ONNX Tanh.
    """
    return unary(b, x, op="tanh")


def erf(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """erf(x) → erf(x).

    Shapes: any.
    Conditions: floats.
    Source: `torch.erf`; ONNX Erf.
    """
    return unary(b, x, op="erf")


def isnan(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """isnan(x) → isnan(x).

    Shapes: any; the result is bool.
    Conditions: floats.
    Source: `torch.isnan`; ONNX IsNaN.
    """
    return unary(b, x, op="isnan")


def binary(b: GraphBuilder, x: NodeId, y: NodeId, *, op: str) -> NodeId | Declined:
    """binary(x, y) → one primitive over the common shape; pow goes through `pow`.

    Shapes: NumPy's common shape.
    Conditions: `op` is a key of `BINARY`; one element type (promotion is the front end's); integer DIV truncates.
    Source: weft.ir.prims.
    """
    prim = BINARY.get(op)
    if prim is None:
        return Declined(f"no binary primitive {op!r}")
    if prim is Prim.POW:
        return pow_(b, x, y)
    s, t = dtype_of(b, x), dtype_of(b, y)
    if s is not t:
        return Declined(f"{op} of {s.value} and {t.value}")
    if s is DType.BOOL and prim not in _LOGICAL | _ORDER:
        return Declined(f"{op} of bool")
    if s.is_float and prim in _LOGICAL | {Prim.SHL, Prim.SHR}:
        return Declined(f"{op} of {s.value}")
    if prim is Prim.ATAN2 and not s.is_float:
        return Declined(f"{op} of {s.value}")
    return b.apply(prim, x, y)


def logical(b: GraphBuilder, x: NodeId, y: NodeId, *, op: str) -> NodeId | Declined:
    """logical(x, y) → and, or, xor of x ≠ 0 and y ≠ 0.

    Shapes: NumPy's common shape; the result is bool.
    Conditions: `op` is "and", "or" or "xor".
    Source: `torch.logical_and`; ONNX And.
    """
    prim = BINARY.get(op)
    if prim not in _LOGICAL or prim is None:
        return Declined(f"no logical operator {op!r}")
    return b.apply(prim, b.cast(x, DType.BOOL), b.cast(y, DType.BOOL))


def logical_not(b: GraphBuilder, x: NodeId) -> NodeId:
    """logical_not(x) → not(x ≠ 0).

    Shapes: any; the result is bool.
    Conditions: none.
    Source: `torch.logical_not`; ONNX Not.
    """
    return b.apply(Prim.NOT, b.cast(x, DType.BOOL))


def cast(b: GraphBuilder, x: NodeId, *, dtype: str) -> NodeId | Declined:
    """cast(x) → cast(x), or x where the type is already right.

    Shapes: any.
    Conditions: `dtype` is a name of `DType`. Float to integer truncates; to bool is x ≠ 0.
    Source: `aten._to_copy`; ONNX Cast.
    """
    try:
        target = DType(dtype)
    except ValueError:
        return Declined(f"cast to {dtype!r}")
    return b.cast(x, target)


def pow_(b: GraphBuilder, x: NodeId, y: NodeId) -> NodeId | Declined:
    """pow(x, y) → x^y; for a constant y of 1, 2, 3, ½, −½, −1: x, x·x, x·x·x, √x, rsqrt(x), 1/x.

    Shapes: NumPy's common shape; the result has the type of x.
    Conditions: numbers. The short forms are PyTorch's own: √x gives NaN at −∞ where pow gives ∞.
    Source: `torch.pow`; ONNX Pow, whose operands may differ in type.
    """
    s, t = b.type_of(x), b.type_of(y)
    if DType.BOOL in (s.dtype, t.dtype):
        return Declined("pow of bool")
    if s.dtype.is_integer and t.dtype.is_float:
        power = b.apply(Prim.POW, b.cast(x, DType.F64), b.cast(y, DType.F64))
        return b.cast(power, s.dtype)
    value = b.constant_value(y)
    if value is not None and value.size == 1 and len(t.shape) <= len(s.shape):
        short = _short_power(b, x, float(value.reshape(-1)[0]))
        if short is not None:
            return short
    return b.apply(Prim.POW, x, b.cast(y, s.dtype))


def _short_power(b: GraphBuilder, x: NodeId, exponent: float) -> NodeId | None:
    dtype = dtype_of(b, x)
    if exponent == 1:
        return x
    if exponent == 2:
        return b.apply(Prim.MUL, x, x)
    if exponent == 3:
        wide = widen(b, x)
        return narrow(b, b.apply(Prim.MUL, b.apply(Prim.MUL, wide, wide), wide), x)
    if not dtype.is_float:
        return None
    form = {0.5: Prim.SQRT, -0.5: Prim.RSQRT, -1.0: Prim.RECIPROCAL}.get(exponent)
    return None if form is None else b.apply(form, x)


def true_divide(b: GraphBuilder, x: NodeId, y: NodeId) -> NodeId | Declined:
    """true_divide(x, y) → x / y, integers and bool in f32.

    Shapes: NumPy's common shape.
    Conditions: one element type.
    Source: `torch.true_divide`.
    """
    s, t = dtype_of(b, x), dtype_of(b, y)
    if s is not t:
        return Declined(f"true_divide of {s.value} and {t.value}")
    wide = s if s.is_float else DType.F32
    return b.apply(Prim.DIV, b.cast(x, wide), b.cast(y, wide))


def floor_divide(b: GraphBuilder, x: NodeId, y: NodeId) -> NodeId | Declined:
    """floor_divide(x, y) → ⌊x / y⌋, corrected by the exact remainder r = fmod(x, y).

    Shapes: NumPy's common shape.
    Conditions: one number type. ⌊x / y⌋ alone is wrong where the quotient rounds up to an integer: 1 // 0.1 is 9.
    Source: `div_floor_floating` in ATen; Python's float.__floordiv__.
    """
    s, t = dtype_of(b, x), dtype_of(b, y)
    if s is not t or s is DType.BOOL:
        return Declined(f"floor_divide of {s.value} and {t.value}")
    if s.is_integer:
        q = b.apply(Prim.DIV, x, y)
        if s is DType.U8:
            return q
        r = b.apply(Prim.SUB, x, b.apply(Prim.MUL, q, y))
        return b.apply(Prim.SELECT, _signs_differ(b, r, y), b.apply(Prim.SUB, q, full(b, 1, s)), q)
    u, v = widen(b, x), widen(b, y)
    r = b.apply(Prim.FMOD, u, v)
    q = b.apply(Prim.DIV, b.apply(Prim.SUB, u, r), v)
    q = b.apply(Prim.SELECT, _signs_differ(b, r, v), b.apply(Prim.SUB, q, 1.0), q)
    f = b.apply(Prim.FLOOR, q)
    f = b.apply(Prim.SELECT, b.apply(Prim.GT, b.apply(Prim.SUB, q, f), 0.5), b.apply(Prim.ADD, f, 1.0), f)
    shape = common_shape(b, x, y)
    y = b.apply(Prim.SELECT, b.broadcast(b.apply(Prim.EQ, v, 0.0), shape), b.apply(Prim.DIV, u, v), f)
    return narrow(b, y, x)


def _signs_differ(b: GraphBuilder, r: NodeId, y: NodeId) -> NodeId:
    """r ≠ 0 and (r < 0) ≠ (y < 0)."""
    zero = full(b, 0, dtype_of(b, y)) if dtype_of(b, y).is_integer else full(b, 0.0, dtype_of(b, y))
    differ = b.apply(Prim.XOR, b.apply(Prim.LT, r, zero), b.apply(Prim.LT, y, zero))
    return b.apply(Prim.AND, b.apply(Prim.NE, r, zero), differ)


def remainder(b: GraphBuilder, x: NodeId, y: NodeId) -> NodeId | Declined:
    """remainder(x, y) → mod(x, y), with the sign of y.

    Shapes: NumPy's common shape.
    Conditions: one number type.
    Source: `torch.remainder`; ONNX Mod with fmod = 0.
    """
    return binary(b, x, y, op="mod")


def is_inf(b: GraphBuilder, x: NodeId, *, positive: bool = True, negative: bool = True) -> NodeId | Declined:
    """is_inf(x) → isinf(x), x = ∞, x = −∞ or False.

    Shapes: any; the result is bool.
    Conditions: floats.
    Source: `torch.isinf`; ONNX IsInf.
    """
    if problem := not_float(b, "is_inf", x):
        return problem
    if positive and negative:
        return b.apply(Prim.ISINF, x)
    if positive or negative:
        return b.apply(Prim.EQ, x, math.inf if positive else -math.inf)
    return full(b, False, DType.BOOL, b.type_of(x).shape)


def exp2(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """exp2(x) → 2^x.

    Shapes: any.
    Conditions: floats. Not exp(x·ln 2), whose rounding of the product grows with |x|.
    Source: `torch.exp2`.
    """
    return not_float(b, "exp2", x) or b.apply(Prim.POW, full(b, 2.0, dtype_of(b, x)), x)


def log_base(b: GraphBuilder, x: NodeId, *, base: float) -> NodeId | Declined:
    """log_base(x) → log(x)/log(base), in f64.

    Shapes: any.
    Conditions: floats; base > 0, ≠ 1. In f64 so that whole powers of the base give whole logarithms after rounding.
    Source: `torch.log2`, `torch.log10`.
    """
    if problem := not_float(b, "log_base", x):
        return problem
    if base <= 0 or base == 1:
        return Declined(f"logarithm to base {base}")
    return b.cast(b.apply(Prim.DIV, b.apply(Prim.LOG, b.cast(x, DType.F64)), math.log(base)), dtype_of(b, x))


def _fold(b: GraphBuilder, prim: Prim, xs: tuple[NodeId, ...]) -> NodeId | Declined:
    if not xs or len({dtype_of(b, x) for x in xs}) > 1 or dtype_of(b, xs[0]) is DType.BOOL:
        return Declined(f"{prim.value} of {', '.join(str(b.type_of(x)) for x in xs[:4]) or 'nothing'}")
    y = xs[0]
    for x in xs[1:]:
        y = b.apply(prim, y, x)
    return y


def sum_n(b: GraphBuilder, *xs: NodeId) -> NodeId | Declined:
    """sum_n(x, …) → x + …, from the left.

    Shapes: NumPy's common shape.
    Conditions: one number type.
    Source: ONNX Sum.
    """
    return _fold(b, Prim.ADD, xs)


def max_n(b: GraphBuilder, *xs: NodeId) -> NodeId | Declined:
    """max_n(x, …) → max(x, …), from the left.

    Shapes: NumPy's common shape.
    Conditions: one number type; NaN wins.
    Source: ONNX Max.
    """
    return _fold(b, Prim.MAX, xs)


def min_n(b: GraphBuilder, *xs: NodeId) -> NodeId | Declined:
    """min_n(x, …) → min(x, …), from the left.

    Shapes: NumPy's common shape.
    Conditions: one number type; NaN wins.
    Source: ONNX Min.
    """
    return _fold(b, Prim.MIN, xs)


def mean_n(b: GraphBuilder, *xs: NodeId) -> NodeId | Declined:
    """mean_n(x, …) → (x + …)·(1/k).

    Shapes: NumPy's common shape.
    Conditions: floats of one type; f32 inside for 16-bit x.
    Source: ONNX Mean.
    """
    if problem := not_float(b, "mean_n", *xs):
        return problem
    total = _fold(b, Prim.ADD, tuple(widen(b, x) for x in xs))
    return total if isinstance(total, Declined) else narrow(b, b.apply(Prim.MUL, total, 1.0 / len(xs)), xs[0])


def where(b: GraphBuilder, c: NodeId, x: NodeId, y: NodeId) -> NodeId | Declined:
    """where(c, x, y) → select(c ≠ 0, x, y).

    Shapes: NumPy's common shape.
    Conditions: one element type for x and y.
    Source: `torch.where`; ONNX Where.
    """
    if dtype_of(b, x) is not dtype_of(b, y):
        return Declined(f"where of {dtype_of(b, x).value} and {dtype_of(b, y).value}")
    return b.apply(Prim.SELECT, b.cast(c, DType.BOOL), x, y)


def masked_fill(
    b: GraphBuilder, x: NodeId, mask: NodeId, fill: NodeId = ABSENT, *, value: float = 0.0
) -> NodeId | Declined:
    """masked_fill(x, mask, fill) → select(mask, fill, x); without `fill` the number `value`.

    Shapes: mask and fill broadcast to x.
    Conditions: an integral value for integers.
    Source: `torch.Tensor.masked_fill`.
    """
    t = b.type_of(x)
    if fill == ABSENT:
        if t.dtype.is_integer and not float(value).is_integer():
            return Declined(f"masked_fill of {t.dtype.value} with {value}")
        fill = full(b, int(value) if t.dtype.is_integer else value, t.dtype)
    return b.apply(Prim.SELECT, b.broadcast(b.cast(mask, DType.BOOL), t.shape), b.cast(fill, t.dtype), x)


def sign_or_zero(b: GraphBuilder, x: NodeId) -> NodeId | Declined:
    """sign_or_zero(x) → select(isnan(x), 0, sign(x)).

    Shapes: any.
    Conditions: numbers.
    Source: `torch.sign`, which gives 0 for NaN where NumPy and ONNX give NaN.
    """
    if not dtype_of(b, x).is_float:
        return unary(b, x, op="sign")
    return b.apply(Prim.SELECT, b.apply(Prim.ISNAN, x), 0.0, b.apply(Prim.SIGN, x))
