"""Gradients that compute forward values again, as candidates: one read of what a product left instead of two.

A group that grows is not left by a path through a product that comes back, so that what a backward pass reads of the
forward one would be stored as it is: the distance of each element from its mean, in f32, of a batch norm. Here the set
of a sum, or of a value that a product or the caller reads, goes back over elementwise primitives to values that are in
memory anyway: what products and sums left, and what products read. Sums of one pass over like values are one candidate.
So are a product of the backward pass and all that is elementwise behind it, forward values computed again included: the
gradient of an activation reads what the product of the forward pass left, in 16 bits, instead of two f32 of that size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations

from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.prims import CATEGORY, Category, Prim
from weft.orchestrate.legality import Legality
from weft.orchestrate.moving import Moving
from weft.orchestrate.stored import Stored

LEAST = 1 << 12
"""Elements of a value below which computing it again saves nothing."""
SMALL = 64
"""A value of so many times fewer elements than the largest of a set is a vector of statistics, or made of such."""
TOGETHER = 4
"""Sums in one pass, at most."""
Found = tuple[Mask, tuple[NodeId, ...]]


def recomputed(graph: Graph, stored: Stored, legality: Legality, whole: Sequence[Moving] = ()) -> Iterator[Found]:
    """(members, those that are written), each set once; only such as a path through a product leaves and comes back.

    And those with an operator that is taken `whole`, which no group grows to.
    """
    sets = _Sets(graph, stored, legality, whole)
    seen: set[Found] = set()
    for found in chain(sets.alone(), sets.together(), sets.behind_products(), sets.around_operators()):
        members, written = found
        if found in seen or not members & (members - 1):
            continue
        seen.add(found)
        between = stored.dag.missing(members)
        grows = not between & legality.linear and not members & sets.moved
        if not grows and not any(between & stored.dag.descendants[w] for w in written):
            yield found


class _Sets:
    def __init__(self, graph: Graph, stored: Stored, legality: Legality, whole: Sequence[Moving]) -> None:
        self.graph, self.stored, self.legality, self.whole = graph, stored, legality, whole
        self.size = [n.type.size for n in graph.nodes]
        self.moved = 0
        """Of operators that are taken whole: they count for nothing."""
        for operator in whole:
            self.moved |= operator.members
        self.plain = self.moved | stored.work & mask_of(
            i for i, n in enumerate(graph.nodes) if CATEGORY[n.prim] is Category.ELEMENTWISE
        )
        self.kept = stored.results
        """What is in memory in any case."""
        for v in bits(stored.work & ~self.plain & ~legality.reductions):
            self.kept |= stored.reads[v]
        for operator in whole:  # maxima and their places, which a gradient reads
            self.kept |= operator.results if operator.results & (operator.results - 1) else 0
        self.constants = mask_of(i for i, n in enumerate(graph.nodes) if n.prim is Prim.CONSTANT)
        readers = stored.dag.consumers
        self.read_often = mask_of(v for v in bits(self.plain & ~_inside(whole)) if readers[v] & (readers[v] - 1))
        self.narrow = mask_of(v for v in bits(self.plain & ~_inside(whole)) if self._is_narrow(v))
        self.shared = self.read_often & self.narrow
        """What it may pay to have in memory: gradients that are added up, from which several things follow."""
        self._known: dict[NodeId, list[Mask]] = {}
        """What `_of` gave."""

    def alone(self) -> Iterator[Found]:
        """Each sum, and each value that is kept, by itself."""
        for sink in bits(self.plain & self.kept & ~self.moved | self.legality.reductions & self.stored.work):
            if max(self.size[sink], self._over(sink)) >= LEAST:
                for members in self._of(sink):
                    if not self._refused(members) and self._reads_no_more(members, (sink,)):
                        yield members, (sink,)

    def together(self) -> Iterator[Found]:
        """Sums over the same axes of values of one shape, which read a large value in common."""
        like: dict[object, list[NodeId]] = {}
        for v in bits(self.legality.reductions & self.stored.work):
            node = self.graph.nodes[v]
            shape = self.graph.type_of(node.inputs[0]).shape
            if self.size[node.inputs[0]] >= LEAST:
                like.setdefault((node.prim, node.attrs, shape), []).append(v)
        for sums in like.values():
            readers: dict[NodeId, list[NodeId]] = {}
            sets = {v: self._of(v) for v in sums}
            for v, own in sets.items():
                for x in bits(self._large(own[-1], v) | self._large(own[0], v)):
                    readers.setdefault(x, []).append(v)
            for of in readers.values():
                for chosen in (of[:TOGETHER], *combinations(of[:TOGETHER], 2)):
                    yield from self._joined(tuple(chosen), [sets[v] for v in chosen])

    def behind_products(self) -> Iterator[Found]:
        """Each value that is kept, with the last product before it, whose result nobody else reads.

        Products of what is constant are the forward pass of a trained network: those grow.
        """
        for sink in bits(self.plain & self.kept):
            if self.size[sink] < LEAST:
                continue
            for members in self._of(sink):
                read = self.stored.inputs_of(members)
                products = read & self.legality.linear
                if not products or self._refused(members) or not self._reads_no_more(members, (sink,)):
                    continue
                for product in bits(products):
                    if not self.stored.dag.descendants[product] & read and self._ends(product, members, sink):
                        yield members | 1 << product, (sink,)

    def around_operators(self) -> Iterator[Found]:
        """Each operator that is taken whole, with what is elementwise in front, and behind if it has one result."""
        for operator in self.whole:
            (sink, *more) = bits(operator.results)
            behind = () if more else self._behind(sink)
            for after, end in ((0, sink), *behind):
                written = (end, *more)
                for stops, vectors in ((s, v) for s in (self.kept, self.kept | self.shared) for v in (True, False)):
                    stops &= ~(operator.members | after)
                    members = self._back(operator.members | after, stops, end, vectors=vectors)
                    if not self._refused(members):
                        yield members, written

    def _behind(self, node: NodeId) -> Iterator[tuple[Mask, NodeId]]:
        """Elementwise values of a value, each read by the next alone, that are no wider; and the last."""
        after, size = 0, self.graph.type_of(node)
        while not self.stored.results >> node & 1:
            readers = self.stored.dag.consumers[node]
            if not readers or readers & (readers - 1) or readers & ~self.plain or readers & self.moved:
                return
            (node,) = bits(readers)
            after |= readers
            if self.size[node] != size.size:
                return
            if self.graph.type_of(node).nbytes <= size.nbytes:
                yield after, node

    def _refused(self, members: Mask) -> str:
        """As `Legality.admit`, operators that are taken whole counting for nothing."""
        return self.legality.admit(members & ~self.moved)

    def _ends(self, product: NodeId, members: Mask, sink: NodeId) -> bool:
        """Whether the members, among which nothing is in front of the product, are what a kernel of it may end in."""
        legality, dag = self.legality, self.stored.dag
        if dag.consumers[product] & ~members or self.stored.reads[product] & (members | self.constants):
            return False
        if legality.with_linear[product] == 1 << product or members.bit_count() >= legality.limits.max_members:
            return False
        size, behind = self.size[product], members & dag.descendants[product]
        largest = max(self.size[v] for v in bits(members))
        return largest <= size == self.size[sink] and all(self.size[v] == size for v in bits(behind))

    def _joined(self, sums: tuple[NodeId, ...], sets: Sequence[Sequence[Mask]]) -> Iterator[Found]:
        written = mask_of(sums)
        if len(sums) < 2 or any(self.stored.dag.ancestors[v] & written for v in sums):
            return
        most = max(map(len, sets))
        for alike in zip(*([*own, *[own[-1]] * (most - len(own))] for own in sets), strict=True):
            members = 0
            for one in alike:
                members |= one
            if not self._refused(members) and self._reads_no_more(members, sums):
                yield members, tuple(sorted(sums))

    def _of(self, sink: NodeId) -> list[Mask]:
        """Its sets: back to what is kept, or shared; less what is read of that; and the same without statistics.

        Where all these are too large, or read more, back to what has 16 bits: a pool's gradient is a long chain.
        """
        if sink not in self._known:
            found: list[Mask] = []
            for stops, vectors in ((s, v) for s in (self.kept, self.kept | self.shared) for v in (True, False)):
                members = self._back(1 << sink, stops, sink, vectors=vectors)
                found += [members, self._absorbed(members, stops, sink, vectors=vectors)]
            cut = any(x & self.narrow & ~(1 << sink) for x in found)
            refused = all(self._refused(x) or not self._reads_no_more(x, (sink,)) for x in found)
            if cut and (refused or any(x & self.moved for x in found)):
                found += [self._back(1 << sink, self.kept | self.narrow, sink, vectors=v) for v in (True, False)]
            self._known[sink] = found
        return self._known[sink]

    def _reads_no_more(self, members: Mask, sinks: Sequence[NodeId]) -> bool:
        """Whether it reads no more bytes than with every value in memory that has several readers."""
        stored = 0
        for sink in sinks:
            stored |= self._back(1 << sink, self.kept | self.read_often, sink, vectors=True)

        def read(some: Mask) -> int:
            large = 0
            for sink in sinks:
                large |= self._large(some, sink)
            return sum(self.graph.nodes[u].type.nbytes for u in bits(large))

        return read(members) <= read(stored)

    def _is_narrow(self, node: NodeId) -> bool:
        """Whether a value is large, and of 16 bits or less."""
        return self.graph.nodes[node].type.dtype.itemsize <= 2 and self.size[node] >= LEAST

    def _back(self, start: Mask, stops: Mask, sink: NodeId, *, vectors: bool) -> Mask:
        """With everything elementwise in front, `stops` excepted; `vectors`: and what is small."""
        least = 0 if vectors else max(self.size[sink], self._over(sink)) // SMALL
        members, frontier = start, start
        while frontier:
            before = 0
            for v in bits(frontier):
                before |= self.stored.reads[v]
            frontier = mask_of(u for u in bits(before & self.plain & ~stops & ~members) if self.size[u] >= least)
            members |= frontier
        return members

    def _absorbed(self, members: Mask, stops: Mask, sink: NodeId, *, vectors: bool) -> Mask:
        """With what is read of the stops, but follows from large values that are read in any case."""
        while True:
            read = self._large(members, sink)
            for v in bits(read & stops & self.plain & ~self.moved):
                larger = self._back(members | 1 << v, stops, sink, vectors=vectors)
                if not self._large(larger, sink) & ~read and not self._refused(larger):
                    members = larger
                    break
            else:
                return members

    def _large(self, members: Mask, sink: NodeId) -> Mask:
        """What a set reads that is as large as what it runs over, nearly."""
        least = max(self.size[sink], self._over(sink)) // SMALL
        return mask_of(u for u in bits(self.stored.inputs_of(members)) if self.size[u] > least)

    def _over(self, sink: NodeId) -> int:
        """Elements that a sum adds up; 0 of what is none."""
        if not self.legality.reductions >> sink & 1:
            return 0
        return self.size[self.graph.nodes[sink].inputs[0]]


def _inside(whole: Sequence[Moving]) -> Mask:
    """Values inside of operators that are taken whole."""
    found = 0
    for operator in whole:
        found |= operator.inner
    return found
