"""Inputs whose rows lie far apart where a graph shifts exponentials by the maximum of their row.

exp(x - max(x)) over the sum of a row is the same for any shift. So a kernel that takes another row's maximum, or that
of a part of the row, is right wherever exp neither overflows nor vanishes: on all inputs of an ordinary size.
`move_rows` raises or lowers whole rows of x, and in some of them one element more, by more than an exponential's
argument may be: what is shifted wrongly is infinite then, zero or NaN.

It does so in the inputs: in elements that reach x through moves, casts, sums and constant factors and lie in one row
each; or, where x is a product of inputs, in its rows and in three columns of what they are multiplied by. What is added
is a power of two, so that differences within a row stay what they were; a product has none in the rows that are moved,
as scores of 16 bits would be rounded to steps as wide as these.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import cast

import torch

from weft.generate.library.execute import TORCH_DTYPE
from weft.ir import attrs as a
from weft.ir.graph import Graph
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.tune.oracle import moved
from weft.tune.shifts import MOVES, Shift, Way, shifts, ways

T = torch.Tensor

APART, APART_F64 = 128.0, 1024.0
"""By what rows are moved. In f32 exp overflows above 88.7 and vanishes below -103.3, in f64 above 709.8 and below
-745.1; kernels evaluate exponentials of 16-bit floats in f32. The rest is room for the values beside it."""
VECTOR = 8
"""Elements before a row's last one that are each the largest of a row: 16 bytes of 16-bit floats."""
OPPOSITE = 2.0
"""What the column that moves rows is multiplied by, in a product."""
MOST = 1 / 8
"""Share of a type's range that may be added."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is shifted, row by row."""

    operand: int
    apart: float
    number: T
    """Of each row: shape of the maximum."""
    most: T
    """Whether an element is the one that may lie above its row; broadcast to the operand's shape."""
    level: T
    """Of each row, flat: -1, 0 or 1."""
    above: T
    """Of each row, flat: whether that element does."""
    first: T
    """Of each row, flat: whether it is its first."""


def move_rows(graph: Graph, inputs: list[T], g: torch.Generator) -> bool:
    """Move rows apart in place of the inputs (in the graph's shapes and types); False: no input can do that."""
    done = [_move(graph, _rows(graph, s, g), inputs) for s in shifts(graph)]
    return any(done)


def _rows(graph: Graph, s: Shift, g: torch.Generator) -> _Rows:
    reduced = graph.nodes[s.maximum]
    operand = reduced.inputs[0]
    axes = cast("a.ReduceAttrs", reduced.attrs).axes
    shape = graph.type_of(operand).shape
    count = math.prod(reduced.type.shape)
    length = math.prod(shape[k] for k in axes)

    def drawn(low: int, high: int) -> T:
        return torch.randint(low, high, (count,), generator=g, device=g.device)

    at = torch.arange(length, device=g.device).view([n if k in axes else 1 for k, n in enumerate(shape)])
    end, anywhere, level, above = drawn(0, 3), drawn(0, max(length, 1)), drawn(-1, 2), drawn(0, 2) == 0
    # what is left out is left out at the ends, and of the last vector in any of its places
    elsewhere = (end == 2) & above
    before_last = elsewhere.cumsum(0)
    anywhere = torch.where(elsewhere & (before_last <= VECTOR), (length - 1 - before_last).clamp_min(0), anywhere)
    most = torch.where(end == 0, 0, torch.where(end == 1, length - 1, anywhere))
    return _Rows(
        operand,
        APART_F64 if graph.type_of(s.difference).dtype is DType.F64 else APART,
        torch.arange(count, device=g.device).view(reduced.type.shape),
        at == most.view(reduced.type.shape),
        level,
        above,
        end == 0,
    )


def _move(graph: Graph, rows: _Rows, inputs: list[T]) -> bool:
    if not math.prod(graph.type_of(rows.operand).shape):
        return False
    if any(_move_input(graph, rows, way, inputs) for way in ways(graph, rows.operand, Prim.INPUT, sums=True)):
        return True
    for way in ways(graph, rows.operand, Prim.MATMUL, sums=True):
        left, right = (list(ways(graph, i, Prim.INPUT, sums=False)) for i in graph.nodes[way.nodes[0]].inputs)
        for x, y in itertools.product(left, right):
            if any(_move_factors(graph, rows, way, x, y, inputs, turned=turned) for turned in (False, True)):
                return True
    return False


def _move_input(graph: Graph, rows: _Rows, way: Way, inputs: list[T]) -> bool:
    """Add to the elements of an input that lie in one row each."""
    start = way.nodes[0]
    by = _power(graph, start, rows.apart / way.gain)
    at = _followed(graph, way, rows.level.device)
    row = _row_of(at, rows.number, graph.type_of(start).size)
    if by == 0.0 or row is None:
        return False
    added = torch.where(row < 0, 0, rows.level[row])
    above = rows.most & rows.above.view(rows.number.shape)
    added[at[above.expand(at.shape)]] += 1
    x = inputs[graph.inputs.index(start)]
    wide = torch.promote_types(x.dtype, torch.float32) if x.element_size() > 1 else torch.float32
    x.copy_((x.to(wide) + by * added.view(x.shape).to(wide)).to(x.dtype))
    return True


def _move_factors(graph: Graph, rows: _Rows, way: Way, left: Way, right: Way, inputs: list[T], *, turned: bool) -> bool:
    """Move the rows of a product, those that its left operand has, or if `turned` its right one.

    Those that move are zero, but for three columns: the first is a level, and meets what is the same everywhere; the
    others are not zero in some of them, and meet what is not zero in the last or in the first place alone.
    """
    device = rows.level.device
    product = way.nodes[0]
    shape = graph.type_of(product).shape
    number = _row_of(_followed(graph, way, device), rows.number, math.prod(shape))
    own, other = (right, left) if turned else (left, right)
    if (
        number is None
        or own.nodes[0] in (*left.beside, *right.beside)
        or other.nodes[0] in (*own.beside, *other.beside)
    ):
        return False
    # (..., rows, what is summed) and (..., places in a row, what is summed), by numbers of the inputs' elements
    number, own_at, other_at = number.view(shape), _followed(graph, own, device), _followed(graph, other, device)
    if turned:
        number, own_at = number.mT, own_at.mT
    else:
        other_at = other_at.mT
    columns = own_at.shape[-1]
    if not columns or not bool((number == number[..., :1]).all()):
        return False
    number = number[..., :1].expand(*number.shape[:-1], columns)
    own_at = own_at.expand(number.shape)
    row = _row_of(own_at, number, graph.type_of(own.nodes[0]).size)
    by = _power(graph, own.nodes[0], rows.apart / (way.gain * own.gain * other.gain * OPPOSITE))
    if by == 0.0 or row is None:
        return False
    if own.nodes[0] == other.nodes[0] and bool(torch.isin(own_at, other_at).any()):
        return False
    x, y = (inputs[graph.inputs.index(w.nodes[0])].view(-1) for w in (own, other))
    x[(row >= 0) & ((rows.level[row] != 0) | rows.above[row])] = 0
    parts = (
        (rows.level, slice(None)),
        (rows.above & ~rows.first, slice(-1, None)),
        (rows.above & rows.first, slice(1)),
    )
    for c, (what, places) in enumerate(parts[:columns]):
        at = own_at[..., c][number[..., c] >= 0]
        x[at] = (by * what[row[at]].float()).to(x.dtype)
        opposite = torch.zeros(other_at.shape[:-1], device=device)
        opposite[..., places] = OPPOSITE
        y[other_at[..., c]] = opposite.to(y.dtype)
    for i in (*left.beside, *right.beside):
        inputs[graph.inputs.index(i)].zero_()
    return True


def _followed(graph: Graph, way: Way, device: torch.device) -> T:
    """Which element of the way's first node (by its number, row-major) stands where in its last one."""
    shape = graph.type_of(way.nodes[0]).shape
    at = torch.arange(math.prod(shape), device=device).view(shape)
    for i in way.nodes[1:]:
        if graph.nodes[i].prim in MOVES:
            at = moved(graph.nodes[i], at)
    return at


def _row_of(at: T, number: T, size: int) -> T | None:
    """The row of each of `size` elements, -1 where one is in none; None: one is in several."""
    row = torch.full((size,), -1, dtype=torch.int64, device=at.device)
    number = number.expand(at.shape)
    row[at.reshape(-1)] = number.reshape(-1)
    return row if torch.equal(row[at], number) else None


def _power(graph: Graph, start: int, by: float) -> float:
    """The power of two, of the same sign, that is at least so much; 0: the input does not hold it."""
    dtype = graph.type_of(start).dtype
    if not dtype.is_float or not math.isfinite(by) or by == 0.0:
        return 0.0
    exponent = math.ceil(math.log2(abs(by)))
    held = exponent < math.log2(torch.finfo(TORCH_DTYPE[dtype]).max * MOST)
    return math.copysign(math.ldexp(1.0, exponent), by) if held else 0.0
