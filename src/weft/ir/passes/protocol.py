"""What a clean-up pass is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from weft.ir.declined import Declined
from weft.ir.graph import Graph


class PassResult(NamedTuple):
    """The graph after a pass."""

    graph: Graph
    """The very graph that was given where nothing changed."""
    num_changes: int
    """Nodes replaced or dropped."""


class Pass(Protocol):
    """A frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """Kebab-case; the file has the same name in snake case."""
        ...

    def requires(self, graph: Graph) -> Declined | None:
        """A cheap reason why the pass cannot change this graph, if there is one."""
        ...

    def run(self, graph: Graph) -> PassResult:
        """A graph of the same signature and meaning."""
        ...


def needs_any(graph: Graph, *prims: object) -> Declined | None:
    """Declined when none of these primitives occurs."""
    wanted = set(prims)
    return None if any(node.prim in wanted for node in graph.nodes) else Declined("nothing to look at")
