"""The records of a plan's steps: each kernel beside those that it competed with, and the larger ones it kept out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from weft.ir.graph import Graph, Mask, NodeId, bits, mask_of
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.plan import Plan, Step
from weft.kernels.record import Neighbour, StepRecord
from weft.kernels.source import CallStep, CallValue, CudaSource, KernelSource, LibraryCall, Ref
from weft.pipeline.problems import Problems, Task
from weft.pipeline.search.prices import Known

MAX_NEIGHBOURS = 4
"""Larger candidates that are told of for each step."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """A plan with what its steps are told beside, looked up once for all of them."""

    graph: Graph
    plan: Plan
    problems: Problems
    known: Known
    tried: Mapping[str, Sequence[Measurement]]
    """By problem key."""
    larger: Mapping[NodeId, Sequence[tuple[Task, Mask]]]
    """By a step's first primitive: problems with the members of their first use, several of them, that compute it."""
    steps: Mapping[NodeId, Sequence[tuple[int, Mask]]]
    """By primitive: positions of the steps that compute it, with their members."""

    @classmethod
    def of(cls, graph: Graph, plan: Plan, problems: Problems, known: Known) -> StepContext:
        """One pass over measurements, problems and steps."""
        tried: dict[str, list[Measurement]] = {}
        for (key, _), m in known.measurements.items():
            tried.setdefault(key, []).append(m)
        first = mask_of(min(s.members) for s in plan.steps if s.members)
        larger: dict[NodeId, list[tuple[Task, Mask]]] = {}
        for task in problems.tasks.values():
            for candidate, _ in task.uses[:1]:
                members = candidate.members
                for node in bits(members & first) if members & (members - 1) else ():
                    larger.setdefault(node, []).append((task, members))
        steps: dict[NodeId, list[tuple[int, Mask]]] = {}
        for position, step in enumerate(plan.steps):
            mine = mask_of(step.members)
            for node in step.members:
                steps.setdefault(node, []).append((position, mine))
        return cls(graph, plan, problems, known, tried, larger, steps)

    def record(self, position: int, *, in_place_us: float, sm_share: str) -> StepRecord:
        """The record of one step; `in_place_us` is 0 and `sm_share` empty where that is not known."""
        graph, step = self.graph, self.plan.steps[position]
        task = self.problems.tasks.get(step.problem_key)
        tried = self.tried.get(step.problem_key, ())
        return StepRecord(
            position=position,
            schedule=str(step.kernel.schedule),
            kind=step.kind.value,
            primitives=tuple(graph.nodes[n].prim.value for n in step.members),
            nodes=step.members,
            operators=operators(graph, step),
            inputs=tuple(f"%{n} {graph.type_of(n)} {f.value}" for n, f in step.inputs),
            outputs=tuple(f"%{n} {graph.type_of(n)} {f.value}" for n, f in step.outputs),
            cost_us=step.cost_us,
            bound_us=task.bound_us if task else 0.0,
            predicted_us=task.estimate_us if task else 0.0,
            in_place_us=in_place_us,
            runner_up=str(step.runner_up) if step.runner_up else "",
            runner_up_us=step.runner_up_us,
            alternatives=len(tried),
            rejected=sum(m.verdict is not Verdict.OK for m in tried),
            measured=step.measured,
            neighbours=self._neighbours(step),
            source=step.kernel.text if isinstance(step.kernel, KernelSource | CudaSource) else call_text(step.kernel),
            sm_share=sm_share,
        )

    def _neighbours(self, step: Step) -> tuple[Neighbour, ...]:
        """Larger candidates around a chosen kernel, with what they would cost against the kernels they replace."""
        if not step.members:
            return ()
        mine = mask_of(step.members)
        found = []
        for task, members in self.larger.get(min(step.members), ()):
            if mine & ~members or mine == members:
                continue
            replaced = {at: mask for n in bits(members) for at, mask in self.steps.get(n, ()) if not mask & ~members}
            if reduce(or_, replaced.values(), 0) != members:
                continue  # of some kernel it would replace a part only
            replaced_us = sum(self.plan.steps[at].cost_us for at in sorted(replaced))
            cost_us, reason = self._why_not(task, replaced_us)
            found.append((cost_us - replaced_us, cost_us, replaced_us, reason, members))
        found.sort(key=lambda n: n[0])
        prims = self.graph.nodes
        return tuple(
            Neighbour(f"+ {', '.join(prims[n].prim.value for n in bits(members & ~mine))}", cost_us, replaced_us, why)
            for _, cost_us, replaced_us, why, members in found[:MAX_NEIGHBOURS]
        )

    def _why_not(self, task: Task, replaced_us: float) -> tuple[float, str]:
        """What a larger candidate costs, and why the plan has those of `replaced_us` instead."""
        best = self.known.best_us.get(task.problem.key)
        if best is None:
            price = self.known.price(task)
            if not self.known.complete:
                return price, "not measured: the time was up before it was known whether a better plan uses it"
            return price, "not measured: even at its optimistic price no better plan uses it"
        if math.isinf(best):
            return best, "no generator makes it, or every kernel was refused"
        slower = best >= replaced_us
        return best, "slower than its parts" if slower else "faster alone, but other kernels need the values inside"


def operators(graph: Graph, step: Step) -> tuple[str, ...]:
    """The model's operators that a step computes, by their names in the model, else by the rules that took them."""
    origins = {graph.nodes[n].origin for n in step.members} - {-1}
    return tuple(dict.fromkeys(graph.origins[o].source or graph.origins[o].rule for o in sorted(origins)))


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
