"""Which values a CUDA kernel stores, and which stages run in one launch.

As for C++ (`loopnest.plan`), a stage is one loop nest. A *segment* here is what the same threads do without leaving the
kernel: one elementwise stage, or a chain of reductions over the same rows and what is computed from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.generate.loopnest.index import Index, Var
from weft.generate.loopnest.plan import REDUCTIONS, WINDOWS, Key, Layout, Stage, cone_of, costly_in_several, sources_of
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim

FEW = 1 << 12
"""Elements of a row that blocks may reduce again and again for the sake of what follows."""
LEAST_RUN = 8
"""Vectors of neighbouring threads that lie side by side where a thread has several."""
MAX_ROW = 1 << 17
"""Elements of a row that the threads of one block or cluster may go through several times."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stage, or the piece of it between edges of joins, for a range of blocks of its own."""

    stage: Stage
    variables: tuple[Var, ...]
    """Outer to inner; the innermost is the one with lanes."""
    lanes: int
    at: dict[Key, Index]
    inner: Var | None = None
    """A short loop inside of that, all of which a thread has."""

    @property
    def vectors(self) -> int:
        """Work items."""
        return math.prod(v.size for v in self.variables) // self.lanes

    def shares(self, items: int) -> bool:
        """Whether a thread's vectors lie along the innermost loop, so that they share all other coordinates."""
        if items == 1 or len(self.variables) < 2:
            return False
        each, rest = divmod(self.variables[-1].size // self.lanes, items)
        return rest == 0 and each >= LEAST_RUN


@dataclass(slots=True)
class Segment:
    """Stages of one launch; `rows`: the loops that blocks divide among them (None: a single elementwise stage)."""

    stages: list[Stage]
    rows: tuple[Key, ...] | None

    @property
    def roots(self) -> list[NodeId]:
        """Everything that the segment computes."""
        return [r for stage in self.stages for r in stage.roots]


def choose_roots(graph: Graph, live: Sequence[NodeId], *, keep: bool) -> frozenset[NodeId]:
    """Values that are computed for their own sake. `keep`: also costly ones that several stages need."""
    roots = set(graph.outputs)  # an input among them is copied: a change of format
    roots |= {n for n in live if graph.nodes[n].prim in REDUCTIONS}
    users: dict[NodeId, list[NodeId]] = {n: [] for n in live}
    for n in live:
        for i in graph.nodes[n].inputs:
            users[i].append(n)
    for n in live:
        record = graph.nodes[n]
        if record.prim in WINDOWS and any(_reaches_window(graph, users, u) for u in users[n]):
            roots.add(n)
        if (
            CATEGORY[record.prim] is Category.ELEMENTWISE
            and any(graph.nodes[u].prim is Prim.BROADCAST for u in users[n])
            and any(graph.nodes[s].prim in REDUCTIONS for s in sources_of(graph, n, frozenset(roots)))
        ):
            roots.add(n)  # e.g. 1/sqrt(var + eps): once per row
    if keep:
        roots |= costly_in_several(graph, roots)
    return frozenset(roots)


def _reaches_window(graph: Graph, users: Mapping[NodeId, list[NodeId]], node: NodeId) -> bool:
    prim = graph.nodes[node].prim
    if prim in WINDOWS:
        return True
    return prim not in REDUCTIONS and any(_reaches_window(graph, users, u) for u in users[node])


def is_heavy(graph: Graph, root: NodeId, roots: frozenset[NodeId]) -> bool:
    """Whether computing a root again, wherever it is read, is out of the question."""
    cone = cone_of(graph, root, roots)
    return any(graph.nodes[n].prim in REDUCTIONS or graph.nodes[n].prim in WINDOWS for n in cone)


def build_segments(
    layout: Layout,
    stages: Sequence[Stage],
    reads: Mapping[NodeId, frozenset[NodeId]],
    *,
    fuse: bool,
    cut: frozenset[NodeId],
    apart: bool = False,
) -> list[Segment]:
    """Stages in runs. `cut`: roots whose readers may not share a run with them; `fuse`: dependent reductions may.

    `apart`: elementwise stages are runs of their own.
    """
    segments: list[Segment] = []
    for stage in stages:
        segment = Segment([stage], stage.free if stage.reductions else None)
        last = segments[-1] if segments else None
        alone = apart and not stage.reductions
        if fuse and not alone and last is not None and _continues(layout, last, stage, reads, cut):
            last.stages.append(stage)
        else:
            segments.append(segment)
    return segments


def _continues(
    layout: Layout,
    last: Segment,
    stage: Stage,
    reads: Mapping[NodeId, frozenset[NodeId]],
    cut: frozenset[NodeId],
) -> bool:
    if last.rows is None:
        return False
    read = _closure({r for root in stage.roots for r in reads[root]}, reads) & set(last.roots)
    if not read or read & cut:
        return False
    rows = set(last.rows)
    if stage.reductions:
        return set(stage.free) == rows and _row_size(layout, stage, rows) <= MAX_ROW
    if not rows <= set(stage.free):
        return False
    inner = {k for s in last.stages if s.reductions for k in s.reduced}
    apart = inner.isdisjoint(stage.free) and math.prod(layout.sizes[k] for k in inner) <= FEW
    return apart or _row_size(layout, stage, rows) <= MAX_ROW


def _closure(roots: set[NodeId], reads: Mapping[NodeId, frozenset[NodeId]]) -> set[NodeId]:
    """Roots that these depend on, directly or not, and themselves."""
    found: set[NodeId] = set()
    stack = [*roots]
    while stack:
        root = stack.pop()
        if root not in found:
            found.add(root)
            stack += reads.get(root, ())
    return found


def _row_size(layout: Layout, stage: Stage, rows: set[Key]) -> int:
    return math.prod(layout.sizes[k] for k in [*stage.free, *stage.reduced] if k not in rows)
