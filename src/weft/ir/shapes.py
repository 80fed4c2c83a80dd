"""The shape rule of each primitive: operand types and attributes -> result type, or a reason why not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

from weft.ir import attrs as a
from weft.ir.prims import ARITY, CATEGORY, PREDICATES, Category, Prim
from weft.ir.types import DType, TensorType

Types = tuple[TensorType, ...]
Rule = Callable[[Types, a.Attrs], TensorType]


class ShapeError(ValueError):
    """Operands or attributes that the primitive does not admit; callers add where and whose fault it is."""


def _need(condition: bool, problem: str) -> None:
    if not condition:
        raise ShapeError(problem)


_FLOAT_ONLY = frozenset(
    {
        Prim.EXP, Prim.EXPM1, Prim.LOG, Prim.LOG1P, Prim.SQRT, Prim.RSQRT, Prim.RECIPROCAL, Prim.ERF, Prim.TANH,
        Prim.SIN, Prim.COS, Prim.TAN, Prim.ASIN, Prim.ACOS, Prim.ATAN, Prim.SINH, Prim.COSH, Prim.ASINH,
        Prim.ACOSH, Prim.ATANH, Prim.FLOOR, Prim.CEIL, Prim.TRUNC, Prim.ROUND, Prim.ISNAN, Prim.ISINF, Prim.ATAN2,
    }
)  # fmt: skip
_BITWISE = frozenset({Prim.AND, Prim.OR, Prim.XOR, Prim.NOT})
_SHIFTS = frozenset({Prim.SHL, Prim.SHR})
_BOOL_OK = _BITWISE | PREDICATES | {Prim.MAX, Prim.MIN}
"""Elementwise primitives (besides CAST and SELECT) that take bool operands."""


def _elementwise(prim: Prim) -> Rule:
    def rule(types: Types, _: a.Attrs) -> TensorType:
        first = types[0]
        for other in types[1:]:
            _need(other == first, f"operands differ: {first} and {other}")
        dtype = first.dtype
        _need(dtype.is_float or prim not in _FLOAT_ONLY, f"{prim.value} needs a float, got {dtype.value}")
        _need(not dtype.is_float or prim not in _BITWISE | _SHIFTS, f"{prim.value} of {dtype.value}")
        _need(dtype is not DType.BOOL or prim in _BOOL_OK, f"{prim.value} of bool")
        return TensorType(DType.BOOL, first.shape) if prim in PREDICATES else first

    return rule


def _cast(types: Types, attrs: a.Attrs) -> TensorType:
    return TensorType(cast("a.CastAttrs", attrs).dtype, types[0].shape)


def _select(types: Types, _: a.Attrs) -> TensorType:
    c, x, y = types
    _need(c.dtype is DType.BOOL, f"condition is {c.dtype.value}, not bool")
    _need(x == y and c.shape == x.shape, f"operands differ: {c}, {x}, {y}")
    return x


def _broadcast(types: Types, attrs: a.Attrs) -> TensorType:
    shape, old = cast("a.BroadcastAttrs", attrs).shape, types[0].shape
    _need(len(old) <= len(shape), f"rank falls from {len(old)} to {len(shape)}")
    tail = shape[len(shape) - len(old) :]
    _need(all(o in (1, n) for o, n in zip(old, tail, strict=True)), f"{old} does not broadcast to {shape}")
    return TensorType(types[0].dtype, shape)


def _reshape(types: Types, attrs: a.Attrs) -> TensorType:
    shape = cast("a.ReshapeAttrs", attrs).shape
    _need(math.prod(shape) == types[0].size, f"{types[0].shape} has no shape {shape}")
    return TensorType(types[0].dtype, shape)


def _transpose(types: Types, attrs: a.Attrs) -> TensorType:
    perm = cast("a.TransposeAttrs", attrs).perm
    _need(sorted(perm) == list(range(types[0].rank)), f"{perm} is no permutation of rank {types[0].rank}")
    return TensorType(types[0].dtype, tuple(types[0].shape[p] for p in perm))


def _slice(types: Types, attrs: a.Attrs) -> TensorType:
    s = cast("a.SliceAttrs", attrs)
    shape = types[0].shape
    _need(len(s.starts) == len(s.sizes) == len(s.steps) == len(shape), "one start, size and step per dimension")
    for n, start, size, step in zip(shape, s.starts, s.sizes, s.steps, strict=True):
        _need(step != 0 and size >= 0, f"step {step}, size {size}")
        last = start + (size - 1) * step
        _need(size == 0 or (0 <= start < n and 0 <= last < n), f"[{start}:+{size}:{step}] leaves [0, {n})")
    return TensorType(types[0].dtype, s.sizes)


def _concat(types: Types, attrs: a.Attrs) -> TensorType:
    axis = cast("a.ConcatAttrs", attrs).axis
    _need(len(types) >= 1, "nothing to join")
    first = types[0]
    _need(0 <= axis < first.rank, f"axis {axis} of rank {first.rank}")
    for t in types:
        same = t.shape[:axis] + t.shape[axis + 1 :] == first.shape[:axis] + first.shape[axis + 1 :]
        _need(
            t.dtype is first.dtype and t.rank == first.rank and same,
            f"{t} does not join {first} on axis {axis}",
        )
    total = sum(t.shape[axis] for t in types)
    return TensorType(first.dtype, (*first.shape[:axis], total, *first.shape[axis + 1 :]))


def _pad(types: Types, attrs: a.Attrs) -> TensorType:
    p = cast("a.PadAttrs", attrs)
    shape = types[0].shape
    _need(len(p.lo) == len(p.hi) == len(shape), "one pair of pads per dimension")
    for n, lo, hi in zip(shape, p.lo, p.hi, strict=True):
        _need(lo >= 0 and hi >= 0, f"negative pad ({lo}, {hi}); use slice")
        _need(
            p.mode != "reflect" or (lo < max(n, 1) and hi < max(n, 1)),
            f"reflect pad ({lo}, {hi}) of size {n}",
        )
        _need(p.mode == "constant" or n > 0 or lo == hi == 0, f"{p.mode} pad of an empty dimension")
    return TensorType(types[0].dtype, tuple(n + lo + hi for n, lo, hi in zip(shape, p.lo, p.hi, strict=True)))


def _gather(types: Types, attrs: a.Attrs) -> TensorType:
    axis = cast("a.GatherAttrs", attrs).axis
    data, idx = types
    _need(idx.dtype in (DType.I64, DType.I32), f"indices are {idx.dtype.value}")
    _need(0 <= axis < data.rank, f"axis {axis} of rank {data.rank}")
    _need(data.shape[axis] > 0 or idx.size == 0, "gather from an empty dimension")
    return TensorType(data.dtype, data.shape[:axis] + idx.shape + data.shape[axis + 1 :])


def _take_along(types: Types, attrs: a.Attrs) -> TensorType:
    axis = cast("a.GatherAttrs", attrs).axis
    data, idx = types
    _need(idx.dtype in (DType.I64, DType.I32), f"indices are {idx.dtype.value}")
    _need(data.rank == idx.rank and 0 <= axis < data.rank, f"axis {axis}, ranks {data.rank} and {idx.rank}")
    same = all(d == i for k, (d, i) in enumerate(zip(data.shape, idx.shape, strict=True)) if k != axis)
    _need(same, f"{data.shape} and {idx.shape} differ outside axis {axis}")
    _need(data.shape[axis] > 0 or idx.size == 0, "take_along an empty dimension")
    return TensorType(data.dtype, idx.shape)


def _iota(_: Types, attrs: a.Attrs) -> TensorType:
    i = cast("a.IotaAttrs", attrs)
    _need(0 <= i.axis < len(i.shape), f"axis {i.axis} of rank {len(i.shape)}")
    _need(i.dtype is not DType.BOOL, "iota of bool")
    return TensorType(i.dtype, i.shape)


def _reduce(prim: Prim) -> Rule:
    def rule(types: Types, attrs: a.Attrs) -> TensorType:
        axes = cast("a.ReduceAttrs", attrs).axes
        t = types[0]
        _need(
            list(axes) == sorted(set(axes)) and all(0 <= x < t.rank for x in axes),
            f"axes {axes} of rank {t.rank}",
        )
        _need(t.dtype is not DType.BOOL or prim in (Prim.REDUCE_MAX, Prim.REDUCE_MIN), f"{prim.value} of bool")
        return TensorType(t.dtype, tuple(1 if k in axes else n for k, n in enumerate(t.shape)))

    return rule


def _arg(types: Types, attrs: a.Attrs) -> TensorType:
    axis, t = cast("a.ArgAttrs", attrs).axis, types[0]
    _need(0 <= axis < t.rank and t.shape[axis] > 0, f"axis {axis} of {t}")
    return TensorType(DType.I64, tuple(1 if k == axis else n for k, n in enumerate(t.shape)))


def window_size(size: int, kernel: int, stride: int, lo: int, hi: int, dilation: int) -> int:
    """Number of whole windows; may be <= 0 where the kernel is larger than the padded input."""
    return (size + lo + hi - (kernel - 1) * dilation - 1) // stride + 1


def _window(types: Types, attrs: a.Attrs) -> TensorType:
    w = cast("a.WindowAttrs", attrs)
    t, k = types[0], len(w.kernel)
    _need(1 <= k <= t.rank, f"{k} window dimensions of rank {t.rank}")
    _need(
        len(w.strides) == len(w.pads_lo) == len(w.pads_hi) == len(w.dilations) == k,
        "window attributes differ",
    )
    _need(min(w.kernel + w.strides + w.dilations) >= 1, "kernel, stride and dilation are at least 1")
    _need(min(w.pads_lo + w.pads_hi) >= 0, "negative pad")
    _need(t.dtype is not DType.BOOL, "window of bool")
    spatial = tuple(
        window_size(n, *p)
        for n, *p in zip(t.shape[-k:], w.kernel, w.strides, w.pads_lo, w.pads_hi, w.dilations, strict=True)
    )
    _need(min(spatial) >= 0, f"window {w.kernel} is larger than the padded input {t.shape}")
    return TensorType(t.dtype, t.shape[:-k] + spatial)


def _scan(types: Types, attrs: a.Attrs) -> TensorType:
    s = cast("a.ScanAttrs", attrs)
    linear = s.kind == "linear"
    _need(len(types) == 1 + linear, f"a {s.kind} scan takes {1 + linear} operands, got {len(types)}")
    first = types[0]
    _need(all(t == first for t in types), f"operands differ: {', '.join(map(str, types))}")
    _need(0 <= s.axis < first.rank, f"axis {s.axis} of rank {first.rank}")
    _need(first.dtype is not DType.BOOL and not first.dtype.is_float8, f"scan of {first.dtype.value}")
    _need(first.dtype.is_float or not linear, f"linear scan of {first.dtype.value}")
    return first


def _matmul(types: Types, _: a.Attrs) -> TensorType:
    x, y = types
    _need(x.dtype is y.dtype and x.dtype is not DType.BOOL, f"operands {x} and {y}")
    _need(x.rank >= 2 and y.rank >= 2, f"ranks {x.rank} and {y.rank}; at least 2")
    _need(x.shape[-1] == y.shape[-2], f"inner dimensions of {x} and {y} differ")
    batch = broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return TensorType(x.dtype, (*batch, x.shape[-2], y.shape[-1]))


def broadcast_shapes(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy's common shape of two; ShapeError if there is none."""
    rank = max(len(x), len(y))
    out = []
    for m, n in zip((1,) * (rank - len(x)) + x, (1,) * (rank - len(y)) + y, strict=True):
        _need(m == n or 1 in (m, n), f"{x} and {y} do not broadcast")
        out.append(n if m == 1 else m)
    return tuple(out)


def _conv(types: Types, attrs: a.Attrs) -> TensorType:
    c = cast("a.ConvAttrs", attrs)
    x, w = types
    k = len(c.strides)
    _need(x.dtype is w.dtype and x.dtype is not DType.BOOL, f"operands {x} and {w}")
    _need(1 <= k <= 3 and x.rank == w.rank == k + 2, f"{k} spatial dimensions with {x} and {w}")
    _need(len(c.pads_lo) == len(c.pads_hi) == len(c.dilations) == k, "convolution attributes differ")
    _need(min(c.strides + c.dilations) >= 1 and c.groups >= 1, "stride, dilation and groups are at least 1")
    _need(min(c.pads_lo + c.pads_hi) >= 0, "negative pad")
    kernel = w.shape[2:]
    _need(min(kernel) >= 1, f"empty kernel {w}")
    if not c.transposed:
        _need(
            w.shape[0] % c.groups == 0 and x.shape[1] == w.shape[1] * c.groups,
            f"channels of {x}, {w}, {c.groups}",
        )
        spatial = tuple(
            window_size(n, *p)
            for n, *p in zip(x.shape[2:], kernel, c.strides, c.pads_lo, c.pads_hi, c.dilations, strict=True)
        )
        _need(min(spatial) >= 0, f"kernel {kernel} is larger than the padded input {x}")
        return TensorType(x.dtype, (x.shape[0], w.shape[0], *spatial))
    _need(x.shape[1] == w.shape[0] and x.shape[1] % c.groups == 0, f"channels of {x}, {w}, {c.groups}")
    _need(len(c.output_padding) == k, "one output padding per spatial dimension")
    spatial = tuple(
        (n - 1) * s - lo - hi + d * (kk - 1) + op + 1
        for n, kk, s, lo, hi, d, op in zip(
            x.shape[2:], kernel, c.strides, c.pads_lo, c.pads_hi, c.dilations, c.output_padding, strict=True
        )
    )
    _need(min(spatial) >= 0, "negative output size")
    return TensorType(x.dtype, (x.shape[0], w.shape[1] * c.groups, *spatial))


def _opaque(_: Types, attrs: a.Attrs) -> TensorType:
    o = cast("a.OpaqueAttrs", attrs)
    _need(0 <= o.result < len(o.types), f"result {o.result} of {len(o.types)}")
    return o.types[o.result]


def _source(_: Types, attrs: a.Attrs) -> TensorType:
    raise ShapeError(f"a source has the type it was given, not one inferred from {attrs}")


SHAPE_RULES: Mapping[Prim, Rule] = {
    **{p: _elementwise(p) for p in Prim if CATEGORY[p] is Category.ELEMENTWISE},
    **{p: _reduce(p) for p in (Prim.REDUCE_SUM, Prim.REDUCE_PROD, Prim.REDUCE_MAX, Prim.REDUCE_MIN)},
    Prim.CAST: _cast,
    Prim.SELECT: _select,
    Prim.BROADCAST: _broadcast,
    Prim.RESHAPE: _reshape,
    Prim.TRANSPOSE: _transpose,
    Prim.SLICE: _slice,
    Prim.CONCAT: _concat,
    Prim.PAD: _pad,
    Prim.GATHER: _gather,
    Prim.TAKE_ALONG: _take_along,
    Prim.IOTA: _iota,
    Prim.ARGMAX: _arg,
    Prim.ARGMIN: _arg,
    Prim.WINDOW_SUM: _window,
    Prim.WINDOW_MAX: _window,
    Prim.SCAN: _scan,
    Prim.MATMUL: _matmul,
    Prim.CONV: _conv,
    Prim.OPAQUE: _opaque,
    Prim.INPUT: _source,
    Prim.CONSTANT: _source,
}


def infer(prim: Prim, types: Types, attrs: a.Attrs) -> TensorType:
    """Result type of one primitive.

    Raises:
        ShapeError: the operands or attributes do not fit; the text names both.
    """
    arity = ARITY[prim]
    _need(arity is None or len(types) == arity, f"{prim.value} takes {arity} operands, got {len(types)}")
    _need(isinstance(attrs, a.ATTRS[prim]), f"{prim.value} with {type(attrs).__name__}")
    result = SHAPE_RULES[prim](types, attrs)
    _need(result.size < 2**62, f"{result} is too large")
    return result
