"""A plan some of whose steps have the roles of a best-effort job in their CTAs, recorded as any plan is.

    fused = FusedPlan(plan.graph, plan.plan, job, facts)
    rebound = fused.rebound({"tma 0123456789ab": shape})            # or Declined
    made = CudaExecutable(plan.linked, rebound=rebound, ...)          # its graphs launch the fused kernels

A fused kernel takes its step's own buffers: inputs, outputs, packed weights, workspace and state. Its best-effort roles
draw from the job's work counter while its CTAs' latency-critical roles run, and end with them: what they draw is what
there is room for (Aker's split at the opportune ratio). Nobody has to launch or stop a kernel besides; the counter is
armed in front of a query and told to stop behind it.

Dependent launches stay: latency-critical threads of a fused kernel wait for the kernels before as they do in the plan,
and best-effort ones, which need nothing of the plan, run meanwhile. What follows waits for the blocks that were drawn,
too. A step that waits for other streams begins when all before it has ended, fused or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import final

from weft.colocate.fuse import LOOP_REGISTERS, judged
from weft.colocate.kernel_job import KernelJob
from weft.colocate.plan_roles import StepRole, roles_of
from weft.colocate.whole_kernels import WholeKernels, whole_kernels
from weft.device.cuda.confined import ConfinedResult
from weft.device.cuda.facts import GpuFacts
from weft.errors import DeviceError
from weft.generate.bind import Addresses, BoundCuda, Prepared
from weft.generate.bind_fused import BoundFused, among
from weft.generate.cuda.role.fused import fuse, shapes
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.kernels.colocation import FusedSource, FusionShape
from weft.kernels.plan import Plan
from weft.runtime.cuda_executable import Rebind

ENTRY = "w_fused"
LEAST_THREADS = 96
"""Of a best-effort role: smaller ones never won on an H200."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A fused kernel of a step that may run."""

    step: StepRole
    source: FusedSource
    result: ConfinedResult


@dataclass(frozen=True, slots=True)
class FusedStep:
    """The same on the GPU."""

    step: StepRole
    bound: BoundFused

    def prepare(
        self, job: KernelJob, alone: BoundCuda, at: Addresses, dependent: bool, *, counter: int = 0
    ) -> Prepared:
        """All launches of the step, the fused one among them, at its addresses.

        `counter`: another one than the job's own, for measurements.
        """
        begins = dependent or self.step.launch > 0
        fused = self.bound.prepare([at, *job.addresses], counter or job.counter, dependent=begins)
        if len(self.step.source.launches) == 1:
            return fused
        return among(alone, self.step.launch, fused, at, dependent=dependent)


def is_for_plans(shape: FusionShape) -> bool:
    """Whether kernels of this shape may share one counter with others.

    Those that fill their grid number their launches in it, as if all were of one kernel; those that draw in time keep
    one kernel's clocks there.
    """
    return not shape.fill_grid and not shape.in_time


def shapes_for(step: StepRole, job: KernelJob, facts: GpuFacts) -> list[FusionShape]:
    """Shapes worth trying: of each place, number of threads and of registers one.

    Of each place in turn, those first whose best-effort threads have as many registers as the job's kernels have by
    themselves.
    """
    kinds: dict[object, FusionShape] = {}
    for s in shapes(step.role, [one.source for one in job.sides], facts):
        if is_for_plans(s) and (s.place == "extra" or s.replicas == 1) and s.threads * s.replicas >= LEAST_THREADS:
            kinds.setdefault((s.place, s.threads * s.replicas, s.registers and s.registers.best_effort), s)
    wanted = job.registers + LOOP_REGISTERS
    every = sorted(kinds.values(), key=lambda s: s.registers is not None and s.registers.best_effort < wanted)
    turn = {s: sum(x.place == s.place for x in every[:k]) for k, s in enumerate(every)}
    return sorted(every, key=turn.__getitem__)


def compiled(step: StepRole, job: KernelJob, shape: FusionShape, facts: GpuFacts) -> Compiled | Declined:
    """A fused kernel of a step, compiled under limits and judged by what the assembler says.

    Several threads may compile for one job.
    """
    if not is_for_plans(shape):
        return Declined("kernels of this shape cannot share a work counter with others")
    source = fuse(step.role, [s.source for s in job.sides], shape, entry=ENTRY, facts=facts)
    if isinstance(source, Declined):
        return source
    (result,) = job.compiler([job.asked(source)])
    if isinstance(result, Declined):
        first = next((x for x in result.reason.splitlines() if "error" in x), result.reason[:200])
        return Declined(f"it does not compile for {facts.arch}: {first[:300]}")
    reason = judged(step.role, source, result, facts.arch, facts, job.compiler)
    return Compiled(step, source, result) if reason is None else Declined(reason)


@final
class FusedPlan:
    """The steps of one plan beside one job. Each kernel is compiled and loaded once, in whatever variants it stands."""

    def __init__(self, graph: Graph, plan: Plan, job: KernelJob, facts: GpuFacts, *, lanes: int = 1) -> None:
        """`lanes`: in how many streams the plan is recorded."""
        self._graph, self._plan, self.job, self._facts, self._lanes = graph, plan, job, facts, lanes
        self._loaded: dict[tuple[str, FusionShape], FusedStep | Declined] = {}

    @cached_property
    def steps(self) -> Mapping[str, StepRole]:
        """Those that can be roles, by name, those first that the plan spends most time in."""
        return {s.name: s for s in self._found[0]}

    @property
    def refused(self) -> Mapping[str, str]:
        """Why the other generated kernels cannot."""
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[Sequence[StepRole], Mapping[str, str]]:
        return roles_of(self._graph, self._plan)

    @cached_property
    def _whole(self) -> WholeKernels | Declined:
        if self._lanes > 1:
            return Declined(f"the plan runs in {self._lanes} streams, and whole kernels stand between steps of one")
        return whole_kernels(self.job, self._facts)

    def load(self, made: Compiled) -> FusedStep | Declined:
        """On the GPU, with constants filled; or why it cannot run there.

        Raises:
            KernelDeclinedError: the job's constants are not those of its files [W205].
        """
        assert made.source.shape is not None
        key = made.step.name, made.source.shape
        if key not in self._loaded:
            try:
                self._loaded[key] = FusedStep(made.step, self.job.with_roles(made.source, made.result))
            except DeviceError as error:
                self._loaded[key] = Declined(str(error).splitlines()[0])
        return self._loaded[key]

    def fused(self, name: str, shape: FusionShape) -> FusedStep | Declined:
        """The fused kernel of a step by name."""
        if (found := self._loaded.get((name, shape))) is not None:
            return found
        step = self.steps.get(name)
        if step is None:
            return Declined(self.refused.get(name, "the plan has no such step"))
        made = compiled(step, self.job, shape, self._facts)
        return made if isinstance(made, Declined) else self.load(made)

    def rebound(self, chosen: Mapping[str, FusionShape], *, whole: bool = False) -> dict[int, Rebind] | Declined:
        """How the steps of these names are launched, by position in the plan; or why one cannot be.

        `whole`: each runs all kernels of the job once.

        Raises:
            KernelDeclinedError: the job's constants are not those of its files [W205].
            DeviceError: the GPU refuses a kernel [W301, W302].
        """
        around = self._whole if whole else None
        if isinstance(around, Declined):
            return around
        at: dict[int, FusedStep] = {}
        for name, shape in chosen.items():
            one = self.fused(name, shape)
            if isinstance(one, Declined):
                return Declined(f"{name}: {one.reason}")
            at.update(dict.fromkeys(one.step.steps, one))
        if around is None:
            return {n: partial(one.prepare, self.job) for n, one in at.items()}
        ends = min(at, default=0), max(at, default=0)
        return {
            n: partial(_with_all, self.job, one, around, first=n == ends[0], last=n == ends[1]) for n, one in at.items()
        }


def _with_all(
    job: KernelJob, one: FusedStep, around: WholeKernels, alone: BoundCuda, at: Addresses, dependent: bool, *,
    first: bool, last: bool,
) -> Prepared:  # fmt: skip
    """A step with all kernels of the job: the first of them waits for what is before."""
    del dependent
    return around.around(one.prepare(job, alone, at, False), first=first, last=last)
