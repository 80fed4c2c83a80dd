"""A group around one scan as its kernels read it: which loop carries, which run side by side, which is summed.

The scan stands between what computes its operands and what is computed from its values: elementwise primitives over the
same loops, reductions over one other loop, and elementwise primitives of their results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from weft.generate.loopnest.plan import ARGS, REDUCTIONS, WINDOWS, Key, Layout, live_nodes
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import CATEGORY, Category, Prim

MAX_STATES = 64
"""Values carried side by side by one thread, or one warp, where they are summed."""


@dataclass(frozen=True, slots=True)
class ScanGroup:
    """Loops and results of a group with one scan."""

    graph: Graph
    layout: Layout
    scan: NodeId
    time: Key
    """The loop along which values are carried."""
    free: tuple[Key, ...]
    """The other loops, outer to inner, without the summed one."""
    summed: Key | None
    """The loop over which reductions of the scan's values run."""
    reductions: tuple[NodeId, ...]
    full: tuple[NodeId, ...]
    """Outputs with one element per element of the scan."""
    post: tuple[NodeId, ...]
    """Outputs with one element per result of the reductions, these included."""

    @property
    def attrs(self) -> a.ScanAttrs:
        """Of the scan."""
        return cast("a.ScanAttrs", self.graph.nodes[self.scan].attrs)

    @property
    def length(self) -> int:
        """Elements along the carried loop."""
        return self.layout.sizes[self.time]

    @property
    def states(self) -> int:
        """Values that are carried side by side for one result of the reductions."""
        return 1 if self.summed is None else self.layout.sizes[self.summed]

    @property
    def rows(self) -> int:
        """Turns of the free loops."""
        return math.prod(self.layout.sizes[k] for k in self.free)


def has_scan(graph: Graph) -> bool:
    """Whether an output needs one."""
    return any(graph.nodes[n].prim is Prim.SCAN for n in live_nodes(graph))


def scan_group(graph: Graph) -> ScanGroup | Declined:
    """The form of a graph, or why it has none."""
    live = live_nodes(graph)
    scans = [n for n in live if graph.nodes[n].prim is Prim.SCAN]
    if len(scans) != 1:
        return Declined(f"{len(scans)} scans in one kernel")
    (scan,) = scans
    t = graph.type_of(scan)
    attrs = cast("a.ScanAttrs", graph.nodes[scan].attrs)
    if t.shape[attrs.axis] < 2 or t.size == 0:
        return Declined("a scan that carries nothing")
    if t.size >= 2**31:
        return Declined(f"a scan of {t.size} elements")
    for n in live:
        if graph.nodes[n].prim in WINDOWS | ARGS or CATEGORY[graph.nodes[n].prim] in (Category.LINEAR, Category.OPAQUE):
            return Declined(f"{graph.nodes[n].prim.value} in the kernel of a scan")
    layout = Layout(graph, live)
    carried = layout.keys(scan)[attrs.axis]
    if len(carried) != 1:
        return Declined("the axis of a scan is several loops")
    ((time, _),) = carried
    loops = layout.flat(scan)
    summed: set[tuple[Key, ...]] = set()
    reductions = [n for n in live if graph.nodes[n].prim in REDUCTIONS]
    after = _after(graph, live, scan)
    for r in reductions:
        free, reduced = layout.split(r)
        if r not in after or {*free, *reduced} != set(loops) or time in reduced:
            return Declined("a reduction that is not of the scan's values")
        if any(i in reductions or _reads(graph, i, reductions) for i in graph.nodes[r].inputs):
            return Declined("a reduction of a reduction")
        summed.add(reduced)
    if len(summed) > 1 or any(len(keys) != 1 for keys in summed):
        return Declined("reductions over several loops")
    over = next(iter(summed))[0] if summed else None
    if over is not None and layout.sizes[over] > MAX_STATES:
        return Declined(f"{layout.sizes[over]} states are summed")
    full, post = [], []
    for o in graph.outputs:
        keys = set(layout.split(o)[0])
        if _reads(graph, o, reductions) or o in reductions:
            if keys != set(loops) - {over}:
                return Declined("a result with other loops than the sums")
            post.append(o)
        elif keys == set(loops):
            full.append(o)
        else:
            return Declined("a result with other loops than the scan")
    rest = tuple(k for k in loops if k not in (time, over))
    return ScanGroup(graph, layout, scan, time, rest, over, tuple(reductions), tuple(full), tuple(post))


def _after(graph: Graph, live: list[NodeId], scan: NodeId) -> set[NodeId]:
    found = {scan}
    for n in live:
        if any(i in found for i in graph.nodes[n].inputs):
            found.add(n)
    return found


def _reads(graph: Graph, node: NodeId, wanted: list[NodeId]) -> bool:
    """Whether computing a node needs one of these."""
    seen: set[NodeId] = set()
    stack = list(graph.nodes[node].inputs)
    while stack:
        n = stack.pop()
        if n in wanted:
            return True
        if n not in seen:
            seen.add(n)
            stack += graph.nodes[n].inputs
    return False
