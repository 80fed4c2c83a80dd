"""Measuring on demand: what an optimal plan would use if it were as fast as it might be, batch by batch.

Where nothing is disturbed by it (a GPU measures), problems are chosen, written and built while others are measured.

    batch 0, 1     the best plan's problems at predicted prices, those that save most over single primitives first
    batch n        the unmeasured problems of the best plan by what was measured when it was begun, then all kernels of
                   its longest measured ones; plans are made beside measuring while there is something left to ask
    until nothing is left to ask, or the budget is spent

Predictions are the model's estimates times what problems of the same family, or else of the same sort, were off by so
far. They are taken almost as they are, so that one whole plan is measured soon; then optimistically, so that other
plans get their chance; at the end of the budget pessimistically first, so that no plan hangs on a guess.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar, final

from weft.ir.graph import Graph
from weft.kernels.formats import Format
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.program import Solution
from weft.orchestrate.select import Priced, select
from weft.pipeline.choose import UNMEASURED_FACTOR
from weft.pipeline.problems import Entry, Problems
from weft.pipeline.search.prices import WIDEN_SHARE, Known, Measure, priced_offers, savings, unmeasured
from weft.platform.policy import SearchPolicy
from weft.tune.thread_pool import DaemonThreadPool

PRIOR_WEIGHT = 4.0
"""Of the estimate as it is, in measurements of a sort."""
SORT_WEIGHT = 1.0
"""Of what is known of the sort, in measurements of a family."""
FARTHEST = 1.2
"""Logarithm to which a single measurement is cut off."""
GAP, SOLVER_S = 0.015, 1.5
"""What the solver may leave open, and seconds that it may take: plans are made of guesses here."""
SHORT_S, SHORT_GAP = 30.0, 0.04
"""A search of fewer seconds is short, and what the solver may leave open there."""
PRICES = (0.95, 0.85, 0.75)
"""Factors on predictions: the next is taken when the plan by the one before is measured throughout."""
TRIAL_S, HURRIED = 0.1, 4.0
"""On a GPU, seconds per problem that is measured for the first time, what building it takes included. Where all of the
plan's would take more than the part of the time that is left, one kernel of each is measured until all of a plan's are:
what nobody measured is in no plan, and costs it more than a second kernel gains."""
LATE_PRICE, LAST_PRICE = 1.4, math.inf
"""Factors of plans made first when time gets short; with the second, groups that nobody measured are out."""


def prices(policy: SearchPolicy, spent: float) -> tuple[float, ...]:
    """Factors on predictions in their order, when that share of the budget is gone."""
    last = (LAST_PRICE,) if spent >= policy.last else ()
    late = (LATE_PRICE,) if spent >= policy.late else ()
    return (*last, *late, *PRICES)


_P = ParamSpec("_P")
_R = TypeVar("_R")


@final
class Inline(Executor):
    """Does things when they are asked for: where a solver would take a core from what is measured."""

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """See `Executor`."""
        done: Future[_R] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@dataclass
class Learning(Known):
    """What is known, with predictions by family and sort."""

    observed: dict[str, dict[str, float]] = field(default_factory=dict)
    """Family or sort -> problem -> log(measured / estimated)."""
    weight: float = PRICES[0]
    """Factor on predictions."""
    coming: frozenset[str] = frozenset()
    """Problems on their way to be measured that plans are to stay with: dearer weights are not for them."""
    plan_us: float = 0.0
    """What the last plan costs, at what is known and predicted."""
    whole_us: float = 0.0
    """What the best plan costs that was measured throughout; 0: none was yet."""
    open: int = 0
    """Problems that the last plan wants measured, as far as they are not."""
    means: dict[str, float] = field(default_factory=dict)
    """Per family and sort the predicted logarithm; emptied when something is learned."""

    def take(self, entry: Entry) -> None:
        """Take in what was measured of a problem."""
        self.learn(entry)
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
        if math.isinf(self.weight):
            return UNMEASURED_FACTOR * max(entry.estimate_us, 1.0) if entry.essential else math.inf
        weight = min(self.weight, PRICES[0]) if entry.problem.key in self.coming else self.weight
        return max(entry.bound_us, entry.estimate_us * math.exp(self._expected(entry)) * weight)

    def _expected(self, entry: Entry) -> float:
        found = self.means.get(entry.family)
        if found is None:
            sort = self.means.get(entry.sort)
            if sort is None:
                sort = self._mean(entry.sort, 0.0, PRIOR_WEIGHT)
            found = self._mean(entry.family, sort, SORT_WEIGHT)
        return found

    def _mean(self, group: str, prior: float, weight: float) -> float:
        seen = self.observed.get(group, {}).values()
        found = self.means[group] = (prior * weight + sum(seen)) / (weight + len(seen))
        return found


def search(
    graph: Graph,
    problems: Problems,
    alternatives: Alternatives,
    measure: Measure,
    options: Options,
    *,
    out_of_time: Callable[[], bool],
    spent: Callable[[], float],
    say: Callable[[str], None],
    policy: SearchPolicy,
    solver: Executor | None = None,
    left_s: Callable[[], float] = lambda: math.inf,
    known: Learning | None = None,
) -> Learning:
    """Measure on demand until the best plan is measured throughout, or `out_of_time` says so.

    `spent` says which share of the budget is gone, from 0 to 1. `solver`: None: a thread. A plan that is not made in
    the seconds that are left is not waited for. `known` is learned into, for who wants to see how far this is.

    Raises:
        OptionError: no plan was found within `options.memory_limit_bytes` [W001].
    """
    with DaemonThreadPool(1, left_s) as thread:
        asking = Asking(
            graph, problems, alternatives, options, out_of_time, spent, say, policy, solver or thread, left_s, known
        )
        while not out_of_time():
            before = asking.number
            for m in measure(asking.batches()):
                asking.known.measurements[m.problem_key, m.schedule] = m
            asking.settle(drained=True)
            if asking.number == before:
                asking.known.complete = not out_of_time() and not problems.uncut
                break
        return asking.known


_Place = tuple[int, tuple[int, ...], tuple[Format, ...], tuple[Format, ...]]


def place(p: Priced) -> _Place:
    """What an offer is, whatever it costs."""
    return p.candidate.members, p.candidate.outputs + p.candidate.inputs, p.input_formats, p.output_formats


ONE, FEW, ALL = range(3)


@dataclass(frozen=True, slots=True)
class _Wish:
    """A problem to measure."""

    entry: Entry
    depth: int
    """How many of its kernels: `ONE`, `FEW` or `ALL`."""

    @property
    def key(self) -> tuple[str, int]:
        return self.entry.problem.key, self.depth


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
        policy: SearchPolicy,
        solver: Executor,
        left_s: Callable[[], float] = lambda: math.inf,
        known: Learning | None = None,
    ) -> None:
        self.known = Learning() if known is None else known
        self._left_s = left_s
        self.number = 0
        """Batches so far."""
        self._graph, self._problems, self._alternatives = graph, problems, alternatives
        self._options, self._policy, self._solver = options, policy, solver
        self._out_of_time, self._spent, self._say = out_of_time, spent, say
        self._flying: dict[str, Entry] = {}
        self._asked: set[tuple[str, int]] = set()
        self._queue: list[_Wish] = []
        self._prices: tuple[float, ...] = PRICES
        self._level = 0
        self._late = 0
        """How many of the prices are those of a search that ends."""
        self._refused = False
        """Whether a problem turned out to have no kernel since."""
        self._covering = False
        """Whether one kernel of each problem of a plan is measured, in a hurry."""
        self._plan_us = 0.0
        self._last: list[_Place] = []
        """The last plan."""
        self._stale = True
        """Whether something was learned since the last plan was begun."""
        self._solving: tuple[Future[Solution], Sequence[Priced], Sequence[Entry]] | None = None
        self._rest: Future[Problems] | None = None
        """Problems that the first plan was made without."""

    def batches(self) -> Iterator[Sequence[Entry]]:
        """What to measure next, asked for while what was given before is built and measured.

        An empty batch: nothing for the moment.
        """
        while not self._out_of_time():
            self.settle()
            if self._solving is not None and self._solving[0].done():
                self._plan()
            if self._solving is None and self._all_known() and self._stale and not self._held:
                self._begin()
            wishes = self._ready()
            if len(wishes) < (1 if self._covering else self._policy.batch) and self._solving is not None:
                self._plan()
                wishes = self._ready()
            if wishes:
                yield self._take(wishes[: self._policy.batch])
            elif self._flying and self._covering:
                yield ()  # what is on its way decides
            elif not self._stale and not self._collect_rest() and not self._dare():
                return

    @property
    def _held(self) -> bool:
        """Whether another plan is worth its time only when more is known, or what the last one has no kernel for."""
        return self._covering and len(self._flying) > self._policy.batch and not self._refused

    def _collect_rest(self) -> bool:
        """Begin with the problems that were left out; False: there are none, or it was begun."""
        if self._problems.rest is None or self._rest is not None:
            return False
        self._rest = self._solver.submit(self._problems.rest, self._out_of_time)
        return True

    def _dare(self) -> bool:
        """Go on with more optimistic prices, if there are any."""
        if self._level + 1 >= len(self._prices):
            return False
        self._level += 1
        self._stale = True
        return True

    def settle(self, *, drained: bool = False) -> None:
        """Learn of the problems that were measured since; of all that were given out if nothing comes any more."""
        measured = self.known.measurements
        for key, entry in list(self._flying.items()):
            made = entry.is_made and all((key, s) in measured for s, _ in entry.asked)
            if made or drained:
                del self._flying[key]
                self.known.take(entry)
                self._stale = True
                self._refused |= math.isinf(self.known.best_us.get(key, math.inf))

    def _ready(self) -> list[_Wish]:
        return [w for w in self._queue if w.key not in self._asked and w.entry.problem.key not in self._flying]

    def _take(self, wishes: Sequence[_Wish]) -> list[Entry]:
        self.number += 1
        self._say(f"batch {self.number}: {len(wishes)} problems to measure, plan at {self._plan_us:.0f} us")
        for wish in wishes:
            self._asked.add(wish.key)
            wish.entry.widened, wish.entry.hurried = wish.depth == ALL, wish.depth == ONE
            wish.entry.library_near = self.known.library_near(wish.entry)
            self._flying[wish.entry.problem.key] = wish.entry
        return [w.entry for w in wishes]

    def _begin(self) -> None:
        """Have a plan made by what is known now."""
        factors = prices(self._policy, self._spent())
        if len(factors) > self._late + len(PRICES):
            self._prices, self._level, self._late = factors, 0, len(factors) - len(PRICES)
        self.known.weight = self._prices[self._level]
        self.known.coming = frozenset(self._flying) if self._covering else frozenset()
        offers, owners = priced_offers(self._problems, self.known)
        self._stale = self._refused = False
        again = {place(p): i for i, p in enumerate(offers)} if self._last else {}
        start = [again[p] for p in self._last if p in again]
        start = start if len(start) == len(self._last) else []
        self._solving = self._solver.submit(self._solve, offers, start), offers, owners

    def _solve(self, offers: Sequence[Priced], start: Sequence[int]) -> Solution:
        return select(
            self._graph,
            offers,
            alternatives=self._alternatives,
            gap=GAP if self._options.budget_s >= SHORT_S else SHORT_GAP,
            seconds=min(SOLVER_S, self._left_s()),
            plans=1,
            memory_limit=self._options.memory_limit_bytes,
            core=True,
            start=start,
        )[0]

    def _plan(self) -> None:
        """The plan that was begun, and what to ask for it: unmeasured problems, then long ones that may get faster."""
        assert self._solving is not None
        future, offers, owners = self._solving
        try:
            found = future.result(None if math.isinf(left := self._left_s()) else left)
        except TimeoutError:
            return  # and then the time is up
        self._solving = None
        self._plan_us = found.cost_us
        self._last = [place(offers[i]) for i in found.chosen]
        known = self.known
        wanted = unmeasured(found.chosen, owners, known)
        known.plan_us, known.open = found.cost_us, len(wanted)
        if not wanted:
            known.whole_us = min(found.cost_us, known.whole_us or math.inf)
        saving = savings(known, offers, owners)
        dear = math.isinf(known.weight)
        first = sorted(wanted.values(), key=lambda e: -known.price(e) * len(e.uses) if dear else -saving(e))
        hurried = self._policy.overlaps and self._search_s < HURRIED * TRIAL_S * len(wanted)
        self._queue = [_Wish(e, self._depth(e, hurried=hurried)) for e in first]
        uses = Counter(owners[i].problem.key for i in found.chosen)
        share = {k: n * known.best_us.get(k, 0.0) for k, n in uses.items()}
        measured = sorted((self._problems.entries[k] for k in share), key=lambda e: -share[e.problem.key])
        self._queue += [_Wish(e, FEW) for e in measured if e.hurried]
        slow = [e for e in measured if share[e.problem.key] >= WIDEN_SHARE * found.cost_us]
        more = [e for e in slow if not (e.widened or e.hurried) and (e.more or len(e.kernels or ()) > e.first)]
        self._queue += [_Wish(e, ALL) for e in more]
        if not wanted:
            self._collect_rest()
        self._cover(hurried=hurried, whole=not wanted)

    def _cover(self, *, hurried: bool, whole: bool) -> None:
        """Once a plan was made in a hurry, the next ones stay with what is known until one is measured throughout."""
        if hurried and not self._covering and not self._late:
            self._covering, self._prices, self._level = True, (LATE_PRICE, *PRICES), 0
        elif whole and self._covering:
            self._covering, self._prices, self._level = False, prices(self._policy, self._spent()), 0

    def _depth(self, entry: Entry, *, hurried: bool) -> int:
        if entry.widened:
            return ALL
        return ONE if hurried and (entry.problem.key, ONE) not in self._asked else FEW

    @property
    def _search_s(self) -> float:
        return (1.0 - self._spent()) * self._options.budget_s

    def _all_known(self) -> bool:
        """Whether no problems are left out any more; waits for them where nothing else is to be asked."""
        if self._rest is None:
            return True
        if not self._rest.done() and self._ready():
            return False
        try:
            rest = self._rest.result(None if math.isinf(left := self._left_s()) else left)
        except TimeoutError:
            return False  # and then the time is up
        self._problems.adopt(rest)
        self._rest, self._stale = None, True
        return True
