"""Element types and tensor types: what a value is, never how it lies in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
"""A NumPy array of any element type. Types that NumPy lacks (bf16, the 8-bit floats) are held as float32 whose values
are exact in them."""


class DType(Enum):
    """The closed set of element types. The value is the name used by the text form."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8E4M3 = "f8e4m3"
    """No infinities, one NaN (0x7F), greatest value 448."""
    F8E5M2 = "f8e5m2"
    """IEEE-like: infinities, greatest value 57344."""
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes per element in memory."""
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        """True for f64, f32, f16, bf16 and the 8-bit floats."""
        return self in _FLOATS

    @property
    def is_float8(self) -> bool:
        """True for the floats of 8 bits: types of memory, in which nothing is computed."""
        return self in _FLOAT8

    @property
    def is_emulated(self) -> bool:
        """True for the types that NumPy lacks: float32 stands in for them."""
        return self is DType.BF16 or self in _FLOAT8

    @property
    def is_integer(self) -> bool:
        """True for the signed and unsigned integers; bool is not one."""
        return not self.is_float and self is not DType.BOOL

    @property
    def accumulator(self) -> DType:
        """The type in which sums and products of this type are accumulated: f32 for floats of 16 and 8 bits."""
        return DType.F32 if self.is_float and self.itemsize < 4 else self

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy type that holds the values; float32 stands in where NumPy has none (`is_emulated`)."""
        return _NUMPY[self]

    @staticmethod
    def from_numpy(dtype: np.dtype[np.generic]) -> DType:
        """The element type of a NumPy array; KeyError for one outside the set (never an emulated one)."""
        return _FROM_NUMPY[np.dtype(dtype)]


_FLOAT8 = frozenset({DType.F8E4M3, DType.F8E5M2})
_FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16}) | _FLOAT8
_ITEMSIZE = {
    DType.F64: 8,
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
    DType.F8E4M3: 1,
    DType.F8E5M2: 1,
    DType.I64: 8,
    DType.I32: 4,
    DType.I16: 2,
    DType.I8: 1,
    DType.U8: 1,
    DType.BOOL: 1,
}
_NUMPY: dict[DType, np.dtype[np.generic]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(np.float32),
    DType.F8E4M3: np.dtype(np.float32),
    DType.F8E5M2: np.dtype(np.float32),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I16: np.dtype(np.int16),
    DType.I8: np.dtype(np.int8),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}
_FROM_NUMPY = {dtype: d for d, dtype in _NUMPY.items() if not d.is_emulated}


@dataclass(frozen=True, slots=True)
class TensorType:
    """An element type and a static shape."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar, 0 when a dimension is 0."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return "x".join([*map(str, self.shape), self.dtype.value])


def round_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Round to the nearest bf16, ties to even; NaN stays NaN, values past the largest bf16 become infinite."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    out = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), out).reshape(np.shape(x))


@dataclass(frozen=True, slots=True)
class Float8:
    """How the bits of an 8-bit float read: sign, exponent, mantissa."""

    mantissa: int
    """Bits of it."""
    least: int
    """Exponent of the least normal number."""
    greatest: float
    overflow: float
    """What a number beyond the greatest becomes."""


FLOAT8 = {
    DType.F8E4M3: Float8(3, -6, 448.0, 448.0),
    DType.F8E5M2: Float8(2, -14, 57344.0, math.inf),
}
"""Casts to e4m3 saturate, to e5m2 they do not. Source: OCP 8-bit Floating Point Specification, revision 1.0, section 5;
overflow as in PyTorch."""


def round_f8(x: npt.NDArray[np.floating], dtype: DType) -> npt.NDArray[np.float32]:
    """Round to the nearest value of an 8-bit float, ties to even, from any float at once; NaN stays NaN."""
    f = FLOAT8[dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        unit = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, f.least) - f.mantissa)
        near = np.where(np.isfinite(x), np.rint(x / unit) * unit, x)
        out = np.where(np.abs(near) > f.greatest, np.copysign(f.overflow, near), near)
    return out.astype(np.float32).reshape(np.shape(x))


@cache
def f8_values(dtype: DType) -> npt.NDArray[np.float32]:
    """What each of the 256 bytes stands for."""
    f = FLOAT8[dtype]
    byte = np.arange(256)
    exponent, fraction = byte >> f.mantissa & 0x7F >> f.mantissa, byte & (1 << f.mantissa) - 1
    whole = np.where(exponent > 0, fraction + (1 << f.mantissa), fraction)
    values = np.ldexp(whole.astype(np.float64), np.maximum(exponent, 1) - 1 + f.least - f.mantissa)
    if math.isinf(f.overflow):
        values = np.where(exponent == 0x7F >> f.mantissa, np.where(fraction == 0, np.inf, np.nan), values)
    values = np.where(byte & 0x7F == 0x7F, np.nan, values)
    return np.where(byte & 0x80, -values, values).astype(np.float32)


def round_emulated(x: Array, dtype: DType) -> Array:
    """Values in float32 rounded to a type that NumPy lacks; anything else as it is."""
    if dtype is DType.BF16:
        return round_bf16(x.astype(np.float32, copy=False))
    return round_f8(x.astype(x.dtype if x.dtype.kind == "f" else np.float64), dtype) if dtype.is_float8 else x


def to_bits(x: Array, dtype: DType) -> Array:
    """The little-endian words of 16 or 8 bits of an emulated type in memory; `x` is exact in it, or is rounded."""
    held = round_emulated(x, dtype).astype(np.float32, copy=False)
    if dtype is DType.BF16:
        return (np.ascontiguousarray(held).view(np.uint32) >> np.uint32(16)).astype("<u2").reshape(x.shape)
    line = f8_values(dtype)[:0x7F]
    line = line[~np.isnan(line)]
    byte = np.where(np.isnan(held), 0x7F, np.searchsorted(line, np.abs(np.where(np.isnan(held), 0.0, held))))
    return np.asarray(byte | np.signbit(held) << 7, np.uint8)


def from_bits(raw: Array, dtype: DType) -> npt.NDArray[np.float32]:
    """The values of words as `to_bits` makes them."""
    if dtype is DType.BF16:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return f8_values(dtype)[raw.astype(np.intp)]
