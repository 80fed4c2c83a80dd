"""What a GPU can do by itself: alone, one after the other, streams, priorities, partitions, time slices."""

from __future__ import annotations

from typing import final

from weft.colocate.policy import MOST_IN_FLIGHT, Costs, Setting
from weft.kernels.scheduling import KEEP, NEVER, OFF, Decision, Query, Situation

SLICE_US = 2000.0
"""Of time slices between processes."""
WINDOW_NS = 100_000_000
"""A controller of partitions decides so often."""


def launches(costs: Costs, s: Situation, variant: int) -> tuple[tuple[Query, int], ...]:
    """As many of those that wait as may be in flight, all by one variant."""
    free = MOST_IN_FLIGHT - len(s.running)
    if free <= 0 or not s.waiting:
        return ()
    if costs.single:
        return tuple((s.waiting[i], variant) for i in range(min(free, len(s.waiting))))
    return tuple((q, variant) for q in costs.ordered(s.waiting)[:free])


@final
class Exclusive:
    """The model alone: what all others are compared with."""

    name = "exclusive"
    cap = -1

    def __init__(self, setting: Setting) -> None:
        self._costs = Costs(setting)

    def decide(self, situation: Situation) -> Decision:
        """What is done now."""
        found = launches(self._costs, situation, 0)
        return Decision(found) if found else KEEP


@final
class Serial:
    """Whole BE kernels, in front of queries that have the headroom for it: one is under way at a time."""

    name = "serial"
    cap = -1

    def __init__(self, setting: Setting) -> None:
        self._costs = Costs(setting)

    def decide(self, situation: Situation) -> Decision:
        """What is done now."""
        s, costs = situation, self._costs
        found = launches(costs, s, 0)
        if s.job.busy_until_ns > s.now_ns or s.job.is_done or len(s.running) == MOST_IN_FLIGHT:
            return Decision(found) if found else KEEP
        room = costs.headroom_with_next(costs.ordered(s.waiting), costs.free_ns(s), s.now_ns)
        fits = room >= costs.kernel_ns + costs.launch_ns
        return Decision(found, kernels_us=costs.kernel_us if fits else 0.0) if found or fits else KEEP


@final
class Beside:
    """The job runs all the time in one form, beside queries too: streams, priorities, MPS, a fixed partition."""

    cap = -1

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self._costs = Costs(setting)
        self._variant = len(setting.models[0].variants) - 1
        """Variant 1: the form. Without it only the model runs, and that is told before."""

    def decide(self, situation: Situation) -> Decision:
        """What is done now."""
        found = launches(self._costs, situation, self._variant)
        if situation.job.form != self._variant:
            return Decision(found, "on", self._variant)
        return Decision(found) if found else KEEP


@final
class Green:
    """A partition of SMs for the job, whose size a controller sets: smaller when p99 nears the target, else larger."""

    name = "green"

    def __init__(self, setting: Setting) -> None:
        self._costs = Costs(setting)
        self._most = len(setting.models[0].variants) - 1
        self._target = min(m.target_ns for m in setting.models)
        self.cap = min(1, self._most)
        self._next = WINDOW_NS
        self._calm = 0

    def decide(self, situation: Situation) -> Decision:
        """What is done now."""
        s = situation
        if s.now_ns >= self._next:
            self._next = s.now_ns + WINDOW_NS
            self._control(s.recent.p99_ns)
        found = launches(self._costs, s, self.cap)
        if self.cap == 0:
            return Decision(found, "off") if s.job.form != OFF else Decision(found)
        if s.job.form != self.cap and not s.running:
            return Decision(found, "on", self.cap)
        return Decision(found) if found else KEEP

    def _control(self, p99_ns: int) -> None:
        if p99_ns > 0.95 * self._target:
            self.cap, self._calm = max(0, self.cap - 1), 0
        elif p99_ns < 0.8 * self._target:
            self._calm += 1
            if self._calm >= 5:
                self.cap, self._calm = min(self._most, self.cap + 1), 0


@final
class TimeSlice:
    """Turns between two processes while both have work, each of `SLICE_US`; a query that has begun is not cut."""

    name = "timeslice"
    cap = -1

    def __init__(self, setting: Setting) -> None:
        self._costs = Costs(setting)
        self._slice_ns = round(SLICE_US * 1e3)
        self._until = NEVER
        """End of the model's slice; `NEVER`: the job had the last one."""

    def decide(self, situation: Situation) -> Decision:
        """What is done now."""
        s = situation
        if s.job.busy_until_ns > s.now_ns:
            self._until = NEVER
            return KEEP
        if not s.waiting and not s.running:
            self._until = NEVER
            return KEEP if s.job.is_done else Decision(kernels_us=SLICE_US)
        if self._until == NEVER:
            self._until = s.now_ns + self._slice_ns
        if s.now_ns < self._until or s.job.is_done:
            found = launches(self._costs, s, 0)
            return Decision(found, wake_ns=self._until) if found else KEEP
        if s.running:
            return KEEP
        self._until = NEVER
        return Decision(kernels_us=SLICE_US)
