"""Sequences, as far as they are known element by element while importing; no sequence leaves the importer."""

from __future__ import annotations

import numpy as np

from weft.frontends.onnx.call import Call, Handler, ListValue, Result
from weft.frontends.onnx.errors import NoRuleError
from weft.ir.attrs import ConcatAttrs
from weft.ir.declined import Declined
from weft.ir.prims import Prim


def _list(c: Call, i: int) -> ListValue:
    value = c.operands[i]
    if not isinstance(value, tuple):
        raise NoRuleError(where=c.where, op=c.op, reason="a tensor where a sequence is wanted")
    return value


def _construct(c: Call) -> Result:
    return (c.xs(),)


def _empty(_: Call) -> Result:
    return ((),)


def _position(c: Call, i: int, n: int, *, end: bool = False) -> int:
    at = c.integer(i)
    at = at + n if at < 0 else at
    if not 0 <= at < n + end:
        c.fail(f"position {at} of a sequence of {n}")
    return at


def _at(c: Call) -> Result:
    items = _list(c, 0)
    return items[_position(c, 1, len(items))]


def _insert(c: Call) -> Result:
    items = _list(c, 0)
    at = _position(c, 2, len(items), end=True) if c.has(2) else len(items)
    return ((*items[:at], c.x(1), *items[at:]),)


def _erase(c: Call) -> Result:
    items = _list(c, 0)
    at = _position(c, 1, len(items)) if c.has(1) else len(items) - 1
    return ((*items[:at], *items[at + 1 :]),)


def _length(c: Call) -> Result:
    return c.b.constant(np.array(len(_list(c, 0)), np.int64))


def _join(c: Call) -> Result:
    b, items = c.b, _list(c, 0)
    if not items:
        return Declined("an empty sequence")
    rank = b.type_of(items[0]).rank
    axis = int(c.get("axis"))
    if c.get("new_axis", 0):
        axis = c.norm(axis, rank + 1)
        items = tuple(b.reshape(x, (*b.type_of(x).shape[:axis], 1, *b.type_of(x).shape[axis:])) for x in items)
    else:
        axis = c.norm(axis, rank)
    return b.add(Prim.CONCAT, *items, attrs=ConcatAttrs(axis))


def _split(c: Call) -> Result:
    b, shape = c.b, c.shape(0)
    axis = c.norm(int(c.get("axis", 0)), len(shape))
    n = shape[axis]
    keep = bool(c.get("keepdims", 1))
    if not c.has(1):
        sizes = (1,) * n
    else:
        keep = True
        given = c.ints(1)
        if c.type(1).rank == 0:
            step = given[0]
            if step <= 0:
                c.fail(f"chunks of {step}")
            sizes = tuple(min(step, n - k) for k in range(0, n, step))
        else:
            sizes = given
    if sum(sizes) != n:
        c.fail(f"size {n} does not split into {sizes}")
    out, start = [], 0
    for size in sizes:
        at = tuple(start if k == axis else 0 for k in range(len(shape)))
        part = b.slice(c.x(0), at, tuple(size if k == axis else m for k, m in enumerate(shape)), (1,) * len(shape))
        out.append(part if keep else b.reshape(part, (*shape[:axis], *shape[axis + 1 :])))
        start += size
    return (tuple(out),)


HANDLERS: dict[tuple[str, str], Handler] = {
    ("", "SequenceConstruct"): _construct,
    ("", "SequenceEmpty"): _empty,
    ("", "SequenceAt"): _at,
    ("", "SequenceInsert"): _insert,
    ("", "SequenceErase"): _erase,
    ("", "SequenceLength"): _length,
    ("", "ConcatFromSequence"): _join,
    ("", "SplitToSequence"): _split,
}
