"""Shapes, slices, joins, padding, indexing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weft.frontends.onnx.call import ABSENT, Call, Handler, Result
from weft.ir.attrs import GatherAttrs
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.shapes import broadcast_shapes
from weft.ir.types import DType


def _reshape(c: Call) -> Result:
    old = c.shape(0)
    want = list(c.ints(1) if c.opset >= 5 else c.get("shape"))
    if not c.get("allowzero", 0):
        want = [old[k] if n == 0 and k < len(old) else n for k, n in enumerate(want)]
    if want.count(-1) > 1 or min(want, default=0) < -1:
        c.fail(f"reshape to {want}")
    if -1 in want:
        rest = math.prod(n for n in want if n != -1)
        if rest == 0 or c.type(0).size % rest:
            if rest == 0 and c.type(0).size == 0:
                want[want.index(-1)] = 0
            else:
                c.fail(f"shape {old} does not reshape to {want}")
        else:
            want[want.index(-1)] = c.type(0).size // rest
    if math.prod(want) != c.type(0).size:
        c.fail(f"shape {old} does not reshape to {want}")
    return c.rule("reshape", c.x(0), shape=tuple(want))


def _transpose(c: Call) -> Result:
    rank = c.type(0).rank
    return c.rule("transpose", c.x(0), perm=tuple(c.get("perm") or range(rank - 1, -1, -1)))


def _flatten(c: Call) -> Result:
    shape = c.shape(0)
    axis = int(c.get("axis", 1))
    axis = axis + len(shape) if axis < 0 else axis
    if not 0 <= axis <= len(shape):
        c.fail(f"axis {axis} of rank {len(shape)}")
    return c.rule("reshape", c.x(0), shape=(math.prod(shape[:axis]), math.prod(shape[axis:])))


def _axes(c: Call) -> tuple[int, ...] | None:
    if c.opset < 13:
        given = c.get("axes")
        return None if given is None else tuple(given)
    return c.ints(1) if c.has(1) else None


def _squeeze(c: Call) -> Result:
    shape, axes = c.shape(0), _axes(c)
    gone = {k for k, n in enumerate(shape) if n == 1}
    if axes is not None:
        gone = {c.norm(a, len(shape)) for a in axes}
    if any(shape[k] != 1 for k in gone):
        c.fail(f"squeeze of axes {sorted(gone)} of {shape}")
    return c.rule("reshape", c.x(0), shape=tuple(n for k, n in enumerate(shape) if k not in gone))


def _unsqueeze(c: Call) -> Result:
    shape = list(c.shape(0))
    axes = _axes(c) or ()
    rank = len(shape) + len(axes)
    at = {c.norm(a, rank) for a in axes}
    if len(at) != len(axes):
        c.fail(f"axes {axes} repeat")
    rest = iter(shape)
    return c.rule("reshape", c.x(0), shape=tuple(1 if k in at else next(rest) for k in range(rank)))


def _expand(c: Call) -> Result:
    return c.rule("expand", c.x(0), shape=broadcast_shapes(c.shape(0), c.ints(1)))


def _tile(c: Call) -> Result:
    repeats = c.ints(1)
    if len(repeats) != c.type(0).rank or min(repeats, default=0) < 0:
        c.fail(f"repeats {repeats} of rank {c.type(0).rank}")
    if 0 in repeats:
        shape = tuple(n * r for n, r in zip(c.shape(0), repeats, strict=True))
        return (
            c.b.slice(
                c.x(0),
                (0,) * len(shape),
                tuple(min(n, m) for n, m in zip(shape, c.shape(0), strict=True)),
                (1,) * len(shape),
            )
            if all(n <= m for n, m in zip(shape, c.shape(0), strict=True))
            else Declined("Tile by 0")
        )
    return c.rule("tile", c.x(0), repeats=repeats)


def _concat(c: Call) -> Result:
    return c.rule("concat", *c.xs(), axis=c.axis("axis", 1))


def _split(c: Call) -> Result:
    axis = c.axis("axis", 0)
    n = c.shape(0)[axis]
    sizes: tuple[int, ...] | None
    sizes = c.get("split")
    if c.opset >= 13:
        sizes = c.ints(1) if c.has(1) else None
    if sizes is None:
        parts = int(c.get("num_outputs") or len(c.node.output))
        step = -(-n // parts) if c.opset >= 18 else n // parts
        if c.opset < 18 and n % parts:
            c.fail(f"size {n} does not split into {parts} parts")
        sizes = tuple(min(step, max(n - k * step, 0)) for k in range(parts))
    if sum(sizes) != n or min(sizes, default=0) < 0 or len(sizes) < len(c.node.output):
        c.fail(f"size {n} does not split into {sizes}")
    return c.rule("split", c.x(0), axis=axis, sizes=tuple(sizes))


def _slice(c: Call) -> Result:
    rank = c.type(0).rank
    if c.opset < 10:
        starts, ends = c.get("starts"), c.get("ends")
        axes = c.get("axes") or tuple(range(len(starts)))
        steps: tuple[int, ...] = (1,) * len(starts)
    else:
        starts, ends = c.ints(1), c.ints(2)
        axes = c.ints(3) if c.has(3) else tuple(range(len(starts)))
        steps = c.ints(4) if c.has(4) else (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        c.fail(f"starts {starts}, ends {ends}, axes {axes}, steps {steps}")
    return c.rule(
        "slice", c.x(0), starts=tuple(starts), ends=tuple(ends), steps=tuple(steps),
        axes=tuple(c.norm(a, rank) for a in axes),
    )  # fmt: skip


def _crop(c: Call, x: NodeId, lo: list[int], hi: list[int]) -> NodeId:
    """Cut -lo and -hi elements off where they are negative."""
    shape = c.b.type_of(x).shape
    starts = tuple(max(-p, 0) for p in lo)
    sizes = tuple(n + min(p, 0) + min(q, 0) for n, p, q in zip(shape, lo, hi, strict=True))
    if min(sizes, default=0) < 0:
        c.fail(f"pads {lo}, {hi} of {shape}")
    return c.b.slice(x, starts, sizes, (1,) * len(shape))


def _pad(c: Call) -> Result:
    t = c.type(0)
    if c.opset < 11:
        pads, value = tuple(c.get("pads")), float(c.get("value", 0.0))
        axes = tuple(range(t.rank))
    else:
        pads = c.ints(1)
        value = c.value(2).reshape(-1)[0].item() if c.has(2) else 0.0
        axes = tuple(c.norm(a, t.rank) for a in c.ints(3)) if c.has(3) else tuple(range(t.rank))
    if len(pads) != 2 * len(axes):
        c.fail(f"{len(pads)} pads for {len(axes)} axes")
    lo, hi = [0] * t.rank, [0] * t.rank
    for k, axis in enumerate(axes):
        lo[axis], hi[axis] = pads[k], pads[len(axes) + k]
    x = _crop(c, c.x(0), lo, hi)
    lo, hi = [max(p, 0) for p in lo], [max(p, 0) for p in hi]
    mode = c.get("mode", "constant")
    if mode == "wrap":
        return _wrap(c, x, lo, hi)
    if t.dtype.is_integer and abs(value) >= 2**53:
        return Declined("Pad with a large integer")
    if t.dtype is DType.BOOL and mode == "constant" and not value:
        value = 0.0
    return c.rule("pad", x, lo=tuple(lo), hi=tuple(hi), mode=mode, value=float(value))


def _wrap(c: Call, x: NodeId, lo: list[int], hi: list[int]) -> Result:
    b = c.b
    for axis, (p, q) in enumerate(zip(lo, hi, strict=True)):
        n = b.type_of(x).shape[axis]
        if (p or q) and n == 0:
            return Declined("wrap pad of an empty dimension")
        if p or q:
            index = np.arange(-p, n + q, dtype=np.int64) % n
            x = b.add(Prim.GATHER, x, b.constant(index), attrs=GatherAttrs(axis))
    return x


def _gather(c: Call) -> Result:
    return c.rule("gather", c.x(0), c.x(1), axis=c.axis("axis", 0))


def _gather_elements(c: Call) -> Result:
    return c.rule("gather_elements", c.x(0), c.x(1), axis=c.axis("axis", 0))


def _gather_nd(c: Call) -> Result:
    return c.rule("gather_nd", c.x(0), c.x(1), batch_dims=int(c.get("batch_dims", 0)))


def _one_hot(c: Call) -> Result:
    """Indices may be floats, and count from the end where negative; outside of [-depth, depth) nothing is hot."""
    b = c.b
    depth = c.integer(1) if c.type(1).dtype.is_integer else int(c.value(1).reshape(-1)[0])
    if depth < 1:
        c.fail(f"OneHot of depth {depth}")
    rank = c.type(0).rank + 1
    axis = c.norm(int(c.get("axis", -1)), rank)
    idx = b.cast(c.x(0), DType.I64)
    zero = b.constant(np.zeros((), np.int64))
    idx = b.apply(
        Prim.SELECT, b.apply(Prim.LT, idx, zero), b.apply(Prim.ADD, idx, b.constant(np.array(depth, np.int64))), idx
    )
    shape = c.shape(0)
    spread = b.reshape(idx, (*shape[:axis], 1, *shape[axis:]))
    full = (*shape[:axis], depth, *shape[axis:])
    hit = b.apply(Prim.EQ, b.broadcast(spread, full), b.iota(full, axis, DType.I64))
    values = c.x(2)
    off, on = (b.reshape(b.slice(values, (k,), (1,), (1,)), ()) for k in (0, 1))
    return b.apply(Prim.SELECT, hit, on, off)


def _space_to_depth(c: Call) -> Result:
    return c.rule("space_to_depth", c.x(0), block=int(c.get("blocksize")), mode=c.get("mode", "DCR"))


def _depth_to_space(c: Call) -> Result:
    return c.rule("depth_to_space", c.x(0), block=int(c.get("blocksize")), mode=c.get("mode", "DCR"))


def _trilu(c: Call) -> Result:
    k = c.integer(1) if c.has(1) else 0
    t = c.type(0)
    k = max(-(2**31), min(k, 2**31 - 1))
    if t.dtype is DType.BOOL or t.size == 0:
        keep = np.tri(t.shape[-2], t.shape[-1], k if not c.get("upper", 1) else k - 1, dtype=np.bool_)
        keep = keep if not c.get("upper", 1) else ~keep
        zero = c.b.constant(np.zeros((), t.dtype.numpy), t.dtype)
        return c.b.apply(Prim.SELECT, c.b.constant(keep), c.x(0), zero)
    return c.rule("triu" if c.get("upper", 1) else "tril", c.x(0), k=k)


def _reverse_sequence(c: Call) -> Result:
    time, batch = int(c.get("time_axis", 0)), int(c.get("batch_axis", 1))
    if {time, batch} != {0, 1}:
        c.fail(f"axes {time} and {batch}")
    return c.rule("reverse_sequence", c.x(0), c.x(1), time_axis=time, batch_axis=batch)


def flat_scatter(c: Call, data: NodeId, index: NodeId, updates: NodeId, reduction: str) -> NodeId | Declined:
    """data (N,) with updates (M,) written, or combined, at flat positions index (M,): a comparison of N by M.

    Nothing is written twice in 'none' mode by the operator's contract; the last one would win here.
    """
    b = c.b
    n, m = b.type_of(data).size, b.type_of(index).size
    t = b.type_of(data)
    if n * max(m, 1) > 1 << 22:
        return Declined(f"scatter of {m} into {n}")
    if m == 0:
        return data
    hit = b.apply(
        Prim.EQ,
        b.broadcast(b.reshape(index, (1, m)), (n, m)),
        b.iota((n, m), 0, DType.I64),
    )
    if reduction == "none":
        # position of the last hit of each element
        order = b.apply(Prim.SELECT, hit, b.iota((n, m), 1, DType.I64), b.constant(np.array(-1, np.int64)))
        last = b.reshape(b.reduce(Prim.REDUCE_MAX, order, (1,)), (n,))
        zero = b.constant(np.zeros((), np.int64))
        picked = b.add(Prim.GATHER, updates, b.apply(Prim.MAX, last, zero), attrs=GatherAttrs(0))
        return b.apply(Prim.SELECT, b.apply(Prim.GE, last, zero), picked, data)
    prim, combine, unit = {
        "add": (Prim.REDUCE_SUM, Prim.ADD, 0),
        "mul": (Prim.REDUCE_PROD, Prim.MUL, 1),
        "max": (Prim.REDUCE_MAX, Prim.MAX, -math.inf),
        "min": (Prim.REDUCE_MIN, Prim.MIN, math.inf),
    }[reduction]
    if t.dtype is DType.BOOL and reduction in ("add", "mul"):
        return Declined(f"scatter with {reduction} of bool")
    if not math.isfinite(unit) and not t.dtype.is_float:
        if t.dtype is DType.BOOL:
            unit = reduction == "min"
        else:
            info = np.iinfo(t.dtype.numpy)  # type: ignore[type-var]
            unit = info.min if reduction == "max" else info.max
    neutral = b.constant(np.array(unit, t.dtype.numpy), t.dtype)
    rows = b.apply(Prim.SELECT, hit, b.broadcast(b.reshape(updates, (1, m)), (n, m)), neutral)
    return b.apply(combine, data, b.reshape(b.reduce(prim, rows, (1,)), (n,)))


def _normal_index(c: Call, index: NodeId, size: NodeId) -> NodeId:
    """Negative positions count from the end; `size` is a node that broadcasts with them."""
    b = c.b
    idx = b.cast(index, DType.I64)
    zero = b.constant(np.zeros((), np.int64))
    return b.apply(Prim.SELECT, b.apply(Prim.LT, idx, zero), b.apply(Prim.ADD, idx, size), idx)


def _scatter_elements(c: Call) -> Result:
    b, shape, inner = c.b, c.shape(0), c.shape(1)
    axis = c.axis("axis", 0)
    if len(shape) != len(inner) or c.shape(2) != inner:
        c.fail(f"indices {inner} and updates {c.shape(2)} into {shape}")
    idx = _normal_index(c, c.x(1), b.constant(np.array(shape[axis], np.int64)))
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    flat = b.apply(Prim.MUL, idx, b.constant(np.array(strides[axis], np.int64)))
    for k, stride in enumerate(strides):
        if k != axis and inner[k] > 1:
            step = b.apply(Prim.MUL, b.iota(inner, k, DType.I64), b.constant(np.array(stride, np.int64)))
            flat = b.apply(Prim.ADD, flat, step)
    m, reduction = math.prod(inner), c.get("reduction", "none")
    data, updates = b.reshape(c.x(0), (c.type(0).size,)), b.reshape(c.x(2), (m,))
    made = flat_scatter(c, data, b.reshape(flat, (m,)), updates, reduction)
    return made if isinstance(made, Declined) else b.reshape(made, shape)


def _flat_rows(c: Call, sizes: Sequence[int], rows: int) -> NodeId:
    """Positions of the rows that indices name among all, a constant where they are."""
    b, count = c.b, len(sizes)
    strides = np.array([math.prod(sizes[j + 1 :]) for j in range(count)], np.int64)
    value = b.constant_value(c.x(1))
    if value is not None:
        at = np.asarray(value).astype(np.int64).reshape(rows, count)
        return b.constant((np.where(at < 0, at + np.array(sizes, np.int64), at) * strides).sum(1))
    at_sizes = b.constant(np.array(sizes, np.int64))
    idx = _normal_index(c, b.reshape(c.x(1), (rows, count)), at_sizes)
    return b.reshape(b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, idx, b.constant(strides)), (1,)), (rows,))


def _scatter_nd(c: Call) -> Result:
    b, shape, inner = c.b, c.shape(0), c.shape(1)
    k = inner[-1]
    tail = shape[k:]
    if k > len(shape) or c.shape(2) != (*inner[:-1], *tail):
        c.fail(f"indices {inner} and updates {c.shape(2)} into {shape}")
    rows, width = math.prod(inner[:-1]), math.prod(tail)
    reduction = c.get("reduction", "none")
    if reduction in ("none", "add") and rows:
        places = b.reshape(c.x(0), (math.prod(shape[:k]), width))
        put = c.rule(
            "put", places, _flat_rows(c, shape[:k], rows), b.reshape(c.x(2), (rows, width)), axis=0,
            add=reduction == "add",
        )  # fmt: skip
        if not isinstance(put, Declined):
            return b.reshape(put[0], shape)
    sizes = b.constant(np.array(shape[:k], np.int64))
    idx = _normal_index(c, b.reshape(c.x(1), (rows, k)), sizes)
    strides = np.array([math.prod(shape[j + 1 :]) for j in range(k)], np.int64)
    start = b.reshape(b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, idx, b.constant(strides)), (1,)), (rows, 1))
    flat = b.apply(Prim.ADD, b.broadcast(start, (rows, width)), b.iota((rows, width), 1, DType.I64))
    data, updates = b.reshape(c.x(0), (c.type(0).size,)), b.reshape(c.x(2), (rows * width,))
    made = flat_scatter(c, data, b.reshape(flat, (rows * width,)), updates, reduction)
    return made if isinstance(made, Declined) else b.reshape(made, shape)


def _compress(c: Call) -> Result:
    """Only with a condition that is known: the size of the result depends on it."""
    keep = np.flatnonzero(np.asarray(c.value(1)).reshape(-1)).astype(np.int64)
    b, x = c.b, c.x(0)
    axis = c.get("axis")
    if axis is None:
        x, axis = b.reshape(x, (c.type(0).size,)), 0
    axis = c.norm(int(axis), b.type_of(x).rank)
    return b.add(Prim.GATHER, x, b.constant(keep[keep < b.type_of(x).shape[axis]]), attrs=GatherAttrs(axis))


def _constant_result(c: Call) -> Result:
    """NonZero and Unique of a constant."""
    if c.im.depends(c.x(0)):
        return Declined("the shape of its result depends on run-time values")
    value = np.asarray(c.value(0))
    if c.op == "NonZero":
        found = np.array(np.nonzero(np.atleast_1d(value)), np.int64)
        return c.b.constant(found.reshape(value.ndim, -1))
    return Declined("Unique")


def _center_crop_pad(c: Call) -> Result:
    shape, wanted = list(c.shape(0)), c.ints(1)
    axes = tuple(c.norm(a, len(shape)) for a in (c.get("axes") or range(len(shape))))
    if len(axes) != len(wanted):
        c.fail(f"{len(wanted)} sizes for axes {axes}")
    lo, hi = [0] * len(shape), [0] * len(shape)
    for a, n in zip(axes, wanted, strict=True):
        extra = n - shape[a]
        if extra >= 0:
            lo[a], hi[a] = extra // 2, extra - extra // 2
        else:
            lo[a] = -(-extra // 2)
            hi[a] = extra - lo[a]
    x = _crop(c, c.x(0), lo, hi)
    return c.rule(
        "pad", x, lo=tuple(max(p, 0) for p in lo), hi=tuple(max(p, 0) for p in hi), mode="constant", value=0.0
    )


def _col2im(c: Call) -> Result:
    """Each block is padded into the image and added."""
    b = c.b
    image, block = c.ints(1), c.ints(2)
    n = len(image)
    dilations = tuple(c.get("dilations") or (1,) * n)
    strides = tuple(c.get("strides") or (1,) * n)
    pads = tuple(c.get("pads") or (0,) * 2 * n)
    batch, rows, _ = c.shape(0)
    kernel = math.prod(block)
    channels = rows // kernel
    out = tuple(
        (image[k] + pads[k] + pads[n + k] - dilations[k] * (block[k] - 1) - 1) // strides[k] + 1 for k in range(n)
    )
    if kernel > 256:
        return Declined(f"Col2Im with blocks of {kernel}")
    x = b.reshape(c.x(0), (batch, channels, *block, *out))
    total = ABSENT
    for at in np.ndindex(*block):
        rank = 2 + 2 * n
        part = b.slice(x, (0, 0, *map(int, at), *(0,) * n), (batch, channels, *(1,) * n, *out), (1,) * rank)
        part = b.reshape(part, (batch, channels, *out))
        for k in range(n):  # stretch by the stride, then move to the place of this block element
            part = _stretch(c, part, 2 + k, strides[k])
        lo = [0, 0, *(int(at[k]) * dilations[k] for k in range(n))]
        shape = b.type_of(part).shape
        full = [image[k] + pads[k] + pads[n + k] for k in range(n)]
        hi = [0, 0, *(full[k] - lo[2 + k] - shape[2 + k] for k in range(n))]
        part = _padded(c, part, lo, hi)
        total = part if total == ABSENT else b.apply(Prim.ADD, total, part)
    return b.slice(total, (0, 0, *pads[:n]), (batch, channels, *image), (1,) * (n + 2))


def _stretch(c: Call, x: NodeId, axis: int, stride: int) -> NodeId:
    """Zeros between the elements of an axis: size (n-1)*stride + 1."""
    b, shape = c.b, c.b.type_of(x).shape
    if stride == 1:
        return x
    apart = b.reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    wide = _padded(
        c, apart, [0] * (len(shape) + 1), [stride - 1 if k == axis + 1 else 0 for k in range(len(shape) + 1)]
    )
    flat = b.reshape(wide, (*shape[:axis], shape[axis] * stride, *shape[axis + 1 :]))
    size = tuple((n - 1) * stride + 1 if k == axis else n for k, n in enumerate(shape))
    return b.slice(flat, (0,) * len(shape), size, (1,) * len(shape))


def _padded(c: Call, x: NodeId, lo: list[int], hi: list[int]) -> NodeId:
    from weft.ir.attrs import PadAttrs

    if not any(lo) and not any(hi):
        return x
    cut = _crop(c, x, lo, hi)
    return c.b.add(
        Prim.PAD, cut, attrs=PadAttrs(tuple(max(p, 0) for p in lo), tuple(max(p, 0) for p in hi), "constant", 0.0)
    )


def _tensor_scatter(c: Call) -> Result:
    """A cache (batch, ..., length, ...) with `update` written from `write_indices` on, along `axis`."""
    b, shape, small = c.b, c.shape(0), c.shape(1)
    axis = c.norm(int(c.get("axis", -2)), len(shape))
    if axis == 0:
        return Declined("TensorScatter along the batch")
    length, step = shape[axis], small[axis]
    start = b.broadcast(b.constant(np.zeros((), np.int64)), (shape[0],))
    if c.has(2):
        start = b.cast(c.x(2), DType.I64)
    grid = (shape[0], length)
    offset = b.apply(Prim.SUB, b.iota(grid, 1, DType.I64), b.reshape(start, (shape[0], 1)))
    if c.get("mode", "linear") == "circular":
        offset = b.apply(Prim.MOD, offset, b.constant(np.array(length, np.int64)))
    zero, end = b.constant(np.zeros((), np.int64)), b.constant(np.array(step, np.int64))
    inside = b.apply(Prim.AND, b.apply(Prim.GE, offset, zero), b.apply(Prim.LT, offset, end))
    safe = b.apply(Prim.SELECT, inside, offset, zero)
    place = tuple(n if k in (0, axis) else 1 for k, n in enumerate(shape))
    index = b.broadcast(b.reshape(safe, place), shape)
    picked = b.add(Prim.TAKE_ALONG, c.x(1), index, attrs=GatherAttrs(axis))
    return b.apply(Prim.SELECT, b.broadcast(b.reshape(inside, place), shape), picked, c.x(0))


def _array_feature(c: Call) -> Result:
    flat = c.b.reshape(c.x(1), (c.type(1).size,))
    made = c.b.add(Prim.GATHER, c.x(0), c.b.cast(flat, DType.I64), attrs=GatherAttrs(c.type(0).rank - 1))
    return made if c.type(0).rank > 1 else c.b.reshape(made, (1, c.type(1).size))


def _binarizer(c: Call) -> Result:
    hit = c.b.apply(Prim.GT, c.x(0), float(c.get("threshold", 0.0)))
    return c.b.cast(hit, c.type(0).dtype)


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "Reshape"): _reshape,
    ("", "Transpose"): _transpose,
    ("", "Flatten"): _flatten,
    ("", "Squeeze"): _squeeze,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Expand"): _expand,
    ("", "Tile"): _tile,
    ("", "Concat"): _concat,
    ("", "Split"): _split,
    ("", "Slice"): _slice,
    ("", "Pad"): _pad,
    ("", "Gather"): _gather,
    ("", "GatherElements"): _gather_elements,
    ("", "GatherND"): _gather_nd,
    ("", "OneHot"): _one_hot,
    ("", "SpaceToDepth"): _space_to_depth,
    ("", "DepthToSpace"): _depth_to_space,
    ("", "Trilu"): _trilu,
    ("", "ReverseSequence"): _reverse_sequence,
    ("", "Scatter"): _scatter_elements,
    ("", "ScatterElements"): _scatter_elements,
    ("", "ScatterND"): _scatter_nd,
    ("", "Compress"): _compress,
    ("", "NonZero"): _constant_result,
    ("", "CenterCropPad"): _center_crop_pad,
    ("", "Col2Im"): _col2im,
    ("", "TensorScatter"): _tensor_scatter,
    ("ai.onnx.ml", "ArrayFeatureExtractor"): _array_feature,
    ("ai.onnx.ml", "Binarizer"): _binarizer,
}
