"""What a plan stores: who writes each value, who reads it, what a graph output finally is."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import InvalidGraphError
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import FREE, Prim
from weft.kernels.formats import Format
from weft.kernels.plan import Plan

Key = tuple[NodeId, Format]
"""A stored value: a node in a memory format."""


@dataclass(frozen=True, slots=True)
class Values:
    """Stored values of one plan; steps by position."""

    first_write: dict[Key, int]
    last_write: dict[Key, int]
    """A value may be computed twice."""
    writers: dict[Key, list[int]]
    readers: dict[Key, list[int]]
    finals: tuple[NodeId, ...]
    """Per graph output: the stored node behind the views at its end."""

    def users(self, key: Key) -> tuple[int, ...]:
        """All steps that write or read a value which some step writes."""
        return tuple(sorted({*self.writers[key], *self.readers.get(key, [])}))

    def last_use(self, key: Key) -> int:
        """The last step that touches a value."""
        return max([self.last_write[key], *self.readers.get(key, [])])


def survey(graph: Graph, plan: Plan) -> Values:
    """Walk a plan once.

    Raises:
        InvalidGraphError: the plan reads a value before a step wrote it, or never writes an output: our bug.
    """
    ready: set[Key] = {(n, Format.ROW) for n in graph.inputs}
    first: dict[Key, int] = {}
    last: dict[Key, int] = {}
    writers: dict[Key, list[int]] = {}
    readers: dict[Key, list[int]] = {}
    for i, step in enumerate(plan.steps):
        for key in step.inputs:
            if key not in ready and graph.nodes[key[0]].prim is not Prim.CONSTANT:
                raise InvalidGraphError(problem=f"step {i} reads %{key[0]} ({key[1].value}) before it is written")
            readers.setdefault(key, []).append(i)
        for key in step.outputs:
            ready.add(key)
            first.setdefault(key, i)
            writers.setdefault(key, []).append(i)
            last[key] = i
    finals = tuple(_core(graph, n, first) for n in graph.outputs)
    return Values(first, last, writers, readers, finals)


def _core(graph: Graph, node: NodeId, written: dict[Key, int]) -> NodeId:
    n = graph.nodes[node]
    while n.prim in (Prim.RESHAPE, Prim.BROADCAST):
        node = n.inputs[0]
        n = graph.nodes[node]
    if n.prim not in FREE and (node, Format.ROW) not in written:
        raise InvalidGraphError(problem=f"no step writes output %{node}")
    return node
