"""Candidates with costs -> the cheapest plans: the adapter between graphs and the integer program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from weft.errors import InvalidGraphError
from weft.ir.graph import Graph, NodeId, bits
from weft.kernels.candidate import Candidate, Kind
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.heuristic import heuristic_plan
from weft.orchestrate.images import formats_in
from weft.orchestrate.instance import Instance, Option, execute
from weft.orchestrate.program import Solution, best_solutions, presolve
from weft.orchestrate.stored import Stored, stored_root

StoredValue = tuple[NodeId, Format]


@dataclass(frozen=True, slots=True)
class Priced:
    """One kernel of one candidate in one choice of formats, with what it costs."""

    candidate: Candidate
    input_formats: tuple[Format, ...]
    """In the order of `candidate.inputs`; a weight's format is not looked at."""
    output_formats: tuple[Format, ...]
    """In the order of `candidate.outputs`."""
    cost_us: float
    launches: int = 1


def select(
    graph: Graph,
    priced: Sequence[Priced],
    *,
    alternatives: Alternatives | None = None,
    launch_us: float = 0.0,
    gap: float = 1e-3,
    seconds: float = 30.0,
    plans: int = 3,
) -> list[Solution]:
    """Up to `plans` distinct choices, best first; `Solution.chosen` are positions in `priced`, in execution order.

    Graph inputs and outputs are row-major. A graph output behind reshapes or broadcasts asks for its stored root.

    Raises:
        InvalidGraphError: some result has no kernel that produces it [W901].
    """
    instance = build_instance(graph, priced, alternatives=alternatives, launch_us=launch_us)
    return best_solutions(instance, plans, gap=gap, seconds=seconds)


def heuristic(
    graph: Graph, priced: Sequence[Priced], *, alternatives: Alternatives | None = None, launch_us: float = 0.0
) -> tuple[int, ...]:
    """The plan without a solver: positions in `priced`, in execution order."""
    instance = build_instance(graph, priced, alternatives=alternatives, launch_us=launch_us)
    return heuristic_plan(instance, presolve(instance))


def execution_order(
    graph: Graph, priced: Sequence[Priced], chosen: Iterable[int], *, alternatives: Alternatives | None = None
) -> tuple[int, ...]:
    """An order in which a choice (a library plan, say) can run.

    Raises:
        InvalidGraphError: it cannot, or it does not produce all results.
    """
    instance = build_instance(graph, priced, alternatives=alternatives)
    order, missing = execute(instance, chosen)
    if missing:
        names = values_of(graph)
        lost = [f"%{names[v][0]} {names[v][1].value}" for v in sorted(missing)]
        raise InvalidGraphError(problem=f"the choice never writes {', '.join(lost)}")
    return order


def values_of(graph: Graph) -> list[StoredValue]:
    """Every (node, format), row-major at 2 i and channels-last at 2 i + 1."""
    return [(i, f) for i in range(len(graph)) for f in (Format.ROW, Format.LAST)]


def build_instance(
    graph: Graph, priced: Sequence[Priced], *, alternatives: Alternatives | None = None, launch_us: float = 0.0
) -> Instance:
    """The program's data. Weights are left out: they stand in memory in whatever order a kernel wants."""
    alternatives = alternatives or Alternatives(graph, {})
    classes = alternatives.classes
    stored = Stored.of(graph)
    weights = frozenset(i for i in bits(stored.leaves) if i not in set(graph.inputs))

    def number(node: NodeId, format: Format) -> int:
        node = classes.get(node, node)
        dual = len(formats_in(graph, node)) > 1
        return 2 * node + int(format is Format.LAST and dual)

    options = []
    for p in priced:
        c = p.candidate
        ins = zip(c.inputs, p.input_formats, strict=True)
        outs = zip(c.outputs, p.output_formats, strict=True)
        options.append(
            Option(
                frozenset(number(i, f) for i, f in ins if i not in weights),
                frozenset(number(o, f) for o, f in outs),
                p.cost_us,
                frozenset(classes.get(m, m) for m in bits(c.members)),
                p.launches,
                c.kind is Kind.CONVERT,
            )
        )
    roots = [stored_root(graph, o) for o in graph.outputs]
    ranks, unavoidable, pairs = _structure(alternatives)
    return Instance(
        tuple(options),
        frozenset(2 * i for i in graph.inputs),
        frozenset(2 * r for r in roots if stored.work >> r & 1),
        unavoidable,
        pairs,
        tuple(ranks[v // 2] for v in range(2 * len(graph))),
        launch_us,
    )


@lru_cache(maxsize=4)
def _structure(
    alternatives: Alternatives,
) -> tuple[tuple[int, ...], frozenset[NodeId], tuple[frozenset[NodeId], ...]]:
    """Ranks and unavoidable values and pairs: the same for every set of costs."""
    stored = Stored.of(alternatives.graph)
    unavoidable = unavoidable_values(stored, alternatives)
    return tuple(alternatives.ranks()), unavoidable, unavoidable_pairs(stored, alternatives, unavoidable)


class _Derivation:
    """Which values can be derived from the inputs when some are not computed."""

    def __init__(self, stored: Stored, alternatives: Alternatives) -> None:
        classes = alternatives.classes
        ranks = alternatives.ranks()
        self.results = stored.results
        self.steps: list[tuple[int, int]] = []
        everything = stored.work | alternatives.work
        for v in sorted(bits(everything), key=lambda v: (ranks[classes.get(v, v)], v)):
            reads = 0
            for r in bits(stored.reads[v] & ~stored.leaves):
                reads |= 1 << classes.get(r, r)
            self.steps.append((1 << classes.get(v, v), reads))

    def needs_one_of(self, values: int) -> bool:
        """True if the results cannot be derived without all of these values."""
        have = 0
        for value, reads in self.steps:
            if not value & values and not reads & ~have:
                have |= value
        return bool(self.results & ~have)


def unavoidable_values(stored: Stored, alternatives: Alternatives) -> frozenset[NodeId]:
    """Value classes that every plan computes.

    A class is unavoidable iff the results can no longer be derived from the inputs once all primitives that compute
    it are removed. Without alternatives that is every live value.
    """
    if not alternatives.classes:
        return frozenset(bits(stored.work))
    derivation = _Derivation(stored, alternatives)
    return frozenset(v for v in bits(stored.work) if derivation.needs_one_of(1 << v))


def unavoidable_pairs(
    stored: Stored, alternatives: Alternatives, unavoidable: frozenset[NodeId]
) -> tuple[frozenset[NodeId], ...]:
    """Pairs of a value and a part of its alternative of which every plan computes one.

    Looked for where it can be: what an alternative is made of, against what the original alone is made of.
    """
    if not alternatives.classes:
        return ()
    derivation = _Derivation(stored, alternatives)
    avoidable = stored.work & ~sum(1 << v for v in unavoidable)
    found: dict[frozenset[NodeId], None] = {}
    for extra, original in alternatives.classes.items():
        new = _behind(stored, extra, alternatives.work) & ~(1 << extra)
        old = _behind(stored, original, avoidable)
        for p in bits(old):
            for q in bits(new):
                pair = frozenset((p, q))
                if pair not in found and derivation.needs_one_of(1 << p | 1 << q):
                    found[pair] = None
    return tuple(found)


def _behind(stored: Stored, node: NodeId, allowed: int) -> int:
    """What a value is made of, as long as it is among `allowed`; the value itself included if it is."""
    found = 0
    waiting = [node]
    while waiting:
        v = waiting.pop()
        if v == node or (allowed >> v & 1 and not found >> v & 1):
            found |= 1 << v & allowed
            waiting.extend(bits(stored.reads[v] & allowed & ~found))
    return found
