"""Fourier transforms as products with a constant matrix, in f64: their results nearly cancel."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from weft.frontends.onnx.call import Call, Handler, Result
from weft.ir.attrs import ConcatAttrs, GatherAttrs, PadAttrs
from weft.ir.declined import Declined
from weft.ir.graph import NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

_MAX_LENGTH = 2048


def _matrix(n: int, rows: int, *, inverse: bool) -> npt.NDArray[np.complex128]:
    """(rows, n): element (k, j) is exp(∓2πi·jk/n), over n for the inverse."""
    turns = np.outer(np.arange(rows), np.arange(n)) % n  # exact angles keep the symmetries exact
    table: npt.NDArray[np.complex128] = np.exp((2j if inverse else -2j) * np.pi * turns / n)
    if inverse:
        table /= n
    return table


def _product(c: Call, x: NodeId, table: npt.NDArray[np.float64]) -> NodeId:
    """(..., n) times the transpose of (rows, n)."""
    b, shape = c.b, c.b.type_of(x).shape
    flat = b.reshape(x, (math.prod(shape[:-1]), shape[-1]))
    made = b.add(Prim.MATMUL, flat, b.constant(np.array(table.T, order="C")))
    return b.reshape(made, (*shape[:-1], table.shape[0]))


def _parts(c: Call, x: NodeId) -> tuple[NodeId, NodeId | None]:
    """Real and imaginary part of a tensor (..., 1) or (..., 2), as f64."""
    b, shape = c.b, c.b.type_of(x).shape
    wide = b.cast(x, DType.F64)
    if shape[-1] == 1:
        return b.reshape(wide, shape[:-1]), None
    one = (*shape[:-1], 1)
    zero = (0,) * len(shape[:-1])
    re, im = (b.reshape(b.slice(wide, (*zero, k), one, (1,) * len(shape)), shape[:-1]) for k in (0, 1))
    return re, im


def _join(c: Call, re: NodeId, im: NodeId) -> NodeId:
    b, shape = c.b, c.b.type_of(re).shape
    return b.add(Prim.CONCAT, b.reshape(re, (*shape, 1)), b.reshape(im, (*shape, 1)), attrs=ConcatAttrs(len(shape)))


def _transform(c: Call, re: NodeId, im: NodeId | None, table: npt.NDArray[np.complex128]) -> tuple[NodeId, NodeId]:
    """The product of the last axis with a complex matrix."""
    b = c.b
    rr, ri = _product(c, re, table.real.copy()), _product(c, re, table.imag.copy())
    if im is None:
        return rr, ri
    return (
        b.apply(Prim.SUB, rr, _product(c, im, table.imag.copy())),
        b.apply(Prim.ADD, ri, _product(c, im, table.real.copy())),
    )


def _dft(c: Call) -> Result:
    b, t = c.b, c.type(0)
    inverse, onesided = bool(c.get("inverse", 0)), bool(c.get("onesided", 0))
    axis = c.integer(2) if c.opset >= 20 and c.has(2) else (-2 if c.opset >= 20 else int(c.get("axis", 1)))
    axis = c.norm(axis, t.rank)
    if axis == t.rank - 1 or t.shape[-1] not in (1, 2):
        c.fail(f"DFT along axis {axis} of {t.shape}")
    n = c.integer(1) if c.has(1) else (2 * (t.shape[axis] - 1) if inverse and onesided else t.shape[axis])
    if not 1 <= n <= _MAX_LENGTH:
        return Declined(f"DFT of length {n}")
    re, im = _parts(c, c.x(0))
    back = list(range(t.rank - 1))
    back[axis], back[-1] = back[-1], back[axis]  # its own inverse
    moved = [None if p is None else b.transpose(p, back) for p in (re, im)]
    if inverse and onesided:
        return _irfft(c, moved, n, back)
    sized = [None if p is None else _fit(c, p, n) for p in moved]
    assert sized[0] is not None
    table = _matrix(n, n // 2 + 1 if onesided else n, inverse=inverse)
    out = [b.transpose(p, back) for p in _transform(c, sized[0], sized[1], table)]
    return b.cast(_join(c, out[0], out[1]), t.dtype)


def _irfft(c: Call, parts: list[NodeId | None], n: int, back: list[int]) -> Result:
    """Half of a Hermitian spectrum -> real signal: the missing half mirrors the first."""
    b, t = c.b, c.type(0)
    half = n // 2 + 1
    re, im = (None if p is None else _fit(c, p, half) for p in parts)
    assert re is not None
    share = np.full(half, 2.0)
    share[0] = 1.0
    if n % 2 == 0:
        share[-1] = 1.0
    table = _matrix(n, n, inverse=True)[:, :half] * share
    y = _product(c, re, table.real.copy())
    if im is not None:
        y = b.apply(Prim.SUB, y, _product(c, im, table.imag.copy()))
    y = b.transpose(y, back)
    return b.cast(b.reshape(y, (*b.type_of(y).shape, 1)), t.dtype)


def _fit(c: Call, x: NodeId, n: int) -> NodeId:
    """Cut or zero-pad the last axis."""
    b, shape = c.b, c.b.type_of(x).shape
    if shape[-1] > n:
        return b.slice(x, (0,) * len(shape), (*shape[:-1], n), (1,) * len(shape))
    if shape[-1] < n:
        lo = (0,) * len(shape)
        return b.add(Prim.PAD, x, attrs=PadAttrs(lo, (*lo[:-1], n - shape[-1]), "constant", 0.0))
    return x


def _stft(c: Call) -> Result:
    """Frames are gathered by a constant table, windowed, and transformed."""
    b, t = c.b, c.type(0)
    step = c.integer(1)
    signal = b.reshape(c.x(0), (*t.shape, 1)) if t.rank == 2 else c.x(0)
    length = c.integer(3) if c.has(3) else c.shape(2)[0]
    if not 1 <= length <= _MAX_LENGTH or step < 1:
        return Declined(f"STFT with frames of {length}")
    frames = (b.type_of(signal).shape[1] - length) // step + 1
    onesided = bool(c.get("onesided", 1)) and b.type_of(signal).shape[-1] == 1
    re, im = _parts(c, signal)
    at = (np.arange(frames)[:, None] * step + np.arange(length)[None, :]).astype(np.int64)
    window = b.cast(c.x(2), DType.F64) if c.has(2) else None

    def cut(p: NodeId) -> NodeId:
        made = b.add(Prim.GATHER, p, b.constant(at), attrs=GatherAttrs(1))
        return made if window is None else b.apply(Prim.MUL, made, window)

    table = _matrix(length, length // 2 + 1 if onesided else length, inverse=False)
    out = _transform(c, cut(re), None if im is None else cut(im), table)
    return b.cast(_join(c, *out), t.dtype)


def _mel_weights(c: Call) -> Result:
    """A table of its operands, which are all scalars."""
    from weft.frontends.onnx.tensors import dtype_of

    bins, length, rate = c.integer(0), c.integer(1), c.integer(2)
    lo, hi = (float(c.value(k).reshape(-1)[0]) for k in (3, 4))
    dtype = dtype_of(c.get("output_datatype", 1), "the table", c.where)
    spectrum = length // 2 + 1
    mel = [2595 * math.log10(1 + f / 700) for f in (lo, hi)]
    edges = mel[0] + np.arange(bins + 2) * ((mel[1] - mel[0]) / (bins + 2))
    at = np.floor(((length + 1) * (700 * (np.power(10, edges / 2595) - 1))) / rate).astype(np.int64)
    table = np.zeros((spectrum, bins))
    for i in range(bins):
        low, middle, high = at[i], at[i + 1], at[i + 2]
        if middle == low:
            table[middle, i] = 1
        else:
            for j in range(low, middle + 1):
                table[j, i] = (j - low) / (middle - low)
        if high > middle:
            for j in range(middle, high):
                table[j, i] = (high - j) / (high - middle)
    return c.b.constant(table.astype(dtype.numpy), dtype)


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "DFT"): _dft,
    ("", "STFT"): _stft,
    ("", "MelWeightMatrix"): _mel_weights,
}
