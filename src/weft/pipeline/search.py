"""Which candidates are measured: those that an optimal plan would use if they were as fast as they might be.

    repeat: price measured candidates by their times, the others by an optimistic prediction
            solve the integer program; measure what the best plans use and nobody measured
    until every kernel of the best plan is measured, or the budget is spent

A candidate that never enters a plan even at its optimistic price is never built: that is the pruning. The
prediction is the model's estimate times what its family (same product, or same mix of primitives) was off by so
far, times `OPTIMISM`, and never below the sound lower bound.

Source: measuring on demand is A* with the estimate as heuristic; `weft.orchestrate.estimate` for the numbers.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.ir.graph import Graph
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.program import Solution
from weft.orchestrate.select import Priced, heuristic, select
from weft.pipeline.problems import Entry, Problems

OPTIMISM = 0.85
MAX_ROUNDS = 40
Measure = Callable[[Sequence[Entry]], Mapping[tuple[str, Schedule], Measurement]]
"""Builds, verifies and times the kernels of some problems (and emits them first)."""


@dataclass
class Known:
    """What is known about each problem's time so far."""

    measurements: dict[tuple[str, Schedule], Measurement] = field(default_factory=dict)
    best_us: dict[str, float] = field(default_factory=dict)
    """By problem key; infinite when every kernel was refused."""
    complete: bool = False
    """True when every kernel of the best plan is measured: more time would change nothing."""
    reused: int = 0
    """Measurements that came from the database."""
    ratios: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Family -> log(measured / estimated)."""

    def learn(self, entries: Sequence[Entry], found: Mapping[tuple[str, Schedule], Measurement]) -> None:
        """Take in the measurements of some problems."""
        self.measurements.update(found)
        for entry in entries:
            times = [
                m.median_us
                for schedule, _ in entry.kernels or ()
                if (m := self.measurements.get((entry.problem.key, schedule))) is not None and m.verdict is Verdict.OK
            ]
            tried = [(entry.problem.key, schedule) in self.measurements for schedule, _ in entry.kernels or ()]
            if entry.kernels is None or (not times and not all(tried)):
                continue  # time ran out before it was its turn
            best = self.best_us[entry.problem.key] = min(times, default=math.inf)
            if math.isfinite(best) and entry.estimate_us > 0:
                self.ratios[entry.family].append(math.log(max(best, 1e-3) / entry.estimate_us))
                self.ratios[""].append(self.ratios[entry.family][-1])

    def price(self, entry: Entry) -> float:
        """Measured time, or the optimistic prediction."""
        known = self.best_us.get(entry.problem.key)
        if known is not None:
            return known
        ratios = self.ratios.get(entry.family) or self.ratios.get("") or [0.0]
        return max(entry.bound_us, entry.estimate_us * math.exp(statistics.median(ratios)) * OPTIMISM)


def search(
    graph: Graph,
    problems: Problems,
    alternatives: Alternatives,
    measure: Measure,
    options: Options,
    *,
    out_of_time: Callable[[], bool],
    say: Callable[[str], None],
) -> Known:
    """Measure on demand until the best plan is measured throughout, or `out_of_time` says so."""
    known = Known()
    for number in range(MAX_ROUNDS):
        if out_of_time():
            break
        offers, owners = priced_offers(problems, known)
        solutions = select(
            graph, offers, alternatives=alternatives, gap=options.solver_gap, seconds=options.solver_s, plans=2
        )
        wanted = _unmeasured(solutions[:1], owners, known)
        if not wanted:
            known.complete = True
            break
        quick = heuristic(graph, offers, alternatives=alternatives)
        also = _unmeasured(solutions[1:], owners, known)
        also |= {owners[i].problem.key: owners[i] for i in quick if owners[i].problem.key not in known.best_us}
        # what the best plan needs goes first, the longest first: time may run out
        entries = sorted(wanted.values(), key=_weight)
        entries += sorted((e for k, e in also.items() if k not in wanted), key=_weight)
        say(f"round {number + 1}: {len(entries)} problems to measure, plan at {solutions[0].cost_us:.0f} us")
        known.learn(entries, measure(entries))
    return known


def _weight(entry: Entry) -> float:
    return -entry.estimate_us * len(entry.uses)


def priced_offers(problems: Problems, known: Known) -> tuple[list[Priced], list[Entry]]:
    """Every use of every problem that may still run, with its price."""
    offers: list[Priced] = []
    owners: list[Entry] = []
    for entry in problems.entries.values():
        price = known.price(entry)
        if not math.isfinite(price):
            continue
        for candidate, cut in entry.uses:
            ins = dict(zip(cut.inputs, cut.problem.input_formats, strict=True))
            outs = dict(zip(cut.outputs, cut.problem.output_formats, strict=True))
            offers.append(
                Priced(
                    candidate,
                    tuple(ins[i] for i in candidate.inputs),
                    tuple(outs[o] for o in candidate.outputs),
                    price,
                )
            )
            owners.append(entry)
    return offers, owners


def _unmeasured(solutions: Sequence[Solution], owners: Sequence[Entry], known: Known) -> dict[str, Entry]:
    used = [owners[i] for s in solutions for i in s.chosen]
    return {e.problem.key: e for e in used if e.problem.key not in known.best_us}
