"""ATen calls that aggregate whole dimensions."""

from __future__ import annotations

from collections.abc import Mapping

from weft.frontends.torch.call import ABSENT, Call, Handler
from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

_REDUCE = {
    "reduce_sum": Prim.REDUCE_SUM, "reduce_prod": Prim.REDUCE_PROD,
    "reduce_max": Prim.REDUCE_MAX, "reduce_min": Prim.REDUCE_MIN,
}  # fmt: skip


def _aggregate(c: Call, rule: str, x: NodeId, axes: tuple[int, ...], keep: bool) -> NodeId:
    if not axes:
        return x
    return c.one(rule, x, axes=axes, keepdims=keep)


def reduction(rule: str) -> Handler:
    """sum, mean, prod, amax, ...: computed in the type of the result; no dims means all of them."""

    def handler(c: Call) -> NodeId:
        x = c.b.cast(c.ref("self"), c.out.dtype)
        axes = c.axes("dim", c.rank(x)) if "dim" in c.arguments else tuple(range(c.rank(x)))
        if c.out.dtype is DType.BOOL:
            if rule not in ("reduce_max", "reduce_min"):
                c.decline(f"{rule} of bool")
            return c.b.reshape(c.b.reduce(_REDUCE[rule], x, axes), c.out.shape)
        return c.b.reshape(_aggregate(c, rule, x, axes, c.flag("keepdim")), c.out.shape)

    return handler


def truth(prim: Prim) -> Handler:
    """any, all: on x != 0. uint8 stays uint8 in ATen, as 0 and 1."""

    def handler(c: Call) -> NodeId:
        x = c.b.cast(c.ref("self"), DType.BOOL)
        axes = c.axes("dim", c.rank(x)) if "dim" in c.arguments else tuple(range(c.rank(x)))
        found = c.b.reduce(prim, x, axes)
        return c.b.cast(c.b.reshape(found, c.out.shape), c.out.dtype)

    return handler


def arg(rule: str) -> Handler:
    """argmax, argmin: over everything, flattened, where no dimension is named."""

    def handler(c: Call) -> NodeId:
        x = c.ref("self")
        if not c.has("dim"):
            x = c.b.reshape(x, (c.type(x).size,))
        axis = c.axis(c.integer("dim"), c.rank(x)) if c.has("dim") else 0
        if c.rank(x) == 0:
            return c.b.broadcast(c.b.scalar(0, DType.I64), c.out.shape)
        found = c.one(rule, x, axis=axis, keepdims=True, select_last=False)
        return c.b.reshape(c.b.cast(found, c.out.dtype), c.out.shape)

    return handler


def extreme(rule: str, arg_prim: Prim) -> Handler:
    """max.dim, min.dim: values and positions of the first ones."""

    def handler(c: Call) -> tuple[NodeId, ...]:
        x = c.ref("self")
        axis, shape = c.axis(c.integer("dim"), c.rank(x)), c.out.shape
        if c.rank(x) == 0:
            return x, c.b.scalar(0, DType.I64)
        if c.type(x).dtype is DType.BOOL and 1 in c.used:
            c.decline("position of the largest bool")
        values = c.b.reshape(c.b.reduce(_REDUCE[rule], x, (axis,)), shape) if 0 in c.used else ABSENT
        if 1 not in c.used:
            return values, ABSENT
        where = c.b.add(arg_prim, x, attrs=a.ArgAttrs(axis))
        return values, c.b.reshape(where, shape)

    return handler


def _correction(c: Call) -> int:
    if "unbiased" in c.arguments:
        return int(c.flag("unbiased"))
    return c.integer("correction") if c.has("correction") else 1


def spread(rule: str) -> Handler:
    """var, std."""

    def handler(c: Call) -> NodeId:
        x = c.ref("self")
        axes = c.axes("dim", c.rank(x)) if "dim" in c.arguments else tuple(range(c.rank(x)))
        if not axes:
            c.decline(f"{rule} of a scalar")
        found = c.one(rule, x, axes=axes, correction=_correction(c), keepdims=c.flag("keepdim"))
        return c.b.reshape(found, c.out.shape)

    return handler


def spread_and_mean(rule: str) -> Handler:
    """var_mean, std_mean."""

    def handler(c: Call) -> tuple[NodeId, ...]:
        x = c.ref("self")
        axes = c.axes("dim", c.rank(x)) if "dim" in c.arguments else tuple(range(c.rank(x)))
        if not axes:
            c.decline(f"{rule} of a scalar")
        keep = c.flag("keepdim")
        var = c.one(rule, x, axes=axes, correction=_correction(c), keepdims=keep) if 0 in c.used else ABSENT
        mean = c.one("reduce_mean", x, axes=axes, keepdims=keep) if 1 in c.used else ABSENT
        return tuple(n if n == ABSENT else c.b.reshape(n, c.out.shape) for n in (var, mean))

    return handler


def cumulative(rule: str) -> Handler:
    """cumsum, cumprod: in the type of the result."""

    def handler(c: Call) -> NodeId:
        x = c.b.cast(c.ref("self"), c.out.dtype)
        return c.one(rule, x, axis=c.axis(c.integer("dim"), c.rank(x))) if c.rank(x) else x

    return handler


def logsumexp(c: Call) -> NodeId:
    """log(sum(exp(x))), shifted by the maximum."""
    x = c.b.cast(c.ref("self"), c.out.dtype)
    axes = c.axes("dim", c.rank(x))
    if not axes:
        return x
    return c.b.reshape(c.one("logsumexp", x, axes=axes, keepdims=c.flag("keepdim")), c.out.shape)


def vector_norm(c: Call) -> NodeId:
    """(sum |x|^p)^(1/p) for p = 1, 2, ±inf, 0."""
    b, dtype = c.b, c.out.dtype
    x = b.cast(c.ref("self"), dtype)
    axes, keep, p = c.axes("dim", c.rank(x)), c.flag("keepdim"), c.real("ord" if "ord" in c.arguments else "p")
    named: Mapping[float, str] = {1.0: "reduce_l1", 2.0: "reduce_l2"}
    if p in named:
        found = _aggregate(c, named[p], x, axes, keep) if axes else b.add(Prim.ABS, x)
    elif p in (float("inf"), float("-inf")):
        found = b.reduce(Prim.REDUCE_MAX if p > 0 else Prim.REDUCE_MIN, b.add(Prim.ABS, x), axes)
    elif p == 0.0:
        found = b.reduce(Prim.REDUCE_SUM, b.cast(b.apply(Prim.NE, x, 0.0), dtype), axes)
    else:
        c.decline(f"norm of order {p}")
    return b.reshape(found, c.out.shape)


def top_one(c: Call) -> tuple[NodeId, ...]:
    """The largest or the smallest element of each row, and where it is; more than one are the framework's."""
    x = c.ref("self")
    if c.integer("k") != 1 or c.type(x).dtype is DType.BOOL:
        c.decline("selects by rank")
    if c.rank(x) == 0:
        return x, c.b.scalar(0, DType.I64)
    rule = "max_dim" if c.flag("largest") else "min_dim"
    if rule == "min_dim" and c.type(x).dtype.is_float:
        c.decline("selects the smallest, of which NaN is none")
    return c.rule(rule, (x,), axis=c.axis(c.integer("dim"), c.rank(x)), keepdims=True)


TABLE: Mapping[str, Handler] = {
    "aten.sum.default": reduction("reduce_sum"),
    "aten.sum.dim_IntList": reduction("reduce_sum"),
    "aten.mean.default": reduction("reduce_mean"),
    "aten.mean.dim": reduction("reduce_mean"),
    "aten.prod.default": reduction("reduce_prod"),
    "aten.prod.dim_int": reduction("reduce_prod"),
    "aten.amax.default": reduction("reduce_max"),
    "aten.amin.default": reduction("reduce_min"),
    "aten.max.default": reduction("reduce_max"),
    "aten.min.default": reduction("reduce_min"),
    "aten.cumsum.default": cumulative("cumulative_sum"),
    "aten.cumprod.default": cumulative("cumulative_prod"),
    **{f"aten.any.{o}": truth(Prim.REDUCE_MAX) for o in ("default", "dim", "dims")},
    **{f"aten.all.{o}": truth(Prim.REDUCE_MIN) for o in ("default", "dim", "dims")},
    "aten.topk.default": top_one,
    "aten.argmax.default": arg("argmax"),
    "aten.argmin.default": arg("argmin"),
    "aten.max.dim": extreme("reduce_max", Prim.ARGMAX),
    "aten.min.dim": extreme("reduce_min", Prim.ARGMIN),
    **{f"aten.var.{o}": spread("var") for o in ("default", "dim", "correction")},
    **{f"aten.std.{o}": spread("std") for o in ("default", "dim", "correction")},
    **{f"aten.var_mean.{o}": spread_and_mean("var") for o in ("default", "dim", "correction")},
    **{f"aten.std_mean.{o}": spread_and_mean("std") for o in ("default", "dim", "correction")},
    "aten.logsumexp.default": logsumexp,
    "aten.linalg_vector_norm.default": vector_norm,
}
"""Handlers by overload."""
