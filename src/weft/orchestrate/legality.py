"""Which sets of primitives some generator can emit as one kernel: mask tests, asked before anything is built.

The classes: a DAG of elementwise and layout primitives; the same with reductions over the same rows; with one window;
one scan with elementwise and layout primitives around it, and reductions of its values; one contraction with an
elementwise epilogue and index-only prologue; an opaque call alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import or_
from typing import cast

from weft.ir import attrs as a
from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.passes.compose_casts import turns_to_first
from weft.ir.prims import CATEGORY, Category, Prim
from weft.orchestrate.stored import Stored, stored_root


@dataclass(frozen=True, slots=True)
class EnumerationLimits:
    """Bounds of the enumeration. 0 means no bound where that is said."""

    max_members: int = 24
    max_inputs: int = 12
    """Stored values read, weights included."""
    max_outputs: int = 4
    max_reductions: int = 6
    max_windows: int = 1
    concat_sources: int = 8
    per_sink: int = 128
    """Sets visited per sink; 0: all."""
    max_candidates: int = 20_000
    """Candidates in all; 0: no bound. Singles and operators' own sets are never dropped."""
    reentrant: bool = True
    reentrant_slack: float = 1.25
    """Recomputing instead of reading a shared value may read so much more."""
    multi_output: bool = True
    every_cut: bool = False
    """Also sets whose boundary lies between two elementwise primitives that nobody else reads."""
    attention: bool = False
    """Also two products with a softmax between them, depthwise with 1x1 convolutions, convolutions with pools, and
    chains of layers, where kernels for them exist (see `orchestrate.attention`, `separable`, `pooled` and `mlp`)."""

    multiprocessors: int = 0
    """Of the GPU: products that do not fill so many are candidates in one launch, too (see `orchestrate.grouped`); 0:
    none are."""

    unions: bool = False
    """Also small elementwise groups that have nothing to do with each other in one launch, see `orchestrate.unions`."""

    changing_weights: bool = True
    """Also a convolution over channels whose weight is no constant with what is around it in one kernel; no template
    for GPUs is."""

    recomputed: bool = True
    """Also gradients that compute forward values again, see `orchestrate.recomputed`."""

    library_calls: bool = False
    """Also what one call of a GPU's libraries covers (see `orchestrate.calls`), for the library plan alone."""

    @staticmethod
    def complete() -> EnumerationLimits:
        """Everything that is legal, for checks against brute force on small graphs."""
        return EnumerationLimits(per_sink=0, max_candidates=0, every_cut=True)


_INDEX_ONLY = {Prim.CONV: frozenset({Prim.PAD, Prim.GATHER}), Prim.MATMUL: frozenset({Prim.TRANSPOSE, Prim.SLICE})}
MOST_OF = 0.75
"""Share of a tensor from which on a product reads a slice of it where it lies: a copy would be nearly all of it."""


@dataclass(frozen=True, slots=True)
class Legality:
    """Masks over one graph. `admit` is monotone: no superset of a refused set is admitted."""

    limits: EnumerationLimits
    linear: Mask
    alone: Mask
    """Opaque calls, and concatenations of too many sources."""
    reductions: Mask
    windows: Mask
    scans: Mask
    with_scan: dict[NodeId, Mask]
    """Per scan: what may share a kernel with it, itself included."""
    with_linear: dict[NodeId, Mask]
    """Per contraction: what may share a kernel with it, itself included."""
    same_rows: dict[NodeId, Mask]
    """Per reduction: the reductions with as many results."""

    @staticmethod
    def of(graph: Graph, stored: Stored, limits: EnumerationLimits) -> Legality:
        """The masks of one graph."""
        of: dict[Category, Mask] = dict.fromkeys(Category, 0)
        for i, node in enumerate(graph.nodes):
            of[CATEGORY[node.prim]] |= 1 << i
        wide = mask_of(
            i for i, n in enumerate(graph.nodes) if n.prim is Prim.CONCAT and len(n.inputs) > limits.concat_sources
        )
        small = _up_to_sizes(graph, of[Category.ELEMENTWISE])
        rows: dict[int, Mask] = {}
        for r in bits(of[Category.REDUCE]):
            rows[graph.nodes[r].type.size] = rows.get(graph.nodes[r].type.size, 0) | 1 << r
        return Legality(
            limits,
            of[Category.LINEAR],
            of[Category.OPAQUE] | wide,
            of[Category.REDUCE],
            of[Category.WINDOW],
            of[Category.SCAN],
            {
                v: _with_scan(graph, stored, v, of[Category.ELEMENTWISE] | of[Category.LAYOUT])
                for v in bits(of[Category.SCAN])
            },
            {
                v: 1 << v | _turned_weight(graph, v)
                if not limits.changing_weights and _changes(graph, v)
                else _with_linear(graph, stored, v, of[Category.ELEMENTWISE], small)
                for v in bits(of[Category.LINEAR])
            },
            {r: rows[graph.nodes[r].type.size] for r in bits(of[Category.REDUCE])},
        )

    def admit(self, members: Mask) -> str:
        """Why no kernel holds these primitives, "" if one may. Cost: a few integer operations."""
        if not members & (members - 1):
            return ""
        if members & self.alone:
            return "an opaque call or wide concat stands alone"
        if members.bit_count() > self.limits.max_members:
            return "too many members"
        linear = members & self.linear
        if linear & (linear - 1):
            return "two contractions"
        if linear and members & ~self.with_linear[linear.bit_length() - 1]:
            return "neither prologue nor epilogue of its contraction"
        scans = members & self.scans
        if scans & (scans - 1):
            return "two scans"
        if scans and members & ~self.with_scan[scans.bit_length() - 1]:
            return "not around its scan"
        windows = members & self.windows
        reductions = members & self.reductions
        if windows and (windows.bit_count() > self.limits.max_windows or reductions):
            return "too many windows"
        if reductions:
            if reductions.bit_count() > self.limits.max_reductions:
                return "too many reductions"
            if reductions & ~self.same_rows[reductions.bit_length() - 1]:
                return "reductions over different rows"
        return ""


def _with_scan(graph: Graph, stored: Stored, scan: NodeId, plain: Mask) -> Mask:
    """What is computed for it, elementwise or moved; what is made of its values; sums of these over another axis."""
    dag, size = stored.dag, graph.nodes[scan].type.size
    behind = dag.descendants[scan]
    axis = cast("a.ScanAttrs", graph.nodes[scan].attrs).axis
    sums = 0
    for v in bits(behind):
        node = graph.nodes[v]
        if CATEGORY[node.prim] is not Category.REDUCE or not isinstance(node.attrs, a.ReduceAttrs):
            continue
        operand = graph.type_of(node.inputs[0])
        if operand.size == size and not (operand.shape == graph.nodes[scan].type.shape and axis in node.attrs.axes):
            sums |= 1 << v
    # what is joined, cut or padded from its values has other loops than they have
    moved = mask_of(v for v in bits(plain & behind) if CATEGORY[graph.nodes[v].prim] is Category.LAYOUT)
    turned = mask_of(v for v in bits(moved) if graph.nodes[v].prim is Prim.TRANSPOSE)
    small = mask_of(v for v in bits(plain) if graph.nodes[v].type.size <= size)
    return 1 << scan | sums | (small & ~moved) | (small & turned)


def _turned_weight(graph: Graph, conv: NodeId) -> Mask:
    """What brings a weight's channels to the front: libraries read weights with channels last, and copy others."""
    at = graph.nodes[conv].inputs[1]
    return 1 << at if turns_to_first(graph.nodes[at]) else 0


def _changes(graph: Graph, linear: NodeId) -> bool:
    """Whether it is a convolution over all channels whose weight is computed, or given with each call."""
    node = graph.nodes[linear]
    if not isinstance(node.attrs, a.ConvAttrs) or node.attrs.groups != 1:
        return False
    return graph.nodes[stored_root(graph, node.inputs[1])].prim is not Prim.CONSTANT


def _up_to_sizes(graph: Graph, nodes: Mask) -> Callable[[int], Mask]:
    """Those of some nodes that have no more elements than a number."""
    of: dict[int, Mask] = {}
    for v in bits(nodes):
        of[graph.nodes[v].type.size] = of.get(graph.nodes[v].type.size, 0) | 1 << v
    sizes = sorted(of)
    masks = [0, *accumulate((of[n] for n in sizes), or_)]
    return lambda size: masks[bisect_right(sizes, size)]


def _with_linear(graph: Graph, stored: Stored, linear: NodeId, elementwise: Mask, small: Callable[[int], Mask]) -> Mask:
    dag = stored.dag
    size = graph.nodes[linear].type.size
    epilogue = 0
    frontier = dag.consumers[linear]
    while frontier:
        grown = 0
        for c in bits(frontier):
            if elementwise >> c & 1 and graph.nodes[c].type.size == size:
                epilogue |= 1 << c
                grown |= dag.consumers[c]
            elif turns_to_first(graph.nodes[c]) or (stored.results >> c & 1 and graph.nodes[c].prim is Prim.TRANSPOSE):
                epilogue |= 1 << c  # results are stored where the graph wants them: heads apart, channels last
        frontier = grown & ~epilogue
    related = dag.ancestors[linear] | dag.descendants[linear]
    beside = small(size) & ~related
    return 1 << linear | epilogue | beside | _prologue(graph, stored, linear)


def _prologue(graph: Graph, stored: Stored, linear: NodeId) -> Mask:
    allowed = _INDEX_ONLY[graph.nodes[linear].prim]
    operands = graph.nodes[linear].inputs[:1] if graph.nodes[linear].prim is Prim.CONV else graph.nodes[linear].inputs
    found = 0
    waiting = list(operands)
    while waiting:
        node = waiting.pop()
        prim = graph.nodes[node].prim
        if prim is Prim.RESHAPE:
            waiting.append(graph.nodes[node].inputs[0])
        elif prim in allowed and _index_only(graph, stored, node):
            found |= 1 << node
            waiting.append(graph.nodes[node].inputs[0])
    return found


def _index_only(graph: Graph, stored: Stored, node: NodeId) -> bool:
    n = graph.nodes[node]
    if n.prim is Prim.GATHER:  # the table must be known before the kernel runs
        table = n.inputs[1]
        known = graph.nodes[table].prim in (Prim.CONSTANT, Prim.IOTA)
        return known or (graph.nodes[table].prim in (Prim.RESHAPE, Prim.BROADCAST) and not stored.reads[table])
    if isinstance(n.attrs, a.SliceAttrs):
        return set(n.attrs.steps) == {1} and n.type.size >= MOST_OF * graph.type_of(n.inputs[0]).size
    return True
