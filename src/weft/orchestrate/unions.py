"""Small elementwise work that has nothing to do with each other, side by side in one launch.

A training step ends with hundreds of updates (weights, momenta, running statistics, counters), and begins with as many
casts of weights: each takes less time than its launch. Two kinds of groups can be joined without closing a cycle,
whatever else the plan holds: those that write nothing but results which nobody reads, and those that read nothing but
the graph's inputs. PyTorch's `foreach` and fused optimizers join the former.

A launch waits for all that its groups read, so one group that reads what no kernel would store else keeps the others
from being joined. Groups begin, where they can, at results of source operators, reductions, products and the like;
those that cannot are joined among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.prims import CATEGORY, Category
from weft.kernels.candidate import Candidate, Kind
from weft.orchestrate.stored import Stored, named_results

SMALL = 1 << 20
"""Bytes of a result: what is larger takes longer than a launch."""
TOGETHER = 32
"""Results of one launch, about."""
FEWEST = 4
"""Results below which nothing is joined."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A group that may be joined with others."""

    members: Mask
    outputs: tuple[NodeId, ...]
    inner: int
    """How many values it reads that are inside a source operator and elementwise or moved there."""


_Score = tuple[int, int, int, int]


def unions(graph: Graph, stored: Stored, candidates: Iterable[Candidate]) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """Members and outputs of joined groups; the groups are `candidates`, of several of an output the best for this."""
    plain = mask_of(
        i for i in bits(stored.work) if CATEGORY[graph.nodes[i].prim] in (Category.ELEMENTWISE, Category.LAYOUT)
    )
    of_operators = mask_of(i for i in bits(plain) if graph.nodes[i].origin >= 0)
    inside_operators = of_operators & ~named_results(graph) & ~stored.results
    sinks: dict[NodeId, tuple[_Score, _Part]] = {}
    sources: dict[NodeId, tuple[_Score, _Part]] = {}
    for c in candidates:
        if c.kind is Kind.CALL or c.members & ~plain or any(graph.nodes[o].type.nbytes > SMALL for o in c.outputs):
            continue
        if sum(not stored.dag.consumers[m] & c.members for m in bits(c.members)) != 1:
            continue  # it is several groups already
        outputs, read = mask_of(c.outputs), stored.inputs_of(c.members)
        inner = (read & inside_operators).bit_count()
        if len(c.outputs) == 1 and not read & ~stored.leaves:
            _note(sources, graph, c, inner)
        ends = not outputs & ~stored.results and stored.dag.written(c.members, stored.results) == outputs
        if ends and not any(stored.dag.consumers[o] & ~c.members for o in c.outputs):
            _note(sinks, graph, c, inner)
    kept = _apart(sinks)
    inside = 0
    for part in kept:
        inside |= part.members
    starts = [p for p in _apart(sources) if not mask_of(p.outputs) & inside]
    for parts in ([p for p in kept if not p.inner], [p for p in kept if p.inner], starts):
        if sum(len(p.outputs) for p in parts) < FEWEST:
            continue
        rest = list(parts)
        while rest:
            members, written = 0, set[NodeId]()
            while rest and len(written) + len(rest[0].outputs) <= max(TOGETHER, len(rest[0].outputs)):
                part = rest.pop(0)
                members |= part.members
                written.update(part.outputs)
            if not stored.dag.missing(members):
                yield members, tuple(sorted(written))


def _note(best: dict[NodeId, tuple[_Score, _Part]], graph: Graph, c: Candidate, inner: int) -> None:
    """Remember a group for its outputs, if it writes more of them, or reads less from inside of operators.

    Of those that are equal in this, if it computes more of the outputs' size and less of others.
    What many updates share (a learning rate out of a table) is computed once, outside.
    """
    size = max(graph.nodes[o].type.size for o in c.outputs)
    own = sum(graph.nodes[m].type.size >= size for m in bits(c.members))
    score = len(c.outputs), -inner, own, -c.members.bit_count()
    for output in c.outputs:
        if output not in best or score > best[output][0]:
            best[output] = score, _Part(c.members, c.outputs, inner)


def _apart(best: dict[NodeId, tuple[_Score, _Part]]) -> list[_Part]:
    """The groups that were best, in order of what they end with, without those of which another writes an output."""
    found: list[_Part] = []
    written: set[NodeId] = set()
    for _, part in sorted(best.values(), key=lambda x: (-len(x[1].outputs), x[1].outputs)):
        if written.isdisjoint(part.outputs):
            written.update(part.outputs)
            found.append(part)
    return sorted(found, key=lambda p: p.outputs[-1])
