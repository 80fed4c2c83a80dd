"""Which candidates are measured: those that an optimal plan would use if they were as fast as they might be.

    repeat: price measured candidates by their times, the others by an optimistic prediction
            solve the integer program
            measure the longest of what the best plan uses and nobody measured
            if there is none: measure further kernels of the problems that take most of the plan
    until nothing is left that could change the best plan, or the budget is spent

A round takes the problems that make up `SHARE` of the unmeasured part of the plan, so that what they teach about the
estimates counts before the small ones are looked at, and so that a search cut short has measured what weighs most.

A candidate that never enters a plan even at its optimistic price is never built: that is the pruning. The
prediction is the model's estimate times what its family (same product, or same mix of primitives) was off by so
far, times `OPTIMISM`, and never below the sound lower bound.

Source: measuring on demand is A* with the estimate as heuristic; `weft.orchestrate.estimate` for the numbers.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weft.ir.graph import Graph
from weft.ir.text import print_graph
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.program import Solution
from weft.orchestrate.select import Priced, heuristic, select
from weft.pipeline.problems import Entry, Problems

OPTIMISM = 0.85
MAX_ROUNDS = 200
SHARE = 0.6
MIN_BATCH = 6
WIDEN_SHARE = 0.01
"""Problems below this share of the best plan are left with the first kernels of each generator."""
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
            keys = [(entry.problem.key, schedule) for schedule, _ in entry.kernels or ()]
            tried = [m for k in keys if (m := self.measurements.get(k)) is not None]
            times = [m.median_us for m in tried if m.verdict is Verdict.OK]
            if entry.kernels is None or (not times and len(tried) < len(keys)):
                entry.widened = entry.widened or len(tried) >= entry.first  # none of the first was right
                continue  # or time ran out before it was its turn
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
            graph, offers, alternatives=alternatives, gap=options.solver_gap, seconds=options.solver_s, plans=1
        )
        wanted = _unmeasured(solutions[:1], owners, known)
        entries = _batch(list(wanted.values()))
        if len(wanted) < MIN_BATCH:
            quick = heuristic(graph, offers, alternatives=alternatives)
            also = {owners[i].problem.key: owners[i] for i in quick if owners[i].problem.key not in known.best_us}
            entries += _batch([e for k, e in also.items() if k not in wanted])
            entries += _widened([owners[i] for i in solutions[0].chosen], known, solutions[0].cost_us)
        if not entries:
            known.complete = True
            break
        say(f"round {number + 1}: {len(entries)} problems to measure, plan at {solutions[0].cost_us:.0f} us")
        known.learn(entries, measure(entries))
    return known


def _batch(entries: list[Entry]) -> list[Entry]:
    """The longest entries that make up `SHARE` of all, longest first; those with equal graphs stand together."""
    entries.sort(key=_weight)
    left = SHARE * sum(_weight(e) for e in entries)  # weights are negative
    count = 0
    while count < len(entries) and (count < MIN_BATCH or left < 0):
        left -= _weight(entries[count])
        count += 1
    groups: dict[str, list[Entry]] = {}
    for entry in entries[:count]:
        groups.setdefault(print_graph(entry.problem.graph), []).append(entry)
    return [e for group in groups.values() for e in group]


def _widened(chosen: Sequence[Entry], known: Known, total_us: float) -> list[Entry]:
    """Entries of a measured plan with kernels left to try, now asked for all of them; the longest few."""
    uses = Counter(e.problem.key for e in chosen)
    share = {e.problem.key: uses[e.problem.key] * known.best_us.get(e.problem.key, 0.0) for e in chosen}
    entries = {e.problem.key: e for e in chosen if not e.widened and len(e.kernels or ()) > e.first}
    found = [e for k, e in entries.items() if known.best_us.get(k) and share[k] >= WIDEN_SHARE * total_us]
    found.sort(key=lambda e: -share[e.problem.key])
    for entry in found[:MIN_BATCH]:
        entry.widened = True
    return found[:MIN_BATCH]


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
