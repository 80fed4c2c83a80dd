"""A plan looked at step by step: which kernel is wrong by itself, and how far every value is from the model's own.

Each step, a conversion of the memory format too, is judged on the values that it really read: its primitives are
evaluated in float64 on those, so that what an earlier step did wrong is not held against it. What a step read is also
compared with what was written, so that a value that something else overwrote in between is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from weft.ir.attrs import ConstantAttrs
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.rewrite import compact
from weft.ir.types import Array
from weft.kernels.plan import Step
from weft.pipeline import finish, reference
from weft.runtime.any import AnyExecutable
from weft.runtime.values import Key, survey
from weft.tune.oracle import Mode, evaluate

Classes = Mapping[NodeId, NodeId]
"""Node -> the node whose value it computes in another way (`Alternatives.classes`)."""


@dataclass(frozen=True, slots=True)
class StepCheck:
    """One step on the values that it read."""

    step: int
    schedule: str
    operators: tuple[str, ...]
    """Source operators that it computes, or primitives where they have none; data of the model."""
    ok: bool
    judged: bool
    """False where nothing but the framework says what it means."""
    worst: float
    """Largest absolute error."""
    rms: float
    """Root of the mean square error."""
    note: str = ""


def check_steps(
    executable: AnyExecutable, inputs: Sequence[torch.Tensor], classes: Classes, *, until: float | None = None
) -> list[StepCheck]:
    """Every step of a run on these inputs, in order; fewer where the monotonic clock passes `until`."""
    graph, plan = executable.graph, executable.plan
    values = survey(graph, plan)
    written: dict[Key, torch.Tensor] = {}
    read: list[tuple[torch.Tensor, ...]] = []
    spoilt: list[str] = []
    found: list[StepCheck] = []

    def before(number: int) -> None:
        if until is not None and time.monotonic() > until:
            return
        if number and len(found) == number - 1:
            step = plan.steps[number - 1]
            outputs = [executable.stored(key).clone() for key in step.outputs]
            written.update(zip(step.outputs, outputs, strict=True))
            found.append(_checked(graph, number - 1, step, read[-1], outputs, classes, spoilt[-1]))
            for key in [k for k in written if values.last_use(k) < number]:
                del written[key]
        if number < len(plan.steps):
            step = plan.steps[number]
            now = tuple(executable.stored(key) for key in step.inputs)
            lost = [k for k, x in zip(step.inputs, now, strict=True) if k in written and not _same(x, written[k])]
            spoilt.append("".join(f"; %{n} was overwritten after it was written" for n, _ in lost))
            read.append(tuple(x.clone() for x in now))
            read[:-1] = [()] * (len(read) - 1)

    executable.run_steps(before, *inputs)
    return found


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _checked(
    graph: Graph,
    number: int,
    step: Step,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    classes: Classes,
    spoilt: str,
) -> StepCheck:
    names = operators_of(graph, step)
    schedule = str(step.kernel.schedule)
    alone = stand_alone(graph, step, classes)
    place = outputs[0].device if outputs else "cpu"
    exact, plain = (evaluate(alone, inputs, mode, seed=0, device=place) for mode in (Mode.PRECISE, Mode.PLAIN))
    if isinstance(exact, Declined) or isinstance(plain, Declined):
        return StepCheck(number, schedule, names, not spoilt, False, 0.0, 0.0, spoilt.removeprefix("; "))
    worst, square, count, note = 0.0, 0.0, 0, spoilt
    for position, got in enumerate(outputs):
        if exact.undefined[position]:
            continue  # any value is right
        mine, want, near = (
            finish.as_array(got), finish.as_array(exact.outputs[position]), finish.as_array(plain.outputs[position])
        )  # fmt: skip
        dtype = graph.type_of(step.outputs[position][0]).dtype
        error = errors_of(mine, want)
        worst, square, count = max(worst, error.worst), square + error.rms**2 * mine.size, count + mine.size
        judged = finish.judged(dtype, mine, want, near, floats=dtype.is_float)
        if not judged.ok:
            note += f"; output {position}: {judged.outside:.2%} outside, cosine {judged.cosine:.6f}"
    rms = (square / count) ** 0.5 if count else 0.0
    return StepCheck(number, schedule, names, not note, True, worst, rms, note.removeprefix("; "))


def operators_of(graph: Graph, step: Step) -> tuple[str, ...]:
    """Source operators of a step's primitives, or these where they have none."""
    sources = (graph.origins[o].source for o in sorted({graph.nodes[m].origin for m in step.members} - {-1}))
    named = tuple(dict.fromkeys(s for s in sources if s))
    return named or tuple(dict.fromkeys(graph.nodes[m].prim.value for m in step.members)) or ("convert",)


def stand_alone(graph: Graph, step: Step, classes: Classes) -> Graph:
    """What a step computes as a graph of its own: one input per value that it reads, one output per value it writes."""
    members = frozenset(step.members)
    inside = {classes[m]: m for m in members if m in classes}
    b = GraphBuilder()
    made: dict[NodeId, NodeId] = {}
    for node, _ in step.inputs:
        fresh = b.input(graph.type_of(node))
        made.setdefault(node, fresh)  # one value may be read in two formats

    def resolved(node: NodeId) -> NodeId:
        if node in members or node in made:  # what is read is read, as a conversion's own value is
            return node
        return inside.get(node, classes.get(node, node))

    def copy(root: NodeId) -> NodeId:
        stack = [resolved(root)]
        while stack:
            node = stack[-1]
            n = graph.nodes[node]
            operands = [resolved(i) for i in n.inputs]
            waiting = [i for i in operands if i not in made] if node not in made else []
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if node not in made:
                made[node] = _copied(b, graph, node, [made[i] for i in operands])
        return made[resolved(root)]

    return b.build([copy(node) for node, _ in step.outputs])


def _copied(b: GraphBuilder, graph: Graph, node: NodeId, operands: Sequence[NodeId]) -> NodeId:
    n = graph.nodes[node]
    if isinstance(n.attrs, ConstantAttrs):
        return b.adopt_constant(n.attrs.digest, graph.constant(node), n.type)
    return b.adopt(n, tuple(operands))


# -- against the model's own values


@dataclass(frozen=True, slots=True)
class Errors:
    """How far values are from those wanted; infinite where one is finite and the other not."""

    worst: float
    rms: float


def errors_of(got: Array, want: Array) -> Errors:
    """Largest and root mean square difference in float64; equal infinities and NaN are no difference."""
    if got.size == 0:
        return Errors(0.0, 0.0)
    mine, wanted = (np.asarray(x, dtype=np.float64).reshape(-1) for x in (got, want))
    with np.errstate(invalid="ignore"):
        apart = np.abs(mine - wanted)
    apart[(mine == wanted) | (np.isnan(mine) & np.isnan(wanted))] = 0.0
    apart[np.isnan(apart)] = np.inf
    return Errors(float(apart.max()), float(np.sqrt(np.mean(apart**2))))


@dataclass(frozen=True, slots=True)
class Layer:
    """What one step stored, against the model's own values there."""

    step: int
    value: str
    """The stored value in the plan's graph: `%12 4x64xf32`."""
    operators: tuple[str, ...]
    weft: Errors
    """Of the plan's value, to float64."""
    framework: Errors
    """Of the framework's own value, to float64."""
    against: str
    """Whose value that is: `onnxruntime`, or `primitives`: one library call each."""
    ok: bool
    note: str = ""


Own = Callable[[Sequence[NodeId]], Mapping[NodeId, Array]]
"""Nodes of the plan's graph -> the framework's values of those that it has."""


def compare(
    executable: AnyExecutable,
    inputs: Sequence[torch.Tensor],
    own: Own | None = None,
    against: str = "",
    named: Graph | None = None,
) -> list[Layer]:
    """Every value that a plan stores against the model's own, in the order of the steps.

    Values are wanted as float64 gives them, or, behind an operator that only the framework knows, as it gives them. How
    far rounding goes is said by the primitives in their own types, one library call each. `own` are the framework's
    values and `against` is its name; `named` is the plan's graph with the names of the source operators.

    Cost: two evaluations of the model; all stored values are held at once, in float64 and twice in their own type.
    """
    graph, plan = named or executable.graph, executable.plan
    own = own or (lambda _: {})
    device = executable.device
    placed = [x.to(device) for x in inputs]
    tf32 = executable.linked.facts.get("allow_tf32") == "True"

    def plain(nodes: Sequence[NodeId]) -> dict[NodeId, Array]:
        wanted = compact(replace(graph, outputs=tuple(nodes), output_names=()))
        found = reference.primitive_by_primitive(wanted, placed, allow_tf32=tf32)
        return {n: finish.as_array(x) for n, x in zip(nodes, found, strict=True)}

    def exact(nodes: Sequence[NodeId]) -> dict[NodeId, Array]:
        opaque: list[bool] = []
        for n in graph.nodes:
            opaque.append(n.prim is Prim.OPAQUE or any(opaque[i] for i in n.inputs))
        known = [n for n in nodes if not opaque[n]]
        wanted = compact(replace(graph, outputs=tuple(known), output_names=()))
        found = evaluate(wanted, placed, Mode.PRECISE, seed=0, exactness=False, device=device)
        assert not isinstance(found, Declined)
        return {n: finish.as_array(x) for n, x in zip(known, found.outputs, strict=True)}

    nodes = sorted({n for step in plan.steps for n, _ in step.outputs})
    near, theirs = plain(nodes), own(nodes)
    want = {**near, **exact(nodes)}
    found: list[Layer] = []

    def before(number: int) -> None:
        if not number:
            return
        step = plan.steps[number - 1]
        for node, format in step.outputs:
            mine = finish.as_array(executable.stored((node, format)))
            dtype = graph.type_of(node).dtype
            judged = finish.judged(dtype, mine, want[node], near[node], floats=dtype.is_float)
            framework = theirs.get(node)
            if framework is not None and framework.shape != mine.shape:
                framework = None  # another tensor of that name
            found.append(
                Layer(
                    number - 1,
                    f"%{node} {graph.type_of(node)}",
                    operators_of(graph, step),
                    errors_of(mine, want[node]),
                    errors_of(near[node] if framework is None else framework, want[node]),
                    "primitives" if framework is None else against,
                    judged.ok,
                    "" if judged.ok else f"{judged.outside:.2%} outside, cosine {judged.cosine:.6f}",
                )
            )

    executable.run_steps(before, *placed)
    return found
