"""Problems with one contraction, for the tests of the templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft.fission.pool import avg_pool, max_pool
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

ROW, LAST = Format.ROW, Format.LAST
F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


def _problem(b: GraphBuilder, y: NodeId, ins: Sequence[Format], out: Format) -> Problem:
    graph = b.build([y])
    return Problem(graph, f"{graph} {[f.value for f in ins]} {out.value}", tuple(ins), (out,))


def convolution(
    n: int,
    c: int,
    h: int,
    w: int,
    oc: int,
    k: int | tuple[int, int],
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
    groups: int = 1,
    *,
    dtype: DType = F16,
    fin: Format = LAST,
    fout: Format = LAST,
    residual: bool = False,
    relu: bool = True,
    before: str = "",
    changing: bool = False,
) -> Problem:
    """relu(conv(x) + bias + residual); `before`: reflect, edge or constant padding by one, `up` for upsampling.

    `changing`: the weight is no constant, and lies channels-last.
    """
    b = GraphBuilder()
    x = source = b.input(TensorType(dtype, (n, c, h, w)))
    if "up" in before:
        for axis, size in ((2, 2 * h), (3, 2 * w)):
            index = b.constant((np.arange(size) // 2).astype(np.int64))
            x = b.add(Prim.GATHER, x, index, attrs=a.GatherAttrs(axis))
    for mode in ("reflect", "edge", "constant"):
        if mode in before:
            x = b.add(Prim.PAD, x, attrs=a.PadAttrs((0, 0, 1, 2), (0, 0, 1, 1), mode))
    kernel = (k, k) if isinstance(k, int) else k
    weight = b.input(TensorType(dtype, (oc, c // groups, *kernel)), is_weight=not changing)
    attrs = a.ConvAttrs((stride, stride), (pad, pad), (pad, pad), (dilation, dilation), groups)
    y = b.add(Prim.CONV, x, weight, attrs=attrs)
    bias = b.input(TensorType(dtype, (oc,)), is_weight=True)
    y = b.apply(Prim.ADD, y, b.reshape(bias, (oc, 1, 1)))
    ins = [fin, LAST if changing else ROW, ROW]
    if residual:
        y = b.apply(Prim.ADD, y, b.input(b.type_of(y)))
        ins.append(fout)
    if relu:
        y = b.apply(Prim.MAX, y, 0.0)
    assert source == 0
    return _problem(b, y, ins, fout)


def product(
    left: tuple[int, ...],
    right: tuple[int, ...],
    *,
    dtype: DType = F16,
    weight: bool = True,
    turn_left: bool = False,
    turn_right: bool = False,
    bias: bool = True,
    gelu: bool = False,
    out: DType | None = None,
) -> Problem:
    """left @ right (+ bias), either operand transposed in memory."""
    b = GraphBuilder()
    x, w = b.input(TensorType(dtype, left)), b.input(TensorType(dtype, right), is_weight=weight)

    def turned(v: NodeId) -> NodeId:
        rank = b.type_of(v).rank
        return b.transpose(v, (*range(rank - 2), rank - 1, rank - 2))

    y = b.add(Prim.MATMUL, turned(x) if turn_left else x, turned(w) if turn_right else w)
    ins = [ROW, ROW]
    if bias:
        y = b.apply(Prim.ADD, y, b.input(TensorType(dtype, (b.type_of(y).shape[-1],)), is_weight=True))
        ins.append(ROW)
    if gelu:
        e = b.apply(Prim.ERF, b.apply(Prim.MUL, y, 0.7071067811865476))
        y = b.apply(Prim.MUL, b.apply(Prim.MUL, y, 0.5), b.apply(Prim.ADD, e, 1.0))
    if out is not None:
        y = b.cast(y, out)
    return _problem(b, y, ins, ROW)


def heads_joined(b0: int, heads: int, rows: int, size: int, n: int, *, dtype: DType = F16) -> Problem:
    """The heads of attention side by side, times a weight, plus a bias: what follows attention."""
    b = GraphBuilder()
    x = b.transpose(b.input(TensorType(dtype, (b0, heads, rows, size))), (0, 2, 1, 3))
    x = b.reshape(b.reshape(x, (b0, rows, heads * size)), (b0 * rows, heads * size))
    y = b.add(Prim.MATMUL, x, b.input(TensorType(dtype, (heads * size, n)), is_weight=True))
    y = b.apply(Prim.ADD, y, b.input(TensorType(dtype, (n,)), is_weight=True))
    return _problem(b, y, [ROW] * 3, ROW)


def heads_parted(b0: int, heads: int, rows: int, size: int, k: int, *, weight: bool = True) -> Problem:
    """A product whose columns become the heads of attention: what precedes it."""
    b = GraphBuilder()
    x = b.input(TensorType(F16, (b0 * rows, k)))
    y = b.add(Prim.MATMUL, x, b.input(TensorType(F16, (k, heads * size)), is_weight=weight))
    y = b.apply(Prim.ADD, y, b.input(TensorType(F16, (heads * size,)), is_weight=True))
    y = b.reshape(b.reshape(y, (b0, rows, heads * size)), (b0, rows, heads, size))
    return _problem(b, b.transpose(y, (0, 2, 1, 3)), [ROW] * 3, ROW)


def pair(
    n: int,
    c: int,
    h: int,
    w: int,
    oc: int,
    k: int = 3,
    stride: int = 1,
    pad: int = 1,
    *,
    dtype: DType = F16,
    fin: Format = LAST,
    fout: Format = LAST,
    residual: bool = False,
    second: int = 1,
    shared: bool = False,
    constants: bool = False,
    texts: bool = False,
    middle: Callable[[GraphBuilder, NodeId], NodeId] = lambda b, y: b.apply(Prim.MAX, y, 0.0),
    between: int = 0,
    groups: int = 1,
) -> Problem:
    """relu(conv1x1(relu(depthwise(x) + bias)) + bias + residual); `shared`: the value between is returned too.

    `constants`: weights are constants of the graph; `texts`: vectors are. `between`: channels of a first convolution
    that is not by channel, in `groups`.
    """
    b = GraphBuilder()

    def weight(*shape: int) -> NodeId:
        if constants or (texts and len(shape) == 1):
            return b.constant(np.full(shape, 1, dtype.numpy))
        return b.input(TensorType(dtype, shape), is_weight=True)

    x = b.input(TensorType(dtype, (n, c, h, w)))
    own, mid = (groups, between) if between else (c, c)
    one = weight(mid, c // own, k, k)
    y = b.add(Prim.CONV, x, one, attrs=a.ConvAttrs((stride, stride), (pad, pad), (pad, pad), (1, 1), own))
    y = b.apply(Prim.ADD, y, b.reshape(weight(mid), (mid, 1, 1)))
    y = inner = middle(b, y)
    two = weight(oc, mid, second, second)
    y = b.add(Prim.CONV, y, two, attrs=a.ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1))
    y = b.apply(Prim.ADD, y, b.reshape(weight(oc), (oc, 1, 1)))
    formats = [fin, ROW, ROW] if texts else [fin, ROW, ROW, ROW, ROW]
    if residual:
        y = b.apply(Prim.ADD, y, b.input(b.type_of(y)))
        formats.append(fout)
    outputs = [b.apply(Prim.MAX, y, 0.0), *([inner] if shared else [])]
    graph = b.build(outputs)
    return Problem(graph, f"{graph}", tuple(formats), (fout,) * len(outputs))


def pooled_convolution(
    n: int,
    c: int,
    h: int,
    w: int,
    oc: int,
    k: int | tuple[int, int],
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
    groups: int = 1,
    *,
    pool: tuple[int, int, int] = (2, 2, 0),
    mean: bool = False,
    ceil: bool = False,
    pool_dilation: int = 1,
    dtype: DType = F16,
    fin: Format = LAST,
    fout: Format = LAST,
    residual: bool = False,
    relu: bool = True,
    behind: bool = False,
    shared: bool = False,
    constants: bool = False,
) -> Problem:
    """pool(relu(conv(x) + bias + residual)), `pool`: size, stride and padding; `mean`: the average of what is inside.

    `behind`: relu(. + bias + another image) of that; `shared`: what is pooled is returned too; `constants`: weights are
    constants of the graph.
    """
    b = GraphBuilder()

    def weight(*shape: int) -> NodeId:
        if constants:
            return b.constant(np.full(shape, 1, dtype.numpy))
        formats.append(ROW)
        return b.input(TensorType(dtype, shape), is_weight=True)

    formats = [fin]
    x = b.input(TensorType(dtype, (n, c, h, w)))
    kernel = (k, k) if isinstance(k, int) else k
    attrs = a.ConvAttrs((stride, stride), (pad, pad), (pad, pad), (dilation, dilation), groups)
    y = b.add(Prim.CONV, x, weight(oc, c // groups, *kernel), attrs=attrs)
    y = b.apply(Prim.ADD, y, b.reshape(weight(oc), (oc, 1, 1)))
    if residual:
        y = b.apply(Prim.ADD, y, b.input(b.type_of(y)))
        formats.append(LAST)
    if relu:
        y = b.apply(Prim.MAX, y, 0.0)
    between = y
    size, step, border = pool
    window: dict[str, Any] = {"kernel": (size, size), "strides": (step, step)}
    window |= {"pads_lo": (border, border), "pads_hi": (border, border), "dilations": (pool_dilation, pool_dilation)}
    found = avg_pool(b, y, **window, ceil=ceil) if mean else max_pool(b, y, **window, ceil=ceil)
    assert not isinstance(found, Declined), found.reason
    y = found
    if behind:
        y = b.apply(Prim.ADD, y, b.reshape(weight(oc), (oc, 1, 1)))
        y = b.apply(Prim.MAX, b.apply(Prim.ADD, y, b.input(b.type_of(y))), 0.0)
        formats.append(LAST)
    outputs = [y, *([between] if shared else [])]
    graph = b.build(outputs)
    return Problem(graph, f"{graph}", tuple(formats), (fout,) * len(outputs))
