"""The record of a compilation: what was found, chosen and refused, and why; plain data for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from weft.frontends.imported import Imported
from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.ir.prims import FREE
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.plan import Plan, Step
from weft.kernels.record import CompileRecord, Neighbour, NodeRecord, PlanRecord, StageRecord, StepRecord
from weft.kernels.source import CallStep, CallValue, CudaSource, KernelSource, LibraryCall, Ref
from weft.orchestrate.enumerate import Enumeration
from weft.pipeline.problems import Problems, Task
from weft.pipeline.search.prices import Known
from weft.pipeline.verdict import UNTUNED, Judged
from weft.runtime.any import AnyExecutable
from weft.runtime.memory import MemoryPlan

MAX_NEIGHBOURS = 4


@dataclass(frozen=True, slots=True)
class Parts:
    """What a record is made from."""

    imported: Imported
    graph: Graph
    found: Enumeration
    problems: Problems
    known: Known
    plans: Sequence[Plan]
    timed: tuple[PlanRecord, ...]
    chosen: str
    union: Graph
    """With the alternatives: what plans are made of."""
    executable: AnyExecutable | None
    """The best plan; None: none is left."""
    in_place_us: Sequence[float] = ()
    """Of each step of the executable's plan, where it stands; empty: not measured."""
    verdict: Judged = UNTUNED


def record(parts: Parts, model: str, environment: Mapping[str, str], stages: tuple[StageRecord, ...]) -> CompileRecord:
    """Everything that the command line and the report show."""
    plan = parts.executable.plan if parts.executable is not None else Plan("none", ())
    memory = parts.executable.memory if parts.executable is not None else MemoryPlan((), 0, 0)
    graph = parts.union
    around = _Around.of(parts, plan)
    solver = next((p.solver for p in parts.plans if p.solver is not None), None)
    refused = Counter(_refusal(m) for m in parts.known.measurements.values() if m.verdict is not Verdict.OK)
    made = sum(len(k.pairs) for k in parts.known.kernels.values())
    declined = Counter(why for k in parts.known.kernels.values() for why in k.declined)
    measured = len(parts.known.measurements)
    return CompileRecord(
        model=model,
        device=environment.get("gpu", "cpu"),
        environment=tuple(sorted(environment.items())),
        operators=parts.imported.operators,
        primitives=sum(n.prim not in FREE for n in graph.nodes),
        primitives_before=sum(n.prim not in FREE for n in parts.imported.graph.nodes),
        stages=stages,
        candidates_raw=parts.found.raw,
        candidates=len(parts.found.candidates),
        capped=parts.found.capped,
        rejected_candidates=tuple(parts.found.rejected.most_common()),
        problems=len(parts.problems.tasks),
        pruned=len(parts.problems.tasks) - len(parts.known.best_us),
        measured=measured - parts.known.reused,
        reused=parts.known.reused,
        rejected_kernels=tuple(refused.most_common()) + tuple(declined.most_common(20)),
        opaque=tuple((u.op, u.reason, u.count) for u in parts.imported.opaque),
        notes=(*parts.imported.notes, f"{made} kernels were generated"),
        solver_seconds=solver.seconds if solver else 0.0,
        solver_gap=solver.gap if solver else 0.0,
        solver_status=solver.status if solver else "none",
        objective_us=solver.objective_us if solver else 0.0,
        plans=parts.timed,
        chosen=parts.chosen,
        steps=tuple(_step(i, s, plan, parts, around) for i, s in enumerate(plan.steps)),
        graph=_nodes(graph, plan),
        arena_bytes=memory.arena_bytes,
        live_bytes=memory.live_bytes,
        weight_bytes=sum(x.nbytes for x in graph.constants.values()),
        seconds=sum(s.seconds for s in stages),
        tuning=parts.verdict.tuning.value,
        unmeasured=parts.verdict.unmeasured,
        wanted=parts.verdict.wanted,
    )


def _refusal(found: Measurement) -> str:
    """In what a refused kernel is counted; one that is right, but over a budget of an SM, by itself."""
    over = found.verdict is Verdict.RESOURCE and "over sm_budget" in found.error
    return "over sm_budget" if over else found.verdict.value


def renamed(
    old: CompileRecord, model: str, imported: Imported, executable: AnyExecutable, stages: tuple[StageRecord, ...]
) -> CompileRecord:
    """The record of a plan that was chosen before, with the names of the model at hand.

    Another model may have had the same graph.
    """
    graph, plan = executable.graph, executable.plan
    steps = tuple(replace(s, operators=_operators(graph, step)) for s, step in zip(old.steps, plan.steps, strict=True))
    return replace(
        old,
        model=model,
        operators=imported.operators,
        opaque=tuple((u.op, u.reason, u.count) for u in imported.opaque),
        stages=stages,
        measured=0,
        steps=steps,
        graph=_nodes(graph, plan),
        seconds=sum(s.seconds for s in stages),
    )


def _operators(graph: Graph, step: Step) -> tuple[str, ...]:
    origins = {graph.nodes[n].origin for n in step.members} - {-1}
    return tuple(dict.fromkeys(graph.origins[o].source or graph.origins[o].rule for o in sorted(origins)))


@dataclass(frozen=True, slots=True)
class _Around:
    """What stands around the steps of a plan, so that each of them need not look at everything."""

    tried: Mapping[str, Sequence[Measurement]]
    """By problem key."""
    over: Mapping[NodeId, Sequence[tuple[Task, Mask]]]
    """By a step's first primitive: problems with the members of their first use, several of them, that compute it."""
    steps: Mapping[NodeId, Sequence[tuple[int, Mask]]]
    """By primitive: positions of the steps that compute it, with their members."""
    shares: Sequence[str]
    """Of each step, what it takes of an SM; empty: that is not bounded."""

    @staticmethod
    def of(parts: Parts, plan: Plan) -> _Around:
        """One pass over measurements, problems and steps."""
        tried: dict[str, list[Measurement]] = {}
        for (key, _), m in parts.known.measurements.items():
            tried.setdefault(key, []).append(m)
        first = mask_of(min(s.members) for s in plan.steps if s.members)
        over: dict[NodeId, list[tuple[Task, Mask]]] = {}
        for task in parts.problems.tasks.values():
            for candidate, _ in task.uses[:1]:
                members = candidate.members
                for node in bits(members & first) if members & (members - 1) else ():
                    over.setdefault(node, []).append((task, members))
        computed: dict[NodeId, list[tuple[int, Mask]]] = {}
        for position, step in enumerate(plan.steps):
            mine = mask_of(step.members)
            for node in step.members:
                computed.setdefault(node, []).append((position, mine))
        return _Around(tried, over, computed, () if parts.executable is None else parts.executable.sm_shares)


def _step(position: int, step: Step, plan: Plan, parts: Parts, around: _Around) -> StepRecord:
    graph = parts.union
    task = parts.problems.tasks.get(step.problem_key)
    tried = around.tried.get(step.problem_key, ())
    return StepRecord(
        position=position,
        schedule=str(step.kernel.schedule),
        kind=step.kind.value,
        primitives=tuple(graph.nodes[n].prim.value for n in step.members),
        nodes=step.members,
        operators=_operators(graph, step),
        inputs=tuple(f"%{n} {graph.type_of(n)} {f.value}" for n, f in step.inputs),
        outputs=tuple(f"%{n} {graph.type_of(n)} {f.value}" for n, f in step.outputs),
        cost_us=step.cost_us,
        bound_us=task.bound_us if task else 0.0,
        predicted_us=task.estimate_us if task else 0.0,
        in_place_us=parts.in_place_us[position] if parts.in_place_us else 0.0,
        runner_up=str(step.runner_up) if step.runner_up else "",
        runner_up_us=step.runner_up_us,
        alternatives=len(tried),
        rejected=sum(m.verdict is not Verdict.OK for m in tried),
        measured=step.measured,
        neighbours=_neighbours(step, plan, parts, around),
        source=step.kernel.text if isinstance(step.kernel, KernelSource | CudaSource) else call_text(step.kernel),
        sm_share=around.shares[position] if around.shares else "",
    )


def call_text(call: LibraryCall) -> str:
    """A library call as readable lines."""
    lines = [f"once  prep{i} = {_call_line(s)}" for i, s in enumerate(call.prepare)]
    lines += [f"call  tmp{i} = {_call_line(s)}" for i, s in enumerate(call.run)]
    return "\n".join(lines)


def _call_line(step: CallStep) -> str:
    args = [_value_text(v) for v in step.args] + [f"{k}={_value_text(v)}" for k, v in step.kwargs]
    return f"{step.target}({', '.join(args)})"


def _value_text(value: CallValue) -> str:
    if isinstance(value, Ref):
        return f"{value.kind}{value.index}"
    if isinstance(value, tuple):
        shown = [_value_text(v) for v in value[:16]] + ["..."] * (len(value) > 16)
        return f"({', '.join(shown)})"
    return str(value)


def _neighbours(step: Step, plan: Plan, parts: Parts, around: _Around) -> tuple[Neighbour, ...]:
    """Larger candidates around a chosen kernel, with what they would cost against the kernels they replace."""
    graph = parts.union
    if not step.members:
        return ()
    mine = mask_of(step.members)
    found = []
    for task, members in around.over.get(min(step.members), ()):
        if mine & ~members or mine == members:
            continue
        replaced = {at: mask for n in bits(members) for at, mask in around.steps.get(n, ()) if not mask & ~members}
        if reduce(or_, replaced.values(), 0) != members:
            continue  # of some kernel it would replace a part only
        parts_us = sum(plan.steps[at].cost_us for at in sorted(replaced))
        cost, reason = _why_not(task, parts, parts_us)
        found.append((cost - parts_us, cost, parts_us, reason, members))
    found.sort(key=lambda n: n[0])
    return tuple(
        Neighbour(f"+ {', '.join(graph.nodes[n].prim.value for n in bits(members & ~mine))}", cost, parts_us, reason)
        for _, cost, parts_us, reason, members in found[:MAX_NEIGHBOURS]
    )


def _why_not(task: Task, parts: Parts, parts_us: float) -> tuple[float, str]:
    best = parts.known.best_us.get(task.problem.key)
    if best is None:
        price = parts.known.price(task)
        if not parts.known.complete:
            return price, "not measured: the time was up before it was known whether a better plan uses it"
        return price, "not measured: even at its optimistic price no better plan uses it"
    if math.isinf(best):
        return best, "no generator makes it, or every kernel was refused"
    verdict = "slower than its parts" if best >= parts_us else "faster alone, but other kernels need the values inside"
    return best, verdict


def _nodes(graph: Graph, plan: Plan) -> tuple[NodeRecord, ...]:
    computed: dict[NodeId, list[int]] = {}
    for position, step in enumerate(plan.steps):
        for node in step.members:
            computed.setdefault(node, []).append(position)
    records = []
    for i, n in enumerate(graph.nodes):
        origin = graph.origins[n.origin] if n.origin >= 0 else None
        records.append(
            NodeRecord(
                id=i,
                prim=n.prim.value,
                type=str(n.type),
                inputs=n.inputs,
                operator=(origin.source or origin.rule) if origin else "",
                location=origin.location if origin else "",
                steps=tuple(computed.get(i, ())),
            )
        )
    return tuple(records)
