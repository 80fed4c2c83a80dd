"""The record of a compilation: what was found, chosen and refused, and why; plain data for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from weft.frontends.imported import Imported
from weft.ir.graph import Graph, NodeId
from weft.ir.prims import FREE
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.plan import Plan
from weft.kernels.record import CompileRecord, NodeRecord, StageRecord, StepRecord
from weft.pipeline.job import Decision, Job, Searched
from weft.pipeline.step_records import StepContext, operators
from weft.pipeline.verdict import UNTUNED
from weft.runtime.any import AnyExecutable
from weft.runtime.memory import MemoryPlan


def record(job: Job, searched: Searched, decision: Decision) -> CompileRecord:
    """Everything that the command line and the report show."""
    known, found, imported, graph = searched.known, searched.found, job.imported, job.graph
    executable = decision.executable
    plan = executable.plan if executable is not None else Plan("none", ())
    memory = executable.memory if executable is not None else MemoryPlan((), 0, 0)
    environment, stages = job.setting.platform.environment, tuple(job.stages.records)
    verdict = searched.verdict or UNTUNED
    solver = next((p.solver for p in searched.plans if p.solver is not None), None)
    refused = Counter(_refusal(m) for m in known.measurements.values() if m.verdict is not Verdict.OK)
    declined = Counter(why for k in known.kernels.values() for why in k.declined)
    written = sum(len(k.pairs) for k in known.kernels.values())
    return CompileRecord(
        model=job.model,
        device=environment.get("gpu", "cpu"),
        environment=tuple(sorted(environment.items())),
        operators=imported.operators,
        primitives=sum(n.prim not in FREE for n in graph.nodes),
        primitives_before=sum(n.prim not in FREE for n in imported.graph.nodes),
        stages=stages,
        candidates_raw=found.raw,
        candidates=len(found.candidates),
        capped=found.capped,
        rejected_candidates=tuple(found.rejected.most_common()),
        problems=len(searched.problems.tasks),
        pruned=len(searched.problems.tasks) - len(known.best_us),
        measured=len(known.measurements) - known.reused,
        reused=known.reused,
        rejected_kernels=tuple(refused.most_common()) + tuple(declined.most_common(20)),
        opaque=tuple((u.op, u.reason, u.count) for u in imported.opaque),
        notes=(*imported.notes, f"{written} kernels were generated"),
        solver_seconds=solver.seconds if solver else 0.0,
        solver_gap=solver.gap if solver else 0.0,
        solver_status=solver.status if solver else "none",
        objective_us=solver.objective_us if solver else 0.0,
        plans=decision.plans,
        chosen=decision.chosen,
        steps=_steps(job, searched, decision, plan),
        graph=_nodes(graph, plan),
        arena_bytes=memory.arena_bytes,
        live_bytes=memory.live_bytes,
        weight_bytes=sum(x.nbytes for x in graph.constants.values()),
        seconds=sum(s.seconds for s in stages),
        tuning=verdict.tuning.value,
        unmeasured=verdict.unmeasured,
        wanted=verdict.wanted,
    )


def _steps(job: Job, searched: Searched, decision: Decision, plan: Plan) -> tuple[StepRecord, ...]:
    context = StepContext.of(job.graph, plan, searched.problems, searched.known)
    times = decision.step_us or [0.0] * len(plan.steps)
    shares = (() if decision.executable is None else decision.executable.sm_shares) or [""] * len(plan.steps)
    both = zip(times, shares, strict=True)
    return tuple(context.record(k, in_place_us=us, sm_share=share) for k, (us, share) in enumerate(both))


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
    steps = tuple(replace(s, operators=operators(graph, step)) for s, step in zip(old.steps, plan.steps, strict=True))
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
