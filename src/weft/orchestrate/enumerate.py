"""Candidates of a graph: single primitives, source operators, grown groups and groups with several outputs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.opaque import call_members
from weft.ir.prims import CATEGORY, Category, Prim
from weft.kernels.candidate import Candidate, Kind
from weft.orchestrate.abstract import Around, Grown, Reentry, grow
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.calls import library_calls
from weft.orchestrate.idiom import Scene
from weft.orchestrate.idioms import IDIOMS
from weft.orchestrate.images import formats_in
from weft.orchestrate.legality import EnumerationLimits, Legality
from weft.orchestrate.moving import Moving, moving
from weft.orchestrate.recomputed import recomputed
from weft.orchestrate.stored import Stored, named_results, origin_cover, tables_inside
from weft.orchestrate.unions import unions


@dataclass(frozen=True, slots=True)
class Enumeration:
    """What was found and what was turned away."""

    candidates: tuple[Candidate, ...]
    """Singles first, then operators, groups, and changes of format, of which no two have equal members and outputs;
    then what only the library plan is made of (`Kind.CALL`)."""
    raw: int
    """Sets made, repetitions included."""
    unique: int
    """Distinct sets visited."""
    rejected: Counter[str]
    """Reasons, with how often."""
    capped: bool
    """True when a limit on counts (not on legality) or the time was hit, so that the list is not complete."""
    seconds: float


FEW_SETS = 16
"""Of a value, where time is short. ResNet-50's training step by estimates: 7.72 ms, 7.58 with all, 9.26 with eight."""


@dataclass(slots=True)
class _Found:
    """Candidates in the order of discovery, each set and outputs once."""

    graph: Graph
    alternatives: Alternatives
    candidates: dict[tuple[Mask, tuple[NodeId, ...]], tuple[int, Candidate]] = field(default_factory=dict)
    calls: list[Candidate] = field(default_factory=list)
    """Apart from the others: the search knows nothing of them."""

    def add(
        self,
        stored: Stored,
        members: Mask,
        outputs: Iterable[NodeId],
        kind: Kind,
        rank: int,
        inputs: Mask | None = None,
    ) -> bool:
        """Note a candidate; False for one that is known. `rank` orders what may be dropped: low stays."""
        written = tuple(sorted(outputs))
        if (members, written) in self.candidates:
            return False
        self.candidates[members, written] = (rank, self.candidate(stored, members, written, kind, inputs))
        return True

    def candidate(
        self, stored: Stored, members: Mask, written: tuple[NodeId, ...], kind: Kind, inputs: Mask | None = None
    ) -> Candidate:
        """A set with what it reads; `inputs`: the stored values, where they are known."""
        classes = self.alternatives.classes
        inputs = stored.inputs_of(members) if inputs is None else inputs
        read = inputs & ~tables_inside(self.graph, members)
        return Candidate(members, tuple(sorted({classes.get(i, i) for i in bits(read)})), written, kind)


def enumerate_candidates(
    graph: Graph,
    limits: EnumerationLimits | None = None,
    alternatives: Alternatives | None = None,
    *,
    hurry: Callable[[], bool] = lambda: False,
    stop: Callable[[], bool] = lambda: False,
) -> Enumeration:
    """Every candidate within the limits. Once `stop` says so no further groups are looked for: see `capped`.

    Once `hurry` says so, of each further value those alone by which it reads least, and what comes behind the groups is
    looked for as ever: products and alternatives, which a plan gains most by, come last.

    With `alternatives` (whose graph must be `graph`) each way to compute a value is enumerated in turn, its readers
    reading that one; inputs are named by the class, outputs by the member that computes them.
    """
    started = time.perf_counter()
    limits = limits or EnumerationLimits()
    alternatives = alternatives or Alternatives(graph, {})
    found = _Found(graph, alternatives)
    rejected: Counter[str] = Counter()
    raw = unique = 0
    capped = False
    every: dict[NodeId, tuple[Mask, ...]] = {}
    whole: tuple[Moving, ...] = ()
    for version in range(alternatives.versions):
        instead = alternatives.version(version)
        stored = Stored.of(graph, instead)
        whole = whole if version else moving(graph, stored)
        only = alternatives.extra_of(version)
        grows = only & ~alternatives.apart
        legality = Legality.of(graph, stored, limits)
        _add_singles(found, stored, grows if version else stored.work)
        if version == 0:
            _add_origins(found, stored, rejected)
            if limits.library_calls:
                _add_calls(found, stored)
        if stop():
            capped = True
            continue  # what no plan can do without is there; an alternative needs its primitives to be one
        sinks = _near(stored, legality, grows, alternatives.ends) if version else stored.work
        cuts = stored.work if limits.every_cut else sensible_cuts(graph, stored, whole)
        groups: dict[NodeId, tuple[Mask, ...]] = {}
        # one sink after another: what lies around all sets of all of them is hundreds of megabytes
        for sink, result in _each_grown(graph, stored, legality, sinks & cuts, rejected, hurry, stop):
            raw += result.raw
            unique += len(result.sets)
            capped |= result.capped
            groups[sink] = _add_groups(found, stored, legality, sink, result, rejected, grows, cuts)
        if stop():
            capped = True
            continue
        if limits.multi_output:
            _add_siblings(found, stored, legality, groups, rejected)
        if limits.unions and version == 0:
            for members, outputs in list(unions(graph, stored, [c for _, c in found.candidates.values()])):
                found.add(stored, members, outputs, Kind.GROUP, -1)
        if limits.recomputed and version == 0:
            tables = _together(x.tables for x in whole)
            inner = mask_of(
                i for i in bits(stored.work & ~cuts) if CATEGORY[graph.nodes[i].prim] is Category.ELEMENTWISE
            )
            for members, outputs in list(recomputed(graph, stored, legality, whole)):
                most = limits.max_inputs + (stored.inputs_of(members) & tables).bit_count()
                _add_whole(found, stored, members, outputs, most, 0, rejected)
                _add_vectors(found, stored, legality, members, inner, rejected)
        every = {**every, **groups}
        _add_idioms(found, stored, limits, every, only, rejected, merged=alternatives.versions > 1)
    kept = [c for _, c in found.candidates.values()]
    if limits.max_candidates and len(kept) > limits.max_candidates:
        capped = True
        kept = _drop_excess(found, limits.max_candidates, rejected)
    order = {Kind.SINGLE: 0, Kind.ORIGIN: 1, Kind.GROUP: 2}
    kept.sort(key=lambda c: (order[c.kind], c.outputs, c.members.bit_count(), c.members))
    kept += _conversions(graph, kept, alternatives)
    kept += found.calls
    return Enumeration(tuple(kept), raw, unique, rejected, capped, time.perf_counter() - started)


def _drop_excess(found: _Found, limit: int, rejected: Counter[str]) -> list[Candidate]:
    """So many: what was found as a whole, then of each value those first whose groups read and write least.

    The order in which groups grow says little: those of the first sets are small, and where a set may be cut at few
    values only, what reads least comes late.
    """
    nbytes = [n.type.nbytes for n in found.graph.nodes]
    fixed = [c for _, c in found.candidates.values() if c.kind is not Kind.GROUP]
    writers: dict[tuple[NodeId, ...], list[tuple[int, int, int, Candidate]]] = {}
    for i, (rank, c) in enumerate(found.candidates.values()):
        if c.kind is Kind.GROUP:
            moved = -1 if rank < 0 else sum(nbytes[v] for v in (*c.inputs, *c.outputs))
            writers.setdefault(c.outputs, []).append((moved, -c.members.bit_count(), i, c))
    groups: list[tuple[int, int, Candidate]] = []
    for of in writers.values():
        of.sort(key=lambda entry: entry[:3])
        groups += [(-1 if moved < 0 else place, i, c) for place, (moved, _, i, c) in enumerate(of)]
    groups.sort(key=lambda entry: entry[:2])
    room = max(0, limit - len(fixed))
    rejected["over the limit of candidates"] += max(0, len(groups) - room)
    return fixed + [c for _, _, c in groups[:room]]


def _near(stored: Stored, legality: Legality, extra: Mask, ends: Mask) -> Mask:
    """Sinks whose sets can hold one of `extra`: followers of it up to the next contraction or opaque call.

    Behind `ends` none is looked for.
    """
    barrier = legality.linear | legality.alone
    found = extra & stored.work
    by_itself = mask_of(v for v, mask in legality.with_linear.items() if mask == 1 << v)
    frontier = found & ~by_itself & ~ends
    while frontier:
        grown = 0
        for v in bits(frontier):
            grown |= stored.dag.consumers[v]
        frontier = grown & ~found & ~barrier
        found |= frontier
    return found


def _each_grown(
    graph: Graph,
    stored: Stored,
    legality: Legality,
    sinks: Mask,
    rejected: Counter[str],
    hurry: Callable[[], bool],
    stop: Callable[[], bool],
) -> Iterator[tuple[NodeId, Grown]]:
    """The sets of each sink."""
    limits = legality.limits
    nbytes = [n.type.nbytes for n in graph.nodes]

    def weight(members: Mask) -> float:
        return float(sum(nbytes[m] for m in bits(members)))

    reentry = None
    if limits.reentrant:
        barriers = legality.linear | legality.alone | legality.reductions | legality.windows | legality.scans
        forbidden = legality.linear | legality.alone | legality.scans
        reentry = Reentry.of(stored.dag, barriers, forbidden, limits.reentrant_slack)
    for v in bits(sinks & ~legality.alone):
        if stop():
            break
        yield (
            v,
            grow(
                stored.dag,
                v,
                legality.admit,
                weight=weight,
                cap=min(limits.per_sink or FEW_SETS, FEW_SETS) if hurry() else limits.per_sink,
                reentry=reentry,
                reads=stored.reads,
                rejected=rejected,
            ),
        )


def sensible_cuts(graph: Graph, stored: Stored, whole: Sequence[Moving] = ()) -> Mask:
    """Values that are worth storing.

    Left out: what is inside of an operator that is taken `whole`; a value between two elementwise primitives (or in
    front of a reduction or scan) that has one reader, is no result of the graph and none of a source operator. Whoever
    can compute it can compute its reader as well, at no traffic.
    """
    computed = (Category.ELEMENTWISE, Category.REDUCE, Category.SCAN)
    inside = mask_of(i for i, n in enumerate(graph.nodes) if CATEGORY[n.prim] in computed)
    named = stored.results | named_results(graph)
    found = 0
    for v in bits(stored.work):
        consumers = stored.dag.consumers[v]
        elementwise = CATEGORY[graph.nodes[v].prim] is Category.ELEMENTWISE
        one_reader = consumers and not consumers & (consumers - 1)
        if not (elementwise and one_reader and not consumers & ~inside) or named >> v & 1:
            found |= 1 << v
    return found & ~_together(x.inner for x in whole)


def _add_singles(found: _Found, stored: Stored, work: Mask) -> None:
    done = 0
    for v in bits(work & stored.work):
        if done >> v & 1:
            continue
        members = call_members(found.graph, v) & stored.work if found.graph.nodes[v].prim is Prim.OPAQUE else 1 << v
        done |= members
        found.add(stored, members, bits(members), Kind.SINGLE, -1)


def _add_groups(
    found: _Found,
    stored: Stored,
    legality: Legality,
    sink: NodeId,
    grown: Grown,
    rejected: Counter[str],
    only: Mask,
    cuts: Mask,
) -> tuple[Mask, ...]:
    """Note the groups of one sink; returns those that nobody outside reads but for the sink, largest first."""
    limits = legality.limits
    closed: list[Mask] = []
    for rank, at in enumerate(grown.around):
        members, inputs = at.members, at.read
        if inputs.bit_count() > limits.max_inputs:
            rejected["too many inputs"] += 1
            continue
        if members & (members - 1) and inputs & stored.work & ~cuts:
            rejected["an input that is not worth storing"] += 1
            continue
        convex = not at.missing
        written = stored.dag.written(members, stored.results) & ~(1 << sink) if convex else 0
        if convex and not written:
            closed.append(members)
        if only and not members & only:
            continue  # known from the version without alternatives
        if members & (members - 1):
            found.add(stored, members, (sink,), Kind.GROUP, rank, inputs)
        if limits.multi_output and written:
            _add_store_through(found, stored, legality, sink, at, written, rank)
    closed.sort(key=lambda s: (-s.bit_count(), s))
    return tuple(closed)


def _add_store_through(
    found: _Found, stored: Stored, legality: Legality, sink: NodeId, at: Around, written: Mask, rank: int
) -> None:
    """The same set, which also writes the interior values that others read.

    One that ends in statistics may write those alone: whoever reads what they are made of has that from its inputs.
    """
    nodes = found.graph.nodes
    add = partial(found.add, stored, at.members, kind=Kind.GROUP, rank=rank + 1, inputs=at.read)
    small = mask_of(v for v in bits(written) if nodes[v].type.size <= nodes[sink].type.size)
    if small and small != written and small.bit_count() < legality.limits.max_outputs:
        add((*bits(small), sink))
    if written.bit_count() + 1 > legality.limits.max_outputs or written.bit_count() > 2:
        return
    add((*bits(written), sink))
    if written.bit_count() == 2:
        for extra in bits(written):
            add((extra, sink))


def _add_siblings(
    found: _Found,
    stored: Stored,
    legality: Legality,
    groups: Mapping[NodeId, tuple[Mask, ...]],
    rejected: Counter[str],
) -> None:
    """Unions of groups that read the same value and run over the same index space: one pass instead of several."""
    readers: dict[tuple[NodeId, tuple[int, ...]], list[NodeId]] = {}
    weights = _weights(found.graph, stored)
    for sink, sets in groups.items():
        if not sets or legality.linear & sets[0] or legality.alone >> sink & 1:
            continue
        shape = found.graph.nodes[sink].type.shape
        for value in bits(stored.inputs_of(sets[0]) & ~weights):
            readers.setdefault((value, shape), []).append(sink)
    limits = legality.limits
    for sinks in readers.values():
        pairs = [(s, t) for i, s in enumerate(sinks) for t in sinks[i + 1 :]][:8]
        unions = [*pairs, tuple(sinks)] if 2 < len(sinks) <= limits.max_outputs else pairs
        for chosen in unions:
            members = 0
            for sink in chosen:
                members |= groups[sink][0]
            outputs = stored.dag.written(members, stored.results)
            if mask_of(chosen) & ~outputs or outputs.bit_count() > limits.max_outputs:
                continue  # one is inside another, or too much is read by others
            reason = legality.admit(members) or ("siblings depend on each other" if stored.dag.missing(members) else "")
            if reason:
                rejected[reason] += 1
            elif stored.inputs_of(members).bit_count() <= limits.max_inputs:
                found.add(stored, members, bits(outputs), Kind.GROUP, 2)


def _add_idioms(
    found: _Found,
    stored: Stored,
    limits: EnumerationLimits,
    groups: Mapping[NodeId, tuple[Mask, ...]],
    only: Mask,
    rejected: Counter[str],
    *,
    merged: bool,
) -> None:
    """What templates make one kernel of beyond a group that grows."""
    scene = Scene(found.graph, stored, limits, found.candidates, groups, merged)
    for idiom in IDIOMS:
        if not idiom.wanted(limits):
            continue
        most = limits.max_inputs if idiom.most_inputs is None else idiom.most_inputs
        for members, written in tuple(idiom.find(scene)):
            _add_whole(found, stored, members, written, most, 0 if idiom.of_original else only, rejected)


def _add_whole(
    found: _Found,
    stored: Stored,
    members: Mask,
    written: Sequence[NodeId],
    most: int,
    only: Mask,
    rejected: Counter[str],
) -> None:
    """A group that was found as a whole, unless it reads too much or has nothing of a version's own nodes `only`."""
    if stored.inputs_of(members).bit_count() > most:
        rejected["too many inputs"] += 1
    elif not only or members & only:
        found.add(stored, members, written, Kind.GROUP, -1)


def _add_vectors(
    found: _Found, stored: Stored, legality: Legality, members: Mask, inner: Mask, rejected: Counter[str]
) -> None:
    """What a group reads though no group of a sink writes it, one by one and together: vectors of statistics, say.

    They are computed from values that are worth storing: `inner` are elementwise ones that are not. Without these
    groups each of their primitives is a kernel.
    """
    limits, chains = legality.limits, dict[NodeId, Mask]()
    for v in bits(stored.inputs_of(members) & inner):
        chain = frontier = 1 << v
        while frontier:
            grown = 0
            for m in bits(frontier):
                grown |= stored.reads[m] & inner
            frontier = grown & ~chain
            chain |= frontier
        chains[v] = chain
        if chain & (chain - 1) and not legality.admit(chain):
            _add_whole(found, stored, chain, (v,), limits.max_inputs, 0, rejected)
    every = _together(chains.values())
    last = [v for v in chains if not stored.dag.descendants[v] & every]  # nothing that the others need waits for it
    every = _together(chains[v] for v in last)
    if 1 < len(last) <= limits.max_outputs and not legality.admit(every) and not stored.dag.missing(every):
        _add_whole(found, stored, every, last, limits.max_inputs, 0, rejected)


def _together(masks: Iterable[Mask]) -> Mask:
    """Nodes in any of them."""
    found = 0
    for mask in masks:
        found |= mask
    return found


def _weights(graph: Graph, stored: Stored) -> Mask:
    return mask_of(i for i in bits(stored.leaves) if graph.nodes[i].prim is Prim.CONSTANT)


def _add_origins(found: _Found, stored: Stored, rejected: Counter[str]) -> None:
    for index in range(len(found.graph.origins)):
        cover = origin_cover(found.graph, stored, index)
        if cover is None:
            continue  # nothing left of it, or its operands are gone
        members, outputs = cover
        if stored.dag.missing(members):
            rejected["operator that is not convex any more"] += 1
        elif stored.dag.written(members, stored.results) & ~outputs:
            rejected["operator with an inner value that others read"] += 1
        else:
            written = stored.dag.written(members, stored.results)
            found.add(stored, members, bits(written or outputs), Kind.ORIGIN, -1)


def _add_calls(found: _Found, stored: Stored) -> None:
    operators = [(c.members, c.outputs[0]) for _, c in found.candidates.values() if len(c.outputs) == 1]
    for members, sink in library_calls(found.graph, stored, operators):
        found.calls.append(found.candidate(stored, members, (sink,), Kind.CALL))


def _conversions(graph: Graph, kept: list[Candidate], alternatives: Alternatives) -> list[Candidate]:
    """A change of format for every value that has two."""
    values = set(graph.inputs)
    for candidate in kept:
        values.update(alternatives.classes.get(o, o) for o in candidate.outputs)
    return [Candidate(0, (v,), (v,), Kind.CONVERT) for v in sorted(values) if len(formats_in(graph, v)) > 1]
