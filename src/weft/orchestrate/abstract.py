"""Enumeration on a bare DAG: which sets of primitives may become one kernel.

Knows nothing of types, shapes or devices. Nodes are topological positions, sets are integers. A *single-sink* set has
one member that every other member reaches inside the set; a *convex* set is left by no path that comes back.

Source: Korch (arXiv 2406.09465), theorem 1, for what is enumerated; the growth per sink is ours.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from weft.ir.graph import Mask, NodeId, bits


@dataclass(frozen=True, slots=True)
class Dag:
    """Producers of each node, and what follows from them. Node ids are topological positions."""

    producers: tuple[Mask, ...]
    consumers: tuple[Mask, ...]
    ancestors: tuple[Mask, ...]
    """Strict: a node is not its own ancestor."""
    descendants: tuple[Mask, ...]

    @staticmethod
    def of(producers: Sequence[Mask], order: Sequence[NodeId] | None = None) -> Dag:
        """The DAG with these direct producers; `order` is topological where the positions are not.

        Raises:
            ValueError: a producer stands behind its consumer.
        """
        n = len(producers)
        order = range(n) if order is None else order
        consumers, ancestors, descendants = [0] * n, [0] * n, [0] * n
        done = 0
        for v in order:
            if producers[v] & ~done:
                late = next(bits(producers[v] & ~done))
                raise ValueError(f"producer {late} does not stand before {v}")
            done |= 1 << v
            for p in bits(producers[v]):
                consumers[p] |= 1 << v
                ancestors[v] |= ancestors[p] | 1 << p
        for v in reversed(order):
            for c in bits(consumers[v]):
                descendants[v] |= descendants[c] | 1 << c
        return Dag(tuple(producers), tuple(consumers), tuple(ancestors), tuple(descendants))

    def __len__(self) -> int:
        return len(self.producers)

    def inputs_of(self, members: Mask) -> Mask:
        """Nodes outside a set that a member reads."""
        found = 0
        for m in bits(members):
            found |= self.producers[m]
        return found & ~members

    def missing(self, members: Mask) -> Mask:
        """Nodes outside a set that lie on a path from member to member; 0 for a convex set."""
        above = below = 0
        for m in bits(members):
            above |= self.ancestors[m]
            below |= self.descendants[m]
        return above & below & ~members

    def written(self, members: Mask, results: Mask = 0) -> Mask:
        """Members that somebody outside reads, or that are among `results`."""
        found = members & results
        for m in bits(members):
            if self.consumers[m] & ~members:
                found |= 1 << m
        return found


@dataclass(frozen=True, slots=True)
class Reentry:
    """When a set may be left by a path that returns: the returning value becomes an input, the prefix is recomputed.

    With `barriers` = all nodes and `forbidden` = 0 this admits every set whose members reach the sink inside it.
    """

    forward: tuple[Mask, ...]
    """Per node: what it reaches over paths without a barrier."""
    backward: tuple[Mask, ...]
    forbidden: Mask
    """Nodes that the missing path must not contain."""
    slack: float
    """Bytes read may grow by this factor when a shared value is recomputed."""

    @staticmethod
    def of(dag: Dag, barriers: Mask, forbidden: Mask = 0, slack: float = float("inf")) -> Reentry:
        """A path that returns must contain a barrier (a reduction, say), else it is closed as in the convex case."""
        n = len(dag)
        forward, backward = [0] * n, [0] * n
        order = sorted(range(n), key=lambda v: dag.ancestors[v].bit_count())  # topological: ancestors have fewer
        for v in order:
            for p in bits(dag.producers[v] & ~barriers):
                backward[v] |= backward[p] | 1 << p
        for v in reversed(order):
            for c in bits(dag.consumers[v] & ~barriers):
                forward[v] |= forward[c] | 1 << c
        return Reentry(tuple(forward), tuple(backward), forbidden, slack)

    def reach(self, members: Mask, known: tuple[Mask, Mask]) -> tuple[Mask, Mask]:
        """What these reach, and what reaches them, over paths without a barrier; `known`: of other members."""
        below, above = known
        for m in bits(members):
            below |= self.forward[m]
            above |= self.backward[m]
        return below, above

    def reason(self, larger: Around, members: Around, *, weighed: bool) -> str:
        """Why `larger`, grown from `members`, is refused; "" where it is convex or may re-enter.

        `weighed`: their costs are what reading them costs.
        """
        if not larger.missing:
            return ""
        if larger.missing & self.forbidden:
            return "re-entrant past a linear primitive"
        if weighed and larger.cost > members.cost * self.slack:
            return "re-entrant set reads more"
        return ""


@final
@dataclass(frozen=True, slots=True)
class Around:
    """What lies around a set, kept with it: a larger one differs in the members that it adds."""

    members: Mask
    producers: Mask
    above: Mask
    below: Mask
    reads: Mask
    reached: tuple[Mask, Mask]
    """See `Reentry.reach`."""
    cost: float
    """Of reading what producers give."""

    @property
    def inputs(self) -> Mask:
        """See `Dag.inputs_of`."""
        return self.producers & ~self.members

    @property
    def read(self) -> Mask:
        """What members read of others."""
        return self.reads & ~self.members

    @property
    def missing(self) -> Mask:
        """See `Dag.missing`."""
        return self.above & self.below & ~self.members


@dataclass(frozen=True, slots=True)
class Grown:
    """The sets of one sink."""

    around: tuple[Around, ...]
    """Of each set, in the order found: {sink} first."""
    raw: int
    """Sets made, repetitions included."""
    capped: bool
    """True when `cap` stopped the growth."""

    @property
    def sets(self) -> tuple[Mask, ...]:
        """In the order found."""
        return tuple(x.members for x in self.around)


@final
@dataclass(frozen=True, slots=True)
class _Surveyor:
    """Says what lies around sets."""

    dag: Dag
    reads: Sequence[Mask]
    weight: Callable[[Mask], float]
    reentry: Reentry | None

    def around(self, members: Mask, smaller: Around | None = None) -> Around:
        """Of a set that holds a `smaller` one."""
        dag, reads, reentry = self.dag, self.reads, self.reentry
        producers = above = below = read = 0
        reached = 0, 0
        added = members
        if smaller is not None:
            added &= ~smaller.members
            producers, above, below, read = smaller.producers, smaller.above, smaller.below, smaller.reads
            reached = smaller.reached
        for m in bits(added):
            producers |= dag.producers[m]
            above |= dag.ancestors[m]
            below |= dag.descendants[m]
            read |= reads[m]
        if reentry is not None:
            reached = reentry.reach(added, reached)
        return Around(members, producers, above, below, read, reached, self.weight(producers & ~members))


def grow(
    dag: Dag,
    sink: NodeId,
    admit: Callable[[Mask], str],
    *,
    weight: Callable[[Mask], float] | None = None,
    cap: int = 0,
    reentry: Reentry | None = None,
    reads: Sequence[Mask] | None = None,
    rejected: Counter[str] | None = None,
) -> Grown:
    """All admitted sets with this sink: convex ones, and with `reentry` those it allows.

    Start at {sink}; add a producer and everything between it and the sink. A convex single-sink set strictly larger
    than another contains a producer of it and hence the closure, so nothing is missed and every set visited is convex.

    `admit` gives "" or the reason against a set. It must be monotone: no superset of a refused set is admitted.
    `weight(inputs)` says what the reading of some nodes costs. With a `cap` the cheapest sets by it are visited first,
    after one greedy chain to a maximal set, so that a wide join keeps its full fusion. `reads` (None: producers) is
    what `Around.read` tells of.
    """
    rejected = Counter() if rejected is None else rejected
    around = _Surveyor(
        dag, dag.producers if reads is None else reads, weight or (lambda mask: float(mask.bit_count())), reentry
    ).around
    start = 1 << sink
    reason = admit(start)
    if reason:
        rejected[reason] += 1
        return Grown((), 1, capped=False)
    seen = {start}
    found: list[Around] = []
    raw = 1

    def choices(at: Around) -> Iterator[tuple[Mask, str | None]]:
        """Sets with one more producer, closed, and why not, as far as that was asked.

        Such as nothing that holds them is admitted are left as they are.
        """
        members = at.members
        reached = at.reached
        for p in bits(at.inputs):
            near = members | 1 << p
            if refused := admit(near):
                yield near, refused
                continue
            closed = near | dag.descendants[p] & dag.ancestors[sink]
            if reentry is None:
                yield closed, None
                continue
            larger = closed
            if closed == near or not (refused := admit(closed)):
                below, above = reentry.reach(closed & ~members, reached)
                larger |= below & above
            yield larger, (refused if larger == closed else None)
            if closed != near:
                own = near | (reached[0] | reentry.forward[p]) & (reached[1] | reentry.backward[p])
                if own != larger:
                    yield own, ("" if own == near else None)

    def steps(at: Around) -> Iterator[Around]:
        nonlocal raw
        for larger, known in choices(at):
            raw += 1
            if larger in seen:
                continue
            seen.add(larger)
            reason = admit(larger) if known is None else known
            if reason:
                rejected[reason] += 1
                continue
            grown = around(larger, at)
            if reentry is not None and (reason := reentry.reason(grown, at, weighed=weight is not None)):
                rejected[reason] += 1
                continue
            yield grown

    first = around(start)
    if not cap:
        stack = [first]
        while stack:
            at = stack.pop()
            found.append(at)
            stack.extend(steps(at))
        return Grown(tuple(found), raw, capped=False)

    found.append(first)
    heap: list[tuple[float, int, Mask, Around]] = []

    def priced(at: Around) -> tuple[float, int, Mask, Around]:
        return at.cost, -at.members.bit_count(), at.members, at

    current = first
    while True:  # the greedy chain: the next set is always the one that reads least
        ahead = [priced(t) for t in steps(current)]
        if not ahead:
            break
        ahead.sort()
        current = ahead[0][3]
        found.append(current)
        for entry in ahead[1:]:
            heapq.heappush(heap, entry)
        if len(found) >= cap:
            break
    while heap and len(found) < cap:
        at = heapq.heappop(heap)[3]
        found.append(at)
        for t in steps(at):
            heapq.heappush(heap, priced(t))
    return Grown(tuple(found), raw, capped=bool(heap))


@dataclass(frozen=True, slots=True)
class Census:
    """Korch's own count, by pairs of execution states: exponential, for tests and small graphs."""

    states: int
    pairs: int
    """Ordered pairs of a state and a strictly larger one."""
    raw: int
    """Pairs whose difference is admitted and has one sink."""
    unique: frozenset[Mask]


def census(dag: Dag, admit: Callable[[Mask], str]) -> Census:
    """Enumerate predecessor-closed sets and take differences, as in Korch's section 4."""
    states = {0}
    frontier = [0]
    while frontier:
        state = frontier.pop()
        for v in range(len(dag)):
            if not state >> v & 1 and not dag.producers[v] & ~state:
                larger = state | 1 << v
                if larger not in states:
                    states.add(larger)
                    frontier.append(larger)
    pairs = raw = 0
    unique = set()
    for small in states:
        for large in states:
            if small == large or small & ~large:
                continue
            pairs += 1
            difference = large & ~small
            if not admit(difference) and single_sink(dag, difference) >= 0:
                raw += 1
                unique.add(difference)
    return Census(len(states), pairs, raw, frozenset(unique))


def single_sink(dag: Dag, members: Mask) -> NodeId:
    """The member that all others reach inside the set; -1 if there is none."""
    if not members:
        return -1
    sink = members.bit_length() - 1
    reached = frontier = 1 << sink
    while frontier:
        grown = 0
        for m in bits(frontier):
            grown |= dag.producers[m]
        frontier = grown & members & ~reached
        reached |= frontier
    return sink if reached == members else -1
