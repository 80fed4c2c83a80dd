"""Calls of this project's operators of attention, as problems hold them: see `generate.library.trained_attention`.

A call's operands are views of the problem's inputs, (rows, positions, heads, elements): reshaped, or slices of the one
tensor that a product gave. Its results are outputs, reshaped, or parts of one that is concatenated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.generate.contraction.values import Expr, NotStridedError, Reader, View, number, plain, regrouped
from weft.generate.cuda.attention.match import Attention, factor
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.opaque import LARGEST_SCORES
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

OPERATOR = "weft::attention"
"""Its operands are query, key and value; its results the output and the logarithms of the softmax's sums."""
OPERANDS = 3
_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class Called:
    """A problem that is one call, or some of its results."""

    operands: tuple[NodeId, ...]
    read: tuple[Expr, ...]
    """The same, each a problem's input."""
    ends: tuple[End, ...]
    causal: bool
    scale: float


@dataclass(frozen=True, slots=True)
class End:
    """Where a result is written."""

    output: int
    """Which output of the problem."""
    result: int
    """Of the call."""
    view: View
    """In the result's shape."""


def called(problem: Problem, operator: str, operands: int) -> Called | Declined:
    """The call of `operator` that a problem is, or why it is none."""
    graph = problem.graph
    calls = [n for n in graph.nodes if n.prim is Prim.OPAQUE]
    attrs = [n.attrs for n in calls if isinstance(n.attrs, a.OpaqueAttrs)]
    if not attrs or len({n.inputs for n in calls}) > 1 or len({(x.framework, x.payload) for x in attrs}) > 1:
        return Declined("not one call")
    told = _told(attrs[0].payload, operator, operands) if attrs[0].framework == "aten" else None
    if told is None:
        return Declined(f"no call of {operator}")
    order, causal, scale = told
    if {*problem.input_formats, *problem.output_formats} != {Format.ROW}:
        return Declined(f"a call of {operator} in another order")
    nodes = tuple(calls[0].inputs[k] for k in order)
    reader = Reader(problem, {})
    try:
        read = tuple(map(reader.read, nodes))
        ends = tuple(_ends(problem))
    except NotStridedError as no:
        return Declined(no.reason)
    if any(x.kind != "input" for x in read) or len({x.result for x in ends}) != len(calls):
        return Declined(f"a call of {operator} with something else")
    return Called(nodes, read, ends, causal, scale)


def _told(payload: str, operator: str, operands: int) -> tuple[list[int], bool, float] | None:
    """Which of a call's operands its arguments are, and what follows them; None for other calls."""
    call: dict[str, Any] = json.loads(payload)
    if call.get("op") != operator or call.get("kwargs"):
        return None
    given = call.get("args", [])
    tensors = [x["tensor"] for x in given[:operands] if isinstance(x, dict) and isinstance(x.get("tensor"), int)]
    if len(tensors) != operands or len(given) != operands + 2:
        return None
    causal, scale = given[operands:]
    return (tensors, causal, float(scale)) if isinstance(causal, bool) and isinstance(scale, float) else None


def _ends(problem: Problem) -> Iterator[End]:
    graph = problem.graph
    for at, output in enumerate(graph.outputs):
        shape = graph.type_of(output).shape
        yield from _parts(graph, at, output, View(shape, problem.output_formats[at].strides(shape)))


def _parts(graph: Graph, at: int, node: NodeId, view: View) -> Iterator[End]:
    """The results of which a value is made that is stored as `view` says."""
    n = graph.nodes[node]
    if isinstance(n.attrs, a.OpaqueAttrs):
        yield End(at, n.attrs.result, plain(view))
    elif isinstance(n.attrs, a.ReshapeAttrs):
        yield from _parts(graph, at, n.inputs[0], regrouped(view, graph.type_of(n.inputs[0]).shape))
    elif isinstance(n.attrs, a.ConcatAttrs):
        starts = [0] * n.type.rank
        for operand in n.inputs:
            shape = graph.type_of(operand).shape
            yield from _parts(graph, at, operand, view.slice(starts, shape, (1,) * len(shape)))
            starts[n.attrs.axis] += shape[n.attrs.axis]
    else:
        raise NotStridedError(f"{n.prim.value} behind a call")


def called_attention(problem: Problem) -> Attention | Declined:
    """Attention as a training step calls it: beside the output, the logarithms of the sums are a result."""
    found = called(problem, OPERATOR, OPERANDS)
    if isinstance(found, Declined):
        return found
    query, key, value = (problem.graph.type_of(n) for n in found.operands)
    if query.rank != 4 or query.dtype not in (DType.F16, DType.BF16) or {key.dtype, value.dtype} != {query.dtype}:
        return Declined(f"a call of attention of {query}")
    rows, positions, heads, width = query.shape
    keys = key.shape[1] if key.rank == 4 else 0
    if not key.shape == value.shape == (rows, keys, heads, width) or (found.causal and keys != positions):
        return Declined(f"a call of attention of {query} and {key}")
    if 0 in query.shape or not keys or not math.isfinite(found.scale):
        return Declined("a call of attention of nothing")
    if any(n.type.size >= _LIMIT for n in problem.graph.nodes):
        return Declined("a value of 2^31 elements or more")
    if rows * heads * positions * keys > LARGEST_SCORES:
        return Declined("more scores than kernels are held to float64 with")
    out, sums = (next((x for x in found.ends if x.result == k), None) for k in range(2))
    if out is None or len({x.result for x in found.ends}) != len(found.ends):
        return Declined("logarithms alone, or a result that is written twice")
    dims = rows, heads, positions
    q, k, v = (x.mapped(lambda view: view.transpose((0, 2, 1, 3))) for x in found.read)
    k, v = (x.mapped(lambda view: _of_all_rows(view, positions)) for x in (k, v))
    score = _score(dims, keys, found)
    return Attention(
        problem, query.dtype, query.dtype, dims, (0, 1), (2,), keys, width, width, q, k, v, score, factor(score), True,
        out.view.transpose((0, 2, 1, 3)), sums=sums.view if sums else None,
        outputs=(out.output, sums.output if sums else -1), finite=True,
    )  # fmt: skip


def _of_all_rows(view: View, positions: int) -> View:
    """(rows, heads, keys, x) for each position of Q, which does not move it."""
    rows, heads, n, x = view.shape
    by_row, by_head, by_key, step = view.strides
    return View((rows, heads, positions, n, x), (by_row, by_head, 0, by_key, step), view.offset)


def _score(dims: tuple[int, ...], keys: int, call: Called) -> Expr:
    """The product times the scale, -inf for keys behind the row's position."""
    scaled = Expr("apply", DType.F32, prim=Prim.MUL, args=(Expr("scores", DType.F32), number(call.scale, DType.F32)))
    if not call.causal:
        return scaled
    shape = *dims, keys
    key, row = (Expr("iota", DType.I32, View(shape, strides)) for strides in ((0, 0, 0, 1), (0, 0, 1, 0)))
    seen = Expr("apply", DType.BOOL, prim=Prim.LE, args=(key, row))
    return Expr("apply", DType.F32, prim=Prim.SELECT, args=(seen, scaled, number(-math.inf, DType.F32)))
