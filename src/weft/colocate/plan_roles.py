"""Which steps of a plan can be latency-critical roles: each is written anew from the plan's graph and its schedule.

A plan has texts, no roles. One is taken only where the kernel of its roles is the plan's own, byte for byte: so a fused
kernel computes what the plan computes, and packed weights, workspace and state are where its step has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import InvalidGraphError
from weft.generate.cuda.generator import CudaGenerator
from weft.generate.cuda.role.assemble import solo
from weft.generate.cuda.role.fused import lc_role, of_launch
from weft.generate.cuda.role.role import RoleSource
from weft.ir.declined import Declined
from weft.ir.graph import Graph, mask_of
from weft.kernels.candidate import Candidate, Problem
from weft.kernels.plan import Plan, Step
from weft.kernels.source import CudaSource
from weft.orchestrate.extract import extract

_DIGITS = 12
"""Of a text's SHA-256 in the name of a step."""


@dataclass(frozen=True, slots=True)
class StepRole:
    """A kernel of a plan as a latency-critical role."""

    name: str
    """The same in every process: by the kernel's text."""
    steps: tuple[int, ...]
    """Positions in the plan that launch it."""
    source: CudaSource
    """As the plan has it, all its launches."""
    role: RoleSource
    """The launch that best-effort roles stand beside."""
    launch: int
    """Its number."""
    cost_us: float
    """Of one step, as the plan was tuned."""

    @property
    def weight_us(self) -> float:
        """Of all its steps."""
        return self.cost_us * len(self.steps)


def name_of(source: CudaSource) -> str:
    """Of a step, by its kernel: the template and the begin of its text's SHA-256."""
    template = dict(source.schedule.params).get("template", "loops")
    return f"{template} {source.sha256[:_DIGITS]}"


def roles_of(graph: Graph, plan: Plan) -> tuple[list[StepRole], dict[str, str]]:
    """The kernels of a plan that can be roles, those first that it spends most time in; and why others cannot, by name.

    Steps with the same text are one.
    """
    alike: dict[str, list[int]] = {}
    for number, step in enumerate(plan.steps):
        if isinstance(step.kernel, CudaSource):
            alike.setdefault(step.kernel.sha256, []).append(number)
    found: list[StepRole] = []
    refused: dict[str, str] = {}
    for numbers in alike.values():
        step = plan.steps[numbers[0]]
        assert isinstance(step.kernel, CudaSource)
        made = _role(graph, step, step.kernel)
        if isinstance(made, Declined):
            refused[name_of(step.kernel)] = made.reason
            continue
        role, launch = made
        found.append(StepRole(name_of(step.kernel), tuple(numbers), step.kernel, role, launch, step.cost_us))
    return sorted(found, key=lambda s: -s.weight_us), refused


def longest(source: RoleSource) -> int:
    """The launch that has most room for best-effort blocks: what copies operands or adds sums up has no tiles."""
    return max(range(len(source.launched)), key=lambda k: source.launched[k].shared_bytes)


def _role(graph: Graph, step: Step, kernel: CudaSource) -> tuple[RoleSource, int] | Declined:
    problem = _problem(graph, step)
    if isinstance(problem, Declined):
        return problem
    every = CudaGenerator().roles(problem, kernel.schedule)
    if isinstance(every, Declined):
        return every
    entry = kernel.launches[0].entry.removesuffix(f"_{every.launched[0].name}" if every.launched[0].name else "")
    if solo(every, entry).sha256 != kernel.sha256:
        return Declined("this version of Weft writes another kernel than the plan has")
    number = longest(every)
    one = every if len(every.launched) == 1 else of_launch(every, number)
    declined = lc_role(one)
    return declined if isinstance(declined, Declined) else (one, number)


def _problem(graph: Graph, step: Step) -> Problem | Declined:
    """What the step computes, cut out of the graph once more."""
    formats = dict(step.inputs), dict(step.outputs)
    inputs, outputs = (tuple(sorted(x)) for x in formats)
    candidate = Candidate(mask_of(step.members), inputs, outputs, step.kind)
    try:
        found = extract(graph, candidate, [formats[0][n] for n in inputs], [formats[1][n] for n in outputs])
    except (InvalidGraphError, KeyError):
        return Declined("its problem is not to be read back from the plan: it computes another form of a value")
    if found.problem.key != step.problem_key:
        return Declined("its problem is not to be read back from the plan: the text differs")
    return found.problem
