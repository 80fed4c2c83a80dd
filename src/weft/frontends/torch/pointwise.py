"""Elementwise ATen calls: promotion, scalars and the activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from weft.frontends.torch.call import Call, Handler, Ref
from weft.frontends.torch.dtypes import FROM_TORCH, TO_TORCH
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def common_dtype(c: Call, *names: str) -> DType:
    """The type in which ATen compares or combines its operands: tensors over numbers, by category."""
    samples: list[torch.Tensor | int | float | bool] = []
    for name in names:
        value = c.arguments[name]
        if isinstance(value, Ref):
            type = c.type(value.node)
            samples.append(torch.empty((1,) if type.rank else (), dtype=TO_TORCH[type.dtype]))
        else:
            samples.append(c.number(name))
    dtype = torch.result_type(*samples) if len(samples) == 2 else samples[0].dtype  # type: ignore[arg-type, union-attr]
    if dtype not in FROM_TORCH:
        c.decline(f"operands promote to {dtype}")
    return FROM_TORCH[dtype]


def compute_dtype(c: Call, dtype: DType, *names: str) -> DType:
    """`dtype`, or f32 where a number among the operands would be rounded by a 16-bit float: ATen does not round it."""
    return dtype if all(c.fits(c.arguments[n], dtype) for n in names) else DType.F32


def unary(prim: Prim) -> Handler:
    """y = prim(x) in the type of the result: integers are converted first."""

    def handler(c: Call) -> NodeId:
        return c.b.add(prim, c.b.cast(c.ref("self"), c.out.dtype))

    return handler


def identity_on_integers(prim: Prim) -> Handler:
    """floor, ceil, ...: integers are returned as they are."""

    def handler(c: Call) -> NodeId:
        x = c.ref("self")
        return c.b.add(prim, x) if c.type(x).dtype.is_float else x

    return handler


def keep_bool(prim: Prim) -> Handler:
    """abs, sign: the identity on bool and, for abs, on unsigned integers."""

    def handler(c: Call) -> NodeId:
        x = c.ref("self")
        dtype = c.type(x).dtype
        return x if dtype is DType.BOOL or (prim is Prim.ABS and dtype is DType.U8) else c.b.add(prim, x)

    return handler


def sign(c: Call) -> NodeId:
    """sign: the identity on bool; zero of NaN, where the primitive gives NaN."""
    x = c.ref("self")
    dtype = c.type(x).dtype
    if dtype is DType.BOOL:
        return x
    found = c.b.add(Prim.SIGN, x)
    return c.b.apply(Prim.SELECT, c.b.add(Prim.ISNAN, x), 0.0, found) if dtype.is_float else found


def classify(prim: Prim) -> Handler:
    """isnan, isinf: false on integers."""

    def handler(c: Call) -> NodeId:
        x = c.ref("self")
        if c.type(x).dtype.is_float:
            return c.b.add(prim, x)
        return c.b.broadcast(c.b.scalar(False, DType.BOOL), c.out.shape)

    return handler


def log_base(base: float) -> Handler:
    """log_b(x) → log(x) / log(b)."""

    def handler(c: Call) -> NodeId:
        return c.b.apply(Prim.DIV, c.b.add(Prim.LOG, c.b.cast(c.ref("self"), c.out.dtype)), math.log(base))

    return handler


def bitwise_not(c: Call) -> NodeId:
    """~x, logical on bool."""
    return c.b.add(Prim.NOT, c.ref("self"))


def logical_not(c: Call) -> NodeId:
    """x == 0."""
    return c.b.add(Prim.NOT, c.b.cast(c.ref("self"), DType.BOOL))


_ON_BOOL: Mapping[Prim, Prim] = {Prim.ADD: Prim.OR, Prim.MUL: Prim.AND, Prim.MAX: Prim.MAX, Prim.MIN: Prim.MIN}
"""Arithmetic on two bools, as ATen defines it; the rest it refuses."""


def arithmetic(prim: Prim, left: str = "self", right: str = "other") -> Handler:
    """z = prim(x, alpha * y) in the type of the result."""

    def handler(c: Call) -> NodeId:
        dtype = c.out.dtype
        work = compute_dtype(c, dtype, left, right, *(("alpha",) if "alpha" in c.arguments else ()))
        x, y = c.as_node(c.arguments[left], work), c.as_node(c.arguments[right], work)
        alpha = c.number("alpha") if c.has("alpha") else 1
        if dtype is DType.BOOL:
            if prim not in _ON_BOOL or alpha != 1:
                c.decline(f"{prim.value} of bool")
            return c.b.apply(_ON_BOOL[prim], x, y)
        if alpha != 1:
            y = c.b.apply(Prim.MUL, y, c.b.scalar(alpha, work))
        return c.b.cast(c.b.apply(prim, x, y), dtype)

    return handler


def rsub(c: Call) -> NodeId:
    """other - alpha * self."""
    work = compute_dtype(c, c.out.dtype, "other", "alpha")
    x, y = c.as_node(c.arguments["self"], work), c.as_node(c.arguments["other"], work)
    if c.number("alpha") != 1:
        x = c.b.apply(Prim.MUL, x, c.b.scalar(c.number("alpha"), work))
    return c.b.cast(c.b.apply(Prim.SUB, y, x), c.out.dtype)


def divide(c: Call) -> NodeId:
    """x / y, rounded as `rounding_mode` says."""
    mode = c.text("rounding_mode")
    dtype = c.out.dtype
    work = compute_dtype(c, dtype, "self", "other")
    x, y = c.as_node(c.arguments["self"], work), c.as_node(c.arguments["other"], work)
    if mode == "floor":
        return c.b.cast(c.one("floor_divide", x, y), dtype)
    quotient = c.b.apply(Prim.DIV, x, y)
    if mode == "trunc" and work.is_float:
        quotient = c.b.add(Prim.TRUNC, quotient)
    return c.b.cast(quotient, dtype)


def power(c: Call) -> NodeId:
    """x ** y, with ATen's own shortcuts for constant exponents."""
    b, dtype = c.b, c.out.dtype
    exponent = c.arguments["exponent"]
    if dtype is DType.BOOL:
        c.decline("pow of bool")
    work = compute_dtype(c, dtype, "self", "exponent")
    x = c.as_node(c.arguments["self"], work)
    if isinstance(exponent, Ref):
        return b.cast(b.apply(Prim.POW, x, c.as_node(exponent, work)), dtype)
    value = c.real("exponent")
    if value == 2.0:
        return b.cast(b.apply(Prim.MUL, x, x), dtype)
    if value == 3.0:
        return b.cast(b.apply(Prim.MUL, b.apply(Prim.MUL, x, x), x), dtype)
    if value == 1.0:
        return b.cast(x, dtype)
    if value == 0.0:
        return b.broadcast(b.scalar(1, dtype), c.out.shape)
    shortcuts = {0.5: Prim.SQRT, -0.5: Prim.RSQRT, -1.0: Prim.RECIPROCAL}
    if value in shortcuts and work.is_float:
        return b.cast(b.add(shortcuts[value], x), dtype)
    return b.cast(b.apply(Prim.POW, x, b.scalar(c.number("exponent"), work)), dtype)


def comparison(prim: Prim) -> Handler:
    """x < y, ...: in the common type of the operands."""

    def handler(c: Call) -> NodeId:
        dtype = common_dtype(c, "self", "other")
        return c.b.apply(prim, c.as_node(c.arguments["self"], dtype), c.as_node(c.arguments["other"], dtype))

    return handler


def logical(prim: Prim) -> Handler:
    """x and y, ...: on x != 0, y != 0."""

    def handler(c: Call) -> NodeId:
        return c.b.apply(prim, c.b.cast(c.ref("self"), DType.BOOL), c.b.cast(c.ref("other"), DType.BOOL))

    return handler


def bitwise(prim: Prim) -> Handler:
    """x & y, ...: logical on bool."""

    def handler(c: Call) -> NodeId:
        dtype = c.out.dtype
        return c.b.apply(prim, c.as_node(c.arguments["self"], dtype), c.as_node(c.arguments["other"], dtype))

    return handler


def shift(prim: Prim) -> Handler:
    """x << n, x >> n of integers by a number that the type has bits for; the sign stays."""

    def handler(c: Call) -> NodeId:
        x, dtype = c.ref("self"), c.out.dtype
        by = c.integer("other")
        if c.type(x).dtype is not dtype or not dtype.is_integer or not 0 <= by < 8 * dtype.itemsize:
            c.decline(f"a shift of {c.type(x)} by {by}")
        return c.b.apply(prim, x, c.b.broadcast(c.b.constant(np.asarray(by, dtype.numpy)), c.shape(x)))

    return handler


def clamp(c: Call) -> NodeId:
    """min(max(x, lo), hi); a lower bound above the upper one gives the upper one."""
    b, dtype = c.b, c.out.dtype
    low, high = c.arguments.get("min"), c.arguments.get("max")
    if dtype is DType.BOOL:
        c.decline("clamp of bool")
    work = compute_dtype(c, dtype, *(n for n in ("min", "max") if c.has(n)))
    x = b.cast(c.ref("self"), work)
    if low is not None:
        x = b.apply(Prim.MAX, x, c.as_node(low, work))
    if high is not None:
        x = b.apply(Prim.MIN, x, c.as_node(high, work))
    return b.cast(x, dtype)


def where(c: Call) -> NodeId:
    """select(condition, x, y), promoted and broadcast."""
    dtype = c.out.dtype
    x, y = c.as_node(c.arguments["self"], dtype), c.as_node(c.arguments["other"], dtype)
    return c.b.apply(Prim.SELECT, c.b.cast(c.ref("condition"), DType.BOOL), x, y)


def activation(name: str, **fixed: float) -> Handler:
    """An activation rule without arguments from the call."""

    def handler(c: Call) -> NodeId:
        return c.one(name, c.b.cast(c.ref("self"), c.out.dtype), **fixed)

    return handler


def relu(c: Call) -> NodeId:
    """max(x, 0); integers too."""
    x = c.ref("self")
    return c.one("relu", x) if c.type(x).dtype.is_float else c.b.apply(Prim.MAX, x, c.b.scalar(0, c.out.dtype))


def gelu(c: Call) -> NodeId:
    """x Φ(x), or its tanh form."""
    return c.one("gelu", c.ref("self"), approximate=c.text("approximate") or "none")


def leaky_relu(c: Call) -> NodeId:
    """x or slope * x."""
    return c.one("leaky_relu", c.ref("self"), alpha=c.real("negative_slope"))


def hardtanh(c: Call) -> NodeId:
    """min(max(x, lo), hi)."""
    low, high = c.number("min_val"), c.number("max_val")
    dtype = c.out.dtype
    if dtype is DType.BOOL:
        c.decline("hardtanh of bool")
    return c.b.apply(Prim.MIN, c.b.apply(Prim.MAX, c.ref("self"), c.b.scalar(low, dtype)), c.b.scalar(high, dtype))


_SELU = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def elu(c: Call) -> NodeId:
    """scale * (max(x, 0) + min(alpha * (exp(input_scale * x) - 1), 0))."""
    alpha, scale, input_scale = c.real("alpha"), c.real("scale"), c.real("input_scale")
    x = c.ref("self")
    if scale == 1.0 and input_scale == 1.0:
        return c.one("elu", x, alpha=alpha)
    if input_scale == 1.0 and alpha > 0:
        return c.one("selu", x, alpha=alpha, gamma=scale)
    b = c.b
    grown = b.apply(Prim.MUL, b.add(Prim.EXPM1, b.apply(Prim.MUL, x, input_scale)), alpha)
    return b.apply(Prim.MUL, b.apply(Prim.SELECT, b.apply(Prim.GT, x, 0.0), x, grown), scale)


def selu(c: Call) -> NodeId:
    """elu with the constants of self-normalising networks."""
    return c.one("selu", c.ref("self"), alpha=_SELU[0], gamma=_SELU[1])


def celu(c: Call) -> NodeId:
    """max(x, 0) + min(alpha * (exp(x / alpha) - 1), 0)."""
    return c.one("celu", c.ref("self"), alpha=c.real("alpha"))


def softplus(c: Call) -> NodeId:
    """log(1 + exp(beta x)) / beta, linear above the threshold."""
    return c.one("softplus", c.ref("self"), beta=c.real("beta"), threshold=c.real("threshold"))


def prelu(c: Call) -> NodeId:
    """x or slope * x, the slope a tensor that broadcasts (`_prelu_kernel`: already aligned)."""
    return c.one("prelu", c.ref("self"), c.ref("weight"))


def threshold(c: Call) -> NodeId:
    """x where x > threshold, else value."""
    b, dtype = c.b, c.out.dtype
    x = c.ref("self")
    above = b.apply(Prim.LE, x, b.scalar(c.number("threshold"), dtype))
    return b.apply(Prim.SELECT, above, b.broadcast(b.scalar(c.number("value"), dtype), c.out.shape), x)


def masked_fill(c: Call) -> NodeId:
    """value where the mask is true, else x."""
    dtype = c.out.dtype
    return c.b.apply(Prim.SELECT, c.ref("mask"), c.as_node(c.arguments["value"], dtype), c.ref("self"))


def dropout(c: Call) -> NodeId:
    """Nothing in evaluation mode."""
    if c.flag("train") and c.real("p") != 0.0:
        c.refuse("draws random numbers")
    return c.ref("input")


def prefer_number(prim: Prim) -> Handler:
    """fmax, fmin: the other operand where one is NaN."""

    def handler(c: Call) -> NodeId:
        b, dtype = c.b, c.out.dtype
        x, y = c.as_node(c.arguments["self"], dtype), c.as_node(c.arguments["other"], dtype)
        z = b.apply(prim, x, y)
        if not dtype.is_float:
            return z
        z = b.apply(Prim.SELECT, b.apply(Prim.ISNAN, y), x, z)
        return b.apply(Prim.SELECT, b.apply(Prim.ISNAN, x), y, z)

    return handler


def exp2(c: Call) -> NodeId:
    """2 ** x."""
    x = c.b.cast(c.ref("self"), c.out.dtype)
    return c.b.apply(Prim.POW, c.b.scalar(2.0, c.out.dtype), x)


def square(c: Call) -> NodeId:
    """x * x."""
    x = c.ref("self")
    return x if c.out.dtype is DType.BOOL else c.b.apply(Prim.MUL, x, x)


def fill(c: Call) -> NodeId:
    """A number (or a scalar tensor) in every element."""
    return c.b.broadcast(c.as_node(c.arguments["value"], c.out.dtype), c.out.shape)


def convert(c: Call) -> NodeId:
    """Another element type; the device stays."""
    return c.b.cast(c.ref("self" if "self" in c.arguments else "a"), c.out.dtype)


def identity(c: Call) -> NodeId:
    """The value itself: memory is no part of a value."""
    return c.ref("self")


_FLOAT_UNARY: Mapping[str, Prim] = {
    "acos": Prim.ACOS, "acosh": Prim.ACOSH, "asin": Prim.ASIN, "asinh": Prim.ASINH, "atan": Prim.ATAN,
    "atanh": Prim.ATANH, "cos": Prim.COS, "cosh": Prim.COSH, "erf": Prim.ERF, "exp": Prim.EXP, "expm1": Prim.EXPM1,
    "log": Prim.LOG, "log1p": Prim.LOG1P, "neg": Prim.NEG, "reciprocal": Prim.RECIPROCAL, "rsqrt": Prim.RSQRT,
    "sin": Prim.SIN, "sinh": Prim.SINH, "sqrt": Prim.SQRT, "tan": Prim.TAN, "tanh": Prim.TANH,
}  # fmt: skip
_ROUNDING: Mapping[str, Prim] = {
    "floor": Prim.FLOOR, "ceil": Prim.CEIL, "trunc": Prim.TRUNC, "round": Prim.ROUND,
}  # fmt: skip
_COMPARE: Mapping[str, Prim] = {
    "eq": Prim.EQ, "ne": Prim.NE, "lt": Prim.LT, "le": Prim.LE, "gt": Prim.GT, "ge": Prim.GE,
}  # fmt: skip
_BITS: Mapping[str, Prim] = {"and": Prim.AND, "or": Prim.OR, "xor": Prim.XOR}
_ARITHMETIC: Mapping[str, Prim] = {
    "add": Prim.ADD, "sub": Prim.SUB, "mul": Prim.MUL, "remainder": Prim.MOD, "fmod": Prim.FMOD,
}  # fmt: skip


def _both(make: Callable[[Prim], Handler], prims: Mapping[str, Prim], prefix: str = "") -> dict[str, Handler]:
    return {f"aten.{prefix}{n}.{o}": make(p) for n, p in prims.items() for o in ("Tensor", "Scalar")}


TABLE: Mapping[str, Handler] = {
    **{f"aten.{name}.default": unary(prim) for name, prim in _FLOAT_UNARY.items()},
    **{f"aten.{name}.default": identity_on_integers(prim) for name, prim in _ROUNDING.items()},
    **_both(comparison, _COMPARE),
    **_both(bitwise, _BITS, "bitwise_"),
    **_both(arithmetic, _ARITHMETIC),
    **{f"aten.__{name}__.Scalar": shift(prim) for name, prim in (("lshift", Prim.SHL), ("rshift", Prim.SHR))},
    **{f"aten.logical_{name}.default": logical(prim) for name, prim in _BITS.items()},
    "aten.abs.default": keep_bool(Prim.ABS),
    "aten.sign.default": sign,
    "aten.isnan.default": classify(Prim.ISNAN),
    "aten.isinf.default": classify(Prim.ISINF),
    "aten.log2.default": log_base(2.0),
    "aten.log10.default": log_base(10.0),
    "aten.bitwise_not.default": bitwise_not,
    "aten.logical_not.default": logical_not,
    "aten.rsub.Tensor": rsub,
    "aten.rsub.Scalar": rsub,
    "aten.remainder.Scalar_Tensor": arithmetic(Prim.MOD),
    "aten.atan2.default": arithmetic(Prim.ATAN2),
    "aten.maximum.default": arithmetic(Prim.MAX),
    "aten.minimum.default": arithmetic(Prim.MIN),
    "aten.div.Tensor": divide,
    "aten.div.Scalar": divide,
    "aten.div.Tensor_mode": divide,
    "aten.div.Scalar_mode": divide,
    "aten.pow.Tensor_Scalar": power,
    "aten.pow.Tensor_Tensor": power,
    "aten.pow.Scalar": power,
    "aten.clamp.default": clamp,
    "aten.clamp.Tensor": clamp,
    "aten.clamp_min.default": clamp,
    "aten.clamp_min.Tensor": clamp,
    "aten.clamp_max.default": clamp,
    "aten.clamp_max.Tensor": clamp,
    "aten.fmax.default": prefer_number(Prim.MAX),
    "aten.fmin.default": prefer_number(Prim.MIN),
    "aten.exp2.default": exp2,
    "aten.square.default": square,
    "aten.dropout.default": dropout,
    "aten.feature_dropout.default": dropout,
    "aten.where.self": where,
    "aten.masked_fill.Scalar": masked_fill,
    "aten.masked_fill.Tensor": masked_fill,
    "aten.fill.Scalar": fill,
    "aten.fill.Tensor": fill,
    "aten.relu.default": relu,
    "aten.relu6.default": activation("relu6"),
    "aten.sigmoid.default": activation("sigmoid"),
    "aten.silu.default": activation("silu"),
    "aten.mish.default": activation("mish"),
    "aten.hardswish.default": activation("hard_swish"),
    "aten.hardsigmoid.default": activation("hard_sigmoid", alpha=1 / 6, beta=0.5),
    "aten.log_sigmoid.default": activation("log_sigmoid"),
    "aten.gelu.default": gelu,
    "aten.leaky_relu.default": leaky_relu,
    "aten.hardtanh.default": hardtanh,
    "aten.elu.default": elu,
    "aten.selu.default": selu,
    "aten.celu.default": celu,
    "aten.softplus.default": softplus,
    "aten._prelu_kernel.default": prelu,
    "aten.threshold.default": threshold,
    "aten._to_copy.default": convert,
    "aten.to.dtype": convert,
    "prims.convert_element_type.default": convert,
    "aten.clone.default": identity,
    "aten.alias.default": identity,
    "aten.detach.default": identity,
    "aten.detach_copy.default": identity,
    "aten.alias_copy.default": identity,
    "aten.detach_.default": identity,
    "aten.contiguous.default": identity,
    "aten.lift_fresh_copy.default": identity,
    "aten.positive.default": identity,
}
"""Handlers by overload."""
