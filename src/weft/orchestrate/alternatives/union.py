"""Further ways to compute a value, in the same graph: a value class with several members."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from weft.errors import InvalidGraphError
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, Mask, NodeId, bits, mask_of
from weft.ir.prims import FREE, Prim
from weft.ir.types import Array, DType
from weft.orchestrate.stored import topological


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Alternatives:
    """A union graph: its extra nodes compute values that the graph already has."""

    graph: Graph
    classes: Mapping[NodeId, NodeId]
    """Extra node -> the node whose value it computes (its class). Members of the class itself are not keys."""
    extra: Mask = 0
    """All nodes that exist only for alternatives, inner ones included."""
    groups: tuple[tuple[Mask, Mapping[NodeId, NodeId]], ...] = field(default=())
    """Versions to enumerate: (extra nodes of it, original -> extra), at most one alternative per class in each."""
    apart: Mask = 0
    """Of the extra nodes those that only candidates made for them compute: no sets are grown from them."""
    ends: Mask = 0
    """Of the extra nodes those that cost nothing behind what they read: no set that begins with them is worth more than
    one that reads what they stand for."""

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

    def acyclic(self) -> bool:
        """Whether every value can be computed before its readers, whichever alternatives are taken."""
        try:
            self.ranks()
        except InvalidGraphError:
            return False
        return True

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


FLOATS = frozenset({DType.F32, DType.F64})
"""Where sums that are not divided yet, and weights multiplied in advance, keep their digits."""


MAX_PER_VALUE = 4


class Maker:
    """A copy of a graph that grows, and what the new nodes stand for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.b = GraphBuilder()
        self.b.adopt_origins(graph.origins)
        self.found: list[tuple[NodeId, NodeId]] = []
        """(original, extra)"""
        self.alone: set[NodeId] = set()
        """Alternatives that share no version with those of other rules."""
        self.users = graph.users()
        self.apart = 0
        """Extra nodes that only candidates made for them compute."""
        self.ends = 0
        """See `Alternatives`."""
        self.sound = all(self._copy(i) == i for i in range(len(graph)))

    def _copy(self, i: NodeId) -> NodeId:
        node = self.graph.nodes[i]
        if node.prim is Prim.INPUT:
            return self.b.input(node.type)
        if isinstance(node.attrs, a.ConstantAttrs):
            return self.b.adopt_constant(node.attrs.digest, self.graph.constant(i), node.type)
        return self.b.adopt(node, node.inputs)

    @property
    def room(self) -> bool:
        """False once the graph has doubled: then no further alternative is begun."""
        return len(self.b) < 2 * len(self.graph) + 16

    def stands_for(self, extra: NodeId, original: NodeId, *, alone: bool = False, ends: bool = False) -> None:
        """Note an alternative; one that turned out to be an old node is none, nor is one of too many.

        `alone`: what it is made of takes the place of values in front of it, which no version of it would compute.
        `ends`: it is stored where it is computed, see `Alternatives.ends`.
        """
        fits = extra >= len(self.graph) and self.b.type_of(extra) == self.graph.type_of(original)
        if fits and sum(o == original for o, _ in self.found) < MAX_PER_VALUE:
            self.found.append((original, extra))
            self.alone |= {extra} if alone else set()
            self.ends |= 1 << extra if ends else 0

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
        """The union graph; the old one where nothing was found."""
        old = len(self.graph)
        if not self.sound or not self.found:
            return Alternatives(self.graph, {})
        extended = self.b.build(self.graph.outputs)
        union = replace(
            extended,
            nodes=self.graph.nodes + extended.nodes[old:],
            origins=self.graph.origins,
            input_names=self.graph.input_names,
            output_names=self.graph.output_names,
        )
        found = self.found
        made = _assemble(union, found, old, self.alone)
        if not made.acyclic():
            found = []
            for pair in self.found:  # some wait for each other: the later ones go
                if _assemble(union, [*found, pair], old, self.alone).acyclic():
                    found.append(pair)
            made = _assemble(union, found, old, self.alone)
        return replace(made, apart=self.apart & made.extra, ends=self.ends & made.extra)


def _assemble(
    union: Graph, found: Sequence[tuple[NodeId, NodeId]], old: int, alone: AbstractSet[NodeId]
) -> Alternatives:
    versions: list[dict[NodeId, NodeId]] = []
    for original, extra in found:
        alike = (v for v in versions if alone.isdisjoint(v.values()) == (extra not in alone))
        home = next((v for v in alike if original not in v), None)
        if home is None:
            home = {}
            versions.append(home)
        home[original] = extra
    groups = tuple((_inner(union, version.values(), old), version) for version in versions)
    classes = {extra: original for original, extra in found}
    return Alternatives(union, classes, mask_of(range(old, len(union))), groups)


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
