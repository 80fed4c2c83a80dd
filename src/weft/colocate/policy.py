"""What a scheduling policy is, what it is told, and what carries its decisions out: a GPU or its simulation.

Costs a policy may have: O(waiting) to a decision. It keeps no situation, and knows no backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

from weft.errors import UnsupportedError
from weft.kernels.scheduling import NEVER, Decision, Query, Running, Situation, Variant

MOST_IN_FLIGHT = 2
"""Queries that are launched and have not ended: the launch of the second hides behind the first."""


class PolicyError(UnsupportedError):
    """A policy that there is not, or that cannot run with this model, job or machine."""

    code = "W206"
    template = "policy {policy!r}: {reason}"
    todo = "{remedy}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What policies know of a latency-critical model."""

    name: str
    target_ns: int
    """From scheduled arrival to completion."""
    variants: tuple[Variant, ...]
    clock_mhz: int = 0
    """Of the SMs, at which their times were measured; 0: not known."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What policies know of the best-effort job."""

    name: str
    kernel_us: float
    """Its longest kernel alone, as it is launched plainly."""
    stop_us: float
    """q99 from the flag to the end of the last block."""
    cuts: bool = True
    """Whether a part of a kernel can be launched, which nothing stops."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy is made for."""

    models: tuple[ModelFacts, ...]
    job: JobFacts | None
    launch_us: float
    """q99 of a launch on an idle stream."""


class Policy(Protocol):
    """Decides at each arrival, each completion, and when it asked to be woken."""

    @property
    def name(self) -> str:
        """As the command calls it."""
        ...

    @property
    def cap(self) -> int:
        """The highest variant that is allowed now; -1: there is no such limit."""
        ...

    def decide(self, situation: Situation) -> Decision:
        """What is done now."""
        ...


@runtime_checkable
class Learning(Protocol):
    """A policy that takes note of what happened when its decision is carried out: no query waits for that."""

    def learn(self) -> None:
        """After each decision."""
        ...


class Backend(Protocol):
    """What carries decisions out: a GPU, or its simulation."""

    def situation(self) -> Situation:
        """All that a policy may know now."""
        ...

    def apply(self, decision: Decision) -> None:
        """In this order: the co-runner, kernels, launches, the wake-up."""
        ...

    def advance(self) -> bool:
        """Wait for the next arrival, completion or wake-up; False: all queries have ended."""
        ...


def drive(policy: Policy, backend: Backend) -> None:
    """A run: one decision for each thing that happens."""
    decide, situation, apply, advance = policy.decide, backend.situation, backend.apply, backend.advance
    learn = policy.learn if isinstance(policy, Learning) else None
    while advance():
        apply(decide(situation()))
        if learn is not None:
            learn()


@final
class Costs:
    """Times of all models' variants as whole nanoseconds, and headroom in them."""

    def __init__(self, setting: Setting) -> None:
        self.lc = {m.name: [round(v.lc_us * 1e3) for v in m.variants] for m in setting.models}
        """Median of a query by model and variant."""
        self.q99 = {m.name: [round(v.lc_q99_us * 1e3) for v in m.variants] for m in setting.models}
        self.target = {m.name: m.target_ns for m in setting.models}
        self.single = len(setting.models) == 1
        self.launch_ns = round(setting.launch_us * 1e3)
        self.stop_ns = round(setting.job.stop_us * 1e3) if setting.job else 0
        self.kernel_ns = round(setting.job.kernel_us * 1e3) if setting.job else 0
        self.kernel_us = setting.job.kernel_us if setting.job else 0.0
        self.shortest_target_ns = min(self.target.values(), default=0)
        self.tightest = min((m.target_ns - round(m.variants[0].lc_q99_us * 1e3) for m in setting.models), default=0)
        """Headroom of a query that arrives now, of the model that has least."""

    def free_ns(self, s: Situation) -> int:
        """When the GPU is expected to have done all that was launched."""
        at = s.now_ns
        if s.running:
            began = max(s.running[0].launched_ns, s.last_done_ns)
            for r in s.running:
                began += self.q99[r.query.model][r.variant]
            at = max(at, began)
        return max(at, s.job.busy_until_ns)

    def expected_free_ns(self, s: Situation) -> int:
        """The same by the medians: as often before as behind it."""
        at = s.job.busy_until_ns
        if s.running:
            began = max(s.running[0].launched_ns, s.last_done_ns)
            for r in s.running:
                began += self.lc[r.query.model][r.variant]
            at = max(at, began)
        return at

    def first(self, waiting: Sequence[Query]) -> Query:
        """Which of those that wait is next: the earliest deadline, of one model in the order of arrival."""
        return waiting[0] if self.single else min(waiting, key=lambda q: (q.deadline_ns, q.number))

    def ordered(self, waiting: Sequence[Query]) -> Sequence[Query]:
        """All that wait, in the order in which they would run."""
        return waiting if self.single else sorted(waiting, key=lambda q: (q.deadline_ns, q.number))

    def headroom(self, order: Sequence[Query], at_ns: int) -> int:
        """Time that all of them can lose and still keep their deadlines, if the first begins at `at_ns`; all alone.

        Negative, and no more exact than that, as soon as one of them is late.
        """
        least, q99 = NEVER, self.q99
        for q in order:
            at_ns += q99[q.model][0]
            least = min(least, q.deadline_ns - at_ns)
            if least < 0:
                break
        return least

    def headroom_with_next(self, order: Sequence[Query], at_ns: int, now_ns: int) -> int:
        """The same, also of a query that arrives now behind all of them."""
        least = self.headroom(order, at_ns)
        if least < 0:
            return least
        behind = at_ns + sum(self.q99[q.model][0] for q in order)
        return min(least, self.tightest - (behind - now_ns))


@final
class Admission:
    """Refuses a query as it comes, where it would end behind its deadline though the job were stopped for it.

    Of several models also where one that waits behind it would: that one was admitted before.
    """

    def __init__(self, setting: Setting) -> None:
        """By the times that were recorded: q99 of each query in front of it, alone."""
        self._costs = Costs(setting)

    def admits(
        self, query: Query, waiting: Iterable[Query], running: Sequence[Running], *, now_ns: int, last_done_ns: int,
        busy_until_ns: int,
    ) -> bool:  # fmt: skip
        """Whether it is to wait behind these."""
        costs = self._costs
        at = max(now_ns + costs.stop_ns, busy_until_ns)
        if running:
            began = max(running[0].launched_ns, last_done_ns)
            at = max(at, began + sum(costs.q99[r.query.model][r.variant] for r in running))
        if costs.single:
            return at + sum(costs.q99[q.model][0] for q in (*waiting, query)) <= query.deadline_ns
        extra = 0
        for q in costs.ordered([*waiting, query]):
            at += costs.q99[q.model][0]
            if q is query:
                extra = costs.q99[q.model][0]
            if at > q.deadline_ns and (q is query or at - extra <= q.deadline_ns):
                return False
        return True
