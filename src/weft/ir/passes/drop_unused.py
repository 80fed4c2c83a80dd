"""Dead code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.passes.protocol import PassResult
from weft.ir.rewrite import compact, live_nodes


@dataclass(frozen=True, slots=True)
class DropUnusedPass:
    """%i = f(…) → nothing, where no output depends on %i and it is no input."""

    name: ClassVar[str] = "drop-unused"

    def requires(self, graph: Graph) -> Declined | None:
        """Some node is dead."""
        return Declined("every node is used") if all(live_nodes(graph)) else None

    def run(self, graph: Graph) -> PassResult:
        """The graph without its dead nodes and their constants."""
        kept = compact(graph)
        return PassResult(kept, len(graph) - len(kept))
