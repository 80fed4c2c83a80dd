"""Further ways to compute a value, in the same graph: a value class with several members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.errors import InvalidGraphError
from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.prims import FREE
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
