"""Loops over time that a framework unrolled: a chain of equal linear steps becomes one scan.

A *column* is what stands at one place of all steps: a tuple of nodes, one a step. Lifting a column gives one node with
an axis for the steps: slices at consecutive positions become the tensor that they cut, equal primitives one primitive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, Node, NodeId
from weft.ir.passes.protocol import PassResult, needs_any
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.rewrite import GONE, Rewriter, live_nodes

LEAST_STEPS = 4
"""Shorter chains stay as they are."""
MOST_COLUMNS = 400
"""Columns behind one stack of results, beyond which nothing is rolled up."""
Column = tuple[NodeId, ...]


class _NotLiftedError(Exception):
    """A column whose nodes are no equal steps."""


@dataclass(frozen=True, slots=True)
class _Link:
    """state = factor · before + term."""

    state: NodeId
    factor: NodeId
    before: NodeId
    term: NodeId


@dataclass(frozen=True, slots=True)
class _Chain:
    """Links in the order of their steps."""

    links: tuple[_Link, ...]

    @property
    def states(self) -> Column:
        """The carried values."""
        return tuple(link.state for link in self.links)


@dataclass(frozen=True, slots=True)
class _Lifted:
    """A node of the builder with the steps' axis at `at`; None: the same value in all steps, without that axis."""

    node: NodeId
    at: int | None


class _Analysis:
    """Chains of a graph, and which stacks of results are made of them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.live = live_nodes(graph)
        self.users: dict[NodeId, set[NodeId]] = {}
        for i, node in enumerate(graph.nodes):
            for j in node.inputs if self.live[i] else ():
                self.users.setdefault(j, set()).add(i)

    def chains(self) -> Iterator[_Chain]:
        """The longest ones, each state in one of them; the first link's options are all tried."""
        used: set[NodeId] = set()
        for i in reversed(range(len(self.graph.nodes))):
            if i in used or not self.live[i]:
                continue
            links: list[_Link] = []
            at = i
            while (found := next((x for x in self._links(at) if self._has_link(x.before)), None)) is not None:
                links.append(found)
                used.add(at)
                at = found.before
            if len(links) + 1 >= LEAST_STEPS:
                used.add(at)
                for first in self._links(at):
                    yield _Chain((first, *reversed(links)))

    def _links(self, i: NodeId) -> Iterator[_Link]:
        node = self.graph.nodes[i]
        if node.prim is not Prim.ADD or not node.type.dtype.is_float:
            return
        for product, term in (node.inputs, node.inputs[::-1]):
            if self.graph.nodes[product].prim is Prim.MUL:
                x, y = self.graph.nodes[product].inputs
                yield _Link(i, x, y, term)
                if x != y:
                    yield _Link(i, y, x, term)

    def _has_link(self, i: NodeId) -> bool:
        return next(self._links(i), None) is not None

    def is_zero(self, i: NodeId) -> bool:
        """Whether a value is zero everywhere."""
        node = self.graph.nodes[i]
        while node.prim in (Prim.BROADCAST, Prim.RESHAPE, Prim.CAST):
            i = node.inputs[0]
            node = self.graph.nodes[i]
        return node.prim is Prim.CONSTANT and not self.graph.constant(i).any()

    def stacks(self, chain: _Chain) -> list[NodeId]:
        """Concatenations of one value of each step that depends on the chain."""
        reach = set(chain.states)
        found = []
        for i in range(min(chain.states), len(self.graph.nodes)):
            node = self.graph.nodes[i]
            if not self.live[i] or i in reach or not reach.intersection(node.inputs):
                continue
            if node.prim is Prim.CONCAT and len(node.inputs) == len(chain.links):
                found.append(i)
            else:
                reach.add(i)
        return found

    def is_alive(self, chain: _Chain, replaced: set[NodeId]) -> bool:
        """Whether a state but the last is still computed once these nodes are replaced."""
        states = set(chain.states[:-1])
        stack = [o for o in self.graph.outputs if o not in replaced]
        seen = set(stack)
        while stack:
            n = stack.pop()
            if n in states:
                return True
            for j in self.graph.nodes[n].inputs:
                if j not in seen and j not in replaced:
                    seen.add(j)
                    stack.append(j)
        return False


class _Lift:
    """Lifts columns of one chain into a builder."""

    def __init__(
        self, graph: Graph, chain: _Chain, zero: bool, b: GraphBuilder, mapped: Mapping[NodeId, NodeId]
    ) -> None:
        self.graph, self.chain, self.zero, self.b, self.mapped = graph, chain, zero, b, mapped
        self.steps = len(chain.links)
        self.states = set(chain.states)
        self.memo: dict[Column, _Lifted] = {}
        self.carried: set[Column] = set()
        """Columns that depend on the chain's states."""

    def scan(self) -> _Lifted:
        """The states of all steps."""
        if (known := self.memo.get(self.chain.states)) is not None:
            return known
        links = self.chain.links
        factor, term = (self.lift(tuple(getattr(x, n) for x in links)) for n in ("factor", "term"))
        at = term.at if term.at is not None else factor.at
        if at is None:
            raise _NotLiftedError
        shape = self.graph.type_of(links[0].state).shape
        terms, factors = self.placed(term, at, shape), self.placed(factor, at, shape)
        if not self.zero:  # the first state, which has what was before it, is its own term
            first = self._with_axis(self.mapped[links[0].state], at)
            whole = self.b.type_of(terms).shape
            starts = tuple(int(k == at) for k in range(len(whole)))
            sizes = tuple(n - s for n, s in zip(whole, starts, strict=True))
            rest = self.b.slice(terms, starts, sizes, (1,) * len(whole))
            terms = self.b.add(Prim.CONCAT, first, rest, attrs=a.ConcatAttrs(at))
        node = self.b.add(Prim.SCAN, factors, terms, attrs=a.ScanAttrs(at, "linear"))
        self.memo[self.chain.states] = found = _Lifted(node, at)
        self.carried.add(self.chain.states)
        return found

    def last(self) -> NodeId:
        """The state of the last step."""
        scan = self.scan()
        assert scan.at is not None
        shape = self.b.type_of(scan.node).shape
        starts = tuple((self.steps - 1) * (k == scan.at) for k in range(len(shape)))
        sizes = tuple(1 if k == scan.at else n for k, n in enumerate(shape))
        piece = self.b.slice(scan.node, starts, sizes, (1,) * len(shape))
        return self.b.reshape(piece, self.graph.type_of(self.chain.states[-1]).shape)

    def stacked(self, stack: NodeId) -> NodeId:
        """What a concatenation of one column is."""
        node = self.graph.nodes[stack]
        axis = cast("a.ConcatAttrs", node.attrs).axis
        self.scan()
        lifted = self.lift(node.inputs)
        if node.inputs not in self.carried:
            raise _NotLiftedError
        whole = self.placed(lifted, axis, self.graph.type_of(node.inputs[0]).shape)
        return self.b.reshape(whole, node.type.shape)

    def lift(self, column: Column) -> _Lifted:
        """One node for a column.

        Raises:
            _NotLiftedError: its nodes are no equal steps.
        """
        known = self.memo.get(column)
        if known is None:
            if len(self.memo) >= MOST_COLUMNS:
                raise _NotLiftedError
            known = self.memo[column] = self._made(column)
        return known

    def _made(self, column: Column) -> _Lifted:
        first = column[0]
        if all(n == first for n in column) and first not in self.states:
            return _Lifted(self.mapped[first], None)
        if not self.states.isdisjoint(column):
            raise _NotLiftedError  # a step that reads the states in another way
        nodes = [self.graph.nodes[n] for n in column]
        node = nodes[0]
        if any(n.prim is not node.prim or n.type != node.type for n in nodes):
            raise _NotLiftedError
        if node.prim is Prim.SLICE and len({n.inputs for n in nodes}) == 1:
            return self._cut(nodes)
        if any(n.attrs != node.attrs or len(n.inputs) != len(node.inputs) for n in nodes):
            raise _NotLiftedError
        if node.prim in (Prim.INPUT, Prim.CONSTANT, Prim.IOTA):
            raise _NotLiftedError
        columns = [tuple(n.inputs[k] for n in nodes) for k in range(len(node.inputs))]
        operands = [self.lift(c) for c in columns]
        rule = _RULES.get(node.prim, _elementwise if CATEGORY[node.prim] is Category.ELEMENTWISE else None)
        if rule is None:
            raise _NotLiftedError
        carried = [c in self.carried for c in columns]
        if any(carried):
            self.carried.add(column)
        shapes = [self.graph.type_of(c[0]).shape for c in columns]
        return rule(self, node, operands, shapes, any(carried))

    def _cut(self, nodes: Sequence[Node]) -> _Lifted:
        """Slices of one tensor at positions in arithmetic progression along one axis."""
        cuts = [cast("a.SliceAttrs", n.attrs) for n in nodes]
        one = cuts[0]
        differ = {k for c in cuts for k, (s, t) in enumerate(zip(c.starts, one.starts, strict=True)) if s != t}
        if len(differ) != 1 or any((c.sizes, c.steps) != (one.sizes, one.steps) for c in cuts):
            raise _NotLiftedError
        (axis,) = differ
        stride = cuts[1].starts[axis] - one.starts[axis]
        if one.sizes[axis] != 1 or any(c.starts[axis] != one.starts[axis] + t * stride for t, c in enumerate(cuts)):
            raise _NotLiftedError
        sizes = tuple(self.steps if k == axis else n for k, n in enumerate(one.sizes))
        steps = tuple(stride if k == axis else s for k, s in enumerate(one.steps))
        whole = self.b.slice(self.mapped[nodes[0].inputs[0]], one.starts, sizes, steps)
        return _Lifted(self.b.reshape(whole, (*sizes[: axis + 1], 1, *sizes[axis + 1 :])), axis)

    def placed(self, x: _Lifted, at: int, shape: tuple[int, ...]) -> NodeId:
        """The node with the steps' axis at this place; `shape` is that of one step."""
        if x.at is None:
            inserted = (*shape[:at], self.steps, *shape[at:])
            return self.b.broadcast(self._with_axis(x.node, at), inserted)
        rank = len(shape) + 1
        others = [k for k in range(rank) if k != x.at]
        return self.b.transpose(x.node, (*others[:at], x.at, *others[at:]))

    def _with_axis(self, node: NodeId, at: int) -> NodeId:
        shape = self.b.type_of(node).shape
        return self.b.reshape(node, (*shape[:at], 1, *shape[at:]))

    def widened(self, x: _Lifted, old: tuple[int, ...], new: tuple[int, ...]) -> _Lifted:
        """One step's value broadcast from one shape to another."""
        if x.at is None:
            return _Lifted(self.b.broadcast(x.node, new), None)
        more = len(new) - len(old)
        flat = self.b.reshape(x.node, ((1,) * more) + self.b.type_of(x.node).shape)
        at = x.at + more
        return _Lifted(self.b.broadcast(flat, (*new[:at], self.steps, *new[at:])), at)


def _common(operands: Sequence[_Lifted]) -> int | None:
    return next((x.at for x in operands if x.at is not None), None)


_Shapes = Sequence[tuple[int, ...]]


def _elementwise(lift: _Lift, node: Node, xs: Sequence[_Lifted], shapes: _Shapes, _: bool) -> _Lifted:
    at = _common(xs)
    if at is None:
        return _Lifted(lift.b.add(node.prim, *(x.node for x in xs), attrs=node.attrs), None)
    placed = [lift.placed(x, at, s) for x, s in zip(xs, shapes, strict=True)]
    return _Lifted(lift.b.add(node.prim, *placed, attrs=node.attrs), at)


def _broadcast(lift: _Lift, node: Node, xs: Sequence[_Lifted], shapes: _Shapes, _: bool) -> _Lifted:
    return lift.widened(xs[0], shapes[0], node.type.shape)


def _reshape(lift: _Lift, node: Node, xs: Sequence[_Lifted], shapes: _Shapes, _: bool) -> _Lifted:
    (x,), (old,), new = xs, shapes, node.type.shape
    if x.at is None:
        return _Lifted(lift.b.reshape(x.node, new), None)
    before = math.prod(old[: x.at])
    at = next((k for k in range(len(new) + 1) if math.prod(new[:k]) == before), None)
    if at is None or math.prod(new[at:]) != math.prod(old[x.at :]):
        at, source = 0, lift.placed(x, 0, old)
    else:
        source = x.node
    return _Lifted(lift.b.reshape(source, (*new[:at], lift.steps, *new[at:])), at)


def _transpose(lift: _Lift, node: Node, xs: Sequence[_Lifted], _s: _Shapes, _: bool) -> _Lifted:
    (x,) = xs
    perm = cast("a.TransposeAttrs", node.attrs).perm
    if x.at is None:
        return _Lifted(lift.b.transpose(x.node, perm), None)
    at = x.at
    moved = [p if p < at else p + 1 for p in perm]
    return _Lifted(lift.b.transpose(x.node, (*moved[:at], at, *moved[at:])), at)


def _reduce(lift: _Lift, node: Node, xs: Sequence[_Lifted], _s: _Shapes, _: bool) -> _Lifted:
    (x,) = xs
    axes = cast("a.ReduceAttrs", node.attrs).axes
    if x.at is not None:
        axes = tuple(k if k < x.at else k + 1 for k in axes)
    return _Lifted(lift.b.reduce(node.prim, x.node, axes), x.at)


def _slice(lift: _Lift, node: Node, xs: Sequence[_Lifted], _s: _Shapes, _: bool) -> _Lifted:
    (x,), s = xs, cast("a.SliceAttrs", node.attrs)
    if x.at is None:
        return _Lifted(lift.b.slice(x.node, s.starts, s.sizes, s.steps), None)
    parts = [(*v[: x.at], more, *v[x.at :]) for v, more in ((s.starts, 0), (s.sizes, lift.steps), (s.steps, 1))]
    return _Lifted(lift.b.slice(x.node, *parts), x.at)


def _concat(lift: _Lift, node: Node, xs: Sequence[_Lifted], shapes: _Shapes, _: bool) -> _Lifted:
    at, axis = _common(xs), cast("a.ConcatAttrs", node.attrs).axis
    if at is None:
        return _Lifted(lift.b.add(Prim.CONCAT, *(x.node for x in xs), attrs=node.attrs), None)
    placed = [lift.placed(x, at, s) for x, s in zip(xs, shapes, strict=True)]
    return _Lifted(lift.b.add(Prim.CONCAT, *placed, attrs=a.ConcatAttrs(axis if axis < at else axis + 1)), at)


def _matmul(lift: _Lift, node: Node, xs: Sequence[_Lifted], shapes: _Shapes, carried: bool) -> _Lifted:
    """A product with a vector of what is carried is a sum behind the scan; all others are one batched product."""
    b, (x, y), (mine, theirs) = lift.b, xs, shapes
    *batch, m, n = node.type.shape
    k = mine[-1]
    if not carried or 1 not in (m, n):
        rank = len(node.type.shape)
        placed = []
        for v, s in zip(xs, shapes, strict=True):
            front = lift.placed(v, 0, s)
            placed.append(b.reshape(front, (lift.steps, *(1,) * (rank - len(s)), *s)))
        return _Lifted(b.add(Prim.MATMUL, *placed), 0)
    wide = node.type.dtype.accumulator

    def turned(v: _Lifted, s: tuple[int, ...]) -> tuple[_Lifted, tuple[int, ...]]:
        perm = (*range(len(s) - 2), len(s) - 1, len(s) - 2)
        if v.at is None:
            return _Lifted(b.transpose(v.node, perm), None), (*s[:-2], s[-1], s[-2])
        at = min(v.at, len(s) - 2)
        moved = _Lifted(lift.placed(v, at, s), at)
        return _Lifted(b.transpose(moved.node, (*range(len(s) - 1), len(s), len(s) - 1)), at), (*s[:-2], s[-1], s[-2])

    if n == 1:
        y, theirs = turned(y, theirs)
        whole, axis = (*batch, m, k), -1
    else:
        x, mine = turned(x, mine)
        whole, axis = (*batch, k, n), -2
    pair = [lift.widened(x, mine, whole), lift.widened(y, theirs, whole)]
    pair = [_Lifted(b.cast(v.node, wide), v.at) for v in pair]
    at = _common(pair)
    assert at is not None  # one of them is carried
    product = b.add(Prim.MUL, *(lift.placed(v, at, whole) for v in pair))
    place = len(whole) + axis
    summed = b.reduce(Prim.REDUCE_SUM, product, (place if place < at else place + 1,))
    return _Lifted(b.cast(summed, node.type.dtype), at)


_Rule = Callable[[_Lift, Node, Sequence[_Lifted], _Shapes, bool], _Lifted]
_RULES: Mapping[Prim, _Rule] = {
    Prim.BROADCAST: _broadcast,
    Prim.RESHAPE: _reshape,
    Prim.TRANSPOSE: _transpose,
    Prim.SLICE: _slice,
    Prim.CONCAT: _concat,
    Prim.MATMUL: _matmul,
    Prim.REDUCE_SUM: _reduce,
    Prim.REDUCE_PROD: _reduce,
    Prim.REDUCE_MAX: _reduce,
    Prim.REDUCE_MIN: _reduce,
}
"""Beside elementwise primitives: what may stand between the slices of a step and the stack of results."""


@dataclass(frozen=True, slots=True)
class _Rolled:
    """A chain that goes, with the stacks of results that a scan makes instead."""

    chain: _Chain
    zero: bool
    """Whether nothing is carried into the first step."""
    stacks: tuple[NodeId, ...]


def _found(graph: Graph) -> list[_Rolled]:
    """Chains that a scan replaces whole."""
    look = _Analysis(graph)
    found: list[_Rolled] = []
    done: set[NodeId] = set()
    trial: tuple[GraphBuilder, Mapping[NodeId, NodeId]] | None = None
    for chain in look.chains():
        if chain.states[-1] in done:
            continue  # with another option of its first link
        zero = look.is_zero(chain.links[0].before)
        trial = trial or _trial(graph)
        stacks = []
        for stack in look.stacks(chain):
            try:
                _Lift(graph, chain, zero, *trial).stacked(stack)
            except _NotLiftedError:
                continue
            stacks.append(stack)
        if not stacks:
            continue
        last = chain.states[-1]
        kept = {last, chain.links[0].state} if not zero else {last}
        if look.is_alive(chain, {*stacks, *kept}):
            continue  # somebody reads a state of the middle: the chain would be computed twice
        done.add(last)
        found.append(_Rolled(chain, zero, tuple(stacks)))
    return found


def _trial(graph: Graph) -> tuple[GraphBuilder, Mapping[NodeId, NodeId]]:
    """A copy to try things on."""
    rewriter = Rewriter(graph)
    rewriter.walk(lambda _b, _n, _i: None)
    return rewriter.builder, rewriter.mapped


@dataclass(frozen=True, slots=True)
class RollRecurrencesPass:
    """h[t] = a[t]·h[t-1] + b[t] for t = 0, 1, … and their stack → scan(a, b).

    Of at least `LEAST_STEPS` equal steps, whose factors and terms are cut from the same tensors at consecutive
    positions, and whose results, or what each step computes from its state in the same way, are joined. The last state
    may be read by others; a chain of which another state is stays as it is. Not exact: a scan may be re-associated,
    and where the state before the first is zero, its factor is not read, so that an infinite one makes no NaN.
    """

    name: ClassVar[str] = "roll-recurrences"

    def requires(self, graph: Graph) -> Declined | None:
        """A concatenation of some results, and slices."""
        if needs_any(graph, Prim.SLICE) is not None:
            return Declined("no slices")
        wide = any(n.prim is Prim.CONCAT and len(n.inputs) >= LEAST_STEPS for n in graph.nodes)
        return None if wide else Declined("no stack of results")

    def run(self, graph: Graph) -> PassResult:
        """Not exact, see the class."""
        rolled = _found(graph)
        if not rolled:
            return PassResult(graph, 0)
        by_stack = {s: r for r in rolled for s in r.stacks}
        by_last = {r.chain.states[-1]: r for r in rolled}
        rewriter = Rewriter(graph)

        def visit(b: GraphBuilder, _: Node, _inputs: tuple[NodeId, ...]) -> NodeId | None:
            here = rewriter.position
            rolled = by_stack.get(here) or by_last.get(here)
            if rolled is None:
                return None
            outer = b.enter(GONE)  # no library's operator computes this
            lift = _Lift(graph, rolled.chain, rolled.zero, b, rewriter.mapped)
            made = lift.stacked(here) if here in by_stack else lift.last()
            b.enter(outer)
            return made

        return PassResult(rewriter.run(visit), rewriter.num_replaced)
