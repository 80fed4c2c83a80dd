"""Attention in a problem: softmax of an expression over q kᵀ, times v, with index maps and prologues around it.

    out[z, m, :] = sum over n of softmax over n (score(q[z, m, :] · k[z, n, :], ...)) v[z, n, :]

Rows are cut into the dimensions along which k or v change (z) and the others (m), whatever heads and batches they come
from: grouped heads and one key for all heads need no copies. `score` is any elementwise expression of the product,
of inputs (masks, biases: any strides) and of positions (causal).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import cast

from weft.generate.contraction.values import Expr, Grouped, NotStridedError, Reader, View, number, plain, written
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem

TYPES = (DType.F16, DType.BF16, DType.F32)
_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Attention:
    """Sizes are counts; the last dimension of every view is the operand's own, the ones before it are `dims`."""

    problem: Problem
    dtype: DType
    """Of q, k and v."""
    out_dtype: DType
    dims: tuple[int, ...]
    """Row dimensions, slowest first."""
    z: tuple[int, ...]
    """Positions of the dimensions along which k or v change."""
    rows: tuple[int, ...]
    """Positions of the others."""
    keys: int
    qk: int
    """Length of the sums of the first product."""
    head: int
    """Columns of v."""
    q: Expr
    """Views (*dims, qk)."""
    k: Expr
    """Views (*dims, keys, qk)."""
    v: Expr
    """Views (*dims, keys, head)."""
    score: Expr
    """Views (*dims, keys)."""
    scale: float
    """Where this is not 0, `score` is the product times it: positive."""
    safe: bool
    """True: a row whose scores are all -inf gives zeros, not NaN."""
    out: View
    """(*dims, head)"""
    tf32: bool = False
    """f32 in memory, multiplied as TF32 by the tensor cores."""
    sums: View | None = None
    """(*dims), f32: where a second result is written, the logarithms of the softmax's sums; None: it has none."""
    outputs: tuple[int, int] = (0, 1)
    """Which outputs of the problem the two results are."""
    finite: bool = False
    """What is not finite may be lost where a mask hides it."""

    @property
    def tensor(self) -> bool:
        """True where tensor cores multiply."""
        return self.tf32 or self.dtype is not DType.F32

    @property
    def blocks(self) -> int:
        """Independent pairs of keys and values."""
        return math.prod(self.dims[i] for i in self.z)

    @property
    def m(self) -> int:
        """Rows of each."""
        return math.prod(self.dims[i] for i in self.rows)


def attention(problem: Problem) -> Attention | Declined:
    """The attention that a problem is, or why it is none that the template takes."""
    graph = problem.graph
    products = [i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL]
    if len(products) != 2 or len(graph.outputs) != 1:
        return Declined("not two products with one result")
    if any(n.type.size >= _LIMIT for i, n in enumerate(graph.nodes) if i in graph.inputs or i in graph.outputs):
        return Declined("a value of 2^31 elements or more")
    try:
        return _matched(problem, *products)
    except NotStridedError as no:
        return Declined(no.reason)


def _matched(problem: Problem, first: NodeId, second: NodeId) -> Attention:
    graph = problem.graph
    dtype = graph.type_of(graph.nodes[first].inputs[0]).dtype
    values = graph.type_of(graph.nodes[second].inputs[1]).dtype
    if dtype not in TYPES or values is not dtype:
        raise NotStridedError(f"attention of {dtype.value} and {values.value}")
    chain = _behind(graph, second)
    softmax = _softmax(graph, graph.nodes[second].inputs[0])
    reader = Reader(problem, {first: Expr("scores", DType.F32)}, late=True)
    score = reader.read(softmax.scores)
    if not score.has_scores:
        raise NotStridedError("a softmax of something else than the first product")
    one, two = graph.type_of(first).shape, graph.type_of(second).shape
    between = graph.type_of(softmax.scores).shape
    if between[-1] != one[-1]:
        raise NotStridedError("a softmax along something else than the keys")
    left, right = (reader.read(i) for i in graph.nodes[first].inputs)
    v = reader.read(graph.nodes[second].inputs[1])
    dims = _refined(one[:-1], between[:-1], two[:-1], *_cut(right, one[:-1]), *_cut(v, one[:-1]))
    if any(x.has_scores for x in (left, right)):
        raise NotStridedError("products in the wrong order")
    keys, qk, head = one[-1], graph.type_of(graph.nodes[first].inputs[0]).shape[-1], two[-1]
    q = left.mapped(lambda v: plain(v.broadcast((*one[:-1], qk)).reshape((*dims, qk))))
    k = right.mapped(lambda v: _keys(v.transpose(_swapped(len(v.shape))), one[:-1], dims))
    if v.has_scores:
        raise NotStridedError("the scores are read as values")
    v = v.mapped(lambda x: _keys(x, two[:-1], dims))
    score = score.mapped(lambda x: plain(x.reshape((*dims, keys))))
    q, by_q = _without_factor(q, dtype)
    k, by_k = _without_factor(k, dtype)
    if by_q * by_k != 1.0:
        score = _scaled(score, by_q * by_k)
    out = plain(written(problem, chain, two).reshape((*dims, head)))
    chosen = tuple(i for i in range(len(dims)) if any(x.view and x.view.strides[i] for e in (k, v) for x in e.leaves))
    rows = tuple(i for i in range(len(dims)) if i not in chosen)
    out_dtype = graph.type_of(graph.outputs[0]).dtype
    if not out_dtype.is_float or out_dtype is DType.F64:
        raise NotStridedError(f"attention that is stored as {out_dtype.value}")
    return Attention(
        problem, dtype, out_dtype, dims, chosen, rows, keys, qk, head, q, k, v, score, factor(score), softmax.safe, out
    )  # fmt: skip


def _swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _keys(view: View, rows: tuple[int, ...], dims: tuple[int, ...]) -> View:
    """(*batch, n, x) of an operand that all rows of a batch read, over the dimensions of rows."""
    n, x = view.shape[-2:]
    wide = view.broadcast((*rows[:-1], n, x))
    # the rows of a batch are a dimension that does not move the operand
    flat = wide.reshape((*rows[:-1], 1, n, x))
    return plain(flat.broadcast((*rows, n, x)).reshape((*dims, n, x)))


def _cut(x: Expr, rows: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The dimensions of which those of rows are made where an operand repeats some of its heads."""
    found = []
    for y in x.leaves:
        if isinstance(y.view, Grouped):
            batch = tuple(n for group in y.view.steps[:-2] for n, _ in group)
            if math.prod(batch) == math.prod(rows[:-1]):
                found.append((*batch, rows[-1]))
    return found


def _refined(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions of which all these shapes are made."""
    if len({math.prod(s) for s in shapes}) != 1 or 0 in shapes[0]:
        raise NotStridedError("rows that are repeated between the products, or none")
    bounds = {1}
    for shape in shapes:
        inner = 1
        for n in reversed(shape):
            inner *= n
            bounds.add(inner)
    ordered = sorted(bounds)
    dims = []
    for small, large in itertools.pairwise(ordered):
        if large % small:
            raise NotStridedError("rows that are cut in unlike ways")
        dims.append(large // small)
    return tuple(reversed(dims)) or (1,)


def _behind(graph: Graph, second: NodeId) -> list[NodeId]:
    """Nodes from the output back to the second product, which alone they read."""
    found = []
    node = graph.outputs[0]
    while node != second:
        found.append(node)
        if len(graph.nodes[node].inputs) != 1:
            raise NotStridedError(f"{graph.nodes[node].prim.value} behind attention")
        node = graph.nodes[node].inputs[0]
    return found


@dataclass(frozen=True, slots=True)
class _Softmax:
    scores: NodeId
    safe: bool


def _softmax(graph: Graph, weights: NodeId) -> _Softmax:
    """exp(s - max s) / sum of it along the last axis; casts and reshapes of rows may stand between."""
    quotient = _bare(graph, weights, Prim.CAST, Prim.RESHAPE)
    if graph.nodes[quotient].prim is not Prim.DIV:
        raise NotStridedError("no softmax in front of the second product")
    e, divisor = graph.nodes[quotient].inputs
    total, at_zero = _guarded(graph, _bare(graph, divisor, Prim.BROADCAST, Prim.CAST), 0.0, 1.0)
    e = _bare(graph, e, Prim.CAST)
    if graph.nodes[e].prim is not Prim.EXP or not _reduces(graph, total, Prim.REDUCE_SUM, e):
        raise NotStridedError("no softmax in front of the second product")
    difference = graph.nodes[_bare(graph, graph.nodes[e].inputs[0], Prim.CAST)]
    if difference.prim is not Prim.SUB:
        raise NotStridedError("a softmax that does not subtract the maximum")
    scores, top = difference.inputs
    top, at_infinity = _guarded(graph, _bare(graph, top, Prim.BROADCAST, Prim.CAST), -math.inf, 0.0)
    if not _reduces(graph, top, Prim.REDUCE_MAX, scores):
        raise NotStridedError("a softmax that does not subtract the maximum")
    if at_zero != at_infinity:
        raise NotStridedError("a softmax that is guarded in an unknown way")
    return _Softmax(scores, at_zero)


def _bare(graph: Graph, node: NodeId, *prims: Prim) -> NodeId:
    while graph.nodes[node].prim in prims:
        node = graph.nodes[node].inputs[0]
    return node


def _guarded(graph: Graph, node: NodeId, at: float, instead: float) -> tuple[NodeId, bool]:
    """(x, True) for select(x == at, instead, x); else the node itself."""
    n = graph.nodes[node]
    if n.prim is not Prim.SELECT:
        return node, False
    test, value, x = n.inputs
    x = _bare(graph, x, Prim.CAST)
    t = graph.nodes[test]
    if t.prim is not Prim.EQ or _value(graph, value) != instead:
        raise NotStridedError("a softmax that is guarded in an unknown way")
    operands = [_bare(graph, i, Prim.CAST) for i in t.inputs]
    if x not in operands or _value(graph, operands[1 - operands.index(x)]) != at:
        raise NotStridedError("a softmax that is guarded in an unknown way")
    return x, True


def _value(graph: Graph, node: NodeId) -> float | None:
    node = _bare(graph, node, Prim.BROADCAST, Prim.CAST, Prim.RESHAPE)
    n = graph.nodes[node]
    return float(graph.constant(node).reshape(-1)[0]) if n.prim is Prim.CONSTANT and n.type.size == 1 else None


def _reduces(graph: Graph, node: NodeId, prim: Prim, operand: NodeId) -> bool:
    n = graph.nodes[node]
    last = graph.type_of(operand).rank - 1
    return (
        n.prim is prim
        and cast("a.ReduceAttrs", n.attrs).axes == (last,)
        and _bare(graph, n.inputs[0], Prim.CAST) == _bare(graph, operand, Prim.CAST)
    )


def _without_factor(x: Expr, dtype: DType) -> tuple[Expr, float]:
    """x = y * c: the factor can go behind the product."""
    factor = 1.0
    while x.kind == "apply" and x.prim is Prim.MUL and x.dtype is dtype:
        numbers = [y for y in x.args if y.kind == "number"]
        others = [y for y in x.args if y.kind != "number"]
        if len(numbers) != 1 or not math.isfinite(numbers[0].number):
            break
        factor *= numbers[0].number
        x = others[0]
    return x, factor


def _scaled(score: Expr, factor: float) -> Expr:
    """The expression with the product times `factor` in place of the product."""
    done: dict[int, Expr] = {}
    for x in score.parts():
        if x.kind == "scores":
            done[id(x)] = Expr("apply", DType.F32, prim=Prim.MUL, args=(x, number(factor, DType.F32)))
        elif x.kind == "apply":
            done[id(x)] = Expr("apply", x.dtype, prim=x.prim, args=tuple(done[id(y)] for y in x.args))
        else:
            done[id(x)] = x
    return done[id(score)]


def factor(score: Expr) -> float:
    """c where the score is c times the product (roundings between left out), 0 for anything else."""
    if score.kind == "scores":
        return 1.0
    if score.kind == "apply" and score.prim is Prim.CAST and score.dtype.is_float:
        return factor(score.args[0])
    if score.kind == "apply" and score.prim in (Prim.MUL, Prim.DIV) and score.dtype.is_float:
        x, y = score.args
        if x.kind == "number" and score.prim is Prim.MUL:
            x, y = y, x
        if y.kind == "number" and math.isfinite(y.number) and y.number > 0:
            return factor(x) * (y.number if score.prim is Prim.MUL else 1.0 / y.number)
    return 0.0
