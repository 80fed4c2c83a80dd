"""Where a value lies while the kernel runs: its address as an index expression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.generate.loopnest.index import Index, Var, index_of
from weft.ir.graph import NodeId
from weft.ir.types import DType


class Unpinned(Exception):  # noqa: N818 - a signal between emitter and planner, not an error
    """A value is read at another position of a shared loop than the one that was just computed."""

    def __init__(self, var: Var) -> None:
        super().__init__(var.name)
        self.var = var


class Unfused(Exception):  # noqa: N818 - as above
    """A value is read inside the loops that compute it, at an element that may not exist yet."""

    def __init__(self, node: NodeId) -> None:
        super().__init__(str(node))
        self.node = node


@dataclass(frozen=True, slots=True)
class Digit:
    """(index[dim] // inner) % size, one digit of an index in mixed radix, and its stride in elements."""

    dim: int
    inner: int
    size: int
    stride: int

    def of(self, index: Sequence[Index]) -> Index:
        """The digit's value."""
        return (index[self.dim] // self.inner) % self.size


@dataclass(frozen=True, slots=True)
class Buffer:
    """Dense storage of one value, or of the part of it that one turn of the shared loops computes."""

    name: str
    dtype: DType
    digits: tuple[Digit, ...]
    pinned: tuple[tuple[Digit, Var], ...] = ()
    """Digits that must equal a shared loop's variable wherever the buffer is read."""
    fixed: bool = False
    """Never written by this kernel."""

    def address(self, index: Sequence[Index]) -> Index:
        """Position in elements.

        Raises:
            Unpinned: read at another turn of a shared loop.
        """
        for digit, var in self.pinned:
            if digit.of(index) != index_of(var):
                raise Unpinned(var)
        total = Index()
        for digit in self.digits:
            total = total + digit.of(index) * digit.stride
        return total


def dense(name: str, dtype: DType, shape: Sequence[int], strides: Sequence[int], *, fixed: bool = False) -> Buffer:
    """A whole tensor."""
    digits = tuple(Digit(d, 1, n, s) for d, (n, s) in enumerate(zip(shape, strides, strict=True)) if n > 1)
    return Buffer(name, dtype, digits, fixed=fixed)
