"""Products that need nothing of each other as one candidate, and a product whose results are slices of its columns.

The first: at equal depth, counted in products from the inputs of the graph or to its results, no product needs another
one. Those that are too small to fill the GPU alone may share a launch (`generate.cuda.gemm.grouped`). The second:
queries, keys and values from one product, each stored where its reader wants it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from weft.ir import attrs as a
from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.prims import CATEGORY, Category, Prim
from weft.orchestrate.contraction_cuda import are_apart, together_us
from weft.orchestrate.idiom import Idiom, Multiplied, Scene
from weft.orchestrate.stored import Stored

MOST_MEMBERS = 16
"""As many as the template takes."""
MAX_INPUTS = 64
SIDE = 64
"""Of the tile by which products are counted as small."""
ROUNDS = 2
"""A product of more tiles than so many for each multiprocessor fills the GPU alone."""
MOST_SLICES = 8
FEW = 4
"""Products of a depth up to which all are one group, and no fewer."""

Parts = Mapping[NodeId, tuple[Mask, NodeId]]
"""Product -> itself with what follows it in its kernel, and the one of these that is written."""


def parts_of(
    graph: Graph, stored: Stored, groups: Mapping[NodeId, Sequence[Mask]]
) -> dict[NodeId, tuple[Mask, NodeId]]:
    """The largest group of each product that nobody outside reads but for one value; `groups` has them by that."""
    linear = mask_of(v for v in bits(stored.work) if CATEGORY[graph.nodes[v].prim] is Category.LINEAR)
    found: dict[NodeId, tuple[Mask, NodeId]] = {v: (1 << v, v) for v in bits(linear)}
    for sink, sets in groups.items():
        for members in sets:
            inside = members & linear
            if inside and not inside & (inside - 1) and not members & ~stored.work:
                v = inside.bit_length() - 1
                if members.bit_count() > found[v][0].bit_count():
                    found[v] = members, sink
    return found


def sibling_groups(
    graph: Graph, stored: Stored, parts: Parts, multiprocessors: int, *, merged: bool = False
) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """(members, those that are written) of small products of one depth; convex.

    `merged`: another version of the graph has products of one operand as one.
    """
    small = [v for v in parts if _is_small(graph, v, multiprocessors)]
    linear = mask_of(parts)
    seen: set[tuple[NodeId, ...]] = set()
    for related, joined in ((stored.dag.ancestors, False), (stored.dag.descendants, True)):
        depth = _depths(parts, related, linear)
        levels: dict[object, list[NodeId]] = {}
        for v in small:
            levels.setdefault((depth[v], graph.type_of(v).dtype), []).append(v)
        for level in levels.values():
            for chosen in _joined(stored, parts, level) if joined else _sets(graph, stored, parts, level):
                if len(chosen) < 2 or chosen in seen or (merged and _merges(graph, parts, chosen)):
                    continue
                seen.add(chosen)
                found = _together(stored, [parts[v] for v in chosen])
                if found is not None:
                    yield found


def _is_small(graph: Graph, v: NodeId, multiprocessors: int) -> bool:
    """A product that a kernel for tensor cores takes, of few tiles."""
    n = graph.nodes[v]
    if not n.type.size or n.type.rank < 2:
        return False
    if isinstance(n.attrs, a.ConvAttrs):
        if n.attrs.transposed or n.attrs.groups > 1:
            return False
        columns = n.type.shape[1]
    else:
        columns = n.type.shape[-1]
    tiles = -(-(n.type.size // columns) // SIDE) * -(-columns // SIDE)
    return tiles <= ROUNDS * multiprocessors


def _depths(parts: Parts, related: Sequence[Mask], linear: Mask) -> dict[NodeId, int]:
    """Products on the longest way to each, itself included; `related` are the nodes on such ways."""
    found: dict[NodeId, int] = {}
    for v in sorted(parts, key=lambda v: (related[v] & linear).bit_count()):
        found[v] = 1 + max((found[u] for u in bits(related[v] & linear)), default=0)
    return found


def _sets(graph: Graph, stored: Stored, parts: Parts, level: list[NodeId]) -> Iterator[tuple[NodeId, ...]]:
    """Sets of products of one depth from the inputs: all; of many also those that read, or are read by, one value."""
    if len(level) <= MOST_MEMBERS:
        yield tuple(level)
    if len(level) > FEW:
        near: dict[NodeId, list[NodeId]] = {}
        for v in level:
            for value in bits(stored.reads[v] & ~parts[v][0]):
                if graph.nodes[value].prim is not Prim.CONSTANT:
                    near.setdefault(value, []).append(v)
        yield from (tuple(x) for x in near.values() if len(x) <= MOST_MEMBERS)
        yield from _joined(stored, parts, level)


def _joined(stored: Stored, parts: Parts, level: list[NodeId]) -> Iterator[tuple[NodeId, ...]]:
    """Sets of products that one product is the next to need, or that lead to results without any further one."""
    linear = mask_of(parts)
    near: dict[NodeId, list[NodeId]] = {}
    for v in level:
        for reader in _next(stored, parts[v][1], linear):
            near.setdefault(reader, []).append(v)
    yield from (tuple(x) for x in near.values() if len(x) <= MOST_MEMBERS)


def _next(stored: Stored, value: NodeId, linear: Mask) -> Iterator[NodeId]:
    """Products that need a value through none before them; -1 where it leads to a result of the graph."""
    seen = frontier = 1 << value
    while frontier:
        grown = 0
        for v in bits(frontier & ~linear | 1 << value & frontier):
            grown |= stored.dag.consumers[v]
        frontier = grown & ~seen
        seen |= frontier
    yield from bits(seen & linear & ~(1 << value))
    if seen & ~linear & stored.results or 1 << value & stored.results:
        yield -1


def _merges(graph: Graph, parts: Parts, chosen: Iterable[NodeId]) -> bool:
    """Whether some are one product in another version of the graph, and nothing is gained by storing them apart."""
    kinds = []
    for v in chosen:
        n = graph.nodes[v]
        if graph.nodes[n.inputs[1]].prim is Prim.CONSTANT and graph.nodes[parts[v][1]].prim is not Prim.TRANSPOSE:
            kernel = graph.type_of(n.inputs[1]).shape[2:] if n.prim is Prim.CONV else ()
            kinds.append((n.prim, n.inputs[0], n.attrs, kernel))
    return len(set(kinds)) < len(kinds)


def _together(stored: Stored, chosen: Iterable[tuple[Mask, NodeId]]) -> tuple[Mask, tuple[NodeId, ...]] | None:
    """The union of products with what follows them; None where one needs another."""
    members = sinks = 0
    every = list(chosen)
    for mask, sink in every:
        if members & mask:
            return None
        members |= mask
        sinks |= 1 << sink
    if any(stored.inputs_of(mask) & members for mask, _ in every) or stored.dag.missing(members):
        return None
    if stored.dag.written(members, stored.results) & ~sinks:
        return None
    return members, tuple(bits(sinks))


def split_groups(graph: Graph, stored: Stored) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """(members, slices) of a product of whose columns all readers take a part each, turned or not."""
    for v in bits(stored.work):
        n = graph.nodes[v]
        if CATEGORY[n.prim] is not Category.LINEAR or not _whole(n.attrs):
            continue
        members, at = 1 << v, v
        while not stored.results >> at & 1:
            readers = stored.dag.consumers[at]
            if readers & (readers - 1) or not readers:
                break
            after = readers.bit_length() - 1
            elementwise = CATEGORY[graph.nodes[after].prim] is Category.ELEMENTWISE
            if graph.type_of(after).size != n.type.size or not (
                elementwise or graph.nodes[after].prim is Prim.TRANSPOSE
            ):
                break
            members |= 1 << after
            at = after
        slices = list(bits(stored.dag.consumers[at]))
        if stored.results >> at & 1 or not 2 <= len(slices) <= MOST_SLICES:
            continue
        if all(graph.nodes[s].prim is Prim.SLICE and graph.nodes[s].type.size < n.type.size for s in slices):
            yield from _ends(graph, stored, members, slices)


def _whole(attrs: a.Attrs) -> bool:
    return not isinstance(attrs, a.ConvAttrs) or (attrs.groups == 1 and not attrs.transposed)


def _ends(
    graph: Graph, stored: Stored, members: Mask, slices: Sequence[NodeId]
) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """The slices as they are, and turned where each has one reader that turns it."""
    plain = members | mask_of(slices)
    if not stored.dag.missing(plain):
        yield plain, tuple(slices)
    ends = []
    for s in slices:
        end, turns = _turned(graph, stored, s)
        plain |= turns
        ends.append(end)
    if ends != list(slices) and not stored.dag.missing(plain):
        yield plain, tuple(sorted(ends))


def _turned(graph: Graph, stored: Stored, at: NodeId) -> tuple[NodeId, Mask]:
    """The last of transpositions behind a value, each the one reader of what is before it, and all of them."""
    found = 0
    while not stored.results >> at & 1:
        readers = stored.dag.consumers[at]
        after = readers.bit_length() - 1
        if not readers or readers & (readers - 1) or graph.nodes[after].prim is not Prim.TRANSPOSE:
            break
        found |= readers
        at = after
    return at, found


def _in_one_launch(scene: Scene) -> Iterator[tuple[Mask, tuple[NodeId, ...]]]:
    """Products that need nothing of each other, then products that are stored as slices."""
    parts = parts_of(scene.graph, scene.stored, scene.groups)
    yield from sibling_groups(scene.graph, scene.stored, parts, scene.limits.multiprocessors, merged=scene.merged)
    yield from split_groups(scene.graph, scene.stored)


GROUPED = Idiom(
    name="grouped",
    patterns=("grouped",),
    find=_in_one_launch,
    multiplied=Multiplied(are_apart, together_us, hides=False),
    wanted=lambda limits: limits.multiprocessors > 0,
    most_inputs=MAX_INPUTS,
)
