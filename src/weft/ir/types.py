"""Element types and tensor types: what a value is, never how it lies in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
"""A NumPy array of any element type. A bf16 array is held as float32 whose values are exact in bf16."""


class DType(Enum):
    """The closed set of element types. The value is the name used by the text form."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
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
        """True for f64, f32, f16 and bf16."""
        return self in _FLOATS

    @property
    def is_integer(self) -> bool:
        """True for the signed and unsigned integers; bool is not one."""
        return not self.is_float and self is not DType.BOOL

    @property
    def accumulator(self) -> DType:
        """The type in which sums and products of this type are accumulated: f32 for the 16-bit floats."""
        return DType.F32 if self in (DType.F16, DType.BF16) else self

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy type that holds the values; float32 stands in for bf16, which NumPy lacks."""
        return _NUMPY[self]

    @staticmethod
    def from_numpy(dtype: np.dtype[np.generic]) -> DType:
        """The element type of a NumPy array; KeyError for one outside the set (never bf16)."""
        return _FROM_NUMPY[np.dtype(dtype)]


_FLOATS = frozenset({DType.F64, DType.F32, DType.F16, DType.BF16})
_ITEMSIZE = {
    DType.F64: 8,
    DType.F32: 4,
    DType.F16: 2,
    DType.BF16: 2,
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
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I16: np.dtype(np.int16),
    DType.I8: np.dtype(np.int8),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}
_FROM_NUMPY = {dtype: d for d, dtype in _NUMPY.items() if d is not DType.BF16}


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
