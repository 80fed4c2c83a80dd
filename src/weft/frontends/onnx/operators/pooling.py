"""Pooling."""

from __future__ import annotations

from weft.frontends.onnx.call import Call, Handler, Result
from weft.frontends.onnx.operators.contract import window
from weft.ir.declined import Declined


def _max_pool(c: Call) -> Result:
    if c.num_outputs > 1:
        return Declined("MaxPool with indices")
    kernel = tuple(c.get("kernel_shape"))
    strides, lo, hi, dilations = window(c, c.shape(0)[2:], kernel)
    return c.rule(
        "max_pool", c.x(0), kernel=kernel, strides=strides, pads_lo=lo, pads_hi=hi, dilations=dilations, ceil=_ceil(c)
    )


def _avg_pool(c: Call) -> Result:
    kernel = tuple(c.get("kernel_shape"))
    strides, lo, hi, dilations = window(c, c.shape(0)[2:], kernel)
    return c.rule(
        "avg_pool", c.x(0), kernel=kernel, strides=strides, pads_lo=lo, pads_hi=hi, dilations=dilations,
        count_include_pad=bool(c.get("count_include_pad", 0)), divisor=0, ceil=_ceil(c),
    )  # fmt: skip


def _ceil(c: Call) -> bool:
    return bool(c.get("ceil_mode", 0)) and not (c.get("auto_pad", "NOTSET") or "").startswith("SAME")


def _lp_pool(c: Call) -> Result:
    kernel = tuple(c.get("kernel_shape"))
    strides, lo, hi, dilations = window(c, c.shape(0)[2:], kernel)
    return c.rule(
        "lp_pool", c.x(0), kernel=kernel, strides=strides, pads_lo=lo, pads_hi=hi, dilations=dilations,
        p=int(c.get("p", 2)), ceil=_ceil(c),
    )  # fmt: skip


def _global(rule: str) -> Handler:
    return lambda c: c.rule(rule, c.x(0))


def _global_lp_pool(c: Call) -> Result:
    p, axes = int(c.get("p", 2)), tuple(range(2, c.type(0).rank))
    if p not in (1, 2):
        return Declined(f"norm of order {p}")
    return c.rule(f"reduce_l{p}", c.x(0), axes=axes, keepdims=True)


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "MaxPool"): _max_pool,
    ("", "AveragePool"): _avg_pool,
    ("", "LpPool"): _lp_pool,
    ("", "GlobalAveragePool"): _global("global_avg_pool"),
    ("", "GlobalMaxPool"): _global("global_max_pool"),
    ("", "GlobalLpPool"): _global_lp_pool,
}
