"""What is known of the problems' times, and what follows for the offers to the integer program.

A candidate that never enters a plan even at its predicted price is never built: that is the pruning. The prediction is
the model's estimate times what its family (same product, or same mix of primitives) was off by so far, and never below
the sound lower bound. `weft.pipeline.search.loop` decides by it what is measured.

Source: measuring on demand is A* with the estimate as heuristic; `weft.orchestrate.estimate` for the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from weft.ir.graph import bits
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import Kernel, LibraryCall, Schedule
from weft.orchestrate.select import Priced
from weft.pipeline.problems import Problems, Task
from weft.pipeline.search.kernels import Kernels

OPTIMISM = 0.85
"""Factor on estimates where nothing was learned from measurements."""
WIDEN_SHARE = 0.01
"""Problems below this share of the best plan are left with the first kernels of each generator."""
REFUSED_FACTOR = 4.0
"""On the estimates of what no plan can do without and every kernel was refused for: a library call may stand there."""


@dataclass
class Known:
    """What is known about each task, by the key of its problem.

    One stage at a time has it and adds to it, each by a method of its own: the search (`wrote`, `learn`) until it has
    ended, then who selects (`wrote`: calls that no plan can do without), then who qualifies (`heard`).
    """

    measurements: dict[tuple[str, Schedule], Measurement] = field(default_factory=dict)
    best_us: dict[str, float] = field(default_factory=dict)
    """By problem key; infinite when every kernel was refused."""
    complete: bool = False
    """True when every kernel of the best plan is measured: more time would change nothing."""
    reused: int = 0
    """Measurements that came from the database."""
    asked_s: float = 0.0
    """Seconds until the first problem was asked for."""
    measured_s: float = 0.0
    """Seconds until the first was measured."""
    right: set[tuple[str, Schedule]] = field(default_factory=set)
    """Calls by problem key that were verified without being timed."""
    refused: set[tuple[str, Schedule]] = field(default_factory=set)
    """Calls that were refused then."""
    odd: set[tuple[str, Schedule]] = field(default_factory=set)
    """Calls that were right then but for which results are NaN or infinite."""
    failed: str = ""
    """Why there is no worker; empty: there is."""
    kernels: dict[str, Kernels] = field(default_factory=dict)
    """What was written; nothing where no generator was asked."""

    def pairs(self, problem_key: str) -> tuple[tuple[Schedule, Kernel], ...]:
        """The kernels of a problem that were written so far."""
        found = self.kernels.get(problem_key)
        return () if found is None else found.pairs

    def wrote(self, problem_key: str, kernels: Kernels) -> None:
        """Take in what was written for a problem, in place of what was before."""
        self.kernels[problem_key] = kernels

    def heard(self, found: Measurement, *, finite: bool) -> None:
        """Take in what was found of a call that was not timed; `finite`: it was verified on finite inputs alone."""
        key = found.problem_key, found.schedule
        odd = found.verdict is Verdict.NAN_CLASS and not finite
        (self.odd if odd else self.right if found.verdict is Verdict.OK else self.refused).add(key)

    def is_odd(self, problem_key: str, schedule: Schedule) -> bool:
        """Whether a call is right but for which results are NaN or infinite.

        oneDNN's convolutions multiply infinite weights with padding. The framework's own operators are what the model
        is written in; where nothing else is right, they may stand in.
        """
        key = problem_key, schedule
        found = self.measurements.get(key)
        return key in self.odd or (found is not None and found.verdict is Verdict.NAN_CLASS)

    def is_right(self, problem_key: str, schedule: Schedule) -> bool:
        """Whether a kernel has run in a worker and was found right there."""
        key = problem_key, schedule
        found = self.measurements.get(key)
        return key in self.right or (found is not None and found.verdict is Verdict.OK)

    def learn(self, task: Task) -> bool:
        """Take in what was measured of a task; whether it takes more of its kernels to know it.

        None of those that go first was right then.
        """
        key = task.problem.key
        kernels = self.kernels.get(key)
        if kernels is None:
            return False  # time ran out before they were written
        tried = [m for schedule, _ in kernels.pairs if (m := self.measurements.get((key, schedule))) is not None]
        times = [m.median_us for m in tried if m.verdict is Verdict.OK]
        if not times and (kernels.more or len(tried) < len(kernels.pairs)):
            return len(tried) >= kernels.first  # else time ran out before it was its turn
        self.best_us[key] = min(times, default=math.inf)
        return False

    def library_near(self, task: Task) -> bool:
        """Whether a library's best call so far comes near the best kernel; false where kernels alone were measured."""
        key = task.problem.key
        best = self.best_us.get(key)
        if best is None or math.isinf(best):
            return True
        found = [
            m.median_us
            for schedule, kernel in self.pairs(key)
            if isinstance(kernel, LibraryCall)
            and (m := self.measurements.get((key, schedule))) is not None
            and m.verdict is Verdict.OK
        ]
        return min(found, default=math.inf) <= task.policy.library_near * best

    def price(self, task: Task) -> float:
        """Measured time, or the optimistic prediction."""
        known = self.best_us.get(task.problem.key)
        if known is not None:
            return known
        return max(task.bound_us, task.estimate_us * OPTIMISM)


def savings(known: Known, offers: Sequence[Priced], owners: Sequence[Task]) -> Callable[[Task], float]:
    """By how much a problem's kernels, where they stand, are predicted to beat its primitives one by one."""
    alone: dict[int, float] = {}
    for offer, owner in zip(offers, owners, strict=True):
        members = offer.candidate.members
        if members and not members & (members - 1):
            price = max(offer.cost_us, owner.estimate_us)
            alone[members] = min(alone.get(members, math.inf), price)

    def saving(task: Task) -> float:
        total = 0.0
        for candidate, _ in task.uses:
            total += sum(alone.get(1 << member, 0.0) for member in bits(candidate.members))
        price = known.price(task)
        return max(total - price * len(task.uses), 0.05 * price)

    return saving


def priced_offers(problems: Problems, known: Known) -> tuple[list[Priced], list[Task]]:
    """Every use of every problem that may still run, or that no plan can do without, with its price."""
    offers: list[Priced] = []
    owners: list[Task] = []
    for task in problems.tasks.values():
        price = known.price(task)
        if not math.isfinite(price):
            if not task.essential:
                continue
            price = REFUSED_FACTOR * max(task.estimate_us, 1.0)
        for candidate, ins, outs in task.formats:
            offers.append(Priced(candidate, ins, outs, price))
            owners.append(task)
    return offers, owners


def unmeasured(chosen: Iterable[int], owners: Sequence[Task], known: Known) -> dict[str, Task]:
    """The problems of a plan whose time nobody knows."""
    used = [owners[i] for i in chosen]
    return {t.problem.key: t for t in used if t.problem.key not in known.best_us}
