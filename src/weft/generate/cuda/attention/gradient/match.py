"""The gradients of attention: a problem as sizes, by the one call that its members are results of."""

from __future__ import annotations

from dataclasses import dataclass

from weft.generate.contraction.values import View
from weft.generate.cuda.attention.called import End, called
from weft.ir.declined import Declined
from weft.ir.opaque import LARGEST_SCORES
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

OPERATOR = "weft::attention_backward"
"""See `generate.library.trained_attention`: its operands and results, which this writes kernels of."""
OPERANDS = 6
HEADS = (64, 128)
"""Elements of a head: whole rows of eight chunks of 16 bytes, so that chunks can change places within them."""
_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class AttentionGradient:
    """dQ, dK and dV of softmax(scale · Q Kᵀ) V, of its result, its gradient and the logarithms of its sums.

    All are (rows, positions, heads, elements), each with strides of its own; the logarithms (rows, heads, positions) in
    f32 lie row-major.
    """

    dtype: DType
    rows: int
    heads: int
    positions: int
    """Of Q, its gradient and the result."""
    keys: int
    """Positions of K and V."""
    width: int
    """Elements of a head."""
    causal: bool
    scale: float
    operands: tuple[tuple[int, View], ...]
    """Position among the problem's inputs, and strides: gradient of the result, Q, K, V, result, logarithms."""
    results: tuple[End, ...]
    """What is written: gradient 0 of Q, 1 of K, 2 of V."""


def attention_gradient(problem: Problem) -> AttentionGradient | Declined:
    """The sizes, or why the template does not take the problem."""
    graph = problem.graph
    found = called(problem, OPERATOR, OPERANDS)
    if isinstance(found, Declined):
        return found
    gradient, query, key, value, result, sums = (graph.type_of(n) for n in found.operands)
    if query.rank != 4 or query.dtype not in (DType.F16, DType.BF16) or sums.dtype is not DType.F32:
        return Declined(f"the gradients of attention of {query}")
    rows, positions, heads, width = query.shape
    if width not in HEADS:
        return Declined(f"{width} elements of a head")
    alike = gradient == query == result and key == value and key.dtype is query.dtype
    alike = alike and key.shape == (rows, key.shape[1], heads, width) and sums.shape == (rows, heads, positions)
    if not alike or (found.causal and key.shape[1] != positions) or max(n.type.size for n in graph.nodes) >= _LIMIT:
        return Declined(f"the gradients of attention of {query} and {key}")
    if rows * heads * positions * key.shape[1] > LARGEST_SCORES:
        return Declined("more scores than kernels are held to float64 with")
    views = [x.view for x in found.read if x.view is not None]
    if not all(map(_in_chunks, (*views[:-1], *(x.view for x in found.ends)))):
        return Declined("operands or results of attention that do not lie in chunks of 16 bytes")
    if views[-1] != View(sums.shape, Format.ROW.strides(sums.shape)):
        return Declined("logarithms in another order")
    return AttentionGradient(
        dtype=query.dtype,
        rows=rows,
        heads=heads,
        positions=positions,
        keys=key.shape[1],
        width=width,
        causal=found.causal,
        scale=found.scale,
        operands=tuple((x.index, view) for x, view in zip(found.read, views, strict=True)),
        results=found.ends,
    )


def _in_chunks(view: View) -> bool:
    """Whether the elements of a head are neighbours, eight of them 16 aligned bytes."""
    steps = [s for n, s in zip(view.shape[:-1], view.strides[:-1], strict=True) if n > 1]
    return view.strides[-1] == 1 and all(x % 8 == 0 for x in (*steps, view.offset))
