"""ATen calls of networks: products, convolutions, attention, norms, softmax, pooling, resizing."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from weft.frontends.torch.call import ABSENT, Call, Handler
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

# products


def _check_alike(c: Call, *operands: NodeId) -> None:
    """Refuse operands of two element types: `torch.export` takes what torch does not run."""
    left, right = (c.type(x).dtype for x in operands)
    if left is not right:
        c.refuse(f"it has operands of {left.value} and {right.value}, which torch does not multiply")


def matmul(c: Call) -> NodeId:
    """mm, _int_mm, bmm, matmul, mv, dot: NumPy's product in the result's type."""
    left = c.ref("self" if "self" in c.arguments else "input")
    right = c.ref(next(n for n in ("mat2", "other", "vec", "tensor") if n in c.arguments))
    _check_alike(c, left, right)
    return c.one("matmul", c.b.cast(left, c.out.dtype), c.b.cast(right, c.out.dtype))


def scaled_mm(c: Call) -> NodeId:
    """(a b) * scale_a * scale_b + bias in f32, rounded once; a and b are 8-bit floats.

    Scales are one number each, or one per row of a and one per column of b. Whether fast accumulation is allowed is for
    the options to say: without, sums are more precise than asked for.
    """
    b, (m, n) = c.b, c.out.shape
    operands = [c.ref(name) for name in ("self", "mat2")]
    if not all(c.type(x).dtype.is_float8 for x in operands):
        c.decline("operands that are no floats of 8 bits")
    if c.has("scale_result"):
        c.decline("a scale of the result, which devices read differently")
    y = c.one("matmul", *(b.cast(x, DType.F32) for x in operands))
    scales = [c.ref("scale_a"), c.ref("scale_b")]
    whole = all(c.type(x).size == 1 for x in scales)
    if not whole and [c.shape(x) for x in scales] != [(m, 1), (1, n)]:
        c.decline(f"scales of shapes {c.shape(scales[0])} and {c.shape(scales[1])}")
    if any(c.type(x).dtype is not DType.F32 for x in scales):
        c.decline("scales that are not f32")
    if whole:
        y = b.apply(Prim.MUL, y, b.apply(Prim.MUL, *(b.reshape(x, ()) for x in scales)))
    else:
        y = b.apply(Prim.MUL, b.apply(Prim.MUL, y, scales[0]), scales[1])
    if c.has("bias"):
        y = b.apply(Prim.ADD, y, b.cast(c.ref("bias"), DType.F32))
    return b.cast(y, c.out.dtype)


def addmm(c: Call) -> NodeId:
    """beta * c + alpha * a @ b."""
    beta, alpha = c.real("beta"), c.real("alpha")
    operands = c.ref("self"), c.ref("mat1"), c.ref("mat2")
    if not c.out.dtype.is_float and (not beta.is_integer() or not alpha.is_integer()):
        c.decline("fractional factors of an integer product")
    return c.one("addmm", *operands, beta=beta, alpha=alpha)


def baddbmm(c: Call) -> NodeId:
    """beta * c + alpha * a @ b over batches."""
    return c.one("baddbmm", c.ref("self"), c.ref("batch1"), c.ref("batch2"), beta=c.real("beta"), alpha=c.real("alpha"))


def addmv(c: Call) -> NodeId:
    """beta * c + alpha * a @ v."""
    b, dtype = c.b, c.out.dtype
    beta, alpha = c.number("beta"), c.number("alpha")
    y = c.one("matmul", c.ref("mat"), c.ref("vec"))
    y = y if alpha == 1 else b.apply(Prim.MUL, y, b.scalar(alpha, dtype))
    if beta == 0:
        return y
    x = c.ref("self")
    return b.apply(Prim.ADD, y, x if beta == 1 else b.apply(Prim.MUL, x, b.scalar(beta, dtype)))


def einsum(c: Call) -> NodeId:
    """Sums of products by Einstein's convention."""
    dtype = c.out.dtype
    return c.rule("einsum", [c.b.cast(x, dtype) for x in c.refs("tensors")], equation=c.text("equation"))[0]


def linear(c: Call) -> NodeId:
    """x wᵀ + b."""
    _check_alike(c, c.ref("input"), c.ref("weight"))
    return c.one("linear", c.ref("input"), c.ref("weight"), c.maybe("bias"))


def convolution(c: Call) -> NodeId:
    """Convolution over 1 to 3 dimensions, or its transpose."""
    x, w, bias = c.ref("input"), c.ref("weight"), c.maybe("bias")
    k = c.rank(w) - 2
    if c.out.size == 0:
        return c.b.broadcast(c.b.scalar(0, c.out.dtype), c.out.shape)
    batched = c.rank(x) == k + 2
    if not batched:
        x = c.b.reshape(x, (1, *c.shape(x)))
    pads = c.ints("padding", k)
    shared: dict[str, int | tuple[int, ...]] = {
        "strides": c.ints("stride", k),
        "pads_lo": pads,
        "pads_hi": pads,
        "dilations": c.ints("dilation", k),
        "groups": c.integer("groups"),
    }
    if c.flag("transposed") or "conv_transpose" in c.op:
        y = c.one("conv_transpose", x, w, bias, **shared, output_padding=c.ints("output_padding", k))
    else:
        y = c.one("conv", x, w, bias, **shared)
    return y if batched else c.b.reshape(y, c.out.shape)


# attention


def attention(c: Call) -> NodeId | tuple[NodeId, ...]:
    """softmax(scale * q kᵀ + mask) v."""
    q, k, v = c.ref("query"), c.ref("key"), c.ref("value")
    if c.has("dropout_p") and c.real("dropout_p") != 0.0:
        c.decline("dropout inside attention")
    if len(c.results) > 1 and c.used - {0}:
        c.decline("the logarithm of the sums is read (training)")
    scale = c.real("scale") if c.has("scale") else 1.0 / math.sqrt(max(c.shape(q)[-1], 1))
    mask = c.maybe("attn_mask")
    y = c.one("sdpa", q, k, v, mask, scale=scale, causal=c.flag("is_causal"), enable_gqa=c.flag("enable_gqa"))
    return (y, *(ABSENT for _ in c.results[1:])) if len(c.results) > 1 else y


# normalisation


def _over_last(c: Call, x: NodeId, count: int) -> tuple[int, ...]:
    return tuple(range(c.rank(x) - count, c.rank(x)))


def _moments(c: Call, x: NodeId, axes: tuple[int, ...], eps: float) -> tuple[NodeId, NodeId]:
    """Mean and 1 / sqrt(variance + eps), dimensions kept; only for the training graph, which saves them."""
    b = c.b
    wide = b.cast(x, c.type(x).dtype.accumulator)
    mean = c.one("reduce_mean", wide, axes=axes, keepdims=True)
    var = c.one("var", wide, axes=axes, correction=0, keepdims=True)
    return mean, b.add(Prim.RSQRT, b.apply(Prim.ADD, var, eps))


def _statistic(c: Call, index: int, value: NodeId) -> NodeId:
    type = c.results[index]
    if type is None:
        return ABSENT
    return c.b.cast(c.b.reshape(value, type.shape), type.dtype)


def layer_norm(c: Call) -> tuple[NodeId, ...]:
    """(x - mean) * rstd * gamma + beta, with mean and rstd where they are read."""
    x, eps = c.ref("input"), c.real("eps")
    axes = _over_last(c, x, len(c.ints("normalized_shape")))
    y = c.one("layer_norm", x, c.maybe("weight"), c.maybe("bias"), axes=axes, eps=eps)
    if len(c.results) == 1 or not c.used - {0}:
        return (y, *(ABSENT for _ in c.results[1:]))
    mean, rstd = _moments(c, x, axes, eps)
    return y, _statistic(c, 1, mean), _statistic(c, 2, rstd)


def rms_norm(c: Call) -> NodeId:
    """x * rsqrt(mean(x²) + eps) * gamma."""
    x = c.ref("input")
    axes = _over_last(c, x, len(c.ints("normalized_shape")))
    machine = {DType.F64: 2.0**-52, DType.F32: 2.0**-23, DType.F16: 2.0**-10, DType.BF16: 2.0**-7}
    # ATen's default is the epsilon of the type it computes in
    eps = c.real("eps") if c.has("eps") else machine[c.type(x).dtype.accumulator]
    return c.one("rms_norm", x, c.maybe("weight"), axes=axes, eps=eps)


def group_norm(c: Call) -> tuple[NodeId, ...]:
    """Layer norm over groups of channels."""
    x, eps = c.ref("input"), c.real("eps")
    groups = c.integer("group" if "group" in c.arguments else "num_groups")
    y = c.one("group_norm", x, c.maybe("weight"), c.maybe("bias"), groups=groups, eps=eps)
    if len(c.results) == 1 or not c.used - {0}:
        return (y, *(ABSENT for _ in c.results[1:]))
    n, channels, *spatial = c.shape(x)
    grouped = c.b.reshape(x, (n, groups, channels // groups * math.prod(spatial)))
    mean, rstd = _moments(c, grouped, (2,), eps)
    return y, _statistic(c, 1, mean), _statistic(c, 2, rstd)


def instance_norm(c: Call) -> NodeId:
    """Normalisation over the spatial dimensions of each image and channel."""
    if c.has("use_input_stats") and not c.flag("use_input_stats"):
        return _normalise(c, c.ref("running_mean"), c.ref("running_var"))
    if c.has("running_mean") or c.has("running_var"):
        c.refuse("updates running statistics")
    return c.one("instance_norm", c.ref("input"), c.maybe("weight"), c.maybe("bias"), eps=c.real("eps"))


def _normalise(c: Call, mean: NodeId, var: NodeId) -> NodeId:
    """Batch norm with given statistics; the parameters that are absent are one and zero."""
    x = c.ref("input")
    channels = c.shape(mean)
    kind = c.type(mean).dtype
    gamma = c.ref("weight") if c.has("weight") else c.b.broadcast(c.b.scalar(1.0, kind), channels)
    beta = c.ref("bias") if c.has("bias") else c.b.broadcast(c.b.scalar(0.0, kind), channels)
    dtype = c.type(x).dtype
    kinds = {c.type(n).dtype for n in (gamma, beta, mean, var)}
    wide = dtype if kinds == {dtype} else DType.F32 if DType.F64 not in kinds | {dtype} else DType.F64
    y = c.one("batch_norm", *(c.b.cast(n, wide) for n in (x, gamma, beta, mean, var)), eps=c.real("eps"))
    return c.b.cast(y, dtype)


def batch_norm_inference(c: Call) -> tuple[NodeId, ...]:
    """Batch norm with the running statistics, which stay as they are; the saved ones are empty."""
    running = (c.ref("running_mean"), c.ref("running_var"))
    y = _normalise(c, *running)
    saved = [
        c.b.broadcast(c.b.scalar(0.0, t.dtype), t.shape) if t is not None and i in c.used else ABSENT
        for i, t in enumerate(c.results[:3])
    ]
    return (y, *saved[1:], *running[: len(c.results) - 3])


def batch_norm(c: Call) -> NodeId:
    """Batch norm of a module in evaluation mode."""
    if c.flag("training") or not c.has("running_mean"):
        c.refuse("updates running statistics")
    return _normalise(c, c.ref("running_mean"), c.ref("running_var"))


def batch_norm_training(c: Call) -> tuple[NodeId, ...]:
    """Batch norm with the statistics of the batch, which are saved; running ones are updated where the call does."""
    x, eps, b = c.ref("input"), c.real("eps"), c.b
    if not c.flag("training"):
        return batch_norm_inference(c)
    axes = tuple(k for k in range(c.rank(x)) if k != 1)
    dtype = c.type(x).dtype
    wide = b.cast(x, dtype.accumulator)
    mean = c.one("reduce_mean", wide, axes=axes, keepdims=True)
    var = c.one("var", wide, axes=axes, correction=0, keepdims=True)
    rstd = b.add(Prim.RSQRT, b.apply(Prim.ADD, var, eps))
    y = b.apply(Prim.MUL, b.apply(Prim.SUB, wide, mean), rstd)
    channels = tuple(1 if k != 1 else n for k, n in enumerate(c.shape(x)))
    for name, prim in (("weight", Prim.MUL), ("bias", Prim.ADD)):
        if c.has(name):
            y = b.apply(prim, y, b.reshape(b.cast(c.ref(name), dtype.accumulator), channels))
    found = [b.cast(y, dtype), _statistic(c, 1, mean), _statistic(c, 2, rstd)]
    if len(c.results) == 5:
        count = c.type(x).size // max(c.shape(x)[1], 1)
        unbiased = b.apply(Prim.MUL, var, count / max(count - 1, 1))
        for name, fresh in (("running_mean", mean), ("running_var", unbiased)):
            old = c.ref(name)
            kept = b.apply(Prim.MUL, old, 1.0 - c.real("momentum"))
            flat = b.cast(b.reshape(fresh, c.shape(old)), c.type(old).dtype)
            found.append(b.apply(Prim.ADD, b.apply(Prim.MUL, flat, c.real("momentum")), kept))
    elif len(c.results) > 3:
        c.decline(f"batch norm with {len(c.results)} results")
    return tuple(found)


# softmax


def softmax(rule: str) -> Handler:
    """softmax and its logarithm, in the type of the result."""

    def handler(c: Call) -> NodeId:
        x = c.b.cast(c.ref("self"), c.out.dtype)
        if c.rank(x) == 0:
            return c.b.reshape(c.one(rule, c.b.reshape(x, (1,)), axis=0), ())
        return c.one(rule, x, axis=c.axis(c.integer("dim"), c.rank(x))) if c.out.size else x

    return handler


def safe_softmax(c: Call) -> NodeId:
    """softmax, and zero in rows that are -inf throughout."""
    b = c.b
    x = b.cast(c.ref("self"), c.out.dtype)
    axis = c.axis(c.integer("dim"), c.rank(x))
    hidden = b.apply(Prim.EQ, b.reduce(Prim.REDUCE_MAX, x, (axis,)), float("-inf"))
    return b.apply(Prim.SELECT, hidden, b.scalar(0.0, c.out.dtype), c.one("softmax", x, axis=axis))


# pooling


def _pool_geometry(c: Call, k: int) -> dict[str, tuple[int, ...]]:
    kernel = c.ints("kernel_size", k)
    strides = c.ints("stride", k) if c.has("stride") else ()
    pads = c.ints("padding", k)
    return {"kernel": kernel, "strides": strides or kernel, "pads_lo": pads, "pads_hi": pads}


def _batched(c: Call, x: NodeId, k: int) -> NodeId:
    return x if c.rank(x) == k + 2 else c.b.reshape(x, (1,) * (k + 2 - c.rank(x)) + c.shape(x))


def max_pool(k: int) -> Handler:
    """Maximum over windows, and its position where that is read."""

    def handler(c: Call) -> tuple[NodeId, ...]:
        if c.out.size == 0:
            c.decline("empty")
        if c.used - {0}:
            return _max_pool_positions(c, k)
        x = _batched(c, c.ref("self"), k)
        g = _pool_geometry(c, k)
        dilations = c.ints("dilation", k)
        # ceil mode: as many windows as the result has; what they reach over the edge counts as padding
        spans = zip(c.shape(x)[2:], c.out.shape[-k:], g["kernel"], g["strides"], g["pads_lo"], dilations, strict=True)
        g["pads_hi"] = tuple(max(p, (out - 1) * s + d * (n - 1) + 1 - size - p) for size, out, n, s, p, d in spans)
        y = c.one("max_pool", x, **g, dilations=dilations)
        return (c.b.reshape(y, c.out.shape), *(ABSENT for _ in c.results[1:]))

    return handler


def _max_pool_positions(c: Call, k: int) -> tuple[NodeId, ...]:
    x, g = c.ref("self"), _pool_geometry(c, k)
    windows = {"kernel": g["kernel"], "strides": g["strides"], "pads": g["pads_lo"], "dilations": c.ints("dilation", k)}
    y, taps = c.rule("max_pool_taps", [x], **windows, ceil=c.flag("ceil_mode"))
    sizes = c.shape(x)[-k:]
    at = c.one("max_pool_positions", taps, sizes=sizes, **windows, ceil=c.flag("ceil_mode"))
    if c.shape(y) != c.out.shape:
        c.decline(f"windows of shape {c.shape(y)} where torch has {c.out.shape}")
    return y, at


def avg_pool(k: int) -> Handler:
    """Mean over windows."""

    def handler(c: Call) -> NodeId:
        if c.out.size == 0:
            c.decline("empty")
        x = _batched(c, c.ref("self"), k)
        divisor = c.integer("divisor_override") if c.has("divisor_override") else 0
        y = c.one(
            "avg_pool",
            x,
            **_pool_geometry(c, k),
            count_include_pad=c.flag("count_include_pad"),
            divisor=divisor,
            ceil=c.flag("ceil_mode"),
        )
        return c.b.reshape(y, c.out.shape)

    return handler


def adaptive_max_pool(k: int) -> Handler:
    """Maximum over windows of which the result's size is given."""

    def handler(c: Call) -> tuple[NodeId, ...]:
        if c.used - {0}:
            c.decline("positions of the maxima are read")
        x = c.ref("self")
        if c.out.size == 0 or c.type(x).size == 0:
            c.decline("empty")
        y = c.one("adaptive_max_pool", _batched(c, x, k), output_size=c.out.shape[-k:])
        return (c.b.reshape(y, c.out.shape), *(ABSENT for _ in c.results[1:]))

    return handler


def adaptive_avg_pool(k: int) -> Handler:
    """Mean over windows of which the result's size is given."""

    def handler(c: Call) -> NodeId:
        x = c.ref("self")
        if c.out.size == 0 or c.type(x).size == 0:
            c.decline("empty")
        if all(n == 1 for n in c.out.shape[-k:]):
            y = c.one("global_avg_pool", _batched(c, x, k))
        else:
            y = c.one("adaptive_avg_pool", _batched(c, x, k), output_size=c.out.shape[-k:])
        return c.b.reshape(y, c.out.shape)

    return handler


# resizing


def _scales(c: Call, k: int) -> tuple[float, ...]:
    """Output over input per dimension, as ATen uses it: the given factor if there is one, else the ratio of sizes."""
    x = c.ref("input" if "input" in c.arguments else "self")
    ratios = tuple(o / n for o, n in zip(c.out.shape[-k:], c.shape(x)[-k:], strict=True))
    if c.has("scale_factors"):
        return c.floats("scale_factors")
    names = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}[k]
    return tuple(c.real(n) if c.has(n) else r for n, r in zip(names, ratios, strict=True))


def _text(scales: tuple[float, ...]) -> str:
    return ",".join(repr(float(s)) for s in (1.0, 1.0, *scales))


def resize_nearest(k: int, exact: bool = False) -> Handler:
    """x[floor(i / scale)]; `exact` counts from the centres of the pixels."""

    def handler(c: Call) -> NodeId:
        x = c.ref("input" if "input" in c.arguments else "self")
        scales = _scales(c, k)
        pairs = tuple(zip(c.shape(x)[-k:], c.out.shape[-k:], scales, strict=True))
        if all(o % n == 0 and s == o // n for n, o, s in pairs):
            mode = "half_pixel" if exact else "asymmetric"
            return c.one(
                "resize_nearest",
                x,
                sizes=c.out.shape,
                scales_text=_text(scales),
                coordinate_mode=mode,
                nearest_mode="round_prefer_floor" if exact else "floor",
            )
        # ATen computes the position in float32; for uneven ratios that decides which neighbour is taken
        for d, (n, o, s) in enumerate(pairs):
            step = np.float32(1.0 / s)
            at = np.arange(o, dtype=np.float32) + np.float32(0.5 if exact else 0.0)
            index = np.minimum(np.floor(at * step).astype(np.int64), n - 1)
            x = c.one("gather", x, c.b.constant(index), axis=c.rank(x) - k + d)
        return x

    return handler


def resize_cubic(antialias: bool) -> Handler:
    """Cubic interpolation (a = -0.75; with antialiasing -0.5, as in Pillow)."""

    def handler(c: Call) -> NodeId:
        x = c.ref("input" if "input" in c.arguments else "self")
        if not c.out.dtype.is_float:
            c.decline(f"cubic interpolation of {c.out.dtype.value}")
        return c.one(
            "resize_cubic",
            x,
            sizes=c.out.shape,
            scales_text=_text(_scales(c, 2)),
            coordinate_mode="align_corners" if c.flag("align_corners") else "half_pixel",
            cubic_coeff=-0.5 if antialias else -0.75,
            antialias=antialias,
            exclude_outside=antialias,
        )

    return handler


def resize_linear(k: int, antialias: bool = False) -> Handler:
    """Linear interpolation between the neighbours, along each of k dimensions."""

    def handler(c: Call) -> NodeId:
        x = c.ref("input" if "input" in c.arguments else "self")
        mode = "align_corners" if c.flag("align_corners") else "half_pixel"
        if not c.out.dtype.is_float:
            c.decline(f"linear interpolation of {c.out.dtype.value}")
        return c.one(
            "resize_linear",
            x,
            sizes=c.out.shape,
            scales_text=_text(_scales(c, k)),
            coordinate_mode=mode,
            antialias=antialias,
            exclude_outside=antialias,
        )

    return handler


_SAMPLED = ("linear", "nearest")
_OUTSIDE = ("zeros", "border", "reflection")


def grid_sample(c: Call) -> NodeId:
    """An image at the points of a grid."""
    mode, padding = c.integer("interpolation_mode"), c.integer("padding_mode")
    if mode not in range(len(_SAMPLED)) or padding not in range(len(_OUTSIDE)):
        c.decline("cubic sampling at data-dependent positions")
    return c.one(
        "grid_sample",
        c.ref("input"),
        c.ref("grid"),
        mode=_SAMPLED[mode],
        padding=_OUTSIDE[padding],
        align_corners=c.flag("align_corners"),
    )


TABLE: Mapping[str, Handler] = {
    **{f"aten.{n}.default": matmul for n in ("mm", "_int_mm", "bmm", "matmul", "mv", "dot")},
    "aten._scaled_mm.default": scaled_mm,
    "aten.addmm.default": addmm,
    "aten.addmv.default": addmv,
    "aten.einsum.default": einsum,
    "aten.baddbmm.default": baddbmm,
    "aten.linear.default": linear,
    "aten.convolution.default": convolution,
    **{f"aten.conv{k}d.default": convolution for k in (1, 2, 3)},
    "aten.conv_transpose1d.default": convolution,
    **{f"aten.conv_transpose{k}d.input": convolution for k in (2, 3)},
    "aten.scaled_dot_product_attention.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention,
    "aten.native_layer_norm.default": layer_norm,
    "aten.layer_norm.default": layer_norm,
    "aten.rms_norm.default": rms_norm,
    "aten.native_group_norm.default": group_norm,
    "aten.group_norm.default": group_norm,
    "aten.instance_norm.default": instance_norm,
    "aten._native_batch_norm_legit_no_training.default": batch_norm_inference,
    "aten.batch_norm.default": batch_norm,
    "aten._native_batch_norm_legit.no_stats": batch_norm_training,
    "aten._native_batch_norm_legit_functional.default": batch_norm_training,
    "aten._softmax.default": softmax("softmax"),
    "aten._log_softmax.default": softmax("log_softmax"),
    "aten.softmax.int": softmax("softmax"),
    "aten.log_softmax.int": softmax("log_softmax"),
    "aten._safe_softmax.default": safe_softmax,
    "aten.max_pool2d_with_indices.default": max_pool(2),
    "aten.max_pool3d_with_indices.default": max_pool(3),
    "aten.max_pool1d.default": max_pool(1),
    "aten.max_pool2d.default": max_pool(2),
    "aten.max_pool3d.default": max_pool(3),
    **{f"aten.avg_pool{k}d.default": avg_pool(k) for k in (1, 2, 3)},
    "aten._adaptive_avg_pool2d.default": adaptive_avg_pool(2),
    "aten._adaptive_avg_pool3d.default": adaptive_avg_pool(3),
    **{f"aten.adaptive_avg_pool{k}d.default": adaptive_avg_pool(k) for k in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{k}d.default": adaptive_max_pool(k) for k in (1, 2, 3)},
    **{f"aten.upsample_bicubic2d.{o}": resize_cubic(False) for o in ("vec", "default")},
    **{f"aten._upsample_bicubic2d_aa.{o}": resize_cubic(True) for o in ("vec", "default")},
    **{f"aten._upsample_bilinear2d_aa.{o}": resize_linear(2, True) for o in ("vec", "default")},
    **{f"aten.upsample_nearest{k}d.{o}": resize_nearest(k) for k in (1, 2, 3) for o in ("vec", "default")},
    **{f"aten._upsample_nearest_exact{k}d.{o}": resize_nearest(k, True) for k in (1, 2, 3) for o in ("vec", "default")},
    **{f"aten.upsample_{n}{k}d.{o}": resize_linear(k)
       for n, k in (("linear", 1), ("bilinear", 2), ("trilinear", 3)) for o in ("vec", "default")},
    **{f"aten.grid_sampler{k}.default": grid_sample for k in ("", "_2d", "_3d")},
}  # fmt: skip
"""Handlers by overload."""
