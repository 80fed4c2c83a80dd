"""Further ways to compute a value, in the same graph: a value class with several members."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from weft.errors import InvalidGraphError
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, Mask, NodeId, bits, mask_of
from weft.ir.prims import FREE, Prim
from weft.ir.types import Array, DType
from weft.orchestrate.stored import topological


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """A union graph: its extra nodes compute values that the graph already has."""

    graph: Graph
    classes: Mapping[NodeId, NodeId]
    """Extra node -> the node whose value it computes (its class). Members of the class itself are not keys."""
    extra: Mask = 0
    """All nodes that exist only for alternatives, inner ones included."""
    groups: tuple[tuple[Mask, Mapping[NodeId, NodeId]], ...] = field(default=())
    """Versions to enumerate: (extra nodes of it, original -> extra), at most one alternative per class in each."""

    def __post_init__(self) -> None:
        for extra, original in self.classes.items():
            if self.graph.type_of(extra) != self.graph.type_of(original):
                raise InvalidGraphError(problem=f"%{extra} cannot stand for %{original}: types differ")

    @property
    def work(self) -> Mask:
        """Extra nodes that are not free."""
        return mask_of(i for i in bits(self.extra) if self.graph.nodes[i].prim not in FREE)

    def ranks(self) -> list[int]:
        """Per node a topological position in the union graph; members of a class share that of the last of them.

        Raises:
            InvalidGraphError: the union graph has a cycle.
        """
        graph, classes = self.graph, self.classes
        producers = [0] * len(graph)
        for v, node in enumerate(graph.nodes):
            for operand in node.inputs:
                producers[classes.get(v, v)] |= 1 << classes.get(operand, operand)
        if not classes:
            return list(range(len(graph)))
        try:
            order = topological(producers)
        except ValueError as error:
            raise InvalidGraphError(problem=f"alternatives close a {error}") from error
        ranks = [0] * len(graph)
        for position, v in enumerate(order):
            ranks[v] = position
        for extra, original in classes.items():
            ranks[extra] = ranks[original]
        return ranks

    @property
    def versions(self) -> int:
        """How many graphs are to be enumerated; number 0 is the original."""
        return 1 + len(self.groups)

    def version(self, index: int) -> Mapping[NodeId, NodeId]:
        """Original node -> the node read instead."""
        return self.groups[index - 1][1] if index else {}

    def extra_of(self, index: int) -> Mask:
        """Extra nodes of one version."""
        return self.groups[index - 1][0] if index else 0


def find_alternatives(graph: Graph, *, strict: bool = False) -> Alternatives:
    """Every alternative that applies. With `strict` none: all of them re-associate sums or round constants anew.

    The graph returned holds the original nodes under their ids, then the extra ones; originals never read extras.
    """
    if strict:
        return Alternatives(graph, {})
    maker = _Maker(graph)
    for rule in (merge_contractions, divide_after_product, sum_as_product, fold_scale):
        rule(maker)
    return maker.finish()


_Numbers = npt.NDArray[np.floating[npt.NBitBase]]
MAX_MERGED = 8
"""Contractions merged into one."""
_FLOATS = frozenset({DType.F32, DType.F64})


class _Maker:
    """A copy of a graph that grows, and what the new nodes stand for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.b = GraphBuilder()
        self.found: list[tuple[NodeId, NodeId]] = []
        """(original, extra)"""
        self.users = graph.users()
        self.sound = all(self._copy(i) == i for i in range(len(graph)))

    def _copy(self, i: NodeId) -> NodeId:
        node = self.graph.nodes[i]
        if node.prim is Prim.INPUT:
            return self.b.input(node.type)
        if node.prim is Prim.CONSTANT:
            return self.b.constant(self.graph.constant(i), node.type.dtype)
        return self.b.add(node.prim, *node.inputs, attrs=node.attrs)

    def stands_for(self, extra: NodeId, original: NodeId) -> None:
        """Note an alternative; one that turned out to be an old node is none."""
        if extra >= len(self.graph) and self.b.type_of(extra) == self.graph.type_of(original):
            self.found.append((original, extra))

    def factor(self, node: NodeId, rank: int, axis: int) -> Array | None:
        """A constant operand that varies along one axis at most: its values along that axis (one, or all).

        `node` may be a constant or a view or broadcast of one. Shapes are aligned right to `rank`.
        """
        chain = node
        while self.graph.nodes[chain].prim is Prim.BROADCAST:
            chain = self.graph.nodes[chain].inputs[0]
        shape = self.graph.type_of(chain).shape
        while self.graph.nodes[chain].prim is Prim.RESHAPE:
            chain = self.graph.nodes[chain].inputs[0]
        if self.graph.nodes[chain].prim is not Prim.CONSTANT:
            return None
        full = (1,) * (rank - len(shape)) + shape
        if any(n != 1 for i, n in enumerate(full) if i != axis):
            return None
        return self.graph.constant(chain).reshape(-1)

    def finish(self) -> Alternatives:
        old = len(self.graph)
        if not self.sound or not self.found or len(self.b) > 2 * old + 16:
            return Alternatives(self.graph, {})
        extended = self.b.build(self.graph.outputs)
        union = replace(
            extended,
            nodes=self.graph.nodes + extended.nodes[old:],
            origins=self.graph.origins,
            input_names=self.graph.input_names,
            output_names=self.graph.output_names,
        )
        versions: list[dict[NodeId, NodeId]] = []
        for original, extra in self.found:
            home = next((v for v in versions if original not in v), None)
            if home is None:
                home = {}
                versions.append(home)
            home[original] = extra
        groups = tuple((_inner(union, version.values(), old), version) for version in versions)
        classes = {extra: original for original, extra in self.found}
        made = Alternatives(union, classes, mask_of(range(old, len(union))), groups)
        try:
            made.ranks()
        except InvalidGraphError:
            return Alternatives(self.graph, {})  # two of them wait for each other
        return made


def _inner(graph: Graph, roots: Iterable[NodeId], old: int) -> Mask:
    """Extra nodes that some alternatives are made of."""
    found = 0
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node >= old and not found >> node & 1:
            found |= 1 << node
            waiting.extend(graph.nodes[node].inputs)
    return found


def merge_contractions(m: _Maker) -> None:
    """x @ A, x @ B → slices of x @ [A | B]; the same for convolutions of one input (A3).

    Conditions: constant weights, equal attributes; biases that are the only readers of every product are merged along.
    Products and sums per result are the same, in an order that the library may change with the width.
    """
    graph = m.graph
    groups: dict[object, list[NodeId]] = {}
    for i, node in enumerate(graph.nodes):
        if node.prim not in (Prim.MATMUL, Prim.CONV) or graph.nodes[node.inputs[1]].prim is not Prim.CONSTANT:
            continue
        weight = graph.type_of(node.inputs[1])
        if node.prim is Prim.MATMUL and weight.rank == 2:
            groups.setdefault((node.inputs[0], "matmul"), []).append(i)
        elif isinstance(node.attrs, a.ConvAttrs) and node.attrs.groups == 1 and not node.attrs.transposed:
            groups.setdefault((node.inputs[0], node.attrs, weight.shape[2:]), []).append(i)
    for group in groups.values():
        if 2 <= len(group) <= MAX_MERGED:
            _merge(m, group)


def _merge(m: _Maker, group: list[NodeId]) -> None:
    graph, first = m.graph, m.graph.nodes[group[0]]
    is_conv = first.prim is Prim.CONV
    rank = first.type.rank
    axis = 1 if is_conv else rank - 1
    weights = [graph.constant(graph.nodes[i].inputs[1]) for i in group]
    joined = m.b.constant(np.concatenate(weights, axis=0 if is_conv else 1), first.type.dtype)
    product = m.b.add(first.prim, first.inputs[0], joined, attrs=first.attrs)
    sizes = [graph.type_of(i).shape[axis] for i in group]
    biased = [_bias_of(m, i, rank, axis) for i in group]
    originals = list(group)
    if all(b is not None for b in biased):
        pairs = [b for b in biased if b is not None]
        originals = [node for node, _ in pairs]
        values = [np.broadcast_to(v, (n,)) for (_, v), n in zip(pairs, sizes, strict=True)]
        product = _add_along(m, Prim.ADD, product, np.concatenate(values), axis)
    start = 0
    shape = m.b.type_of(product).shape
    for original, size in zip(originals, sizes, strict=True):
        starts = tuple(start if i == axis else 0 for i in range(rank))
        sliced = tuple(size if i == axis else n for i, n in enumerate(shape))
        m.stands_for(m.b.slice(product, starts, sliced, (1,) * rank), original)
        start += size


def _bias_of(m: _Maker, node: NodeId, rank: int, axis: int) -> tuple[NodeId, Array] | None:
    """The addition of a per-channel constant that is the only reader of a product."""
    users = m.users[node]
    if len(users) != 1 or node in m.graph.outputs or m.graph.nodes[users[0]].prim is not Prim.ADD:
        return None
    other = [i for i in m.graph.nodes[users[0]].inputs if i != node]
    values = m.factor(other[0], rank, axis) if len(other) == 1 else None
    return None if values is None else (users[0], values)


def _add_along(m: _Maker, prim: Prim, x: NodeId, values: Array, axis: int) -> NodeId:
    """x (prim) values, which lie along one axis of x."""
    type = m.b.type_of(x)
    constant = m.b.constant(np.ascontiguousarray(values), type.dtype)
    shaped = m.b.reshape(constant, (len(values), *(1,) * (type.rank - 1 - axis)))
    return m.b.add(prim, x, m.b.broadcast(shaped, type.shape))


def divide_after_product(m: _Maker) -> None:
    """(e / s) @ v → (e @ v) / s, where s is constant along the contraction (A2).

    Conditions: f32 or f64, so that the undivided sums do not overflow where the divided ones do not by design:
    e = exp(x - max) is at most 1, so a sum is at most the length of the row times max |v|.
    """
    graph = m.graph
    for i, node in enumerate(graph.nodes):
        if node.prim is not Prim.MATMUL or node.type.dtype not in _FLOATS:
            continue
        quotient = graph.nodes[node.inputs[0]]
        if quotient.prim is not Prim.DIV or quotient.type.shape[:-2] != node.type.shape[:-2]:
            continue
        e, divisor = quotient.inputs
        if graph.nodes[divisor].prim is not Prim.BROADCAST or graph.nodes[e].prim is not Prim.EXP:
            continue  # only exponentials are known to be bounded
        s = graph.nodes[divisor].inputs[0]
        if graph.type_of(s).shape[-1:] == (1,):
            product = m.b.add(Prim.MATMUL, e, node.inputs[1])
            m.stands_for(m.b.add(Prim.DIV, product, m.b.broadcast(s, node.type.shape)), i)


def sum_as_product(m: _Maker) -> None:
    """sum over the last axis of e → e @ 1, where e is the left operand of a product anyway (A1)."""
    graph = m.graph
    for i, node in enumerate(graph.nodes):
        if node.prim is not Prim.REDUCE_SUM or node.type.dtype not in _FLOATS or node.type.rank < 2:
            continue
        e = node.inputs[0]
        axes = cast("a.ReduceAttrs", node.attrs).axes
        if axes == (node.type.rank - 1,) and _multiplied(m, e):
            ones = np.ones((graph.type_of(e).shape[-1], 1), node.type.dtype.numpy)
            m.stands_for(m.b.add(Prim.MATMUL, e, m.b.constant(ones, node.type.dtype)), i)


def _multiplied(m: _Maker, e: NodeId) -> bool:
    """True if a product reads e on the left, or e over a row-wise divisor."""
    nodes = m.graph.nodes
    for u in m.users[e]:
        if nodes[u].prim is Prim.MATMUL and nodes[u].inputs[0] == e:
            return True
        if nodes[u].prim is Prim.DIV and nodes[u].inputs[0] == e:
            return any(nodes[w].prim is Prim.MATMUL and nodes[w].inputs[0] == u for w in m.users[u])
    return False


def fold_scale(m: _Maker) -> None:
    """conv(x, w)·s + t → conv(x, w·s) + t, where others read the product too (A6); the same for x @ w.

    Conditions: constant weights, s and t per output channel, scaled weights finite. Where nobody else reads it the
    clean-up has folded it already.
    """
    graph = m.graph
    for i, node in enumerate(graph.nodes):
        if node.prim not in (Prim.MATMUL, Prim.CONV) or graph.nodes[node.inputs[1]].prim is not Prim.CONSTANT:
            continue
        attrs = node.attrs
        if isinstance(attrs, a.ConvAttrs) and attrs.transposed:
            continue
        weight = graph.constant(node.inputs[1])
        is_conv = node.prim is Prim.CONV
        if node.type.dtype not in _FLOATS or (not is_conv and weight.ndim != 2):
            continue
        axis = 1 if is_conv else node.type.rank - 1
        for scaled in m.users[i]:
            s = _operand(m, scaled, i, Prim.MUL, axis)
            if s is None or len(m.users[i]) == 1:
                continue
            column = s.reshape(-1, *(1,) * (weight.ndim - 1)) if is_conv else s.reshape(1, -1)
            with np.errstate(over="ignore"):
                folded = np.multiply(cast("_Numbers", weight), cast("_Numbers", column)).astype(weight.dtype)
            if not np.isfinite(folded).all():
                continue
            product = m.b.add(node.prim, node.inputs[0], m.b.constant(folded, node.type.dtype), attrs=attrs)
            shifts = [(u, t) for u in m.users[scaled] if (t := _operand(m, u, scaled, Prim.ADD, axis)) is not None]
            if len(m.users[scaled]) == 1 and shifts and scaled not in graph.outputs:
                u, t = shifts[0]
                values = np.broadcast_to(t, (node.type.shape[axis],))
                m.stands_for(_add_along(m, Prim.ADD, product, values, axis), u)
            else:
                m.stands_for(product, scaled)


def _operand(m: _Maker, node: NodeId, x: NodeId, prim: Prim, axis: int) -> Array | None:
    """The constant along `axis` that `node` = x (prim) constant takes; None if it is no such node."""
    n = m.graph.nodes[node]
    other = [i for i in n.inputs if i != x]
    return m.factor(other[0], n.type.rank, axis) if n.prim is prim and len(other) == 1 else None
