"""Causal masks: which keys a row of attention sees follows from positions, so tiles are skipped or need no mask."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.generate.contraction.values import Expr
from weft.generate.cuda.attention.match import Attention, factor
from weft.ir.prims import Prim


@dataclass(frozen=True, slots=True)
class Band:
    """Row r of `queries` sees the keys up to r + shift; the rows of attention are `repeats` times those queries."""

    scale: float
    """Scores are products times this."""
    shift: int
    queries: int
    repeats: int


_SHIFTS = {  # keys left of the comparison, and whether what it holds for is kept
    (Prim.LE, True): 0,
    (Prim.LT, True): -1,
    (Prim.GT, False): 0,
    (Prim.GE, False): -1,
}
_MIRRORED = {Prim.LE: Prim.GE, Prim.LT: Prim.GT, Prim.GE: Prim.LE, Prim.GT: Prim.LT}


def band(p: Attention) -> Band | None:
    """The causal mask that is all there is between the products besides a factor, or None."""
    score = p.score
    while score.kind == "apply" and score.prim is Prim.CAST and score.dtype.is_float:
        score = score.args[0]
    if score.kind != "apply" or score.prim is not Prim.SELECT:
        return None
    test, yes, no = score.args
    kept = no.kind == "number" and no.number == -math.inf
    masked = yes.kind == "number" and yes.number == -math.inf
    scale = factor(yes if kept else no)
    if kept == masked or not scale or test.kind != "apply" or test.prim not in _MIRRORED:
        return None
    (left, less), (right, more) = (_counted(x) for x in test.args)
    prim = test.prim
    if _row(p, left) is not None:
        left, less, right, more, prim = right, more, left, less, _MIRRORED[prim]
    position = _row(p, right)
    if not _is_key(left) or position is None or (prim, kept) not in _SHIFTS:
        return None
    assert left.view is not None
    assert right.view is not None
    last = [i for i in p.rows if p.dims[i] > 1][-1:]
    if last != [position]:
        return None
    shift = _SHIFTS[prim, kept] + right.view.offset + more - left.view.offset - less
    return Band(scale, shift, p.dims[position], p.m // p.dims[position])


def _counted(x: Expr) -> tuple[Expr, int]:
    """A position and the integer that is added to it."""
    if x.kind == "apply" and x.prim is Prim.ADD and x.dtype.is_integer:
        for position, more in (x.args, x.args[::-1]):
            if more.kind == "number":
                return position, int(more.number)
    return x, 0


def _is_key(x: Expr) -> bool:
    """Whether a value is the position of the key."""
    return x.kind == "iota" and x.view is not None and not any(x.view.strides[:-1]) and x.view.strides[-1] == 1


def _row(p: Attention, x: Expr) -> int | None:
    """The dimension whose position a value is; None: it is none."""
    if x.kind != "iota" or x.view is None or x.view.strides[-1]:
        return None
    found = [i for i in range(len(p.dims)) if x.view.strides[i] and p.dims[i] > 1]
    return found[0] if len(found) == 1 and found[0] in p.rows and x.view.strides[found[0]] == 1 else None
