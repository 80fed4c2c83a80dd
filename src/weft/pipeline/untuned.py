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
from weft.pipeline.problems import Entry, Problems, collect, make_kernels
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
    maker = _Maker(problems, setting, way)
    if way == "library":
        calls = [(e, maker.covered(e)) for e in problems.entries.values() if e.called]
        ranked = [choose.Ranked(e, k, (1.0,) * len(k), measured=False, rejected=0) for e, k in calls if k]
        return choose.library_plan(alternatives.graph, ranked, alternatives, setting.options)
    entries = list(problems.entries.values())
    for _ in range(ROUNDS):
        ranked = [
            choose.Ranked(e, maker.kernels.get(e.problem.key, ()), (price,), measured=False, rejected=0)
            for e in entries
            if math.isfinite(price := maker.price(e))
        ]
        offers = choose.offers(ranked, kinds=_PRIMITIVES if way == "single" else None)
        chosen = heuristic(alternatives.graph, [o.priced for o in offers], alternatives=alternatives)
        fresh = {e.problem.key: e for i in chosen if (e := offers[i].ranked.entry).problem.key not in maker.kernels}
        if not fresh:
            return choose.assemble(way, offers, chosen, alternatives, None)
        for entry in fresh.values():
            maker.make(entry)
    raise InvalidGraphError(problem=f"no {way} plan after {ROUNDS} rounds")


class _Maker:
    """The one kernel of each problem that a way of planning asks for, and the problem's price."""

    def __init__(self, problems: Problems, setting: Setting, way: str) -> None:
        if way not in WAYS:
            raise ValueError(f"{way!r} is none of {WAYS}")
        self.kernels: dict[str, Kernels] = {}
        """By problem key; empty where nothing takes the problem."""
        self._problems = problems
        self._setting = setting
        self._way = way
        platform, self._device = setting.platform, setting.platform.kind
        self._generators = generators(library=False, generated=platform.compiler is not None, device=self._device)

    def price(self, entry: Entry) -> float:
        """What the plan is charged: the estimate, or a random number; library calls only where nothing else is."""
        made = self.kernels.get(entry.problem.key)
        if made == ():
            return math.inf
        price = entry.estimate_us if self._way == "fused" else 1.0
        if self._way == "mixed":
            price = self._chance(entry).lognormvariate(0.0, 1.0)
        called = made is not None and isinstance(made[0][1], LibraryCall)
        return price * LIBRARY if called and self._way != "mixed" else price

    def make(self, entry: Entry) -> None:
        """Ask the generators, then the library."""
        calls = self.library(entry) if entry.essential else ()
        own = self._own(entry)
        if self._way == "mixed":
            chance = self._chance(entry)
            chance.shuffle(own)
            prefer_call = chance.random() < CALLS
            found = (*calls, *own) if prefer_call else (*own, *calls)
        else:
            found = (*own, *calls)
        self.kernels[entry.problem.key] = tuple(found[:1])

    def library(self, entry: Entry) -> Kernels:
        """Library calls of a problem, the operator's own before primitive by primitive."""
        alone = replace(entry, kernels=None, widened=True)
        setting = self._setting
        makers = generators(generated=False, device=self._device)
        return tuple(make_kernels(alone, self._problems, makers, setting.platform.facts, setting.options))

    def covered(self, entry: Entry) -> Kernels:
        """As a plan that nobody measured takes them: the forms that a test covers; others where there is none."""
        calls = self.library(entry)
        tested = [x for x in calls if isinstance(x[1], LibraryCall) and is_covered(entry.problem, x[1], self._device)]
        return tuple(tested) or (calls if entry.essential else ())

    def _own(self, entry: Entry) -> list[tuple[Schedule, Kernel]]:
        alone = replace(entry, kernels=None, widened=True)
        setting = self._setting
        options = setting.options if self._way == "mixed" else replace(setting.options, keep_per_problem=1)
        return make_kernels(alone, self._problems, self._generators, setting.platform.facts, options)

    def _chance(self, entry: Entry) -> random.Random:
        seed = f"{self._setting.options.seed}|{entry.problem.key}"
        return random.Random(hashlib.sha256(seed.encode()).digest())
