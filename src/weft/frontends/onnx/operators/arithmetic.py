"""Elementwise operators and activations."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.frontends.onnx.call import ABSENT, Call, Handler, Result
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

_UNARY = {
    "Abs": Prim.ABS, "Neg": Prim.NEG, "Sign": Prim.SIGN, "Exp": Prim.EXP, "Log": Prim.LOG, "Sqrt": Prim.SQRT,
    "Reciprocal": Prim.RECIPROCAL, "Erf": Prim.ERF, "Sin": Prim.SIN, "Cos": Prim.COS, "Tan": Prim.TAN,
    "Asin": Prim.ASIN, "Acos": Prim.ACOS, "Atan": Prim.ATAN, "Sinh": Prim.SINH, "Cosh": Prim.COSH,
    "Asinh": Prim.ASINH, "Acosh": Prim.ACOSH, "Atanh": Prim.ATANH, "Floor": Prim.FLOOR, "Ceil": Prim.CEIL,
    "Round": Prim.ROUND, "Tanh": Prim.TANH, "IsNaN": Prim.ISNAN, "Not": Prim.NOT, "BitwiseNot": Prim.NOT,
}  # fmt: skip
_BINARY = {
    "Add": Prim.ADD, "Sub": Prim.SUB, "Mul": Prim.MUL, "Div": Prim.DIV, "And": Prim.AND, "Or": Prim.OR,
    "Xor": Prim.XOR, "BitwiseAnd": Prim.AND, "BitwiseOr": Prim.OR, "BitwiseXor": Prim.XOR, "Equal": Prim.EQ,
    "Greater": Prim.GT, "GreaterOrEqual": Prim.GE, "Less": Prim.LT, "LessOrEqual": Prim.LE,
}  # fmt: skip


def rule1(name: str, **defaults: tuple[str, Any]) -> Handler:
    """A rule of one operand; `param=("attribute", default)`."""

    def handler(c: Call) -> Result:
        return c.rule(name, c.x(0), **{p: c.get(a, d) for p, (a, d) in defaults.items()})

    return handler


def _shrink(c: Call) -> Result:
    """Of integers: in floats, and cut back, as ONNX Runtime and the reference evaluator do; ONNX's body is not."""
    dtype = c.type(0).dtype
    params = {"lambd": c.get("lambd", 0.5), "bias": c.get("bias", 0.0)}
    if dtype.is_float:
        return c.rule("shrink", c.x(0), **params)
    made = c.rule("shrink", c.b.cast(c.x(0), DType.F64), **params)
    return made if isinstance(made, Declined) else c.b.cast(made[0], dtype)


def _unary(prim: Prim) -> Handler:
    def handler(c: Call) -> Result:
        return c.rule("unary", c.x(0), op=prim.value)

    return handler


def _aligned(c: Call, x: NodeId, y: NodeId) -> NodeId:
    """Opset 6: `broadcast=1, axis=k` aligns the second operand at dimension k."""
    if c.opset >= 7 or not c.get("broadcast", 0) or c.get("axis") is None:
        return y
    rank, shape = c.b.type_of(x).rank, c.b.type_of(y).shape
    axis = c.norm(int(c.get("axis")), rank)
    return c.b.reshape(y, (*shape, *(1,) * (rank - axis - len(shape))))


def _binary(prim: Prim) -> Handler:
    def handler(c: Call) -> Result:
        x = c.x(0)
        return c.rule("binary", x, _aligned(c, x, c.x(1)), op=prim.value)

    return handler


def _pow(c: Call) -> Result:
    x, y = c.x(0), _aligned(c, c.x(0), c.x(1))
    base, exponent = c.b.type_of(x).dtype, c.b.type_of(y).dtype
    if base is exponent:
        return c.rule("binary", x, y, op="pow")
    if base.is_float or exponent.is_integer:
        return c.rule("binary", x, c.b.cast(y, base), op="pow")
    # an integer to the power of a float: computed as floats, then cut to the type of the base
    wide = DType.F64 if DType.F64 in (base, exponent) or base is DType.I64 else DType.F32
    made = c.rule("binary", c.b.cast(x, wide), c.b.cast(y, wide), op="pow")
    return made if isinstance(made, Declined) else c.b.cast(made[0], base)


def _mod(c: Call) -> Result:
    if c.get("fmod", 0):
        return c.rule("binary", c.x(0), c.x(1), op="fmod")
    return c.rule("binary", c.x(0), c.x(1), op="mod")


def _bit_shift(c: Call) -> Result:
    """Amounts below 0 or past the width leave only copies of the sign bit; as a primitive they are undefined."""
    b, t = c.b, c.type(0)
    right = c.get("direction") != "LEFT"
    y = c.x(1)
    top = b.constant(np.asarray(t.dtype.itemsize * 8 - 1, c.type(1).dtype.numpy))
    zero = b.constant(np.asarray(0, c.type(1).dtype.numpy))
    inside = b.apply(Prim.LE, y, top)
    if t.dtype is not DType.U8:
        inside = b.apply(Prim.AND, inside, b.apply(Prim.GE, y, zero))
    safe = b.apply(Prim.SELECT, inside, y, top)
    shifted = b.apply(Prim.SHR if right else Prim.SHL, c.x(0), safe)
    if right and t.dtype is not DType.U8:
        return shifted  # a shift by width - 1 already leaves the sign alone
    return b.apply(Prim.SELECT, inside, shifted, _zero(c, 0))


def _variadic(rule: str) -> Handler:
    def handler(c: Call) -> Result:
        return c.rule(rule, *c.xs())

    return handler


def _is_inf(c: Call) -> Result:
    return c.rule(
        "is_inf", c.x(0), positive=bool(c.get("detect_positive", 1)), negative=bool(c.get("detect_negative", 1))
    )


def _where(c: Call) -> Result:
    return c.rule("where", c.x(0), c.x(1), c.x(2))


def _clip(c: Call) -> Result:
    if c.opset < 11:
        dtype = c.type(0).dtype
        given = {"lo": c.get("min"), "hi": c.get("max")}
        return c.rule("clip", c.x(0), **{k: v for k, v in given.items() if v is not None and dtype.is_float})
    bounds = [c.x(k) for k in (1, 2)]
    return c.rule("clip", c.x(0), *(b if b == ABSENT else c.b.reshape(b, ()) for b in bounds))


def _prelu(c: Call) -> Result:
    slope = c.x(1)
    rank, shape = c.type(0).rank, c.shape(1)
    if c.opset < 7 and len(shape) == 1 and rank > 1:  # one slope per channel
        slope = c.b.reshape(slope, (shape[0], *(1,) * (rank - 2)))
    return (
        c.b.apply(
            Prim.SELECT,
            c.b.apply(Prim.LT, c.x(0), _zero(c, 0)),
            c.b.apply(Prim.MUL, c.x(0), slope),
            c.x(0),
        )
        if not c.type(0).dtype.is_float
        else c.rule("prelu", c.x(0), slope)
    )


def _zero(c: Call, like: int) -> NodeId:
    return c.b.constant(np.asarray(0, c.type(like).dtype.numpy))


def _gelu(c: Call) -> Result:
    return c.rule("gelu", c.x(0), approximate=c.get("approximate", "none"))


def _celu(c: Call) -> Result:
    return c.rule("celu", c.x(0), alpha=c.get("alpha", 1.0))


def _softplus(c: Call) -> Result:
    return c.rule("softplus", c.x(0))


def _swish(c: Call) -> Result:
    alpha = c.get("alpha", 1.0)
    if alpha == 1.0:
        return c.rule("silu", c.x(0))
    made = c.rule("sigmoid", c.b.apply(Prim.MUL, c.x(0), float(alpha)))
    return made if isinstance(made, Declined) else c.b.apply(Prim.MUL, c.x(0), made[0])


def _relu(c: Call) -> Result:
    if c.type(0).dtype.is_integer:
        return c.b.apply(Prim.MAX, c.x(0), _zero(c, 0))
    return c.rule("relu", c.x(0))


HANDLERS: dict[tuple[str, str], Handler] = {
    **{("", op): _unary(prim) for op, prim in _UNARY.items()},
    **{("", op): _binary(prim) for op, prim in _BINARY.items()},
    ("", "Pow"): _pow,
    ("", "Mod"): _mod,
    ("", "BitShift"): _bit_shift,
    ("", "Max"): _variadic("max_n"),
    ("", "Min"): _variadic("min_n"),
    ("", "Sum"): _variadic("sum_n"),
    ("", "Mean"): _variadic("mean_n"),
    ("", "IsInf"): _is_inf,
    ("", "Where"): _where,
    ("", "Clip"): _clip,
    ("", "Relu"): _relu,
    ("", "PRelu"): _prelu,
    ("", "LeakyRelu"): rule1("leaky_relu", alpha=("alpha", 0.01)),
    ("", "Gelu"): _gelu,
    ("", "Sigmoid"): rule1("sigmoid"),
    ("", "HardSwish"): rule1("hard_swish"),
    ("", "HardSigmoid"): rule1("hard_sigmoid", alpha=("alpha", 0.2), beta=("beta", 0.5)),
    ("", "Mish"): rule1("mish"),
    ("", "Softplus"): _softplus,
    ("", "Elu"): rule1("elu", alpha=("alpha", 1.0)),
    ("", "Selu"): rule1("selu", alpha=("alpha", 1.67326319217681884765625), gamma=("gamma", 1.05070102214813232421875)),
    ("", "Celu"): _celu,
    ("", "Softsign"): rule1("softsign"),
    ("", "ThresholdedRelu"): rule1("thresholded_relu", alpha=("alpha", 1.0)),
    ("", "Shrink"): _shrink,
    ("", "Swish"): _swish,
}
