"""From a problem to stages: which values are stored, which loops compute them, which loops are shared.

A *root* is a value that is stored: an output, a reduction, or a value that is cheaper to keep than to compute again.
A *stage* is one loop nest: elementwise roots over all of its loops (`pre`), reductions of them over the reduced
loops, and elementwise roots of the results (`post`). A *segment* is a run of stages inside common outer loops
(`shared`), which threads divide among them; between segments stands a barrier.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import cast

from weft.generate.loopnest.axes import Axes, Axis
from weft.generate.loopnest.body import Coord
from weft.generate.loopnest.index import ZERO, Index
from weft.ir import attrs as a
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim

Key = tuple[int, int]
"""Serial of an axis and which of its occurrences inside one value: one loop of a stage."""

EXPENSIVE = frozenset(
    {
        Prim.EXP, Prim.EXPM1, Prim.LOG, Prim.LOG1P, Prim.ERF, Prim.TANH, Prim.SIN, Prim.COS, Prim.TAN, Prim.ASIN,
        Prim.ACOS, Prim.ATAN, Prim.SINH, Prim.COSH, Prim.ASINH, Prim.ACOSH, Prim.ATANH, Prim.POW, Prim.ATAN2,
        Prim.FMOD, Prim.MOD, Prim.DIV, Prim.RECIPROCAL, Prim.SQRT, Prim.RSQRT, Prim.WINDOW_SUM, Prim.WINDOW_MAX,
    }
)  # fmt: skip
REDUCTIONS = frozenset(p for p in Prim if CATEGORY[p] is Category.REDUCE)
WINDOWS = frozenset({Prim.WINDOW_SUM, Prim.WINDOW_MAX})
ARGS = frozenset({Prim.ARGMAX, Prim.ARGMIN})


@dataclass(slots=True)
class Stage:
    """One loop nest."""

    free: tuple[Key, ...]
    reduced: tuple[Key, ...] = ()
    pre: list[NodeId] = field(default_factory=list)
    reductions: list[NodeId] = field(default_factory=list)
    post: list[NodeId] = field(default_factory=list)

    @property
    def roots(self) -> list[NodeId]:
        """Everything that the stage stores."""
        return self.pre + self.reductions + self.post


@dataclass(slots=True)
class Segment:
    """Stages inside common loops."""

    stages: list[Stage]
    shared: tuple[Key, ...] = ()


class Layout:
    """Loops of every value of a graph."""

    def __init__(self, graph: Graph, live: Sequence[NodeId]) -> None:
        self.graph = graph
        self._axes = Axes(graph, list(live))
        self.sizes: dict[Key, int] = {}
        self._keys: dict[NodeId, list[list[tuple[Key, int]]]] = {}

    def keys(self, node: NodeId) -> list[list[tuple[Key, int]]]:
        """Per dimension its loops, outer to inner, with their strides inside the dimension."""
        found = self._keys.get(node)
        if found is None:
            found = self._keys[node] = self._find_keys(node)
        return found

    def _find_keys(self, node: NodeId) -> list[list[tuple[Key, int]]]:
        seen: dict[int, int] = {}
        out = []
        for dim in range(self.graph.type_of(node).rank):
            axes: list[Axis] = self._axes.of(node, dim)
            inner = math.prod(x.size for x in axes) if 0 not in [x.size for x in axes] else 0
            found = []
            for axis in axes:
                inner = inner // axis.size if axis.size else 1
                occurrence = seen.get(axis.serial, 0)
                seen[axis.serial] = occurrence + 1
                key = (axis.serial, occurrence)
                self.sizes[key] = axis.size
                found.append((key, max(inner, 1)))
            out.append(found)
        return out

    def flat(self, node: NodeId) -> tuple[Key, ...]:
        """All loops of a value, outer to inner."""
        return tuple(key for dim in self.keys(node) for key, _ in dim)

    def split(self, node: NodeId) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        """Free and reduced loops of a root."""
        record = self.graph.nodes[node]
        if record.prim not in REDUCTIONS:
            return self.flat(node), ()
        axes = reduced_axes(self.graph, node)
        dims = self.keys(record.inputs[0])
        free = tuple(key for d, dim in enumerate(dims) if d not in axes for key, _ in dim)
        return free, tuple(key for d, dim in enumerate(dims) if d in axes for key, _ in dim)

    def coord(self, node: NodeId, at: dict[Key, Index]) -> Coord:
        """Index of a value, given the value of each loop."""
        coord = []
        for dim in self.keys(node):
            total = ZERO
            for key, stride in dim:
                total = total + at[key] * stride
            coord.append(total)
        return tuple(coord)

    def result_coord(self, node: NodeId, at: dict[Key, Index]) -> Coord:
        """Index of a root's own value: for a reduction, by the operand's loops."""
        record = self.graph.nodes[node]
        if record.prim not in REDUCTIONS:
            return self.coord(node, at)
        axes = reduced_axes(self.graph, node)
        zeros = dict.fromkeys((k for k, _ in _pairs(self.keys(record.inputs[0]), axes)), Index())
        inner = self.coord(record.inputs[0], {**at, **zeros})
        return tuple(Index() if d in axes else i for d, i in enumerate(inner))


def _pairs(dims: list[list[tuple[Key, int]]], axes: tuple[int, ...]) -> list[tuple[Key, int]]:
    return [pair for d in axes for pair in dims[d]]


def reduced_axes(graph: Graph, node: NodeId) -> tuple[int, ...]:
    """Axes over which a reduction runs."""
    attrs = graph.nodes[node].attrs
    return (attrs.axis,) if isinstance(attrs, a.ArgAttrs) else cast("a.ReduceAttrs", attrs).axes


def live_nodes(graph: Graph) -> list[NodeId]:
    """Nodes that the outputs need, ascending."""
    need = set(graph.outputs)
    for node in range(len(graph) - 1, -1, -1):
        if node in need:
            need.update(graph.nodes[node].inputs)
    return sorted(need)


def sources_of(graph: Graph, node: NodeId, stored: frozenset[NodeId]) -> frozenset[NodeId]:
    """Stored values that computing `node` reads."""
    found: set[NodeId] = set()
    seen: set[NodeId] = set()
    stack = list(graph.nodes[node].inputs)
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if n in stored:
            found.add(n)
        else:
            stack += graph.nodes[n].inputs
    return frozenset(found)


def cone_of(graph: Graph, node: NodeId, stored: frozenset[NodeId]) -> set[NodeId]:
    """Nodes that are computed in the loops of root `node` (itself included)."""
    seen = {node}
    stack = list(graph.nodes[node].inputs)
    while stack:
        n = stack.pop()
        if n not in seen and n not in stored:
            seen.add(n)
            stack += graph.nodes[n].inputs
    return seen


def costly_in_several(graph: Graph, roots: Collection[NodeId]) -> set[NodeId]:
    """Expensive values that the loops of several roots would each compute."""
    stored = frozenset(roots)
    count = Counter(n for root in roots for n in cone_of(graph, root, stored))
    return {n for n, c in count.items() if c > 1 and graph.nodes[n].prim in EXPENSIVE and graph.type_of(n).size > 1}


def choose_roots(graph: Graph, live: Sequence[NodeId], *, keep: bool) -> frozenset[NodeId]:
    """Values that are stored. `keep`: also costly values that several stages need."""
    sources = {n for n in live if CATEGORY[graph.nodes[n].prim] is Category.SOURCE}
    roots = {n for n in graph.outputs if n not in sources}
    roots |= {n for n in live if graph.nodes[n].prim in REDUCTIONS}
    users: dict[NodeId, list[NodeId]] = {n: [] for n in live}
    for n in live:
        for i in graph.nodes[n].inputs:
            users[i].append(n)
    for n in live:
        record = graph.nodes[n]
        if record.prim is Prim.PAD and any(graph.nodes[u].prim in WINDOWS for u in users[n]):
            roots.add(n)  # a padded copy spares every tap its test
        if record.prim in WINDOWS and any(_reaches_window(graph, users, u) for u in users[n]):
            roots.add(n)
        if (
            CATEGORY[record.prim] is Category.ELEMENTWISE
            and any(graph.nodes[u].prim is Prim.BROADCAST for u in users[n])
            and any(graph.nodes[s].prim in REDUCTIONS for s in sources_of(graph, n, frozenset(roots)))
        ):
            roots.add(n)  # e.g. 1/sqrt(var + eps): computed once per reduction, not once per element
    padded = {n for n in roots if graph.nodes[n].prim is Prim.PAD}
    roots -= {n for n in roots - set(graph.outputs) if graph.nodes[n].prim in WINDOWS and set(users[n]) <= padded}
    if keep:
        roots |= costly_in_several(graph, roots)
    return frozenset(roots)


def _reaches_window(graph: Graph, users: dict[NodeId, list[NodeId]], node: NodeId) -> bool:
    """Whether a value is read several times per element by a window or reduction further down."""
    prim = graph.nodes[node].prim
    if prim in WINDOWS or prim in REDUCTIONS:
        return True
    return any(_reaches_window(graph, users, u) for u in users[node])


def build_stages(
    graph: Graph, layout: Layout, roots: frozenset[NodeId], alone: frozenset[NodeId]
) -> tuple[list[Stage], dict[NodeId, frozenset[NodeId]]]:
    """Roots in topological order, joined into common loop nests where their loops are the same.

    `alone`: roots that an earlier try could not join. Also returns each root's stored sources.
    """
    stages: list[Stage] = []
    stage_of: dict[NodeId, int] = {}
    reads: dict[NodeId, frozenset[NodeId]] = {}
    for root in sorted(roots):
        reads[root] = sources_of(graph, root, roots)
        free, reduced = layout.split(root)
        at = -1
        if root not in alone:
            at = _join(graph, stages, stage_of, root, reads[root], free, reduced, alone)
        if at < 0:
            at = len(stages)
            stages.append(Stage(free, reduced))
            (stages[at].reductions if graph.nodes[root].prim in REDUCTIONS else stages[at].pre).append(root)
        stage_of[root] = at
    return stages, reads


def _join(
    graph: Graph,
    stages: list[Stage],
    stage_of: dict[NodeId, int],
    root: NodeId,
    reads: frozenset[NodeId],
    free: tuple[Key, ...],
    reduced: tuple[Key, ...],
    alone: frozenset[NodeId],
) -> int:
    first = max((stage_of[r] for r in reads), default=0)
    for k in range(first, len(stages)):
        stage = stages[k]
        here = {r for r in reads if stage_of[r] == k}
        if here & alone:
            continue
        of_pre = here <= set(stage.pre)
        if graph.nodes[root].prim in REDUCTIONS:
            same = set(stage.free) == set(free) and set(stage.reduced) == set(reduced)
            pointwise = not stage.reductions and set(stage.free) == set(free) | set(reduced)
            if of_pre and ((same and stage.reductions) or pointwise):
                if pointwise:
                    stage.free, stage.reduced = free, reduced
                stage.reductions.append(root)
                return k
            continue
        if of_pre and set(free) == set(stage.free) | set(stage.reduced):
            stage.pre.append(root)
            return k
        if stage.reductions and set(free) == set(stage.free) and not here & set(stage.pre):
            stage.post.append(root)
            return k
    return -1


def build_segments(
    layout: Layout,
    stages: list[Stage],
    *,
    rows: bool,
    inner: Sequence[frozenset[Key]],
    banned: frozenset[Key],
) -> list[Segment]:
    """Runs of stages with common outer loops. `inner`: per stage the loops to keep inside; `rows`: share at all."""
    segments: list[Segment] = []
    for stage, own in zip(stages, inner, strict=True):
        if rows and segments:
            last = segments[-1]
            common = set(stage.free) - own - banned
            common &= set(last.shared)
            if math.prod(layout.sizes[k] for k in common) > 1:
                last.stages.append(stage)
                last.shared = tuple(k for k in last.shared if k in common)
                continue
        segments.append(Segment([stage], tuple(k for k in stage.free if k not in own | banned and k[1] == 0)))
    for segment in segments:
        if len(segment.stages) == 1:
            segment.shared = ()
    return segments
