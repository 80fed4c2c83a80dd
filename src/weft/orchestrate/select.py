"""Candidates with costs -> the cheapest plans: the adapter between graphs and the integer program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from weft.errors import InvalidGraphError
from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.remembered import while_it_lives
from weft.kernels.candidate import Candidate, Kind
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.heuristic import heuristic_plan
from weft.orchestrate.images import formats_in
from weft.orchestrate.instance import Instance, Option, Way, execute, out_of_reach
from weft.orchestrate.memory import fits
from weft.orchestrate.program import Solution, best_solutions, plan_by_windows, presolve
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
    memory_limit: int = 0,
    core: bool = False,
    start: Sequence[int] = (),
) -> list[Solution]:
    """Up to `plans` distinct choices, best first; `Solution.chosen` are positions in `priced`, in execution order.

    Graph inputs and outputs are row-major. A graph output behind reshapes or broadcasts asks for its stored root.
    `memory_limit` bounds the bytes of all values alive at once, results included, inputs and weights not; 0: none.
    `core` is the faster way through many options of like price, `start` a plan: see `program.best_solutions`.

    Raises:
        InvalidGraphError: some result has no kernel that produces it [W901].
        OptionError: no plan was found within the limit [W001].
    """
    instance = build_instance(graph, priced, alternatives=alternatives, launch_us=launch_us)
    instance = replace(instance, memory_limit=memory_limit)
    try:
        return best_solutions(instance, plans, gap=gap, seconds=seconds, core=core, start=start)
    except InvalidGraphError as error:
        raise _named(error, graph, instance) from None


def select_by_windows(
    graph: Graph,
    priced: Sequence[Priced],
    *,
    alternatives: Alternatives | None = None,
    seconds: float = 1.5,
    start: Sequence[int] = (),
    begin: float = 0.0,
) -> tuple[Solution, float]:
    """One choice, for programs that are too large to be solved as a whole: see `program.plan_by_windows`.

    Raises:
        InvalidGraphError: some result has no kernel that produces it [W901].
    """
    instance = build_instance(graph, priced, alternatives=alternatives)
    try:
        return plan_by_windows(instance, seconds=seconds, start=start, begin=begin)
    except InvalidGraphError as error:
        raise _named(error, graph, instance) from None


def heuristic(
    graph: Graph, priced: Sequence[Priced], *, alternatives: Alternatives | None = None, launch_us: float = 0.0
) -> tuple[int, ...]:
    """The plan without a solver: positions in `priced`, in execution order.

    Raises:
        InvalidGraphError: some result has no kernel that produces it [W901].
    """
    instance = build_instance(graph, priced, alternatives=alternatives, launch_us=launch_us)
    try:
        return heuristic_plan(instance, presolve(instance))
    except InvalidGraphError as error:
        raise _named(error, graph, instance) from None


def _named(error: InvalidGraphError, graph: Graph, instance: Instance) -> InvalidGraphError:
    """What is missing by what it is in the graph, the first of it; the error itself where nothing is."""
    nodes = list(dict.fromkeys(v // 2 for v in out_of_reach(instance)))
    if not nodes:
        return error
    shown = ", ".join(f"%{i} {graph.nodes[i].prim.value} {graph.type_of(i)}{_of_operator(graph, i)}" for i in nodes[:3])
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return InvalidGraphError(problem=f"no kernel produces the values {shown}{more}")


def _of_operator(graph: Graph, node: NodeId) -> str:
    origin = graph.nodes[node].origin
    return f" of {graph.origins[origin].source}" if origin >= 0 and graph.origins[origin].source else ""


def is_within(
    graph: Graph,
    priced: Sequence[Priced],
    order: Sequence[int],
    memory_limit: int,
    *,
    alternatives: Alternatives | None = None,
) -> bool:
    """Does a choice, run in this order, keep to a limit as `select` understands it?"""
    if not memory_limit:
        return True
    return fits(replace(build_instance(graph, priced, alternatives=alternatives), memory_limit=memory_limit), order)


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
    translate = _translation(alternatives)
    options = []
    for p in priced:
        reads, writes, computes = translate(p.candidate, p.input_formats, p.output_formats)
        options.append(Option(reads, writes, p.cost_us, computes, p.launches, p.candidate.kind is Kind.CONVERT))
    stored = Stored.of(graph)
    roots = [stored_root(graph, o) for o in graph.outputs]
    ranks, unavoidable, ways = _structure(alternatives)
    return Instance(
        tuple(options),
        frozenset(2 * i for i in graph.inputs),
        frozenset(2 * r for r in roots if stored.work >> r & 1),
        unavoidable,
        ways,
        tuple(ranks[v // 2] for v in range(2 * len(graph))),
        launch_us,
        tuple(graph.type_of(v // 2).nbytes for v in range(2 * len(graph))),
    )


_Numbers = tuple[frozenset[int], frozenset[int], frozenset[int]]


@while_it_lives
def _translation(
    alternatives: Alternatives,
) -> Callable[[Candidate, tuple[Format, ...], tuple[Format, ...]], _Numbers]:
    """What a candidate reads, writes and computes, as numbers: the same for every set of costs."""
    classes, graph, count = alternatives.classes, alternatives.graph, len(alternatives.graph)
    inputs = set(graph.inputs)
    duals = mask_of(i for i in range(count) if len(formats_in(graph, i)) > 1)
    weights = frozenset(i for i in bits(Stored.of(graph).leaves) if i not in inputs)
    several = frozenset(classes) | frozenset(classes.values())

    @cache
    def number(node: NodeId, format: Format) -> int:
        node = classes.get(node, node)
        return 2 * node + int(format is Format.LAST and bool(duals >> node & 1))

    @cache
    def computes(members: Mask) -> frozenset[int]:
        found = [classes.get(m, m) for m in bits(members)]
        return frozenset((*found, *(count + m for m in bits(members) if m in several)))

    @cache
    def translate(c: Candidate, ins: tuple[Format, ...], outs: tuple[Format, ...]) -> _Numbers:
        reads = frozenset(number(i, f) for i, f in zip(c.inputs, ins, strict=True) if i not in weights)
        writes = frozenset(number(o, f) for o, f in zip(c.outputs, outs, strict=True))
        return reads, writes, computes(c.members)

    return translate


@while_it_lives
def _structure(alternatives: Alternatives) -> tuple[tuple[int, ...], frozenset[int], tuple[Way, ...]]:
    """Ranks, unavoidable values and ways: the same for every set of costs."""
    needs = Needs.of(Stored.of(alternatives.graph), alternatives)
    return tuple(alternatives.ranks()), needs.unavoidable, needs.ways


@dataclass(frozen=True, slots=True)
class Needs:
    """What every plan computes, and what every plan computes that takes one of several primitives of a value.

    A base below the number of nodes is a value (its class); node v's own primitive, where a value has several, is the
    number of nodes plus v.
    """

    unavoidable: frozenset[int]
    ways: tuple[Way, ...]

    @staticmethod
    def of(stored: Stored, alternatives: Alternatives) -> Needs:
        """One sweep: a value needs itself and what each of its primitives needs, a primitive what its operands need.

        That is exact, as no value is its own ancestor in the union graph: a value cannot be derived without p iff
        none of its primitives can, a primitive iff one of its operands cannot.
        """
        classes, ranks, n = alternatives.classes, alternatives.ranks(), len(alternatives.graph)
        members: dict[NodeId, list[NodeId]] = {}
        for v in bits(stored.work | alternatives.work):
            members.setdefault(classes.get(v, v), []).append(v)
        needs: dict[NodeId, int] = {}
        behind: dict[NodeId, int] = {}
        for value in sorted(members, key=lambda v: (ranks[v], v)):
            several = len(members[value]) > 1
            common = -1
            for v in members[value]:
                behind[v] = 1 << n + v if several else 0
                for r in bits(stored.reads[v] & ~stored.leaves):
                    behind[v] |= needs.get(classes.get(r, r), 0)
                common &= behind[v]
            needs[value] = common | 1 << value
        every = 0
        for result in bits(stored.results):
            every |= needs[result]
        ways = tuple(
            Way(value, n + v, frozenset(bits(behind[v] & ~every)))
            for value, found in sorted(members.items())
            if len(found) > 1
            for v in found
        )
        return Needs(frozenset(bits(every)), ways)
