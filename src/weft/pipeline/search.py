"""Which candidates are measured: those that an optimal plan would use if they were as fast as they might be.

    repeat: price measured candidates by their times, the others by an optimistic prediction
            solve the integer program
            measure the longest of what the best plan uses and nobody measured
            if there is none: measure further kernels of the problems that take most of the plan
    until nothing is left that could change the best plan, or the budget is spent

A round takes the problems that make up `SHARE` of the unmeasured part of the plan, so that what they teach about the
estimates counts before the small ones are looked at, and so that a search cut short has measured what weighs most.
On a GPU, where many kernels are built while others are measured, there are no rounds: see `weft.pipeline.stream`.

A candidate that never enters a plan even at its optimistic price is never built: that is the pruning. The
prediction is the model's estimate times what its family (same product, or same mix of primitives) was off by so
far, times `OPTIMISM`, and never below the sound lower bound.

Source: measuring on demand is A* with the estimate as heuristic; `weft.orchestrate.estimate` for the numbers.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.ir.graph import Graph, bits
from weft.ir.text import print_graph
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.select import Priced, heuristic, select
from weft.pipeline.problems import Entry, Problems

OPTIMISM = 0.85
MAX_ROUNDS = 200
SHARE = 0.6
MIN_BATCH = 6
WIDEN_SHARE = 0.01
"""Problems below this share of the best plan are left with the first kernels of each generator."""
Measure = Callable[[Iterator[Sequence[Entry]]], Iterator[Measurement]]
"""Emits, builds, verifies and times the kernels of batches of problems, in their order. Batches are taken while those
before them are measured."""


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
            if entry.kernels is None:
                continue  # time ran out before it was made
            if not times and (entry.more or len(tried) < len(keys)):
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
    """Measure on demand until the best plan is measured throughout, or `out_of_time` says so.

    Raises:
        OptionError: no plan was found within `options.memory_limit_bytes` [W001].
    """
    known = Known()
    number = 0
    while number < MAX_ROUNDS and not out_of_time():
        offers, owners = priced_offers(problems, known)
        best = select(
            graph,
            offers,
            alternatives=alternatives,
            gap=options.solver_gap,
            seconds=options.solver_s,
            plans=1,
            memory_limit=options.memory_limit_bytes,
        )[0]
        wanted = unmeasured(best.chosen, owners, known)
        entries = _batch(list(wanted.values()))
        if len(wanted) < MIN_BATCH:
            quick = unmeasured(heuristic(graph, offers, alternatives=alternatives), owners, known)
            entries += _batch([e for k, e in quick.items() if k not in wanted])
            entries += widened([owners[i] for i in best.chosen], known, best.cost_us, MIN_BATCH)
        if not entries:
            known.complete = True
            break
        number += 1
        say(f"round {number}: {len(entries)} problems to measure, plan at {best.cost_us:.0f} us")
        known.learn(entries, {(m.problem_key, m.schedule): m for m in measure(iter([entries]))})
    return known


def savings(known: Known, offers: Sequence[Priced], owners: Sequence[Entry]) -> Callable[[Entry], float]:
    """By how much a problem's kernels, where they stand, are predicted to beat its primitives one by one."""
    alone: dict[int, float] = {}
    for offer, owner in zip(offers, owners, strict=True):
        members = offer.candidate.members
        if members and not members & (members - 1):
            price = max(offer.cost_us, owner.estimate_us)
            alone[members] = min(alone.get(members, math.inf), price)

    def saving(entry: Entry) -> float:
        total = 0.0
        for candidate, _ in entry.uses:
            total += sum(alone.get(1 << member, 0.0) for member in bits(candidate.members))
        price = known.price(entry)
        return max(total - price * len(entry.uses), 0.05 * price)

    return saving


def _batch(entries: list[Entry]) -> list[Entry]:
    """The longest entries that make up `SHARE` of all, at least `MIN_BATCH`; equal graphs stand together."""
    entries.sort(key=_weight)
    left = SHARE * -sum(_weight(e) for e in entries)
    count = 0
    while count < len(entries) and (count < MIN_BATCH or left > 0):
        left += _weight(entries[count])
        count += 1
    groups: dict[str, list[Entry]] = {}
    for entry in entries[:count]:
        groups.setdefault(print_graph(entry.problem.graph), []).append(entry)
    return [e for group in groups.values() for e in group]


def widened(chosen: Sequence[Entry], known: Known, total_us: float, most: int) -> list[Entry]:
    """Entries of a measured plan with kernels left to try, now asked for all of them; the longest few."""
    uses = Counter(e.problem.key for e in chosen)
    share = {e.problem.key: uses[e.problem.key] * known.best_us.get(e.problem.key, 0.0) for e in chosen}
    entries = {e.problem.key: e for e in chosen if not e.widened and (e.more or len(e.kernels or ()) > e.first)}
    found = [e for k, e in entries.items() if known.best_us.get(k) and share[k] >= WIDEN_SHARE * total_us]
    found.sort(key=lambda e: -share[e.problem.key])
    for entry in found[:most]:
        entry.widened = True
    return found[:most]


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
        for candidate, ins, outs in entry.formats:
            offers.append(Priced(candidate, ins, outs, price))
            owners.append(entry)
    return offers, owners


def unmeasured(chosen: Iterable[int], owners: Sequence[Entry], known: Known) -> dict[str, Entry]:
    """The problems of a plan whose time nobody knows."""
    used = [owners[i] for i in chosen]
    return {e.problem.key: e for e in used if e.problem.key not in known.best_us}
