"""Reductions, arg-reductions, and running sums and products."""

from __future__ import annotations

from weft.frontends.onnx.call import Call, Handler, Result
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


def _cumulative(rule: str) -> Handler:
    def handler(c: Call) -> Result:
        t = c.type(0)
        axis = c.norm(c.integer(1), t.rank)
        if t.rank == 0 or t.dtype is DType.BOOL:
            return Declined(f"{c.op} of {t}")
        flags = {name: bool(c.get(name, 0)) for name in ("exclusive", "reverse")}
        return c.rule(rule, c.x(0), axis=axis, **flags)

    return handler


HANDLERS: dict[tuple[str, str], Handler] = {
    **{("", op): _reduce(op) for op in _RULES},
    ("", "ArgMax"): _arg("argmax"),
    ("", "ArgMin"): _arg("argmin"),
    ("", "CumSum"): _cumulative("cumulative_sum"),
    ("", "CumProd"): _cumulative("cumulative_prod"),
}
