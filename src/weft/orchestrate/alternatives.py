"""Further ways to compute a value, in the same graph: a value class with several members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.errors import InvalidGraphError
from weft.ir.graph import Graph, Mask, NodeId


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
    def versions(self) -> int:
        """How many graphs are to be enumerated; number 0 is the original."""
        return 1 + len(self.groups)

    def version(self, index: int) -> Mapping[NodeId, NodeId]:
        """Original node -> the node read instead."""
        return self.groups[index - 1][1] if index else {}

    def extra_of(self, index: int) -> Mask:
        """Extra nodes of one version."""
        return self.groups[index - 1][0] if index else 0
