"""ATen calls that move, repeat, join or make values: views are values here, strides are no part of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weft.frontends.torch.call import ABSENT, Call, Handler
from weft.ir import attrs as a
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def reshape(c: Call) -> NodeId:
    """view, squeeze, unsqueeze, ...: the shape of the result says it all."""
    return c.b.reshape(c.ref("self" if "self" in c.arguments else "a"), c.out.shape)


def permute(c: Call) -> NodeId:
    """Dimensions in another order."""
    x = c.ref("self")
    rank = c.rank(x)
    return c.b.transpose(x, tuple(c.axis(d, rank) for d in c.ints("dims")))


def transpose(c: Call) -> NodeId:
    """Two dimensions change places; `t` of rank below two is the identity."""
    x = c.ref("self")
    rank = c.rank(x)
    if rank < 2:
        return x
    i, j = (c.integer("dim0"), c.integer("dim1")) if c.has("dim0") else (0, 1)
    perm = list(range(rank))
    i, j = i % rank, j % rank
    perm[i], perm[j] = perm[j], perm[i]
    return c.b.transpose(x, perm)


def expand(c: Call) -> NodeId:
    """Repeat along dimensions of size 1."""
    return c.b.broadcast(c.ref("self"), c.out.shape)


def take_slice(c: Call, x: NodeId, axis: int, start: int, size: int, step: int = 1) -> NodeId:
    """x[..., start : start + size * step : step, ...]."""
    shape = c.shape(x)
    starts = tuple(start if k == axis and size else 0 for k in range(len(shape)))
    sizes = tuple(size if k == axis else n for k, n in enumerate(shape))
    return c.b.slice(x, starts, sizes, tuple(step if k == axis else 1 for k in range(len(shape))))


def slice_bounds(c: Call, size: int) -> tuple[int, int, int]:
    """start, length and step of a Python slice over `size` elements."""
    start = c.integer("start") if c.has("start") else None
    end = c.integer("end") if c.has("end") else None
    step = c.integer("step") if c.has("step") else 1
    picked = range(size)[slice(start, end, step)]
    return picked.start, len(picked), step


def slice_(c: Call) -> NodeId:
    """x[start:end:step] along one dimension."""
    x = c.ref("self")
    axis = c.axis(c.integer("dim"), c.rank(x))
    start, size, step = slice_bounds(c, c.shape(x)[axis])
    return take_slice(c, x, axis, start, size, step)


def select(c: Call) -> NodeId:
    """x[index] along one dimension, which goes away."""
    x = c.ref("self")
    axis = c.axis(c.integer("dim"), c.rank(x))
    picked = take_slice(c, x, axis, c.integer("index") % c.shape(x)[axis], 1)
    return c.b.reshape(picked, c.out.shape)


def split(c: Call) -> tuple[NodeId, ...]:
    """Consecutive parts along one dimension; their sizes are those of the results."""
    x = c.ref("self")
    axis = c.axis(c.integer("dim"), c.rank(x))
    parts, start = [], 0
    for i, type in enumerate(c.results):
        if type is None:
            c.decline("a part is left out")
        size = type.shape[axis]
        parts.append(take_slice(c, x, axis, start, size) if i in c.used else ABSENT)
        start += size
    return tuple(parts)


def unbind(c: Call) -> tuple[NodeId, ...]:
    """Each slice along one dimension, which goes away."""
    x = c.ref("self")
    axis = c.axis(c.integer("dim"), c.rank(x))
    shape = c.shape(x)[:axis] + c.shape(x)[axis + 1 :]
    return tuple(
        c.b.reshape(take_slice(c, x, axis, i, 1), shape) if i in c.used else ABSENT for i in range(len(c.results))
    )


def join(c: Call, parts: Sequence[NodeId], axis: int) -> NodeId:
    """Concatenate; one part is itself."""
    return parts[0] if len(parts) == 1 else c.b.add(Prim.CONCAT, *parts, attrs=a.ConcatAttrs(axis))


def cat(c: Call) -> NodeId:
    """Join along a dimension; the old rule that an empty vector joins anything holds."""
    rank, dtype = c.out.rank, c.out.dtype
    given = [x for x in c.refs("tensors") if c.rank(x) == rank and not (c.shape(x) == (0,) and rank != 1)]
    if not given:
        c.decline("nothing to join")
    axis = c.axis(c.integer("dim"), rank)
    return join(c, [c.b.cast(x, dtype) for x in given], axis)


def stack(c: Call) -> NodeId:
    """Join along a new dimension."""
    axis = c.axis(c.integer("dim"), c.out.rank)
    one = tuple(1 if k == axis else n for k, n in enumerate(c.out.shape))
    return join(c, [c.b.reshape(c.b.cast(x, c.out.dtype), one) for x in c.refs("tensors")], axis)


def repeat(c: Call) -> NodeId:
    """Whole copies along each dimension."""
    x = c.ref("self")
    repeats = c.ints("repeats")
    shape = (1,) * (len(repeats) - c.rank(x)) + c.shape(x)
    return c.one("tile", c.b.reshape(x, shape), repeats=repeats) if c.out.size else _empty(c)


def _empty(c: Call) -> NodeId:
    return c.b.broadcast(c.b.scalar(0, c.out.dtype), c.out.shape)


def flip(c: Call) -> NodeId:
    """Reverse dimensions."""
    x = c.ref("self")
    dims = c.ints("dims")
    rank = c.rank(x)
    if not dims or rank == 0 or c.out.size == 0:
        return x
    return c.one("flip", x, axes=tuple(sorted(c.axis(d, rank) for d in dims)))


def roll(c: Call) -> NodeId:
    """Shift cyclically; without dims over the flattened tensor."""
    x = c.ref("self")
    if c.out.size == 0:
        return x
    shifts, dims = c.ints("shifts"), c.ints("dims")
    if not dims:
        flat = c.b.reshape(x, (c.out.size,))
        return c.b.reshape(_roll_one(c, flat, 0, shifts[0]), c.out.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _roll_one(c, x, c.axis(dim, c.rank(x)), shift)
    return x


def _roll_one(c: Call, x: NodeId, axis: int, shift: int) -> NodeId:
    size = c.shape(x)[axis]
    k = shift % size
    if k == 0:
        return x
    return join(c, [take_slice(c, x, axis, size - k, k), take_slice(c, x, axis, 0, size - k)], axis)


def diagonal(c: Call) -> NodeId:
    """The elements x[..., i, i + offset]: a gather from the two dimensions made one."""
    x = c.ref("self")
    rank = c.rank(x)
    i, j = c.integer("dim1") % rank, c.integer("dim2") % rank
    offset, count = c.integer("offset"), c.out.shape[-1]
    rows, cols = c.shape(x)[i], c.shape(x)[j]
    rest = [k for k in range(rank) if k not in (i, j)]
    flat = c.b.reshape(c.b.transpose(x, [*rest, i, j]), (*(c.shape(x)[k] for k in rest), rows * cols))
    if count == 0:
        return _empty(c)
    first = offset if offset >= 0 else -offset * cols
    return take_slice(c, flat, len(rest), first, count, cols + 1)


def windows(c: Call) -> NodeId:
    """unfold: overlapping slices along one dimension, as a new last one."""
    x = c.ref("self")
    rank = c.rank(x)
    if rank == 0 or c.out.size == 0:
        c.decline("scalar or empty")
    axis, size, step = c.axis(c.integer("dimension"), rank), c.integer("size"), c.integer("step")
    count = c.out.shape[axis]
    index = np.arange(count, dtype=np.int64)[:, None] * step + np.arange(size, dtype=np.int64)
    y = c.one("gather", x, c.b.constant(index), axis=axis)
    return c.b.transpose(y, (*range(axis + 1), *range(axis + 2, rank + 1), axis + 1))


def narrow(c: Call) -> NodeId:
    """x[start : start + length] along one dimension."""
    x = c.ref("self")
    axis = c.axis(c.integer("dim"), c.rank(x))
    return take_slice(c, x, axis, c.integer("start") % max(c.shape(x)[axis], 1), c.integer("length"))


def pad(c: Call) -> NodeId | tuple[NodeId, ...]:
    """F.pad, by mode."""
    if c.text("mode") == "circular":
        return _circular(c)
    mode = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}.get(c.text("mode") or "constant")
    if mode is None:
        c.decline(f"pad mode {c.text('mode')!r}")
    return pad_with(mode)(c)


def _circular(c: Call) -> NodeId:
    """The other end of each dimension, joined on."""
    x, amounts = c.ref("self"), c.ints("pad", 2)
    if min(amounts) < 0:
        c.decline("negative circular pad")
    for k in range(len(amounts) // 2):
        axis = c.rank(x) - 1 - k
        size, lo, hi = c.shape(x)[axis], amounts[2 * k], amounts[2 * k + 1]
        parts = [take_slice(c, x, axis, size - lo, lo)] if lo else []
        parts.append(x)
        parts += [take_slice(c, x, axis, 0, hi)] if hi else []
        x = join(c, parts, axis)
    return x


def pad_with(mode: str) -> Handler:
    """Constant, reflect or edge padding of the last dimensions, the last one first; a negative amount cuts."""

    def handler(c: Call) -> NodeId:
        x = c.ref("self")
        rank = c.rank(x)
        amounts = c.ints("pad" if "pad" in c.arguments else "padding", 2)
        lo, hi = [0] * rank, [0] * rank
        for k in range(len(amounts) // 2):
            lo[rank - 1 - k], hi[rank - 1 - k] = amounts[2 * k], amounts[2 * k + 1]
        for k, (before, after) in enumerate(zip(lo, hi, strict=True)):
            if min(before, after) < 0:
                cut = take_slice(c, x, k, max(-before, 0), c.shape(x)[k] + min(before, 0) + min(after, 0))
                x, lo[k], hi[k] = cut, max(before, 0), max(after, 0)
        if not any(lo) and not any(hi):
            return x
        value = c.real("value") if c.has("value") else 0.0
        if mode == "constant" and not _exact(value, c.out.dtype):
            c.decline(f"pad value {value!r} in {c.out.dtype.value}")
        return c.one("pad", x, lo=tuple(lo), hi=tuple(hi), mode=mode, value=value)

    return handler


def _exact(value: float, dtype: DType) -> bool:
    return dtype.is_float or float(value).is_integer()


def full(c: Call) -> NodeId:
    """A number in every element."""
    name = next(n for n in ("fill_value", "s", "value") if n in c.arguments)
    return c.b.broadcast(c.as_node(c.arguments[name], c.out.dtype), c.out.shape)


def filled(value: int) -> Callable[[Call], NodeId]:
    """zeros, ones, empty: `empty` has no defined values, so zeros are as good as any."""

    def handler(c: Call) -> NodeId:
        return c.b.broadcast(c.b.scalar(value, c.out.dtype), c.out.shape)

    return handler


def arange(c: Call) -> NodeId:
    """start + step * iota."""
    dtype, n = c.out.dtype, c.out.shape[0]
    start = c.number("start") if c.has("start") else 0
    step = c.number("step") if c.has("step") else 1
    if n == 0:
        return filled(0)(c)
    work = DType.F64 if dtype.is_float else DType.I64
    counts = c.b.iota((n,), 0, work)
    if step != 1:
        counts = c.b.apply(Prim.MUL, counts, c.b.scalar(step, work))
    if start != 0:
        counts = c.b.apply(Prim.ADD, counts, c.b.scalar(start, work))
    return c.b.cast(counts, dtype)


def iota(c: Call) -> NodeId:
    """prims.iota(length, start, step)."""
    return arange(c)


def triangle(upper: bool) -> Handler:
    """tril, triu: zero outside."""

    def handler(c: Call) -> NodeId:
        x = c.ref("self")
        if c.out.size == 0:
            return x
        b = c.b
        matrix = c.shape(x)[-2:]
        rows, cols = b.iota(matrix, 0, DType.I64), b.iota(matrix, 1, DType.I64)
        edge = b.apply(Prim.ADD, rows, b.scalar(c.integer("diagonal"), DType.I64))
        inside = b.apply(Prim.GE if upper else Prim.LE, cols, edge)
        return b.apply(Prim.SELECT, inside, x, b.scalar(0, c.out.dtype))

    return handler


def eye(c: Call) -> NodeId:
    """Ones on the diagonal."""
    if c.out.size == 0:
        return filled(0)(c)
    rows, cols = (c.b.iota(c.out.shape, k, DType.I64) for k in (0, 1))
    return c.b.cast(c.b.add(Prim.EQ, rows, cols), c.out.dtype)


def copy(c: Call) -> NodeId:
    """The source in shape and type of the destination."""
    return c.b.broadcast(c.b.cast(c.ref("src"), c.out.dtype), c.out.shape)


def slice_scatter(c: Call) -> NodeId:
    """x with a run of slices replaced → concat(before, source, after)."""
    x, src = c.ref("self"), c.ref("src")
    axis = c.axis(c.integer("dim"), c.rank(x))
    n = c.shape(x)[axis]
    start, size, step = slice_bounds(c, n)
    if step == 1 or size <= 1:
        return _replace(c, x, src, axis, start, size)
    at = np.arange(n) - start
    inside = (at >= 0) & (at % step == 0) & (at // step < size)
    spread = c.one("gather", src, c.b.constant(np.clip(at // step, 0, size - 1).astype(np.int64)), axis=axis)
    mask = c.b.constant(inside.reshape(-1, *(1,) * (c.rank(x) - axis - 1)))
    return c.b.apply(Prim.SELECT, mask, c.b.cast(spread, c.out.dtype), x)


def select_scatter(c: Call) -> NodeId:
    """x with one slice replaced."""
    x = c.ref("self")
    axis = c.axis(c.integer("dim"), c.rank(x))
    one = tuple(1 if k == axis else n for k, n in enumerate(c.shape(x)))
    return _replace(c, x, c.b.reshape(c.ref("src"), one), axis, c.integer("index") % c.shape(x)[axis], 1)


def _replace(c: Call, x: NodeId, src: NodeId, axis: int, start: int, size: int) -> NodeId:
    n = c.shape(x)[axis]
    pieces = [(0, start), (start + size, n - start - size)]
    before, after = (take_slice(c, x, axis, s, k) if k else None for s, k in pieces)
    parts = [p for p in (before, c.b.cast(src, c.out.dtype) if size else None, after) if p is not None]
    return join(c, parts, axis) if parts else x


def pixel_shuffle(c: Call) -> NodeId:
    """(n, c r², h, w) → (n, c, h r, w r)."""
    x, r = c.ref("self"), c.integer("upscale_factor")
    *lead, channels, h, w = c.shape(x)
    k = len(lead)
    split = c.b.reshape(x, (*lead, channels // (r * r), r, r, h, w))
    moved = c.b.transpose(split, (*range(k), k, k + 3, k + 1, k + 4, k + 2))
    return c.b.reshape(moved, c.out.shape)


def pixel_unshuffle(c: Call) -> NodeId:
    """(n, c, h r, w r) → (n, c r², h, w)."""
    x, r = c.ref("self"), c.integer("downscale_factor")
    *lead, channels, h, w = c.shape(x)
    k = len(lead)
    split = c.b.reshape(x, (*lead, channels, h // r, r, w // r, r))
    moved = c.b.transpose(split, (*range(k), k, k + 2, k + 4, k + 1, k + 3))
    return c.b.reshape(moved, c.out.shape)


def as_strided(c: Call) -> NodeId:
    """A view of memory; a value only where it covers a dense tensor exactly."""
    return c.b.reshape(_whole(c, "reads memory by strides"), c.ints("size"))


def as_strided_scatter(c: Call) -> NodeId:
    """What is written over all of x, if that is dense."""
    x = _whole(c, "writes memory by strides")
    return c.b.cast(c.b.reshape(c.ref("src"), c.shape(x)), c.out.dtype)


def _whole(c: Call, reason: str) -> NodeId:
    x = c.ref("self")
    size, stride = c.ints("size"), c.ints("stride")
    dense = [math.prod(size[k + 1 :]) for k in range(len(size))]
    same = all(n == 1 or s == d for n, s, d in zip(size, stride, dense, strict=True))
    if c.flag("dense_input") and same and math.prod(size) == c.type(x).size and not c.arguments.get("storage_offset"):
        return x
    return c.decline(reason)


TABLE: Mapping[str, Handler] = {
    **{
        f"aten.{name}": reshape
        for name in (
            "view.default", "_unsafe_view.default", "reshape.default", "squeeze.default", "squeeze.dim",
            "squeeze.dims", "unsqueeze.default", "flatten.using_ints", "unflatten.int", "view_copy.default",
        )
    },
    "prims.view_of.default": reshape,
    "aten.permute.default": permute,
    "aten.permute_copy.default": permute,
    "aten.unfold.default": windows,
    "aten.unfold_copy.default": windows,
    "aten.narrow.default": narrow,
    "aten.narrow_copy.default": narrow,
    "aten.unbind_copy.int": unbind,
    "aten.pad.default": pad,
    "aten.t.default": transpose,
    "aten.transpose.int": transpose,
    "aten.expand.default": expand,
    "aten.slice.Tensor": slice_,
    "aten.select.int": select,
    "aten.split_with_sizes.default": split,
    "aten.split.Tensor": split,
    "aten.chunk.default": split,
    "aten.unbind.int": unbind,
    "aten.cat.default": cat,
    "aten.stack.default": stack,
    "aten.repeat.default": repeat,
    "aten.flip.default": flip,
    "aten.roll.default": roll,
    "aten.diagonal.default": diagonal,
    "aten.constant_pad_nd.default": pad_with("constant"),
    **{f"aten.reflection_pad{k}d.default": pad_with("reflect") for k in (1, 2, 3)},
    **{f"aten.replication_pad{k}d.default": pad_with("edge") for k in (1, 2, 3)},
    "aten.full.default": full,
    "aten.full_like.default": full,
    "aten.new_full.default": full,
    "aten.scalar_tensor.default": full,
    **{f"aten.{n}.default": filled(0) for n in ("zeros", "zeros_like", "new_zeros", "empty_like", "new_empty")},
    **{f"aten.{n}.default": filled(1) for n in ("ones", "ones_like", "new_ones")},
    "aten.empty.memory_format": filled(0),
    "aten.empty_strided.default": filled(0),
    "aten.new_empty_strided.default": filled(0),
    "aten.empty_permuted.default": filled(0),
    "aten.arange.default": arange,
    "aten.arange.start": arange,
    "aten.arange.start_step": arange,
    "prims.iota.default": iota,
    "aten.tril.default": triangle(upper=False),
    "aten.triu.default": triangle(upper=True),
    "aten.eye.default": eye,
    "aten.eye.m": eye,
    "aten.copy.default": copy,
    "aten.slice_scatter.default": slice_scatter,
    "aten.select_scatter.default": select_scatter,
    "aten.pixel_shuffle.default": pixel_shuffle,
    "aten.pixel_unshuffle.default": pixel_unshuffle,
    "aten.as_strided.default": as_strided,
    "aten.as_strided_scatter.default": as_strided_scatter,
}  # fmt: skip
"""Handlers by overload."""
