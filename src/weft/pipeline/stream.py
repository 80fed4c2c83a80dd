"""Measuring on demand without rounds: a GPU measures some problems while the next are chosen, written and built.

    batch 0, 1     the best plan's problems at predicted prices, those that save most over single primitives first
    batch n        solve with what was measured of batch n - 2 and before; the new plan's unmeasured problems, then all
                   kernels of its longest measured ones
    until nothing is left to ask, or the budget is spent

Predictions are the model's estimates times what problems of the same family, or else of the same sort, were off by so
far, and are weighed by how much of the budget is left: unbiased at first, so that one whole plan is measured soon;
optimistic then, so that other plans get their chance; pessimistic at the end, so that no plan hangs on a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from weft.ir.graph import Graph
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.select import Priced, select
from weft.pipeline.problems import Entry, Problems
from weft.pipeline.search import Known, Measure, priced_offers, savings, unmeasured, widened

PRIORS = {
    "product": 1.9,
    "product alone": 1.6,
    "reduction": 1.6,
    "reduction alone": 1.6,
    "plain": 1.4,
    "plain alone": 1.05,
}
"""Measured over estimated time by sort of problem, before anything is measured (medians of 680 problems on an H200)."""
PRIOR_WEIGHT = 4.0
"""In measurements of a sort."""
SORT_WEIGHT = 1.0
"""Of what is known of the sort, in measurements of a family."""
FARTHEST = 1.2
"""Logarithm to which a single measurement is cut off."""
BATCH = 24
"""Problems that are built at a time."""
GAP, SOLVER_S = 0.01, 2.0
"""What the solver may leave open, and seconds that it may take: plans are made of guesses here."""
NEW, LATE = 0.15, 0.8
"""Shares of the budget before and after which prices are unbiased and pessimistic."""
FIRST_PRICE, PRICE, LATE_PRICE = 1.0, 0.85, 1.4


@dataclass
class Learning(Known):
    """What is known, with predictions by family and sort."""

    observed: dict[str, dict[str, float]] = field(default_factory=dict)
    """Family or sort -> problem -> log(measured / estimated)."""
    weight: float = FIRST_PRICE
    """Factor on predictions."""
    means: dict[str, float] = field(default_factory=dict)
    """Per family and sort the predicted logarithm; emptied when something is learned."""

    def take(self, entry: Entry) -> None:
        """Take in what was measured of a problem."""
        self.learn([entry], {})
        best = self.best_us.get(entry.problem.key, math.inf)
        if math.isfinite(best) and entry.estimate_us > 0:
            off = math.log(max(best, 1e-3) / entry.estimate_us)
            for group in (entry.family, entry.sort):
                self.observed.setdefault(group, {})[entry.problem.key] = max(-FARTHEST, min(FARTHEST, off))
            self.means.clear()

    def price(self, entry: Entry) -> float:
        """Measured time, or the weighed prediction; never below the bound."""
        known = self.best_us.get(entry.problem.key)
        if known is not None:
            return known
        return max(entry.bound_us, entry.estimate_us * math.exp(self._expected(entry)) * self.weight)

    def _expected(self, entry: Entry) -> float:
        found = self.means.get(entry.family)
        if found is None:
            sort = self.means.get(entry.sort)
            if sort is None:
                sort = self._mean(entry.sort, math.log(PRIORS[entry.sort]), PRIOR_WEIGHT)
            found = self._mean(entry.family, sort, SORT_WEIGHT)
        return found

    def _mean(self, group: str, prior: float, weight: float) -> float:
        seen = self.observed.get(group, {}).values()
        found = self.means[group] = (prior * weight + sum(seen)) / (weight + len(seen))
        return found


def stream(
    graph: Graph,
    problems: Problems,
    alternatives: Alternatives,
    measure: Measure,
    options: Options,
    *,
    out_of_time: Callable[[], bool],
    spent: Callable[[], float],
    say: Callable[[str], None],
    batch: int = BATCH,
) -> Known:
    """As `search`; `spent` says which share of the budget is gone, from 0 to 1.

    Raises:
        OptionError: no plan was found within `options.memory_limit_bytes` [W001].
    """
    asking = Asking(graph, problems, alternatives, options, out_of_time, spent, say, batch)
    while not out_of_time():
        before = asking.number
        for m in measure(asking.batches()):
            asking.known.measurements[m.problem_key, m.schedule] = m
        asking.settle(drained=True)
        if asking.number == before:
            asking.known.complete = not out_of_time()
            break
    return asking.known


@final
class Asking:
    """Decides batch by batch what is measured."""

    def __init__(
        self,
        graph: Graph,
        problems: Problems,
        alternatives: Alternatives,
        options: Options,
        out_of_time: Callable[[], bool],
        spent: Callable[[], float],
        say: Callable[[str], None],
        batch: int,
    ) -> None:
        self.known = Learning()
        self.number = 0
        """Batches so far."""
        self._graph, self._problems, self._alternatives = graph, problems, alternatives
        self._options, self._batch = options, batch
        self._out_of_time, self._spent, self._say = out_of_time, spent, say
        self._flying: dict[str, Entry] = {}
        self._queue: list[Entry] = []
        self._plan_us = 0.0
        self._stale = True
        """Whether something was learned since the last plan."""

    def batches(self) -> Iterator[Sequence[Entry]]:
        """What to measure next, asked for while what was given before is built and measured."""
        while not self._out_of_time():
            self.settle()
            if self._stale:
                self._queue = self._wanted()
            batch = [e for e in self._queue if e.problem.key not in self._flying][: self._batch]
            self._queue = [e for e in self._queue if e not in batch]
            if not batch:
                return
            self.number += 1
            self._say(f"batch {self.number}: {len(batch)} problems to measure, plan at {self._plan_us:.0f} us")
            self._flying.update((e.problem.key, e) for e in batch)
            yield batch

    def settle(self, *, drained: bool = False) -> None:
        """Learn of the problems that were measured since; of all that were given out if nothing comes any more."""
        measured = self.known.measurements
        for key, entry in list(self._flying.items()):
            made = entry.is_made and all((key, s) in measured for s, _ in entry.asked)
            if made or drained:
                del self._flying[key]
                self.known.take(entry)
                self._stale = True

    def _wanted(self) -> list[Entry]:
        """Problems of the best plan that nobody measured, then those of its measured ones that may get faster."""
        share = self._spent()
        known = self.known
        known.weight = FIRST_PRICE if share < NEW else PRICE if share < LATE else LATE_PRICE
        offers, owners = priced_offers(self._problems, known)
        chosen, self._plan_us = self._solve(offers)
        wanted = unmeasured(chosen, owners, known)
        saving = savings(known, offers, owners)
        entries = sorted(wanted.values(), key=lambda e: -saving(e))
        if len([e for e in entries if e.problem.key not in self._flying]) < self._batch:
            entries += widened([owners[i] for i in chosen], known, self._plan_us, self._batch // 2)
        self._stale = False
        return entries

    def _solve(self, offers: Sequence[Priced]) -> tuple[Sequence[int], float]:
        found = select(
            self._graph,
            offers,
            alternatives=self._alternatives,
            gap=GAP,
            seconds=SOLVER_S,
            plans=1,
            memory_limit=self._options.memory_limit_bytes,
            core=True,
        )[0]
        return found.chosen, found.cost_us
