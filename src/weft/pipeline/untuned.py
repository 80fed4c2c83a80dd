"""Executables without measuring: the same candidates, generators and linker, other prices.

For conformance, where the question is whether what is generated is right, not which of it is fast. One graph becomes
several plans, so that its kernels are met in more forms than the tuned plan would have:

    fused    few large kernels, generated wherever a generator takes the problem
    single   one kernel per primitive, generated where that is possible
    mixed    random groups, formats and schedules, reproducible from a seed; library calls among them
    library  the library plan, without a generated kernel
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.errors import InvalidGraphError
from weft.frontends.imported import Imported
from weft.generate.library.covered import is_covered
from weft.generate.registry import generators
from weft.ir.passes import clean_up
from weft.kernels.candidate import Kind
from weft.kernels.plan import Plan
from weft.kernels.source import CudaSource, Kernel, KernelSource, LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.select import heuristic
from weft.pipeline import choose
from weft.pipeline.link import link
from weft.pipeline.problems import Problems, Task, collect
from weft.pipeline.search.kernels import Depth, Order, write
from weft.pipeline.setting import Setting, survey
from weft.runtime.any import AnyExecutable

WAYS = ("fused", "single", "mixed", "library")
LIBRARY = 1e6
"""A library call's price next to that of a generated kernel, where generated ones are wanted."""
CALLS = 0.2
"""Share of library calls in a mixed plan, where both are possible."""
ROUNDS = 200
_PRIMITIVES = frozenset({Kind.SINGLE, Kind.CONVERT})
Kernels = tuple[tuple[Schedule, Kernel], ...]


@dataclass(frozen=True)
class Untuned:
    """The distinct plans of one graph, linked; the first way that led to a plan names it."""

    executables: Mapping[str, AnyExecutable]

    @property
    def generated(self) -> int:
        """Distinct generated kernels in all plans."""
        steps = [s for e in self.executables.values() for s in e.plan.steps]
        return len({s.kernel.sha256 for s in steps if isinstance(s.kernel, KernelSource | CudaSource)})


def build(imported: Imported, options: Options, ways: Sequence[str] = WAYS) -> Untuned:
    """Plan in each of the `ways`, compile, link; nothing is run.

    Raises:
        WeftError: what the compiler says; never because of a time that is missing.
    """
    setting = survey(options)
    cleaned = clean_up(imported.graph, strict=options.strict)
    platform = setting.platform
    alternatives = platform.find_alternatives(cleaned.graph, strict=options.strict)
    found = enumerate_candidates(alternatives.graph, platform.limits(options, platform.facts), alternatives)
    problems = collect(alternatives.graph, found.candidates, alternatives, platform.facts)
    built: dict[str, AnyExecutable] = {}
    seen: set[object] = set()
    for way in ways:
        plan = plan_in(way, problems, alternatives, setting)
        identity = tuple((s.kernel, s.inputs, s.outputs) for s in plan.steps)
        if identity not in seen:
            seen.add(identity)
            built[way] = link(alternatives.graph, plan, setting)
    return Untuned(built)


def plan_in(way: str, problems: Problems, alternatives: Alternatives, setting: Setting) -> Plan:
    """One plan. Kernels are emitted on demand: only of problems that the plan of some round wants.

    Raises:
        InvalidGraphError: no plan exists: our bug [W901].
        ValueError: a `way` that is not in `WAYS`.
    """
    maker = _Maker(setting, way)
    if way == "library":
        calls = [(t, maker.covered(t)) for t in problems.tasks.values() if t.called]
        ranked = [choose.Ranked(t, k, (1.0,) * len(k), measured=False, rejected=0) for t, k in calls if k]
        return choose.library_plan(alternatives.graph, ranked, alternatives, setting.options, setting.platform.facts)
    tasks = list(problems.tasks.values())
    for _ in range(ROUNDS):
        ranked = [
            choose.Ranked(t, maker.kernels.get(t.problem.key, ()), (price,), measured=False, rejected=0)
            for t in tasks
            if math.isfinite(price := maker.price(t))
        ]
        offers = choose.offers(ranked, kinds=_PRIMITIVES if way == "single" else None)
        chosen = heuristic(alternatives.graph, [o.priced for o in offers], alternatives=alternatives)
        fresh = {t.problem.key: t for i in chosen if (t := offers[i].ranked.task).problem.key not in maker.kernels}
        if not fresh:
            return choose.assemble(way, offers, chosen, alternatives, None)
        for task in fresh.values():
            maker.make(task)
    raise InvalidGraphError(problem=f"no {way} plan after {ROUNDS} rounds")


class _Maker:
    """The one kernel of each problem that a way of planning asks for, and the problem's price."""

    def __init__(self, setting: Setting, way: str) -> None:
        if way not in WAYS:
            raise ValueError(f"{way!r} is none of {WAYS}")
        self.kernels: dict[str, Kernels] = {}
        """By problem key; empty where nothing takes the problem."""
        self._setting = setting
        self._way = way
        platform, self._device = setting.platform, setting.platform.kind
        self._generators = generators(library=False, generated=platform.compiler is not None, device=self._device)

    def price(self, task: Task) -> float:
        """What the plan is charged: the estimate, or a random number; library calls only where nothing else is."""
        made = self.kernels.get(task.problem.key)
        if made == ():
            return math.inf
        price = task.estimate_us if self._way == "fused" else 1.0
        if self._way == "mixed":
            price = self._rng(task).lognormvariate(0.0, 1.0)
        called = made is not None and isinstance(made[0][1], LibraryCall)
        return price * LIBRARY if called and self._way != "mixed" else price

    def make(self, task: Task) -> None:
        """Ask the generators, then the library."""
        calls = self.library(task) if task.essential else ()
        own = self._own(task)
        if self._way == "mixed":
            rng = self._rng(task)
            rng.shuffle(own)
            prefer_call = rng.random() < CALLS
            found = (*calls, *own) if prefer_call else (*own, *calls)
        else:
            found = (*own, *calls)
        self.kernels[task.problem.key] = tuple(found[:1])

    def library(self, task: Task) -> Kernels:
        """Library calls of a problem, the operator's own before primitive by primitive."""
        setting = self._setting
        makers = generators(generated=False, device=self._device)
        return write(Order(task, Depth.ALL), makers, setting.platform.facts, setting.options).pairs

    def covered(self, task: Task) -> Kernels:
        """As a plan that nobody measured takes them: the forms that a test covers; others where there is none."""
        calls = self.library(task)
        tested = [x for x in calls if isinstance(x[1], LibraryCall) and is_covered(task.problem, x[1], self._device)]
        return tuple(tested) or (calls if task.essential else ())

    def _own(self, task: Task) -> list[tuple[Schedule, Kernel]]:
        setting = self._setting
        options = setting.options if self._way == "mixed" else replace(setting.options, keep_per_problem=1)
        return list(write(Order(task, Depth.ALL), self._generators, setting.platform.facts, options).pairs)

    def _rng(self, task: Task) -> random.Random:
        seed = f"{self._setting.options.seed}|{task.problem.key}"
        return random.Random(hashlib.sha256(seed.encode()).digest())
