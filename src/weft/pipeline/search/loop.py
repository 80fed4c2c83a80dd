"""Measuring on demand: what an optimal plan would use if it were as fast as it might be, batch by batch.

Where nothing is disturbed by it (a GPU measures), problems are chosen, written and built while others are measured.

    batch 0, 1     the best plan's problems at predicted prices, those that save most over single primitives first
    batch n        the unmeasured problems of the best plan by what was measured when it was begun, then all kernels of
                   its longest measured ones; plans are made beside measuring while there is something left to ask
    until nothing is left to ask, or the budget is spent

What is asked and what was measured cross between threads by two queues, see `Search`.

Predictions are the model's estimates times what problems of the same family, or else of the same sort, were off by so
far. They are taken almost as they are, so that one whole plan is measured soon; then optimistically, so that other
plans get their chance; at the end of the budget pessimistically first, so that no plan hangs on a guess.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar, final

from weft.ir.graph import Graph
from weft.kernels.formats import Format
from weft.kernels.measurement import Measurement
from weft.kernels.source import Kernel, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives
from weft.orchestrate.program import Solution
from weft.orchestrate.select import Priced, select, select_by_windows
from weft.pipeline.choose import UNMEASURED_FACTOR
from weft.pipeline.problems import Problems, Task
from weft.pipeline.search.kernels import Depth, Kernels, Order
from weft.pipeline.search.prices import WIDEN_SHARE, Known, priced_offers, savings, unmeasured
from weft.platform.policy import SearchPolicy

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
LARGE = 12_000
"""Uses of kernels from which plans are made window by window: the relaxation of the whole takes seconds there."""
PRICES = (0.95, 0.85, 0.75)
"""Factors on predictions: the next is taken when the plan by the one before is measured throughout."""
TRIAL_S, HURRIED = 0.1, 4.0
"""On a GPU, seconds per problem that is measured for the first time, what building it takes included. Where all of the
plan's would take more than the part of the time that is left, one kernel of each is measured until all of a plan's are:
what nobody measured is in no plan, and costs it more than a second kernel gains."""
SPARE_SHARE, SPARES = 0.002, 2
"""Of the best plan: what a measured problem takes of it whose other kernels are measured while the host makes a plan;
and so many of these are asked at a time, as what the plan wants goes first once it is there."""
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


@final
@dataclass
class Learning(Known):
    """What is known, with predictions by family and sort."""

    observed: dict[str, dict[str, float]] = field(default_factory=dict)
    """Family or sort -> problem -> log(measured / estimated)."""
    weight: float = PRICES[0]
    """Factor on predictions."""
    coming: frozenset[str] = frozenset()
    """Problems on their way to be measured that plans are to stay with: dearer weights are not for them."""
    means: dict[str, float] = field(default_factory=dict)
    """Per family and sort the predicted logarithm; emptied when something is learned."""

    def learn(self, task: Task) -> bool:
        """See `Known`."""
        deeper = super().learn(task)
        best = self.best_us.get(task.problem.key, math.inf)
        if math.isfinite(best) and task.estimate_us > 0:
            off = math.log(max(best, 1e-3) / task.estimate_us)
            for group in (task.family, task.sort):
                self.observed.setdefault(group, {})[task.problem.key] = max(-FARTHEST, min(FARTHEST, off))
            self.means.clear()
        return deeper

    def price(self, task: Task) -> float:
        """Measured time, or the weighed prediction; never below the bound."""
        known = self.best_us.get(task.problem.key)
        if known is not None:
            return known
        if math.isinf(self.weight):
            return UNMEASURED_FACTOR * max(task.estimate_us, 1.0) if task.essential else math.inf
        weight = min(self.weight, PRICES[0]) if task.problem.key in self.coming else self.weight
        return max(task.bound_us, task.estimate_us * math.exp(self._expected(task)) * weight)

    def _expected(self, task: Task) -> float:
        found = self.means.get(task.family)
        if found is None:
            sort = self.means.get(task.sort)
            if sort is None:
                sort = self._mean(task.sort, 0.0, PRIOR_WEIGHT)
            found = self._mean(task.family, sort, SORT_WEIGHT)
        return found

    def _mean(self, group: str, prior: float, weight: float) -> float:
        seen = self.observed.get(group, {}).values()
        found = self.means[group] = (prior * weight + sum(seen)) / (weight + len(seen))
        return found


@final
@dataclass(frozen=True, slots=True)
class Window:
    """The time of a search; asked by any thread."""

    is_over: Callable[[], bool]
    spent: Callable[[], float]
    """The share of it that is gone, from 0 to 1."""
    left_s: Callable[[], float] = lambda: math.inf
    """Until what was begun is given up: a plan that is not made by then is not waited for."""


@final
@dataclass(frozen=True, slots=True)
class Standing:
    """How far a search is, for people."""

    measured: int = 0
    """Problems."""
    open: int = 0
    """Problems that the last plan wants measured, as far as they are not."""
    plan_us: float = 0.0
    """What the last plan costs, at what is known and predicted."""
    whole_us: float = 0.0
    """What the best plan costs that was measured throughout; 0: none was yet."""


_Spot = tuple[int, tuple[int, ...], tuple[Format, ...], tuple[Format, ...]]


def spot(p: Priced) -> _Spot:
    """What an offer is, whatever it costs."""
    return p.candidate.members, p.candidate.outputs + p.candidate.inputs, p.input_formats, p.output_formats


@final
@dataclass(frozen=True, slots=True)
class _Request:
    """A task to measure, so deep."""

    task: Task
    depth: Depth

    @property
    def key(self) -> tuple[str, Depth]:
        return self.task.problem.key, self.depth


@final
@dataclass(frozen=True, slots=True)
class _Planning:
    """A plan that is being made, of these offers."""

    future: Future[tuple[Solution, float]]
    """The plan, and where the next one is to begin with its windows."""
    offers: Sequence[Priced]
    owners: Sequence[Task]


@final
class Search:
    """Decides batch by batch what is measured, and learns from it. All that is known is its own until it has ended.

        next_batch -> orders -> (emission, the tuner's queue of what is asked) -> measured -> next_batch

    Threads. `run` is called by the thread that measures. `next_batch` and `wrote` are called by the one that makes
    trials: on a CPU the same, on a GPU that of the tuner's queue, which is ahead of measuring. What was measured
    reaches them by the queue `measured` alone. `standing` is replaced as a whole, so that any thread may read it. When
    the time is up, a thread that makes trials may be left at work: the lock and `_ended` keep it from changing what is
    known then.
    """

    def __init__(
        self,
        graph: Graph,
        problems: Problems,
        alternatives: Alternatives,
        options: Options,
        policy: SearchPolicy,
        window: Window,
        solver: Executor,
        say: Callable[[str], None],
    ) -> None:
        """`solver`: makes plans, `Inline` or beside measuring."""
        self.known = Learning()
        self.problems = problems
        self.measured: SimpleQueue[Measurement] = SimpleQueue()
        """What was measured and not looked at yet."""
        self.standing = Standing()
        self.number = 0
        """Batches so far."""
        self._graph, self._alternatives = graph, alternatives
        self._options, self._policy, self._window = options, policy, window
        self._solver, self._say = solver, say
        self._lock, self._ended = threading.Lock(), False
        self._flying: dict[str, Order] = {}
        """By problem key, what was asked and is not measured yet."""
        self._depths: dict[str, Depth] = {}
        """How deep a task was asked for last, or is to be next; `FEW` where it is not here."""
        self._asked: set[tuple[str, Depth]] = set()
        self._queue: list[_Request] = []
        self._spare: list[Task] = []
        """Dear problems of the last plan, the dearest first."""
        self._spared: set[str] = set()
        """Problems of these that were asked for."""
        self._prices: tuple[float, ...] = PRICES
        self._level = 0
        self._late = 0
        """How many of the prices are those of a search that ends."""
        self._refused = False
        """Whether a problem turned out to have no kernel since."""
        self._completing = False
        """Whether one kernel of each problem of a plan is measured, in a hurry."""
        self._last: list[_Spot] = []
        """The last plan."""
        self._came_to = 0.0
        """Where the next is to begin."""
        self._stale = True
        """Whether something was learned since the last plan was begun."""
        self._planning: _Planning | None = None
        self._rest: Future[Problems] | None = None
        """Problems that the first plan was made without."""

    def run(self, measure: Callable[[], Iterator[Measurement]]) -> Learning:
        """Measure until the best plan is measured throughout, or the time is over.

        `measure` asks for batches until there is none, and gives what was measured of them. A plan may be left for when
        all of them are measured; then it is called once more.

        Raises:
            OptionError: no plan was found within `options.memory_limit_bytes` [W001].
        """
        try:
            while not self._window.is_over():
                before = self.number
                for found in measure():
                    self.measured.put(found)
                with self._lock:
                    self._drain(ended=True)
                if self.number == before:
                    self.known.complete = not self._window.is_over() and not self.problems.uncut
                    break
        finally:
            self._ended = True
        with self._lock:  # who was left at work has taken in what it was at
            return self.known

    def next_batch(self) -> Sequence[Order] | None:
        """What to measure next, while what was given before is written, built and measured.

        Nothing in it: nothing for the moment. None: nothing more until all that was given is measured.
        """
        with self._lock:
            while not (self._ended or self._window.is_over()):
                self._drain()
                if self._planning is not None and self._planning.future.done():
                    self._plan()
                if self._planning is None:
                    if self._rest is not None and (spare := self._meanwhile(self._rest)):
                        return self._take(spare)
                    if self._all_known() and self._stale and not self._held:
                        self._begin()
                if self._planning is not None and (spare := self._meanwhile(self._planning.future)):
                    return self._take(spare)
                requests = self._ready()
                if not requests and self._planning is not None and self._spared & self._flying.keys():
                    return ()  # another is asked for once one of these is measured, or the plan is there
                few = len(requests) < (1 if self._completing else self._policy.batch)
                idle = self._policy.overlaps and len(self._flying) < SPARES  # who measures would wait for the plan
                if few and self._planning is not None and not (requests and idle):
                    self._plan()
                    requests = self._ready()
                if requests:
                    return self._take(requests[: self._policy.batch])
                if self._flying and self._completing:
                    return ()  # what is on its way decides
                if not self._stale and not self._collect_rest() and not self._raise_optimism():
                    return None
            return None

    def wrote(self, order: Order, kernels: Kernels) -> list[tuple[Schedule, Kernel]]:
        """Take in what was written for an order; those of its kernels that are to be measured now."""
        key = order.task.problem.key
        with self._lock:
            if self._ended:
                return []
            self.known.wrote(key, kernels)
            return [pair for pair in order.chosen(kernels) if (key, pair[0]) not in self.known.measurements]

    @property
    def _held(self) -> bool:
        """Whether another plan is worth its time only when more is known, or what the last one has no kernel for."""
        return self._completing and len(self._flying) > self._policy.batch and not self._refused

    def _collect_rest(self) -> bool:
        """Begin with the problems that were left out; False: there are none, or it was begun."""
        if self.problems.rest is None or self._rest is not None:
            return False
        self._rest = self._solver.submit(self.problems.rest, self._window.is_over)
        return True

    def _raise_optimism(self) -> bool:
        """Go on with more optimistic prices, if there are any."""
        if self._level + 1 >= len(self._prices):
            return False
        self._level += 1
        self._stale = True
        return True

    def _drain(self, *, ended: bool = False) -> None:
        """Learn of the tasks that were measured since; of all that were given out if nothing comes any more."""
        measured = self.known.measurements
        while True:
            try:
                found = self.measured.get_nowait()
            except Empty:
                break
            measured[found.problem_key, found.schedule] = found
        for key, order in list(self._flying.items()):
            if ended or self._is_measured(order):
                del self._flying[key]
                before = self.known.best_us.get(key)
                deeper = self.known.learn(order.task)
                if deeper:
                    self._depths[key] = Depth(min(order.depth + 1, Depth.ALL))
                # where the other kernels of a measured problem are slower, all plans are as they were
                self._stale |= deeper or before is None or self.known.best_us.get(key) != before
                self._refused |= math.isinf(self.known.best_us.get(key, math.inf))
        self.standing = replace(self.standing, measured=len(self.known.best_us))

    def _is_measured(self, order: Order) -> bool:
        key = order.task.problem.key
        kernels = replace(order, before=self.known.kernels.get(key)).written
        if kernels is None:
            return False
        return all((key, schedule) in self.known.measurements for schedule, _ in order.chosen(kernels))

    def _meanwhile(self, busy: Future[_R]) -> list[_Request]:
        """What else to measure where nothing is asked until the host is ready: of large networks that takes seconds."""
        if busy.done() or not self._policy.overlaps or self._ready():
            return []
        if len(self._spared & self._flying.keys()) >= SPARES:
            return []
        depth = Depth.FEW if self._completing else Depth.ALL  # what the plan wants is to go first once it is there
        for task in self._spare:
            key = task.problem.key
            measured = key in self.known.best_us and key not in self._flying
            if measured and self._depth_of(task) < depth and self._has_more(task):
                self._spared.add(key)
                return [_Request(task, depth)]
        return []

    def _ready(self) -> list[_Request]:
        return [w for w in self._queue if w.key not in self._asked and w.task.problem.key not in self._flying]

    def _take(self, requests: Sequence[_Request]) -> list[Order]:
        self.number += 1
        plan_us = self.standing.plan_us
        self._say(f"batch {self.number}: {len(requests)} problems to measure, plan at {plan_us:.0f} us")
        orders = []
        for request in requests:
            key = request.task.problem.key
            near, before = self.known.library_near(request.task), self.known.kernels.get(key)
            self._asked.add(request.key)
            self._depths[key] = request.depth
            self._flying[key] = Order(request.task, request.depth, near, before)
            orders.append(self._flying[key])
        return orders

    def _begin(self) -> None:
        """Have a plan made by what is known now."""
        factors = prices(self._policy, self._window.spent())
        if len(factors) > self._late + len(PRICES):
            self._prices, self._level, self._late = factors, 0, len(factors) - len(PRICES)
        self.known.weight = self._prices[self._level]
        self.known.coming = frozenset(self._flying) if self._completing else frozenset()
        offers, owners = priced_offers(self.problems, self.known)
        self._stale = self._refused = False
        again = {spot(p): i for i, p in enumerate(offers)} if self._last else {}
        start = [again[p] for p in self._last if p in again]
        self._planning = _Planning(self._solver.submit(self._solve, offers, start), offers, owners)

    def _solve(self, offers: Sequence[Priced], start: Sequence[int]) -> tuple[Solution, float]:
        seconds = min(SOLVER_S, self._window.left_s())
        if len(offers) >= LARGE and not self._options.memory_limit_bytes:
            return select_by_windows(
                self._graph,
                offers,
                alternatives=self._alternatives,
                seconds=seconds,
                start=start,
                begin=self._came_to,
            )
        found = select(
            self._graph,
            offers,
            alternatives=self._alternatives,
            gap=GAP if self._options.budget_s >= SHORT_S else SHORT_GAP,
            seconds=seconds,
            plans=1,
            memory_limit=self._options.memory_limit_bytes,
            core=True,
            start=start if len(start) == len(self._last) else (),
        )
        return found[0], 0.0

    def _plan(self) -> None:
        """The plan that was begun, and what to ask for it: unmeasured problems, then long ones that may get faster."""
        assert self._planning is not None
        future, offers, owners = self._planning.future, self._planning.offers, self._planning.owners
        try:
            found, self._came_to = future.result(None if math.isinf(left := self._window.left_s()) else left)
        except TimeoutError:
            return  # and then the time is up
        self._planning = None
        self._last = [spot(offers[i]) for i in found.chosen]
        known = self.known
        wanted = unmeasured(found.chosen, owners, known)
        whole_us = self.standing.whole_us if wanted else min(found.cost_us, self.standing.whole_us or math.inf)
        self.standing = Standing(len(known.best_us), len(wanted), found.cost_us, whole_us)
        saving = savings(known, offers, owners)
        dear = math.isinf(known.weight)
        first = sorted(wanted.values(), key=lambda t: -known.price(t) * len(t.uses) if dear else -saving(t))
        hurried = self._policy.overlaps and self._search_s < HURRIED * TRIAL_S * len(wanted)
        self._queue = [_Request(t, self._depth(t, hurried=hurried)) for t in first]
        uses = Counter(owners[i].problem.key for i in found.chosen)
        tasks = {k: self.problems.tasks[k] for k in uses}
        share = {k: n * known.price(tasks[k]) for k, n in uses.items()}
        dearest = [tasks[k] for k in sorted(share, key=lambda k: -share[k])]
        measured = [t for t in dearest if t.problem.key not in wanted]
        self._queue += [_Request(t, Depth.FEW) for t in measured if self._depth_of(t) is Depth.ONE]
        slow = [t for t in measured if share[t.problem.key] >= WIDEN_SHARE * found.cost_us]
        self._queue += [_Request(t, Depth.ALL) for t in slow if self._depth_of(t) is Depth.FEW and self._has_more(t)]
        self._spare = [t for t in dearest if share[t.problem.key] >= SPARE_SHARE * found.cost_us]
        if not wanted:
            self._collect_rest()
        self._complete_plan(hurried=hurried, whole=not wanted)

    def _complete_plan(self, *, hurried: bool, whole: bool) -> None:
        """Once a plan was made in a hurry, the next ones stay with what is known until one is measured throughout."""
        if hurried and not self._completing and not self._late:
            self._completing, self._prices, self._level = True, (LATE_PRICE, *PRICES), 0
        elif whole and self._completing:
            self._completing, self._prices, self._level = False, prices(self._policy, self._window.spent()), 0

    def _depth_of(self, task: Task) -> Depth:
        return self._depths.get(task.problem.key, Depth.FEW)

    def _depth(self, task: Task, *, hurried: bool) -> Depth:
        """How deep an unmeasured task is asked for."""
        if self._depth_of(task) is Depth.ALL:
            return Depth.ALL
        return Depth.ONE if hurried and (task.problem.key, Depth.ONE) not in self._asked else Depth.FEW

    def _has_more(self, task: Task) -> bool:
        """Whether there are kernels, or may be, beside those that are measured first."""
        kernels = self.known.kernels.get(task.problem.key)
        return kernels is not None and (kernels.more or len(kernels.pairs) > kernels.first)

    @property
    def _search_s(self) -> float:
        return (1.0 - self._window.spent()) * self._options.budget_s

    def _all_known(self) -> bool:
        """Whether no problems are left out any more; waits for them where nothing else is to be asked."""
        if self._rest is None:
            return True
        if not self._rest.done() and self._ready():
            return False
        try:
            rest = self._rest.result(None if math.isinf(left := self._window.left_s()) else left)
        except TimeoutError:
            return False  # and then the time is up
        self.problems = self.problems.joined(rest)
        self._rest, self._stale = None, True
        return True
