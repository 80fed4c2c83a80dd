"""Products and convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from weft.frontends.onnx.call import ABSENT, Call, Handler, Result
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType


def same_pads(
    c: Call, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(lo, hi) of `auto_pad` SAME_UPPER / SAME_LOWER: output size is ceil(size / stride)."""
    lo, hi = [], []
    for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        out = -(-n // s)
        total = max((out - 1) * s + (k - 1) * d + 1 - n, 0)
        small, large = total // 2, total - total // 2
        upper = c.get("auto_pad") == "SAME_UPPER"
        lo.append(small if upper else large)
        hi.append(large if upper else small)
    return tuple(lo), tuple(hi)


def window(
    c: Call, sizes: Sequence[int], kernel: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """strides, pads_lo, pads_hi, dilations of a convolution or pooling call."""
    n = len(kernel)
    strides = tuple(c.get("strides") or (1,) * n)
    dilations = tuple(c.get("dilations") or (1,) * n)
    if len(sizes) != n or len(strides) != n or len(dilations) != n or min((*strides, *dilations, *kernel)) < 1:
        c.fail(f"kernel {tuple(kernel)}, strides {strides}, dilations {dilations} for {len(sizes)} spatial dimensions")
    mode = c.get("auto_pad", "NOTSET") or "NOTSET"
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        return strides, *same_pads(c, sizes, kernel, strides, dilations), dilations
    pads = tuple(c.get("pads") or (0,) * 2 * n) if mode == "NOTSET" else (0,) * 2 * n
    if len(pads) != 2 * n:
        c.fail(f"{len(pads)} pads for {n} spatial dimensions")
    return strides, pads[:n], pads[n:], dilations


def _groups(c: Call) -> int:
    groups = int(c.get("group", 1))
    if groups < 1:
        c.fail(f"{c.op} in {groups} groups")
    return groups


def _conv(c: Call) -> Result:
    w = c.shape(1)
    kernel = tuple(c.get("kernel_shape") or w[2:])
    if kernel != w[2:]:
        c.fail(f"kernel_shape {kernel} with a weight of shape {w}")
    strides, lo, hi, dilations = window(c, c.shape(0)[2:], kernel)
    return c.rule(
        "conv", c.x(0), c.x(1), c.x(2),
        strides=strides, pads_lo=lo, pads_hi=hi, dilations=dilations, groups=_groups(c),
    )  # fmt: skip


def _conv_transpose(c: Call) -> Result:
    w, sizes = c.shape(1), c.shape(0)[2:]
    n = len(w) - 2
    kernel = tuple(c.get("kernel_shape") or w[2:])
    strides = tuple(c.get("strides") or (1,) * n)
    dilations = tuple(c.get("dilations") or (1,) * n)
    extra = tuple(c.get("output_padding") or (0,) * n)
    pads = tuple(c.get("pads") or (0,) * 2 * n)
    lo, hi = list(pads[:n]), list(pads[n:])
    mode = c.get("auto_pad", "NOTSET") or "NOTSET"
    target = c.get("output_shape")
    if target is not None or mode.startswith("SAME"):
        wanted = tuple(target)[-n:] if target is not None else tuple(m * s for m, s in zip(sizes, strides, strict=True))
        for k in range(n):
            full = strides[k] * (sizes[k] - 1) + extra[k] + (kernel[k] - 1) * dilations[k] + 1
            total = full - wanted[k]
            if total < 0:  # longer than the full result: zeros at the end
                extra = (*extra[:k], extra[k] - total, *extra[k + 1 :])
                total = 0
            small, large = total // 2, total - total // 2
            lo[k], hi[k] = (small, large) if mode == "SAME_UPPER" else (large, small)
    elif mode == "VALID":
        lo, hi = [0] * n, [0] * n
    return c.rule(
        "conv_transpose", c.x(0), c.x(1), c.x(2),
        strides=strides, pads_lo=tuple(lo), pads_hi=tuple(hi), dilations=dilations, groups=_groups(c),
        output_padding=extra,
    )  # fmt: skip


def _gemm(c: Call) -> Result:
    return c.rule(
        "gemm", c.x(0), c.x(1), c.x(2),
        alpha=c.get("alpha", 1.0), beta=c.get("beta", 1.0),
        trans_a=bool(c.get("transA", 0)), trans_b=bool(c.get("transB", 0)),
    )  # fmt: skip


def _matmul(c: Call) -> Result:
    return c.rule("matmul", c.x(0), c.x(1))


def _einsum(c: Call) -> Result:
    return c.rule("einsum", *c.xs(), equation=c.get("equation"))


def _minus_zero(c: Call, x: NodeId, zero: NodeId, axis: int | None) -> NodeId:
    """An 8-bit tensor minus its zero point, as i32; a vector of zero points lies along `axis`."""
    b = c.b
    wide = b.cast(x, DType.I32)
    if zero == ABSENT:
        return wide
    z = b.cast(zero, DType.I32)
    shape, rank = b.type_of(z).shape, b.type_of(x).rank
    if len(shape) == 1 and axis is not None:
        z = b.reshape(z, tuple(shape[0] if k == axis % rank else 1 for k in range(rank)))
    return b.apply(Prim.SUB, wide, z)


def _matmul_integer(c: Call) -> Result:
    x = _minus_zero(c, c.x(0), c.x(2), c.type(0).rank - 2 if c.type(0).rank > 1 else None)
    y = _minus_zero(c, c.x(1), c.x(3), c.type(1).rank - 1)
    return c.rule("matmul", x, y)


def _conv_integer(c: Call) -> Result:
    w = c.shape(1)
    strides, lo, hi, dilations = window(c, c.shape(0)[2:], w[2:])
    return c.rule(
        "conv", _minus_zero(c, c.x(0), c.x(2), None), _minus_zero(c, c.x(1), c.x(3), 0), ABSENT,
        strides=strides, pads_lo=lo, pads_hi=hi, dilations=dilations, groups=_groups(c),
    )  # fmt: skip


def _requantise(c: Call, total: NodeId, scale: NodeId, zero: NodeId) -> NodeId:
    """round(total * scale) + zero, clamped to the type of `zero`."""
    b = c.b
    dtype = b.type_of(zero).dtype
    y = b.apply(Prim.ROUND, b.apply(Prim.MUL, b.cast(total, DType.F32), scale))
    y = b.apply(Prim.ADD, y, b.cast(zero, DType.F32))
    info = np.iinfo(dtype.numpy)  # type: ignore[type-var]
    y = b.apply(Prim.MAX, b.apply(Prim.MIN, y, float(info.max)), float(info.min))
    return b.cast(y, dtype)


def _column(c: Call, v: NodeId, rank: int, axis: int) -> NodeId:
    shape = c.b.type_of(v).shape
    if len(shape) != 1:
        return v
    return c.b.reshape(v, tuple(shape[0] if k == axis else 1 for k in range(rank)))


def _qlinear_matmul(c: Call) -> Result:
    b = c.b
    if c.type(0).rank < 2 or c.type(3).rank < 2:
        return Declined("QLinearMatMul of vectors")
    x = _minus_zero(c, c.x(0), c.x(2), -2)
    y = _minus_zero(c, c.x(3), c.x(5), -1)
    total = c.rule("matmul", x, y)
    if isinstance(total, Declined):
        return total
    rank = b.type_of(total[0]).rank
    sx, sy, sz = (b.cast(c.x(k), DType.F32) for k in (1, 4, 6))
    scale = b.apply(Prim.MUL, _column(c, sx, rank, rank - 2), _column(c, sy, rank, rank - 1))
    scale = b.apply(Prim.DIV, scale, _column(c, sz, rank, rank - 2))
    return _requantise(c, total[0], scale, _column(c, c.x(7), rank, rank - 2))


def _qlinear_conv(c: Call) -> Result:
    b, w = c.b, c.shape(3)
    strides, lo, hi, dilations = window(c, c.shape(0)[2:], w[2:])
    total = c.rule(
        "conv", _minus_zero(c, c.x(0), c.x(2), None), _minus_zero(c, c.x(3), c.x(5), 0), c.x(8),
        strides=strides, pads_lo=lo, pads_hi=hi, dilations=dilations, groups=_groups(c),
    )  # fmt: skip
    if isinstance(total, Declined):
        return total
    sx, sw, sy = (b.reshape(c.x(k), ()) if b.type_of(c.x(k)).size == 1 else c.x(k) for k in (1, 4, 6))
    scale = b.apply(Prim.DIV, b.apply(Prim.MUL, sx, _column(c, sw, len(w), 1)), sy)
    return _requantise(c, total[0], scale, b.reshape(c.x(7), ()))


def _det(c: Call) -> Result:
    """Cofactor expansion, for the small matrices that occur in models."""
    b, shape = c.b, c.shape(0)
    n = shape[-1]
    if len(shape) < 2 or n != shape[-2] or n > 4 or n < 1:
        return Declined(f"determinant of {shape}")

    def at(i: int, j: int) -> NodeId:
        lead = shape[:-2]
        cut = b.slice(c.x(0), (0,) * len(lead) + (i, j), (*lead, 1, 1), (1,) * len(shape))
        return b.reshape(cut, lead)

    return _minor(b, at, 0, tuple(range(n)))


def _minor(b: GraphBuilder, at: Callable[[int, int], NodeId], i: int, columns: tuple[int, ...]) -> NodeId:
    """Of the rows from `i` on and these columns."""
    if len(columns) == 1:
        return at(i, columns[0])
    total = ABSENT
    for k, j in enumerate(columns):
        term = b.apply(Prim.MUL, at(i, j), _minor(b, at, i + 1, columns[:k] + columns[k + 1 :]))
        total = term if total == ABSENT else b.apply(Prim.SUB if k % 2 else Prim.ADD, total, term)
    return total


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "Conv"): _conv,
    ("", "ConvTranspose"): _conv_transpose,
    ("", "Gemm"): _gemm,
    ("", "MatMul"): _matmul,
    ("", "Einsum"): _einsum,
    ("", "MatMulInteger"): _matmul_integer,
    ("", "ConvInteger"): _conv_integer,
    ("", "QLinearMatMul"): _qlinear_matmul,
    ("", "QLinearConv"): _qlinear_conv,
    ("", "Det"): _det,
}
