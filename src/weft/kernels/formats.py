"""How a value lies in memory: a small closed set, a variable of the integer program."""

from __future__ import annotations

from enum import Enum

from weft.ir.types import TensorType


class Format(Enum):
    """Dense memory orders. The value is the name in plans."""

    ROW = "row"
    """Row-major (NCHW for images): the format of every model input and output."""
    LAST = "last"
    """Channels-last: dimension 1 of a rank-4 (or rank-5, rank-3) value varies fastest (NHWC)."""

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Strides in elements of a dense tensor of this shape."""
        order = self.order(len(shape))
        out = [0] * len(shape)
        step = 1
        for dim in reversed(order):
            out[dim] = step
            step *= max(shape[dim], 1)
        return tuple(out)

    def order(self, rank: int) -> tuple[int, ...]:
        """Dimensions from slowest to fastest."""
        if self is Format.LAST and rank >= 3:
            return (0, *range(2, rank), 1)
        return tuple(range(rank))


def formats_of(type: TensorType) -> tuple[Format, ...]:
    """Formats worth considering for a value: both for images with more than one channel and pixel, else ROW."""
    if type.rank == 4 and type.shape[1] > 1 and type.shape[2] * type.shape[3] > 1:
        return (Format.ROW, Format.LAST)
    return (Format.ROW,)
