"""Products of a normalised left operand: the norm is taken off the problem, and done to elements on their way.

    A'[m, k] = f(A[m, k], values of row m, vectors along k), rounded to the type in which it would be stored

Values of a row are computed from the operand's own row, or from what a kernel before has left of it: means, or partial
sums of pieces of a row. `PartialStats` is the other end of that: a product that also leaves those of its result.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, Node, NodeId
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format

HALVES = frozenset({DType.F16, DType.BF16})
PIECE = 32
"""Neighbouring results of a row whose mean and spread a product leaves."""
MOST_PIECES = 128
"""Values of a row that are read for its mean and variance, where these are not computed from the row itself."""
MOST_SHAPES = 6
"""Schedules of one problem, and configurations that each template offers for it."""
LOOKED_AT = 40
"""Configurations of the plain product among which these are."""
MOST_LENGTH = 2048
"""Length of a row; its vectors stay in shared memory."""
MOST_STEPS = 12
"""Primitives for an element."""
MOST_ROWS = 4
"""Values of a row that stay in registers."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """What is done to the left operand; nodes are those of the problem's own graph."""

    graph: Graph
    value: NodeId
    """The normalised operand as the product reads it, before renamings."""
    source: NodeId
    """The input whose elements they are."""
    body: tuple[NodeId, ...]
    """Primitives of the operand's size, operands first."""
    rows: tuple[NodeId, ...]
    """Values of a row that they read."""
    columns: tuple[NodeId, ...]
    """Inputs along the sum that they read."""
    length: int
    """Elements of a row."""
    stored: int = -1
    """Position among the problem's outputs of the normalised operand itself; -1: it is not stored."""

    @property
    def count(self) -> int:
        """Rows."""
        return self.graph.type_of(self.value).size // self.length

    @property
    def dtype(self) -> DType:
        """Type of the elements, before and after."""
        return self.graph.type_of(self.value).dtype

    @property
    def own(self) -> bool:
        """True where a row's values are computed from the whole row."""
        return any(self.width(r) == self.length > 1 for r in reductions(self))

    def width(self, node: NodeId) -> int:
        """Elements of a row that a reduction joins."""
        return self.graph.type_of(self.graph.nodes[node].inputs[0]).size // self.count

    def inputs(self) -> tuple[int, ...]:
        """Positions among the problem's inputs of what is read beside the operand."""
        graph = self.graph
        found = [*self.columns, *_leaves(graph, self.rows)]
        places = {n: i for i, n in enumerate(graph.inputs)}
        return tuple(dict.fromkeys(places[n] for n in found if n != self.source))


@dataclass(frozen=True, slots=True)
class PartialStats:
    """What a product leaves of each `PIECE` neighbouring results of a row: outputs of these positions."""

    mean: int
    spread: int
    """Sum of squared distances from the mean."""


@dataclass(frozen=True, slots=True, eq=False)
class Stripped:
    """A problem without its norm or partial sums, and what was taken off."""

    problem: Problem
    positions: tuple[int, ...]
    """Of the outputs that are left, among those of the whole."""
    norm: Norm | None = None
    partial_stats: PartialStats | None = None


def applies(graph: Graph) -> bool:
    """Whether a product reads what is computed from halves, or ends in sums over its columns."""
    at = next((i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL), -1)
    if at < 0:
        return False
    value = graph.nodes[at].inputs[0]
    while graph.nodes[value].prim is Prim.RESHAPE:
        value = graph.nodes[value].inputs[0]
    if CATEGORY[graph.nodes[value].prim] is Category.ELEMENTWISE and graph.type_of(value).dtype in HALVES:
        return True
    return any(CATEGORY[n.prim] is Category.REDUCE for n in graph.nodes[at:])


def stripped(problem: Problem) -> Stripped | Declined:
    """The problem without what this module does."""
    graph = problem.graph
    if any(f is not Format.ROW for f in (*problem.input_formats, *problem.output_formats)):
        return Declined("a norm of images that lie channels-last")
    parts = _parts(graph)
    if isinstance(parts, Declined):
        return parts
    norm = _norm(graph)
    if isinstance(norm, Declined):
        return norm
    if parts is None and norm is None:
        return Declined("neither a norm before nor one behind the product")
    gone = {parts.mean, parts.spread} if parts else set()
    if norm is not None and norm.value in graph.outputs:
        norm = replace(norm, stored=graph.outputs.index(norm.value))
        gone.add(norm.stored)
    positions = tuple(i for i in range(len(graph.outputs)) if i not in gone)
    if not positions:
        return Declined("no result of the product itself")
    plain = _without(graph, [graph.outputs[i] for i in positions], norm)
    formats = tuple(problem.output_formats[i] for i in positions)
    return Stripped(Problem(plain, problem.key, problem.input_formats, formats), positions, norm, parts)


def _without(graph: Graph, outputs: list[NodeId], norm: Norm | None) -> Graph:
    """The graph of some outputs, the operand in place of the normalised one."""
    b = GraphBuilder()
    new: dict[NodeId, NodeId] = {}
    for i in graph.inputs:
        node = graph.nodes[i]
        new[i] = b.input(node.type, is_weight=cast("a.InputAttrs", node.attrs).is_weight)
    if norm is not None:
        new[norm.value] = b.reshape(new[norm.source], graph.type_of(norm.value).shape)
    needed = _above(graph, outputs, new)
    for i in sorted(needed):
        node = graph.nodes[i]
        if isinstance(node.attrs, a.ConstantAttrs):
            new[i] = b.adopt_constant(node.attrs.digest, graph.constant(i), node.type)
        else:
            new[i] = b.adopt(replace(node, origin=-1), tuple(new[j] for j in node.inputs))
    return b.build([new[o] for o in outputs])


def _above(graph: Graph, roots: list[NodeId], stop: Container[NodeId]) -> set[NodeId]:
    """Nodes that the roots are computed from, up to `stop`."""
    found: set[NodeId] = set()
    todo = [r for r in roots if r not in stop]
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            todo += [j for j in graph.nodes[at].inputs if j not in stop]
    return found


# ---- the norm in front


def _norm(graph: Graph) -> Norm | Declined | None:
    product = next((n for n in graph.nodes if n.prim is Prim.MATMUL), None)
    if product is None:
        return None
    value = product.inputs[0]
    while graph.nodes[value].prim is Prim.RESHAPE:
        value = graph.nodes[value].inputs[0]
    node = graph.nodes[value]
    if CATEGORY[node.prim] is not Category.ELEMENTWISE:
        return None
    if node.type.dtype not in HALVES or node.type.rank < 2:
        return Declined("a left operand that is computed, but not of halves")
    length = node.type.shape[-1]
    if graph.type_of(product.inputs[0]).shape[-1] != length or not 0 < length <= MOST_LENGTH:
        return Declined("a norm over other rows than those of the product, or over long ones")
    return _body(graph, value, length)


def _body(graph: Graph, value: NodeId, length: int) -> Norm | Declined:
    shape = graph.type_of(value).shape
    body: list[NodeId] = []
    rows: dict[NodeId, None] = {}
    columns: dict[NodeId, None] = {}
    sources: set[NodeId] = set()
    for i in sorted(_above(graph, [value], _Beside(graph, shape))):
        node = graph.nodes[i]
        if CATEGORY[node.prim] is not Category.ELEMENTWISE or node.type.shape != shape:
            return Declined(f"{node.prim.value} in front of the product")
        body.append(i)
        for j in node.inputs:
            kind = _kind(graph, j, shape)
            if isinstance(kind, Declined):
                return kind
            if kind == "row":
                rows[_under(graph, j)] = None
            elif kind == "column":
                columns[_root(graph, j)] = None
            elif kind == "source":
                sources.add(j)
    if len(sources) != 1:
        return Declined("a left operand that is computed from several values, or from none")
    source = sources.pop()
    if graph.type_of(source).dtype is not graph.type_of(value).dtype:
        return Declined("a norm that changes the type")
    norm = Norm(graph, value, source, tuple(body), tuple(rows), tuple(columns), length)
    if len(body) > MOST_STEPS or not 0 < len(rows) <= MOST_ROWS or len(columns) > 2:
        return Declined("no norm: more or less than a kernel does to an element on its way")
    return _row_program(norm) or norm


class _Beside:
    """Membership: nodes at which the body of a norm ends."""

    def __init__(self, graph: Graph, shape: tuple[int, ...]) -> None:
        self.graph, self.shape = graph, shape

    def __contains__(self, node: object) -> bool:
        n = self.graph.nodes[cast("int", node)]
        return n.prim in (Prim.BROADCAST, Prim.INPUT, Prim.CONSTANT)


def _kind(graph: Graph, node: NodeId, shape: tuple[int, ...]) -> str | Declined:
    """What an operand of the body is: `source`, `row`, `column`, `scalar`, or another member."""
    n = graph.nodes[node]
    if n.prim is Prim.INPUT:
        return "source" if n.type.shape == shape else Declined("an input of another shape in front of the product")
    if n.prim is not Prim.BROADCAST:
        return "member"
    inner = graph.type_of(_under(graph, node)).shape
    if math.prod(inner) == 1:
        return "scalar" if scalar_of(graph, node) is not None else _one_row(shape)
    if inner[-1] == shape[-1] and math.prod(inner) == shape[-1]:
        return "column" if _root(graph, node) >= 0 else Declined("a vector in front of the product that is computed")
    if (
        inner[-1] == 1
        and inner[:-1] == shape[len(shape) - len(inner) : -1]
        and math.prod(inner) == math.prod(shape[:-1])
    ):
        return "row"
    return Declined("an operand in front of the product that is neither of a row nor of a column")


def _one_row(shape: tuple[int, ...]) -> str | Declined:
    """Of a matrix of one row, a value of that."""
    return "row" if math.prod(shape[:-1]) == 1 else Declined("a computed scalar in front of the product")


def _under(graph: Graph, node: NodeId) -> NodeId:
    """What a broadcast repeats."""
    while graph.nodes[node].prim is Prim.BROADCAST:
        node = graph.nodes[node].inputs[0]
    return node


def scalar_of(graph: Graph, node: NodeId) -> float | None:
    """The one value of a constant."""
    while graph.nodes[node].prim in (Prim.BROADCAST, Prim.RESHAPE):
        node = graph.nodes[node].inputs[0]
    if graph.nodes[node].prim is not Prim.CONSTANT or graph.type_of(node).size != 1:
        return None
    return float(np.asarray(graph.constant(node)).reshape(()))


def _root(graph: Graph, node: NodeId) -> NodeId:
    """The input that a vector is, seen through renamings and casts that lose nothing; -1: none."""
    while graph.nodes[node].prim in (Prim.BROADCAST, Prim.RESHAPE, Prim.CAST):
        before = graph.nodes[node].inputs[0]
        if graph.nodes[node].prim is Prim.CAST and graph.type_of(node).dtype is not DType.F32:
            return -1
        node = before
    known = graph.type_of(node).dtype in (*HALVES, DType.F32)
    return node if graph.nodes[node].prim is Prim.INPUT and known else -1


def column_of(graph: Graph, node: NodeId) -> NodeId:
    """The vector that an operand of the body reads."""
    return _root(graph, node)


def row_of(graph: Graph, node: NodeId) -> NodeId:
    """The value of a row that an operand of the body reads."""
    return _under(graph, node)


# ---- values of a row


def _leaves(graph: Graph, rows: tuple[NodeId, ...]) -> list[NodeId]:
    inside = _above(graph, list(rows), set())
    return [i for i in sorted(inside) if graph.nodes[i].prim is Prim.INPUT]


def reductions(norm: Norm) -> list[NodeId]:
    """Sums that values of a row are computed from, in order."""
    inside = _above(norm.graph, list(norm.rows), set())
    return [i for i in sorted(inside) if CATEGORY[norm.graph.nodes[i].prim] is Category.REDUCE]


def _row_program(norm: Norm) -> Declined | None:
    """Why values of a row cannot be computed by a few lanes."""
    graph, count = norm.graph, norm.count
    if not count:
        return Declined("a norm of no rows")
    for i in sorted(_above(graph, list(norm.rows), set())):
        node = graph.nodes[i]
        if node.prim is Prim.CONSTANT or scalar_of(graph, i) is not None:
            continue
        if node.type.size % count:
            return Declined("a value of several rows")
        wide = node.type.size // count
        if node.prim is Prim.INPUT:
            if i != norm.source and (wide > MOST_PIECES or node.type.dtype is not DType.F32):
                return Declined("a value of a row that is read, but not one of a few of f32")
        elif node.prim is Prim.REDUCE_SUM:
            whole = graph.type_of(node.inputs[0])
            axes = cast("a.ReduceAttrs", node.attrs).axes
            if wide != 1 or math.prod(whole.shape[: axes[0]]) != count:
                return Declined("a sum over other values than those of a row")
        elif node.prim is Prim.BROADCAST:
            inner = graph.type_of(node.inputs[0]).shape
            lead = node.type.shape[: len(node.type.shape) - 1]
            if math.prod(inner) != count or inner[-1] != 1 or (wide > 1 and math.prod(lead) != count):
                return Declined("a value of a row that is repeated otherwise than along it")
        elif node.prim is not Prim.RESHAPE and CATEGORY[node.prim] is not Category.ELEMENTWISE:
            return Declined(f"{node.prim.value} for a value of a row")
    return None


# ---- partial sums behind


def _parts(graph: Graph) -> PartialStats | Declined | None:
    """Partial sums of the one other output, as `partial_sums` writes them."""
    product = next((i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL), -1)
    behind = _behind(graph, product)
    outs = [o for o in graph.outputs if CATEGORY[_reads(graph, o).prim] is Category.REDUCE and o in behind]
    if not outs:
        return None
    if len(outs) != 2 or len(graph.outputs) != 3:
        return Declined("sums over columns of a product that are no segments of its rows")
    (x,) = (o for o in graph.outputs if o not in outs)
    for mean, spread in (outs, outs[::-1]):
        if _is_mean(graph, mean, x) and _is_spread(graph, spread, x, mean):
            return PartialStats(graph.outputs.index(mean), graph.outputs.index(spread))
    return Declined("sums over columns of a product other than means and spreads of segments of a row")


def _behind(graph: Graph, start: NodeId) -> set[NodeId]:
    found = {start}
    for i in range(start + 1, len(graph.nodes)):
        if any(j in found for j in graph.nodes[i].inputs):
            found.add(i)
    return found


def _reads(graph: Graph, node: NodeId) -> Node:
    """The reduction under a scaled output."""
    n = graph.nodes[node]
    if n.prim is Prim.MUL:
        n = next((graph.nodes[j] for j in n.inputs if CATEGORY[graph.nodes[j].prim] is Category.REDUCE), n)
    return n


def _pieces(graph: Graph, node: NodeId, x: NodeId) -> bool:
    """Whether a node is the result, widened, as pieces of `PIECE`."""
    n = graph.nodes[node]
    shape = graph.type_of(x).shape
    if n.prim is not Prim.RESHAPE or n.type.shape != (math.prod(shape[:-1]), shape[-1] // PIECE, PIECE):
        return False
    wide = graph.nodes[n.inputs[0]]
    return wide.prim is Prim.CAST and wide.inputs == (x,) and wide.type.dtype is DType.F32


def _sum_of(graph: Graph, node: NodeId) -> NodeId:
    """What is summed over the last axis; -1 where that is not so."""
    n = graph.nodes[node]
    if n.prim is not Prim.REDUCE_SUM:
        return -1
    last = graph.type_of(n.inputs[0]).rank - 1
    return n.inputs[0] if cast("a.ReduceAttrs", n.attrs).axes == (last,) else -1


def _is_mean(graph: Graph, node: NodeId, x: NodeId) -> bool:
    n = graph.nodes[node]
    if n.prim is not Prim.MUL:
        return False
    for total, scale in (n.inputs, n.inputs[::-1]):
        summed = _sum_of(graph, total)
        if summed >= 0 and _pieces(graph, summed, x) and scalar_of(graph, scale) == 1.0 / PIECE:
            return True
    return False


def _is_spread(graph: Graph, node: NodeId, x: NodeId, mean: NodeId) -> bool:
    squares = _sum_of(graph, node)
    if squares < 0 or graph.nodes[squares].prim is not Prim.MUL or len(set(graph.nodes[squares].inputs)) != 1:
        return False
    away = graph.nodes[graph.nodes[squares].inputs[0]]
    return (
        away.prim is Prim.SUB
        and _pieces(graph, away.inputs[0], x)
        and graph.nodes[away.inputs[1]].prim is Prim.BROADCAST
        and graph.nodes[away.inputs[1]].inputs[0] == mean
    )


def partial_sums(b: GraphBuilder, x: NodeId) -> tuple[NodeId, NodeId]:
    """(mean, sum of squared distances from it) of each `PIECE` neighbours of a row: what `PartialStats` matches."""
    shape = b.type_of(x).shape
    pieces = b.reshape(b.cast(x, DType.F32), (math.prod(shape[:-1]), shape[-1] // PIECE, PIECE))
    mean = b.apply(Prim.MUL, b.reduce(Prim.REDUCE_SUM, pieces, (2,)), 1.0 / PIECE)
    away = b.apply(Prim.SUB, pieces, mean)
    return mean, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, away, away), (2,))


def joined_sums(b: GraphBuilder, mean: NodeId, spread: NodeId, shape: tuple[int, ...]) -> tuple[NodeId, NodeId]:
    """(mean, variance) of whole rows, in this shape, from those of their pieces.

    The variance is that within pieces and that of their means: nothing large is taken from something large.
    Source: Chan, Golub and LeVeque 1979, updating formulae for sums of squares.
    """
    rows, count, _ = b.type_of(mean).shape
    whole = b.apply(Prim.MUL, b.reshape(b.reduce(Prim.REDUCE_SUM, mean, (1,)), shape), 1.0 / count)
    away = b.apply(Prim.SUB, b.reshape(mean, (rows, count)), b.reshape(whole, (rows, 1)))
    between = b.reshape(b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, away, away), (1,)), shape)
    within = b.reshape(b.reduce(Prim.REDUCE_SUM, spread, (1,)), shape)
    total = b.apply(Prim.ADD, within, b.apply(Prim.MUL, between, float(PIECE)))
    return whole, b.apply(Prim.MUL, total, 1.0 / (count * PIECE))
