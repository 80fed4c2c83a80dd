"""Reductions and arg-reductions."""

from __future__ import annotations

import numpy as np

from weft.frontends.onnx.call import Call, Handler, Result
from weft.ir.attrs import ConcatAttrs, WindowAttrs
from weft.ir.declined import Declined
from weft.ir.prims import Prim
from weft.ir.types import DType

_RULES = {
    "ReduceSum": "reduce_sum", "ReduceMean": "reduce_mean", "ReduceMax": "reduce_max", "ReduceMin": "reduce_min",
    "ReduceProd": "reduce_prod", "ReduceL1": "reduce_l1", "ReduceL2": "reduce_l2", "ReduceLogSum": "reduce_log_sum",
    "ReduceLogSumExp": "reduce_log_sum_exp", "ReduceSumSquare": "reduce_sum_square",
}  # fmt: skip


def axes_of(c: Call, since: int) -> tuple[int, ...] | None:
    """Reduced axes: an attribute before opset `since`, an operand from then on; None: nothing is to be done."""
    rank = c.type(0).rank
    operand = c.ints(1) if c.opset >= since and c.has(1) else None
    given = c.get("axes") if c.opset < since else operand
    if given is None or len(given) == 0:
        if c.opset >= since and c.get("noop_with_empty_axes", 0):
            return None
        return tuple(range(rank))
    return tuple(sorted(c.norm(a, rank) for a in given))


def _reduce(op: str) -> Handler:
    rule = _RULES[op]

    def handler(c: Call) -> Result:
        axes = axes_of(c, 13 if op == "ReduceSum" else 18)
        if axes is None:
            # the spec: no axis is reduced, what happens to single elements still does
            return _pointwise(c, op)
        return c.rule(rule, c.x(0), axes=axes, keepdims=bool(c.get("keepdims", 1)))

    return handler


def _pointwise(c: Call, op: str) -> Result:
    b, x = c.b, c.x(0)
    if op in ("ReduceL1", "ReduceL2"):
        return b.apply(Prim.ABS, x)
    if op == "ReduceSumSquare":
        return b.apply(Prim.MUL, x, x)
    if op == "ReduceLogSum":
        return b.apply(Prim.LOG, x)
    return x


def _arg(rule: str) -> Handler:
    def handler(c: Call) -> Result:
        if c.shape(0) and not c.shape(0)[c.axis("axis", 0)]:
            c.fail(f"{c.op} over an axis without elements, shape {list(c.shape(0))[:8]}")
        return c.rule(
            rule, c.x(0), axis=c.axis("axis", 0), keepdims=bool(c.get("keepdims", 1)),
            select_last=bool(c.get("select_last_index", 0)),
        )  # fmt: skip

    return handler


def _cum_sum(c: Call) -> Result:
    """Windows as wide as the axis, padded with zeros on one side: no product, so infinities stay where they are."""
    b, t = c.b, c.type(0)
    axis = c.norm(c.integer(1), t.rank)
    if t.rank == 0 or t.dtype is DType.BOOL:
        return Declined(f"CumSum of {t}")
    n = t.shape[axis]
    if not 1 <= n <= 2048 or t.size == 0:
        return Declined(f"CumSum over {n} elements")
    perm = (*(k for k in range(t.rank) if k != axis), axis)
    x = b.transpose(c.x(0), perm)
    exclusive, reverse = bool(c.get("exclusive", 0)), bool(c.get("reverse", 0))
    pad = n if exclusive else n - 1
    lo, hi = (0, pad) if reverse else (pad, 0)
    y = b.add(Prim.WINDOW_SUM, x, attrs=WindowAttrs((n,), (1,), (lo,), (hi,), (1,)))
    if exclusive:
        shape = b.type_of(x).shape
        y = b.slice(y, (*(0,) * (t.rank - 1), 1 if reverse else 0), shape, (1,) * t.rank)
    return b.transpose(y, tuple(sorted(range(t.rank), key=lambda k: perm[k])))


def _cum_prod(c: Call) -> Result:
    """One slice and one product per element."""
    b, t = c.b, c.type(0)
    axis = c.norm(c.integer(1), t.rank)
    if t.rank == 0 or t.shape[axis] > 256 or t.size == 0:
        return Declined(f"CumProd of {t}")
    n = t.shape[axis]
    size = (*t.shape[:axis], 1, *t.shape[axis + 1 :])

    def at(i: int) -> int:
        return b.slice(c.x(0), tuple(i if k == axis else 0 for k in range(t.rank)), size, (1,) * t.rank)

    order = range(n - 1, -1, -1) if c.get("reverse", 0) else range(n)
    rows: dict[int, int] = {}
    running = b.broadcast(b.constant(np.ones((), t.dtype.numpy), t.dtype), size)
    for i in order:
        if c.get("exclusive", 0):
            rows[i] = running
            running = b.apply(Prim.MUL, running, at(i))
        else:
            running = b.apply(Prim.MUL, running, at(i))
            rows[i] = running
    return b.add(Prim.CONCAT, *(rows[i] for i in range(n)), attrs=ConcatAttrs(axis))


HANDLERS: dict[tuple[str, str], Handler] = {
    **{("", op): _reduce(op) for op in _RULES},
    ("", "ArgMax"): _arg("argmax"),
    ("", "ArgMin"): _arg("argmin"),
    ("", "CumSum"): _cum_sum,
    ("", "CumProd"): _cum_prod,
}
