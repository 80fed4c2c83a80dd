"""From measurements to plans: price every use of every problem, solve, and turn choices into steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.device.any import DeviceFacts
from weft.generate.library.algorithm import names_algorithm
from weft.generate.library.cost import overhead_us
from weft.generate.library.execute import is_capturable
from weft.ir.attrs import InputAttrs
from weft.ir.graph import Graph, NodeId, bits
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.candidate import Candidate, Kind, Problem
from weft.kernels.formats import Format, formats_of
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.plan import Plan, Step
from weft.kernels.source import Kernel, LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.extract import Extracted
from weft.orchestrate.program import Solution
from weft.orchestrate.select import Priced, heuristic, is_within, select
from weft.pipeline.problems import Problems, Task
from weft.pipeline.search.prices import Known
from weft.platform.table import platform_of

UNMEASURED_FACTOR = 4.0
"""An estimate stands in for a missing time only to keep the program feasible: it is made unattractive."""
UNVERIFIED_FACTOR = 1.25
"""Calls that were verified without being timed are taken before those that must be verified still."""
SOLVER_S, SOLVER_SHARE = 3.0, 0.05
"""Where programs are large, the final plans are solved for in this share of the budget, at least so many seconds."""


TURNED = 2.0
"""What a convolution of row-major images costs besides its call, in calls: its operand and its result are turned."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """The kernels of one problem that may be used, fastest first."""

    task: Task
    kernels: tuple[tuple[Schedule, Kernel], ...]
    times_us: tuple[float, ...]
    measured: bool
    rejected: int


@dataclass(frozen=True, slots=True)
class Offer:
    """One use of a problem, as the integer program sees it."""

    priced: Priced
    ranked: Ranked
    candidate: Candidate
    cut: Extracted


WORTH_TURNING_US = 10.0
"""By so much a call on a GPU is better in another order of its images, where they are turned for it alone."""
TRANSFORMED = ("winograd4", "winograd2")
"""Algorithms whose rounding is larger than that of a plain sum, worst first: each kernel is within its limits, but a
deep network may add them up to more than the whole model may be off by."""


Stands = Callable[[Task, LibraryCall], bool]
"""Whether a call may stand in a plan unmeasured."""


def rank(
    problems: Problems, known: Known, *, library_only: bool, avoid: Sequence[str] = (), stands: Stands | None = None
) -> list[Ranked]:
    """Per problem the accepted kernels by time; of essential problems without any, the calls that may stand in.

    Kernels with an `algorithm` in `avoid` are left out. `stands`: None: every call may that nothing speaks against; it
    must be verified before the plan runs.
    """
    measurements = known.measurements
    found = []
    for task in problems.tasks.values():
        timed = []
        rejected = 0
        for schedule, kernel in known.pairs(task.problem.key):
            if library_only and not isinstance(kernel, LibraryCall):
                continue
            if dict(schedule.params).get("algorithm") in avoid:
                continue
            m = measurements.get((task.problem.key, schedule))
            if m is not None and m.verdict is Verdict.OK:
                timed.append((m.median_us, schedule, kernel))
            rejected += m is not None and m.verdict is not Verdict.OK
        timed = _recorded(timed)
        timed.sort(key=lambda t: t[0])
        if timed:
            kernels = tuple((s, k) for _, s, k in timed)
            found.append(Ranked(task, kernels, tuple(t for t, _, _ in timed), measured=True, rejected=rejected))
            continue
        fresh = [x for x in stand_ins(task, known) if stands is None or stands(task, x[1])]
        if (task.called if library_only else task.essential) and fresh:
            cost = UNMEASURED_FACTOR * max(task.estimate_us, 1.0) + task.policy.unmeasured_call_us
            if not known.is_right(task.problem.key, fresh[0][0]):
                cost *= UNVERIFIED_FACTOR
            found.append(Ranked(task, tuple(fresh), (cost,) * len(fresh), measured=False, rejected=rejected))
    return found


def _recorded(timed: list[tuple[float, Schedule, Kernel]]) -> list[tuple[float, Schedule, Kernel]]:
    """Without calls that wait for the host, where others are right: a GPU's plan that has one is several graphs.

    What that costs the steps around it, no measurement of the call shows.
    """
    return [x for x in timed if not isinstance(x[2], LibraryCall) or is_capturable(x[2])] or timed


def stand_ins(task: Task, known: Known) -> list[tuple[Schedule, LibraryCall]]:
    """Library calls that may stand in for want of a measured kernel, best first: those that nothing speaks against.

    Where each was refused, those that are only odd. First what need not wait for the host (see `_recorded`), of that
    what was verified, then the framework's own calls.
    """
    key = task.problem.key
    calls = [(s, k) for s, k in known.pairs(key) if isinstance(k, LibraryCall) and (key, s) not in known.refused]
    tried = [(s, k, known.measurements.get((key, s))) for s, k in calls]
    open_ = [(s, k) for s, k, m in tried if _is_open(m) and not known.is_odd(key, s)]
    fresh = open_ or [(s, k) for s, k, _ in tried if known.is_odd(key, s)]
    return sorted(fresh, key=lambda x: (not is_capturable(x[1]), (key, x[0]) not in known.right, names_algorithm(x[1])))


def _is_open(m: Measurement | None) -> bool:
    """Never measured, or given up on next to a faster kernel: nothing speaks against its being right."""
    return m is None or m.verdict is Verdict.SLOW


def offers(ranked: Sequence[Ranked], *, kinds: frozenset[Kind] | None = None) -> list[Offer]:
    """Every use of every ranked problem, at its best time."""
    made = []
    for r in ranked:
        uses = r.task.uses if kinds is None or Kind.CALL not in kinds else (*r.task.uses, *r.task.calls)
        for candidate, cut in uses:
            if kinds is not None and candidate.kind not in kinds:
                continue
            ins = dict(zip(cut.inputs, cut.problem.input_formats, strict=True))
            outs = dict(zip(cut.outputs, cut.problem.output_formats, strict=True))
            priced = Priced(
                candidate,
                tuple(ins[i] for i in candidate.inputs),
                tuple(outs[o] for o in candidate.outputs),
                r.times_us[0],
            )
            made.append(Offer(priced, r, candidate, cut))
    return made


def plain_plan(
    name: str, graph: Graph, available: Sequence[Offer], alternatives: Alternatives, options: Options
) -> Plan:
    """The best solution alone. OptionError: none was found within the limit on memory."""
    found = _solve(graph, [o.priced for o in available], alternatives, options, plans=1)[0]
    return assemble(name, available, found.chosen, alternatives, found)


def plans(graph: Graph, available: Sequence[Offer], alternatives: Alternatives, options: Options) -> list[Plan]:
    """Up to three solutions of the integer program, and the heuristic plan if it keeps to the limit on memory.

    Raises:
        OptionError: no plan was found within that limit [W001].
    """
    priced = [o.priced for o in available]
    solutions = _solve(graph, priced, alternatives, options, plans=3)
    found = [assemble(f"solution-{i + 1}", available, s.chosen, alternatives, s) for i, s in enumerate(solutions)]
    quick = heuristic(graph, priced, alternatives=alternatives)
    within = platform_of(options.device).policy.heuristic_within
    slow = sum(priced[i].cost_us for i in quick) > within * solutions[0].cost_us
    if not slow and is_within(graph, priced, quick, options.memory_limit_bytes, alternatives=alternatives):
        found.append(assemble("heuristic", available, quick, alternatives, None))
    return found


def _solve(
    graph: Graph, priced: Sequence[Priced], alternatives: Alternatives, options: Options, *, plans: int
) -> list[Solution]:
    large = platform_of(options.device).policy.large_programs
    return select(
        graph,
        priced,
        alternatives=alternatives,
        gap=options.solver_gap,
        seconds=min(options.solver_s, max(SOLVER_S, SOLVER_SHARE * options.budget_s)) if large else options.solver_s,
        plans=plans,
        memory_limit=options.memory_limit_bytes,
        core=large,
    )


def library_plan(
    graph: Graph,
    ranked: Sequence[Ranked],
    alternatives: Alternatives,
    options: Options,
    facts: DeviceFacts,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """One library call per operator where there is one, per primitive elsewhere; no fusion.

    As few calls as possible, changes of format counted; images lie channels-last where that spares libraries more of
    these inside their convolutions.

    Without a budget it is made without a solver, whose loading alone takes a second. Once `stop` says so, the orders of
    images that were tried must do.

    Raises:
        OptionError: no such plan was found within the limit on memory [W001].
    """
    calls = [x for r in ranked if (x := _of_the_framework(r)) is not None]
    available = [o for o in offers(calls, kinds=_CALLED) if not (o.candidate.members & alternatives.extra)]
    launches = platform_of(options.device).policy.counts_launches
    price = _Overheads(facts) if launches else _calls
    priced = [replace(o.priced, cost_us=price(o)) for o in available]
    if (launches or options.budget_s <= 0) and not options.memory_limit_bytes:
        return assemble("library", available, _cheapest(graph, priced, alternatives, stop), alternatives, None)
    fewest = _solve(graph, priced, alternatives, replace(options, solver_gap=0.0), plans=1)[0]
    return assemble("library", available, fewest.chosen, alternatives, None)


_CALLED = frozenset({Kind.SINGLE, Kind.ORIGIN, Kind.CONVERT, Kind.CALL})


def _of_the_framework(ranked: Ranked) -> Ranked | None:
    """Without a library's algorithms by number, where the plan can do without: None if nothing is left.

    The library's best for a problem may be far worse than what the framework makes of the same operators: of
    convolutions of row-major halves with a bias, cuDNN's heuristic names one without tensor cores.
    """
    kept = [k for k, (_, kernel) in enumerate(ranked.kernels) if not names_algorithm(kernel)]
    if len(kept) == len(ranked.kernels) or (not kept and any(c.kind is Kind.SINGLE for c, _ in ranked.task.uses)):
        return ranked
    if not kept:
        return None
    kernels, times = ranked.kernels, ranked.times_us
    return replace(ranked, kernels=tuple(kernels[k] for k in kept), times_us=tuple(times[k] for k in kept))


def _cheapest(
    graph: Graph, priced: Sequence[Priced], alternatives: Alternatives, stop: Callable[[], bool]
) -> Sequence[int]:
    """The best of the plans of all offers, and of those in which images lie in one order wherever they may.

    The way without a solver changes one value after another, and seldom finds its way out of a region in one format.
    """
    best: tuple[float, Sequence[int]] | None = None
    images = any(p.candidate.kind is Kind.CONVERT for p in priced)
    for wanted in (None, Format.LAST, Format.ROW) if images else (None,):
        if best is not None and stop():
            break
        kept = [*range(len(priced))] if wanted is None else _mostly(priced, wanted)
        chosen = heuristic(graph, [priced[k] for k in kept], alternatives=alternatives)
        cost = sum(priced[kept[k]].cost_us for k in chosen)
        if best is None or cost < best[0]:
            best = cost, [kept[k] for k in chosen]
    assert best is not None
    return best[1]


def _mostly(priced: Sequence[Priced], wanted: Format) -> list[int]:
    """Positions of what leaves images in one order, of changes of format, and of what is far better otherwise."""
    there: dict[Candidate, float] = {}
    for p in priced:
        if {*p.input_formats, *p.output_formats} <= {wanted}:
            there[p.candidate] = min(p.cost_us, there.get(p.candidate, math.inf))
    return [
        k
        for k, p in enumerate(priced)
        if p.candidate.kind is Kind.CONVERT
        or {*p.input_formats, *p.output_formats} <= {wanted}
        or p.cost_us < there.get(p.candidate, math.inf) - WORTH_TURNING_US
    ]


class _Overheads:
    """On a GPU: see `generate.library.cost`. One problem stands in many places."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts
        self._known: dict[tuple[str, bool], float] = {}

    def __call__(self, offer: Offer) -> float:
        key = offer.cut.problem.key, offer.candidate.kind is Kind.CONVERT
        if key not in self._known:
            call = offer.ranked.kernels[0][1]
            assert isinstance(call, LibraryCall)
            self._known[key] = overhead_us(offer.cut.problem, call, offer.candidate.kind, self._facts)
        return self._known[key]


def _calls(offer: Offer) -> float:
    """What an offer costs on a CPU, in calls: a change of format inside is one more.

    Turned operands of a convolution are two: oneDNN turns these itself where they are row-major.
    """
    problem = offer.cut.problem
    images = {f for n, f in _images(problem)}
    fast = (DType.F32, DType.BF16)
    turns = images == {Format.ROW} and any(n.prim is Prim.CONV and n.type.dtype in fast for n in problem.graph.nodes)
    return 1.0 + TURNED * turns + (len(images) > 1 and offer.candidate.kind is not Kind.CONVERT)


def _images(problem: Problem) -> Iterator[tuple[NodeId, Format]]:
    """Inputs and outputs that may lie in either format, and how they do."""
    graph = problem.graph
    given = [*zip(graph.inputs, problem.input_formats, strict=True)]
    for node, format_ in (*given, *zip(graph.outputs, problem.output_formats, strict=True)):
        weight = isinstance(at := graph.nodes[node].attrs, InputAttrs) and at.is_weight
        if not weight and len(formats_of(graph.type_of(node))) > 1:
            yield node, format_


def assemble(
    name: str,
    available: Sequence[Offer],
    chosen: Sequence[int],
    alternatives: Alternatives,
    solution: Solution | None,
) -> Plan:
    """A plan of the fastest kernels of the `chosen` offers, in that order."""
    classes = alternatives.classes
    steps = []
    for index in chosen:
        offer = available[index]
        cut, ranked = offer.cut, offer.ranked
        steps.append(
            Step(
                kernel=ranked.kernels[0][1],
                inputs=_stored(cut.inputs, cut.problem.input_formats, classes),
                outputs=_stored(cut.outputs, cut.problem.output_formats, classes),
                members=tuple(bits(offer.candidate.members)),
                kind=offer.candidate.kind,
                problem_key=cut.problem.key,
                cost_us=ranked.times_us[0],
                measured=ranked.measured,
                runner_up=ranked.kernels[1][0] if len(ranked.kernels) > 1 else None,
                runner_up_us=ranked.times_us[1] if len(ranked.times_us) > 1 else 0.0,
            )
        )
    return Plan(name, tuple(steps), None if solution is None else solution.report)


def _stored(
    nodes: Sequence[NodeId], formats: Sequence[Format], classes: Mapping[NodeId, NodeId]
) -> tuple[tuple[NodeId, Format], ...]:
    return tuple((classes.get(n, n), f) for n, f in zip(nodes, formats, strict=True))
