"""Einstein summation."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence

from weft.fission.layout import diagonal
from weft.fission.rule import dtype_of, shape_of
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType

Term = tuple[NodeId, tuple[str, ...]]
"""A node and the label of each of its axes; the axes of an ellipsis are "…0", "…1", counted from the right."""


def einsum(b: GraphBuilder, *operands: NodeId, equation: str) -> NodeId | Declined:
    """einsum(x, y, …) → matmul of the transposed, reshaped pair, from the left; product where nothing is contracted.

    Shapes: `equation` as in NumPy, with ellipses and repeated labels (diagonals); sizes of 1 broadcast.
    Conditions: one number type.
    Source: `numpy.einsum`; `torch.einsum`; ONNX Einsum.
    """
    if len({dtype_of(b, x) for x in operands}) != 1 or dtype_of(b, operands[0]) is DType.BOOL:
        return Declined("einsum of bool or of several element types")
    parsed = _parse(equation, [shape_of(b, x) for x in operands])
    if isinstance(parsed, Declined):
        return parsed
    labels, result = parsed
    sizes: dict[str, int] = {}
    terms: list[Term] = []
    for x, names in zip(operands, labels, strict=True):
        term = _without_repeats(b, x, names)
        if isinstance(term, Declined):
            return term
        terms.append(term)
        for name, n in zip(term[1], shape_of(b, term[0]), strict=True):
            if n != sizes.setdefault(name, n) and 1 not in (n, sizes[name]):
                return Declined(f"einsum {equation!r}: sizes {sizes[name]} and {n} of {name!r}")
            sizes[name] = n if sizes[name] == 1 else sizes[name]
    terms = [_without_ones(b, t, sizes) for t in terms]
    left = terms[0]
    for i, right in enumerate(terms[1:], 2):
        later = {name for _, names in terms[i:] for name in names} | set(result)
        left = _pair(b, left, right, later)
    x, names = _summed(b, left, set(result))
    # a label of the result that only size-1 axes carried was dropped and comes back with size 1
    missing = tuple(name for name in result if name not in names)
    x, names = b.reshape(x, (*shape_of(b, x), *(1,) * len(missing))), (*names, *missing)
    return b.transpose(x, tuple(names.index(name) for name in result))


def _parse(
    equation: str, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[tuple[str, ...]], tuple[str, ...]] | Declined:
    """Labels of every operand and of the result."""
    text = equation.replace(" ", "")
    inputs, arrow, output = text.partition("->")
    parts = inputs.split(",")
    if len(parts) != len(shapes):
        return Declined(f"einsum {equation!r} of {len(shapes)} operands")
    labels = []
    for part, shape in zip(parts, shapes, strict=True):
        names = _labels(part, len(shape))
        if names is None or len(names) != len(shape):
            return Declined(f"einsum {equation!r}: {part!r} does not name the {len(shape)} axes")
        labels.append(names)
    seen = [name for names in labels for name in names]
    dots = sorted({name for name in seen if len(name) > 1}, key=lambda name: -int(name[1:]))
    if not arrow:
        once = sorted(name for name in set(seen) if len(name) == 1 and seen.count(name) == 1)
        return labels, (*dots, *once)
    result = _labels(output, len(output.replace("...", "")) + len(dots))
    if result is None or len(set(result)) != len(result) or not set(result) <= set(seen):
        return Declined(f"einsum {equation!r}: result {output!r}")
    return labels, result


def _labels(part: str, rank: int) -> tuple[str, ...] | None:
    """One label per axis; None for a text that is no list of letters with at most one ellipsis."""
    before, dots, after = part.partition("...")
    if not set(before + after) <= set(string.ascii_letters):
        return None
    hidden = rank - len(before) - len(after) if dots else 0
    return (*before, *(f"…{i}" for i in reversed(range(hidden))), *after)


def _without_repeats(b: GraphBuilder, x: NodeId, names: tuple[str, ...]) -> Term | Declined:
    """Diagonals in place of repeated labels."""
    while len(set(names)) < len(names):
        name = next(n for n in names if names.count(n) > 1)
        i = names.index(name)
        j = names.index(name, i + 1)
        if shape_of(b, x)[i] != shape_of(b, x)[j]:
            return Declined(f"einsum: a diagonal of {b.type_of(x)}")
        found = diagonal(b, x, axis1=i, axis2=j)
        if isinstance(found, Declined):
            return found
        x, names = found, (*(n for k, n in enumerate(names) if k not in (i, j)), name)
    return x, names


def _without_ones(b: GraphBuilder, term: Term, sizes: dict[str, int]) -> Term:
    """An axis of size 1 whose label is larger elsewhere broadcasts, so the operand can do without it."""
    x, names = term
    shape = shape_of(b, x)
    kept = [k for k, name in enumerate(names) if shape[k] == sizes[name]]
    return b.reshape(x, tuple(shape[k] for k in kept)), tuple(names[k] for k in kept)


def _summed(b: GraphBuilder, term: Term, needed: set[str]) -> Term:
    """Labels that nobody needs are summed away."""
    x, names = term
    axes = tuple(k for k, name in enumerate(names) if name not in needed)
    if not axes:
        return term
    total = b.reduce(Prim.REDUCE_SUM, x, axes)
    kept = [k for k in range(len(names)) if k not in axes]
    return b.reshape(total, tuple(shape_of(b, total)[k] for k in kept)), tuple(names[k] for k in kept)


def _pair(b: GraphBuilder, left: Term, right: Term, later: set[str]) -> Term:
    """One contraction: (batch, m, k) @ (batch, k, n)."""
    x, u = _summed(b, left, later | set(right[1]))
    y, v = _summed(b, right, later | set(left[1]))
    batch = tuple(n for n in u if n in v and n in later)
    joined = tuple(n for n in u if n in v and n not in later)
    rows = tuple(n for n in u if n not in v)
    cols = tuple(n for n in v if n not in u)
    size = dict(zip((*u, *v), (*shape_of(b, x), *shape_of(b, y)), strict=True))
    if not joined:
        order = (*batch, *rows, *cols)
        x = b.transpose(x, tuple(u.index(n) for n in (*batch, *rows)))
        y = b.transpose(y, tuple(v.index(n) for n in (*batch, *cols)))
        x = b.reshape(x, tuple(size[n] if n in u else 1 for n in order))
        y = b.reshape(y, tuple(size[n] if n in v else 1 for n in order))
        return b.apply(Prim.MUL, x, y), order
    front = tuple(size[n] for n in batch)
    m, k, n = (math.prod(size[name] for name in part) for part in (rows, joined, cols))
    x = b.reshape(b.transpose(x, tuple(u.index(name) for name in (*batch, *rows, *joined))), (*front, m, k))
    y = b.reshape(b.transpose(y, tuple(v.index(name) for name in (*batch, *joined, *cols))), (*front, k, n))
    order = (*batch, *rows, *cols)
    return b.reshape(b.add(Prim.MATMUL, x, y), tuple(size[name] for name in order)), order
