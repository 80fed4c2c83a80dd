"""Normalisations and softmax."""

from __future__ import annotations

import math

import numpy as np

from weft.frontends.onnx.call import ABSENT, Call, Handler, Result
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def _softmax(rule: str) -> Handler:
    def handler(c: Call) -> Result:
        shape = c.shape(0)
        if c.opset >= 13:
            return c.rule(rule, c.x(0), axis=c.axis("axis", -1))
        axis = c.axis("axis", 1)  # before opset 13: the dimensions from `axis` on count as one
        if axis == len(shape) - 1:
            return c.rule(rule, c.x(0), axis=axis)
        flat = c.b.reshape(c.x(0), (math.prod(shape[:axis]), math.prod(shape[axis:])))
        made = c.rule(rule, flat, axis=1)
        return made if isinstance(made, Declined) else c.b.reshape(made[0], shape)

    return handler


def _hardmax(c: Call) -> Result:
    shape = c.shape(0)
    if c.opset >= 13:
        return c.rule("hardmax", c.x(0), axis=c.axis("axis", -1))
    axis = c.axis("axis", 1)
    flat = c.b.reshape(c.x(0), (math.prod(shape[:axis]), math.prod(shape[axis:])))
    made = c.rule("hardmax", flat, axis=1)
    return made if isinstance(made, Declined) else c.b.reshape(made[0], shape)


def _batch_norm(c: Call) -> Result:
    eps = c.get("epsilon", 1e-5)
    x, gamma, beta, mean, var = (c.x(k) for k in range(5))
    training = bool(c.get("training_mode", 0))
    if c.opset < 7 and not c.get("is_test", 0):
        return Declined("BatchNormalization of opset 6 in training mode")
    if not training:
        if c.num_outputs > 1:
            return Declined("BatchNormalization with batch statistics")
        return c.rule("batch_norm", x, gamma, beta, mean, var, eps=eps)
    b, t = c.b, c.type(0)
    axes = tuple(k for k in range(t.rank) if k != 1)
    stats = c.b.type_of(mean).dtype
    wide = b.cast(x, stats)
    means = c.rule("reduce_mean", wide, axes=axes, keepdims=False)
    if isinstance(means, Declined):
        return means
    spread = c.rule("var", wide, axes=axes, correction=0, keepdims=False)
    if isinstance(spread, Declined):
        return spread
    y = c.rule("batch_norm", x, gamma, beta, b.cast(means[0], stats), b.cast(spread[0], stats), eps=eps)
    if isinstance(y, Declined):
        return y
    momentum = float(c.get("momentum", 0.9))

    def running(old: NodeId, new: NodeId) -> NodeId:
        return b.apply(Prim.ADD, b.apply(Prim.MUL, old, momentum), b.apply(Prim.MUL, new, 1.0 - momentum))

    return (y[0], running(mean, means[0]), running(var, spread[0]))[: max(c.num_outputs, 1)]


def _layer_norm(c: Call) -> Result:
    rank = c.type(0).rank
    axis = c.axis("axis", -1)
    axes, eps = tuple(range(axis, rank)), c.get("epsilon", 1e-5)
    b, t = c.b, c.type(0)
    wide = DType(DType.F32) if c.get("stash_type", 1) == 1 and t.dtype in (DType.F16, DType.BF16) else t.dtype
    if c.num_outputs == 1:
        gamma = _trailing(c, c.x(1), axis)
        beta = _trailing(c, c.x(2), axis)
        if gamma is not None and beta is not None:
            return c.rule("layer_norm", c.x(0), gamma, beta, axes=axes, eps=eps)
    x = b.cast(c.x(0), wide)
    moments = _moments(c, x, axes)
    if isinstance(moments, Declined):
        return moments
    mean, variance = moments
    inverse = b.apply(Prim.RECIPROCAL, b.apply(Prim.SQRT, b.apply(Prim.ADD, variance, float(eps))))
    y = b.cast(b.apply(Prim.MUL, b.apply(Prim.SUB, x, mean), inverse), t.dtype)
    y = b.apply(Prim.MUL, y, c.x(1))
    if c.has(2):
        y = b.apply(Prim.ADD, y, c.x(2))
    return (y, mean, inverse)[: c.num_outputs]


def _moments(c: Call, x: NodeId, axes: tuple[int, ...]) -> tuple[NodeId, NodeId] | Declined:
    """Mean and variance over the axes, which stay as ones."""
    means = c.rule("reduce_mean", x, axes=axes, keepdims=True)
    spread = c.rule("var", x, axes=axes, correction=0, keepdims=True)
    if isinstance(means, Declined):
        return means
    return spread if isinstance(spread, Declined) else (means[0], spread[0])


def _trailing(c: Call, p: NodeId, axis: int) -> NodeId | None:
    """A scale or bias in the exact shape of the normalised dimensions; None if it only broadcasts to more."""
    if p == ABSENT:
        return p
    want = c.shape(0)[axis:]
    shape = c.b.type_of(p).shape
    while len(shape) > len(want) and shape[0] == 1:
        shape = shape[1:]
    if len(shape) > len(want) or any(n not in (1, m) for n, m in zip(shape[::-1], want[::-1], strict=False)):
        return None
    return c.b.broadcast(c.b.reshape(p, shape), want)


def _rms_norm(c: Call) -> Result:
    axis = c.axis("axis", -1)
    gamma = _trailing(c, c.x(1), axis)
    axes, eps = tuple(range(axis, c.type(0).rank)), c.get("epsilon", 1e-5)
    if gamma is not None:
        return c.rule("rms_norm", c.x(0), gamma, axes=axes, eps=eps)
    made = c.rule("rms_norm", c.x(0), ABSENT, axes=axes, eps=eps)
    return made if isinstance(made, Declined) else c.b.apply(Prim.MUL, made[0], c.x(1))


def _instance_norm(c: Call) -> Result:
    return c.rule("instance_norm", c.x(0), c.x(1), c.x(2), eps=c.get("epsilon", 1e-5))


def _group_norm(c: Call) -> Result:
    groups, channels = int(c.get("num_groups")), c.shape(0)[1]
    gamma, beta = c.x(1), c.x(2)
    if c.opset < 21 and c.shape(1) == (groups,) and groups != channels:  # one scale per group, not per channel
        b = c.b

        def spread(p: NodeId) -> NodeId:
            return b.reshape(b.broadcast(b.reshape(p, (groups, 1)), (groups, channels // groups)), (channels,))

        gamma, beta = spread(gamma), spread(beta)
    return c.rule("group_norm", c.x(0), gamma, beta, groups=groups, eps=c.get("epsilon", 1e-5))


def _lp_norm(c: Call) -> Result:
    return c.rule("lp_normalize", c.x(0), axis=c.axis("axis", -1), p=int(c.get("p", 2)))


def _mean_variance_norm(c: Call) -> Result:
    axes = tuple(sorted(c.norm(a, c.type(0).rank) for a in c.get("axes", (0, 2, 3))))
    b, x = c.b, c.x(0)
    moments = _moments(c, x, axes)
    if isinstance(moments, Declined):
        return moments
    deviation = b.apply(Prim.ADD, b.apply(Prim.SQRT, moments[1]), 1e-9)
    return b.apply(Prim.DIV, b.apply(Prim.SUB, x, moments[0]), deviation)


def _lrn(c: Call) -> Result:
    """x / (bias + alpha/size * sum over a window of channels of x²) ** beta."""
    from weft.ir.attrs import WindowAttrs

    b, x, t = c.b, c.x(0), c.type(0)
    size, rank = int(c.get("size")), t.rank
    alpha, beta, bias = c.get("alpha", 1e-4), c.get("beta", 0.75), c.get("bias", 1.0)
    perm = (0, *range(2, rank), 1)
    squares = b.transpose(b.apply(Prim.MUL, x, x), perm)
    lo = (size - 1) // 2
    attrs = WindowAttrs((size,), (1,), (lo,), (size - 1 - lo,), (1,))
    total = b.add(Prim.WINDOW_SUM, squares, attrs=attrs)
    back = b.transpose(total, tuple(np.argsort(perm).tolist()))
    scaled = b.apply(Prim.ADD, b.apply(Prim.MUL, back, alpha / size), float(bias))
    return b.apply(Prim.DIV, x, b.apply(Prim.POW, scaled, float(beta)))


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "Softmax"): _softmax("softmax"),
    ("", "LogSoftmax"): _softmax("log_softmax"),
    ("", "Hardmax"): _hardmax,
    ("", "BatchNormalization"): _batch_norm,
    ("", "LayerNormalization"): _layer_norm,
    ("", "RMSNormalization"): _rms_norm,
    ("", "InstanceNormalization"): _instance_norm,
    ("", "GroupNormalization"): _group_norm,
    ("", "LpNormalization"): _lp_norm,
    ("", "MeanVarianceNormalization"): _mean_variance_norm,
    ("", "LRN"): _lrn,
}
