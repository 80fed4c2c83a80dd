"""If, Loop and Scan: decided while importing where condition and trip count are known."""

from __future__ import annotations

import numpy as np
import onnx

from weft.frontends.onnx.call import Call, Foreign, Handler, Result, Value, foreign_type
from weft.ir.attrs import ConcatAttrs
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
from weft.ir.prims import Prim

MAX_TURNS = 512


def _if(c: Call) -> Result:
    if c.type(0).size != 1:
        c.fail(f"a condition of {c.type(0).size} elements, not 1")
    if c.im.depends(c.x(0)) and not c.im.lent(c.x(0)):
        return Declined("the condition is a run-time value")
    taken = bool(c.value(0).reshape(-1)[0])
    return c.im.subgraph(c.get("then_branch" if taken else "else_branch"), c.scope)


def _stack(c: Call, rows: list[NodeId], axis: int = 0) -> NodeId:
    b = c.b
    wide = []
    for r in rows:
        shape = b.type_of(r).shape
        wide.append(b.reshape(r, (*shape[:axis], 1, *shape[axis:])))
    return b.add(Prim.CONCAT, *wide, attrs=ConcatAttrs(axis))


def _tensor(c: Call, v: Value) -> NodeId:
    if isinstance(v, tuple):
        c.fail("a sequence where a tensor is wanted")
    if isinstance(v, Foreign):
        raise foreign_type(v, "a result of its body", c.where, c.op)
    return v


def _empty(c: Call, body: onnx.GraphProto, output: int) -> NodeId | None:
    """A scan output of a loop that never turns: 0 rows of the body's declared shape."""
    from weft.frontends.onnx.tensors import DTYPES

    t = body.output[output].type.tensor_type
    dtype = DTYPES.get(t.elem_type)
    if dtype is None or not t.HasField("shape") or any(not d.HasField("dim_value") for d in t.shape.dim):
        return None
    return c.b.constant(np.zeros((0, *(d.dim_value for d in t.shape.dim)), dtype.numpy), dtype)


def _loop(c: Call) -> Result:
    body: onnx.GraphProto = c.get("body")
    trips = c.integer(0) if c.has(0) else None
    going = bool(c.value(1).reshape(-1)[0]) if c.has(1) else True
    carried = list(c.operands[2:])
    n = len(carried)
    scans: list[list[NodeId]] = [[] for _ in range(len(body.output) - 1 - n)]
    turn = 0
    condition: NodeId = c.b.constant(np.array(going))
    while going and (trips is None or turn < trips):
        if turn >= MAX_TURNS:
            return Declined(f"a loop of more than {MAX_TURNS} turns")
        step = c.b.constant(np.array(turn, np.int64))
        results = c.im.subgraph(body, c.scope, (step, condition, *carried))
        condition = _tensor(c, results[0])
        if c.im.depends(condition) and not c.im.lent(condition):
            return Declined("the condition is a run-time value")
        going = bool(c.im.need(condition, c).reshape(-1)[0])
        carried = list(results[1 : 1 + n])
        for rows, r in zip(scans, results[1 + n :], strict=True):
            rows.append(_tensor(c, r))
        turn += 1
    out: list[Value] = list(carried)
    for k, rows in enumerate(scans):
        made = _stack(c, rows) if rows else _empty(c, body, 1 + n + k)
        if made is None:
            return Declined("a scan output of a loop that never turns")
        out.append(made)
    return tuple(out)


def _scan(c: Call) -> Result:
    body: onnx.GraphProto = c.get("body")
    m = int(c.get("num_scan_inputs"))
    if c.opset < 9:
        return _scan8(c, body, m)
    operands = [c.x(k) for k in range(len(c.operands))]
    n = len(operands) - m
    return _scanned(c, body, operands[:n], operands[n:])


def _scanned(c: Call, body: onnx.GraphProto, state: list[NodeId], scanned: list[NodeId]) -> Result:
    b, m, n = c.b, len(scanned), len(state)
    k = len(body.output) - n
    axes_in = c.get("scan_input_axes") or (0,) * m
    axes_out = c.get("scan_output_axes") or (0,) * k
    back_in = c.get("scan_input_directions") or c.get("directions") or (0,) * m
    back_out = c.get("scan_output_directions") or (0,) * k
    axes_in = [c.norm(a, b.type_of(x).rank) for a, x in zip(axes_in, scanned, strict=True)]
    lengths = {b.type_of(x).shape[a] for x, a in zip(scanned, axes_in, strict=True)}
    if len(lengths) != 1:
        c.fail(f"scanned lengths {sorted(lengths)} differ")
    length = lengths.pop()
    if not 1 <= length <= MAX_TURNS:
        return Declined(f"a scan of {length} steps")
    rows: list[list[NodeId]] = [[] for _ in range(k)]
    for turn in range(length):
        parts = []
        for x, a, back in zip(scanned, axes_in, back_in, strict=True):
            shape = b.type_of(x).shape
            at = length - 1 - turn if back else turn
            cut = b.slice(
                x, tuple(at if d == a else 0 for d in range(len(shape))),
                tuple(1 if d == a else s for d, s in enumerate(shape)), (1,) * len(shape),
            )  # fmt: skip
            parts.append(b.reshape(cut, (*shape[:a], *shape[a + 1 :])))
        results = c.im.subgraph(body, c.scope, (*state, *parts))
        state = [_tensor(c, r) for r in results[:n]]
        for found, r in zip(rows, results[n:], strict=True):
            found.append(_tensor(c, r))
    out = []
    for found, a, back in zip(rows, axes_out, back_out, strict=True):
        rank = b.type_of(found[0]).rank + 1
        out.append(_stack(c, found[::-1] if back else found, c.norm(a, rank)))
    return (*state, *out)


def _scan8(c: Call, body: onnx.GraphProto, m: int) -> Result:
    """Opset 8: an optional tensor of lengths first, and a batch dimension in front of everything."""
    b = c.b
    if c.has(0):
        return Declined("Scan with sequence lengths")
    operands = [c.x(k) for k in range(1, len(c.operands))]
    n = len(operands) - m
    batch = b.type_of(operands[0]).shape[0]
    if batch > 16:
        return Declined(f"Scan over a batch of {batch}")
    per: list[tuple[Value, ...]] = []
    for i in range(batch):
        cut = []
        for x in operands:
            shape = b.type_of(x).shape
            part = b.slice(x, (i, *(0,) * (len(shape) - 1)), (1, *shape[1:]), (1,) * len(shape))
            cut.append(b.reshape(part, shape[1:]))
        made = _scanned(c, body, cut[:n], cut[n:])
        if isinstance(made, (Declined, int)):
            return made
        per.append(made)
    return tuple(_stack(c, [_tensor(c, p[k]) for p in per]) for k in range(len(per[0])))


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "If"): _if,
    ("", "Loop"): _loop,
    ("", "Scan"): _scan,
}
