"""q, k and v as tensor maps, and the copies that fill shared memory with tiles of them.

A tile is panels of 64 columns: rows of 128 bytes, swizzled; columns and rows that do not exist arrive as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.generate.contraction.values import Expr
from weft.generate.cuda.attention.match import Attention
from weft.generate.cuda.gemm.tma.operands import Dim, merged
from weft.generate.expr.integer import Int
from weft.ir.declined import Declined
from weft.kernels.source import Pointer, TensorMap

PANEL = 64
"""Columns of a panel."""
ROWS = 64
"""Rows of q of one warpgroup, and of a box of q."""
_RANK = 5


@dataclass(frozen=True, slots=True)
class Mapped:
    """An operand that TMA reads; the last coordinates follow those of column and row."""

    map: TensorMap
    rows: tuple[str, ...]
    """Coordinates of row `m` (of key `n`), fastest first."""
    outer: tuple[str, ...]
    """Coordinates of the pair of keys and values `z`."""
    offset: int
    """Of the first column."""

    def copy(self, name: str, to: str, bar: str, column: int) -> str:
        """Statement: the box of a panel to a shared address."""
        at = ", ".join((str(column + self.offset), *self.rows, *self.outer))
        return f"w_tma(&{name}, {to}, {bar}, {at});"


def panels(columns: int) -> int:
    """Panels of so many columns."""
    return -(-columns // PANEL)


def mapped(p: Attention, x: Expr, columns: int, box: int, *, keyed: bool) -> Mapped | Declined:
    """The map of an operand whose tiles have `box` rows: keys if `keyed`, else rows of q."""
    if x.kind != "input" or x.dtype is not p.dtype or x.dtype.itemsize != 2 or x.view is None:
        return Declined("an operand that must be computed before it is multiplied")
    view = x.view
    if view.strides[-1] != 1 and columns > 1:
        return Declined("an operand whose columns are not neighbours in memory")
    if keyed:
        rows = [(p.keys, view.strides[-2])] if p.keys > 1 else []
        fixed = any(view.strides[i] for i in p.rows)
        if fixed:
            return Declined("keys that change along rows")
    else:
        rows = merged(p.dims, view.strides, p.rows)
        if any(n % ROWS for n, _ in rows[1:]):
            return Declined("rows that no TMA box describes")
    outer = [(n, step, inner) for n, step, inner in _places(merged(p.dims, view.strides, p.z)) if step]
    index = "n" if keyed else "m"
    dims = [Dim(columns + view.offset, 1, PANEL, "")]
    dims += [
        Dim(n, step, box if i == 0 else 1, _digit(index, n, inner, last=i == len(rows) - 1))
        for i, (n, step, inner) in enumerate(reversed(_places(rows)))
    ]
    if not rows:
        dims.append(Dim(1, -(-(columns + view.offset) // 8) * 8, box, "0"))
    count = len(dims) - 1
    dims += [
        Dim(n, step, 1, _digit("z", n, inner, last=i == len(outer) - 1))
        for i, (n, step, inner) in enumerate(reversed(outer))
    ]
    strides = tuple(d.step * x.dtype.itemsize for d in dims[1:])
    if len(dims) > _RANK:
        return Declined(f"an operand of {len(dims)} dimensions; tensor maps have {_RANK}")
    if any(s <= 0 or s % 16 or s >= 1 << 40 for s in strides):
        return Declined("strides that are no multiples of 16 bytes")
    found = TensorMap(
        Pointer("in", x.index),
        x.dtype.value,
        tuple(d.size for d in dims),
        strides,
        tuple(d.box for d in dims),
        (1,) * len(dims),
        2 * PANEL,
    )
    at = [d.at for d in dims[1:]]
    return Mapped(found, tuple(at[:count]), tuple(at[count:]), view.offset)


def _places(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(size, step, product of the sizes of all faster ones)."""
    found = []
    inner = 1
    for n, step in reversed(dims):
        found.append((n, step, inner))
        inner *= n
    return list(reversed(found))


def _digit(index: str, n: int, inner: int, *, last: bool) -> str:
    """C text of one dimension's part of a joint index."""
    quotient = Int(index) / inner
    return str(quotient if last else quotient % n)
