"""Attention as the plain scaled dot product; ONNX's own body does the rest: caches, windows, run-time masks."""

from __future__ import annotations

import numpy as np

from weft.frontends.onnx.call import ABSENT, Call, Handler, Result
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
from weft.ir.types import DType


def _heads(c: Call, i: int, count: int | None) -> NodeId:
    """(batch, length, heads · size) -> (batch, heads, length, size)."""
    shape = c.shape(i)
    if len(shape) == 4:
        return c.x(i)
    if count is None or len(shape) != 3 or shape[2] % count:
        c.fail(f"operand {i} of shape {shape} with {count} heads")
    split = c.b.reshape(c.x(i), (shape[0], shape[1], count, shape[2] // count))
    return c.b.transpose(split, (0, 2, 1, 3))


def _attention(c: Call) -> Result:
    b = c.b
    if c.num_outputs > 1 or c.has(4) or c.has(5) or c.has(6):
        return Declined("Attention with caches or further outputs")
    if c.get("left_window_size", -1) != -1 or c.get("right_window_size", -1) != -1:
        return Declined("Attention with a window")
    if c.get("softmax_precision") not in (None, 0, 1) or c.type(0).dtype is DType.F64:
        return Declined("Attention with a softmax in another precision")
    q, k, v = (
        _heads(c, 0, c.get("q_num_heads")),
        _heads(c, 1, c.get("kv_num_heads")),
        _heads(c, 2, c.get("kv_num_heads")),
    )
    causal = bool(c.get("is_causal", 0))
    mask = ABSENT
    if c.has(3):
        # a row without any key is 0 in ONNX and NaN as a plain softmax: only a known mask shows that there is none
        mask = c.x(3)
        if c.im.depends(mask) or b.type_of(mask).size > c.im.limits.fold_elements or causal:
            return Declined("Attention with a mask at run time")
        data = c.value(3)
        keep = data if data.dtype == np.bool_ else ~np.isneginf(data)
        if b.type_of(mask).shape[-1] != b.type_of(k).shape[2] or not keep.any(-1).all():
            return Declined("Attention with a row without keys")
    size = b.type_of(q).shape[-1]
    scale = float(c.get("scale") or 1.0 / np.sqrt(size))
    made = c.rule(
        "sdpa", q, k, v, mask, scale=scale, causal=causal, softcap=float(c.get("softcap", 0.0)),
        enable_gqa=b.type_of(q).shape[1] != b.type_of(k).shape[1],
    )  # fmt: skip
    if isinstance(made, Declined) or len(c.shape(0)) == 4:
        return made
    y = b.type_of(made[0]).shape
    return b.reshape(b.transpose(made[0], (0, 2, 1, 3)), (y[0], y[2], y[1] * y[3]))


HANDLERS: dict[tuple[str, str], Handler] = {("", "Attention"): _attention}
