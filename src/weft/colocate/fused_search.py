"""Which steps of a plan are worth fusing with a job, and in which shape: measured on this GPU.

Fused kernels of the costliest steps are compiled side by side. Then the plan runs once step by step, and in front of
each such step its kernels are compared, on the values that the step really reads, with the step and the job by
themselves: bit by bit, with nothing to draw, stopped, and at splits of the job (`weft.tune.cuda_pair.verify`). What is
right is timed. Blocks are drawn from a counter of this module's own, and the job's buffers are put back behind it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, final

from weft.colocate.fused_plan import Compiled, FusedPlan, FusedStep, compiled, shapes_for
from weft.colocate.plan_roles import StepRole
from weft.colocate.whole_kernels import drain_of
from weft.device.cuda.facts import GpuFacts
from weft.generate.bind import Addresses, BoundCuda, Prepared
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.prims import Prim
from weft.kernels.colocation import FusionShape
from weft.kernels.plan import Plan
from weft.kernels.samples import StepSamples
from weft.runtime.cuda_executable import Rebind
from weft.tune.cuda_pair import Machine, Memory, Moment, Pair, Side, Wanted, alone, moment, verify, verify_drain
from weft.tune.halving import added_work

SECONDS = 60.0
"""Of a search, about."""
MOST_STEPS = 12
"""That are looked at, the costliest."""
MOST_SHAPES = 6
"""Of a step."""
COMPILERS = 8
COMPILING = 0.6
"""Of the seconds, in which kernels are compiled."""
MOMENT_US = 400.0
"""How long the launches last that are timed together, about."""
ROUNDS = 5
POISON = b"\xa5"
_LATE = "there was no time to measure it"


class SteppedPlan(Protocol):
    """A plan that runs step by step: `CudaExecutable`."""

    @property
    def graph(self) -> Graph:
        """That it computes."""

    @property
    def plan(self) -> Plan:
        """Its steps."""

    def run_steps(self, before: Callable[[int], None]) -> None:
        """Launch them one by one; `before` is called with the number of each, and of none at the end."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Device memory of two work counters that are not the job's."""

    now: int
    fresh: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A fused kernel that is right."""

    shape: FusionShape
    moment: Moment
    fraction: float
    """BE work in one launch, in its time alone, over LC's time alone."""

    @property
    def slowdown(self) -> float:
        """What LC pays."""
        return self.moment.fused_us / self.moment.lc_us - 1.0


@final
@dataclass(slots=True)
class Places:
    """Where a plan's steps lie: noted while it is bound."""

    at: dict[int, tuple[BoundCuda, Addresses]] = field(default_factory=dict)

    def rebound(self, numbers: Sequence[int]) -> dict[int, Rebind]:
        """For `CudaExecutable`: the steps of these numbers are launched as they are."""
        return {n: partial(self._note, n) for n in numbers}

    def _note(self, number: int, kernel: BoundCuda, at: Addresses, dependent: bool) -> Prepared:
        self.at[number] = kernel, at
        return kernel.prepare(at, dependent=dependent)


@final
class FusedSearch:
    """Of one plan and job."""

    def __init__(
        self, fused: FusedPlan, machine: Machine, counters: Counters, facts: GpuFacts, *, block_us: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`block_us`: time of the whole GPU that a block of the job takes alone. `clock`: in seconds."""
        self._fused, self._machine, self._counters, self._facts = fused, machine, counters, facts
        self._block_us, self._clock = block_us, clock
        self.refused: dict[str, str] = dict(fused.refused)
        """By step: why it is not fused."""

    def run(
        self, model: str, make: Callable[[Mapping[int, Rebind]], SteppedPlan], seconds: float = SECONDS
    ) -> tuple[StepSamples, ...]:
        """Samples of the steps that can be fused, each in the shape by which most work is done in the time of a launch.

        `make`: records the plan with some steps launched in another way.

        Raises:
            KernelDeclinedError: the job's constants are not those of its files [W205].
            DeviceError: the GPU refuses something, or a kernel fails [W301, W302].
        """
        end = self._clock() + seconds
        chosen = list(self._fused.steps.values())[:MOST_STEPS]
        for late in list(self._fused.steps)[MOST_STEPS:]:
            self.refused[late] = f"the plan spends more time in {MOST_STEPS} others"
        built = self._built(chosen, seconds * COMPILING)
        places = Places()
        plan = make(places.rebound([s.steps[0] for s in chosen if built.get(s.name)]))
        found: list[StepSamples] = []
        with self._job_kept():

            def look(number: int) -> None:
                step = next((s for s in chosen if s.steps[0] == number and number in places.at), None)
                if step is None:
                    return
                best = self._best(step, built[step.name], _Step(plan, number, *places.at[number]), end)
                if isinstance(best, Declined):
                    self.refused[step.name] = best.reason
                else:
                    found.append(self._samples(model, step, best))

            plan.run_steps(look)
        return tuple(found)

    def _built(self, chosen: Sequence[StepRole], seconds: float) -> dict[str, list[Compiled]]:
        """Kernels that may run, by step: the first shape of every step, then the second, as far as the time goes."""
        job = self._fused.job
        shapes = {s.name: shapes_for(s, job, self._facts)[:MOST_SHAPES] for s in chosen}
        asked = [(s, shapes[s.name][k]) for k in range(MOST_SHAPES) for s in chosen if k < len(shapes[s.name])]
        for step in chosen:
            self.refused[step.name] = _LATE if shapes[step.name] else "no shape holds it and the job"
        built: dict[str, list[Compiled]] = {}
        end = self._clock() + seconds
        with ThreadPoolExecutor(COMPILERS) as pool:
            work = [(s, pool.submit(compiled, s, job, shape, self._facts)) for s, shape in asked]
            for step, future in work:
                if self._clock() > end and future.cancel():
                    continue
                made = future.result()
                if isinstance(made, Declined):
                    self.refused[step.name] = made.reason
                else:
                    built.setdefault(step.name, []).append(made)
        return built

    def _best(self, step: StepRole, kernels: Sequence[Compiled], at: _Step, end: float) -> Measured | Declined:
        """Of the shapes of one step, as many as there is time for."""
        reason, found, want = _LATE, list[Measured](), None
        memory = tuple(at.memory(self._machine))
        for made in kernels:
            if self._clock() > end:
                break
            loaded = self._fused.load(made)
            if isinstance(loaded, Declined):
                reason = loaded.reason
                continue
            pair = self._pair(loaded, at, memory, made.source.stages)
            if isinstance(pair, Declined):
                return pair
            if want is None:
                want = self._wanted(pair)
            if isinstance(want, str):
                return Declined(want)
            if wrong := verify(self._machine, pair, want):
                reason = wrong
                continue
            assert made.source.shape is not None
            one = self._timed(pair, step, made.source.shape)
            if one.fraction > 0:
                found.append(one)
            else:
                reason = "none of the job's blocks run in it"
        return max(found, key=added_work) if found else Declined(reason)

    def _pair(
        self, loaded: FusedStep, at: _Step, memory: tuple[Memory, ...], stages: tuple[int, ...]
    ) -> Pair | Declined:
        job, counters = self._fused.job, self._counters
        drain = drain_of(job, self._facts, counter=counters.now)
        if isinstance(drain, Declined):
            return drain
        fused = loaded.prepare(job, at.kernel, at.addresses, True, counter=counters.now)
        lc = Side((at.kernel.prepare(at.addresses),), memory)
        be = Side(tuple(k.launch for k in job.plain()), self._job_memory)
        return Pair(lc, be, fused, drain.launch, counters.now, counters.fresh, stages, job.exact)

    def _wanted(self, pair: Pair) -> Wanted | str:
        """What both leave by themselves; or why that is no proof."""
        want = alone(self._machine, pair)
        return want if isinstance(want, str) else verify_drain(self._machine, pair, want) or want

    def _timed(self, pair: Pair, step: StepRole, shape: FusionShape) -> Measured:
        launches = max(1, min(64, round(MOMENT_US / max(step.cost_us, 1.0))))
        found = moment(self._machine, pair, launches, ROUNDS)
        return Measured(shape, found, found.blocks * self._block_us / found.lc_us)

    @contextmanager
    def _job_kept(self) -> Iterator[None]:
        """The job's buffers are as they were behind it, whatever ran in them.

        Meanwhile comparisons begin with what the job had at first: a pass that has run before leaves the same again.
        """
        machine, job = self._machine, self._fused.job
        kept = [_kept(machine, *m) for m in job.memory]
        job.forget_results()
        self._job_memory = tuple(_kept(machine, *m) for m in job.memory)
        try:
            yield
        finally:
            for m in kept:
                machine.restore(m, m.before)

    def _samples(self, model: str, step: StepRole, best: Measured) -> StepSamples:
        self.refused.pop(step.name, None)
        m = best.moment
        idle = m.idle_us / m.lc_us - 1.0
        return StepSamples(
            model, self._fused.job.name, step.name, len(step.steps), m.lc_us, best.slowdown, best.fraction,
            idle if math.isfinite(idle) else math.nan, best.fraction > best.slowdown, 0, best.shape,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in front of which the plan stands."""

    plan: SteppedPlan
    number: int
    kernel: BoundCuda
    addresses: Addresses

    def memory(self, machine: Machine) -> Iterator[Memory]:
        """What it reads, as it is now, and what it writes, poisoned."""
        step, graph = self.plan.plan.steps[self.number], self.plan.graph
        for (node, _), address in zip(step.inputs, self.addresses.inputs, strict=True):
            size = graph.type_of(node).nbytes
            if size and graph.nodes[node].prim is not Prim.CONSTANT:  # of what is packed nothing else may be left
                yield _kept(machine, address, size)
        for (node, _), address in zip(step.outputs, self.addresses.outputs, strict=True):
            if size := graph.type_of(node).nbytes:
                machine.write(address, POISON * size)
                yield _kept(machine, address, size)


def _kept(machine: Machine, address: int, size: int) -> Memory:
    return Memory(address, size, machine.keep(Memory(address, size, None)))
