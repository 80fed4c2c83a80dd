"""Recurrent layers, opaque as a whole; those with the batch in front are turned into those with time in front."""

from __future__ import annotations

import onnx
from onnx import helper

from weft.frontends.onnx.call import Call, Handler, Result
from weft.ir.declined import Declined

_TURNED_INPUTS = {0: (1, 0, 2), 5: (1, 0, 2), 6: (1, 0, 2)}
_TURNED_OUTPUTS = {0: (2, 0, 1, 3), 1: (1, 0, 2), 2: (1, 0, 2)}


def _layer(c: Call) -> Result:
    """RNN(X; layout 1) → RNN(turned X; layout 0), turned back.

    Shapes: X (b, t, i) from (t, b, i); states (b, d, h) from (d, b, h); Y (b, t, d, h) from (t, d, b, h).
    """
    if not c.get("layout", 0):
        return Declined("a recurrence")
    before, after = [], []
    inner = onnx.NodeProto(op_type=c.op, domain=c.node.domain)
    inner.attribute.extend(a for a in c.im.attributes(c.node, c.scope, c.where) if a.name != "layout")
    for k in range(len(c.operands)):
        turned = c.has(k) and k in _TURNED_INPUTS
        if turned:
            before.append(helper.make_node("Transpose", [f"in{k}"], [f"turned{k}"], perm=_TURNED_INPUTS[k]))
        inner.input.append(f"turned{k}" if turned else f"in{k}" if c.has(k) else "")
    for k, name in enumerate(c.node.output):
        inner.output.append(f"inner{k}" if name else "")
        if name:
            after.append(helper.make_node("Transpose", [f"inner{k}"], [f"out{k}"], perm=_TURNED_OUTPUTS[k]))
    body = onnx.FunctionProto(name="layout", node=[*before, inner, *after])
    body.input.extend(f"in{k}" for k in range(len(c.operands)))
    body.output.extend(f"out{k}" for k in range(len(c.node.output)))
    return c.im.inline(body, c.operands, {}, c.where, dict(c.scope.opsets))


HANDLERS: dict[tuple[str, str], Handler] = {("", name): _layer for name in ("RNN", "GRU", "LSTM")}
