"""Weft's policy: one decision to a query, among plan variants that were recorded before.

1. A query's headroom is what it and all that wait behind it can lose: spending here delays every one of them.
2. It runs by the largest variant whose extra time, at q99, is within that headroom.
3. A controller caps the variant, ten times a second, so that the p99 that queueing theory predicts for the rate seen
   stays below the target. A p99 above it, over the last windows, puts the cap to 0 for a second; then it rises one by
   one. (A single late query does not: at p99 one of a hundred is.)
4. Of several models the earliest deadline goes first, and nobody is preempted. The cap's queue is that of all of them,
   by what each had of the queries that have ended.
5. Where no query runs the job has the whole GPU, and is stopped when one comes. It is launched while the last query
   still runs, so that its launch hides behind it. A whole kernel, which nothing stops, runs where it is longer than a
   stop takes, and the next query's headroom and the p99 seen allow it: p99 rises by no more than the kernel's length.

A variant whose times drift is not used for a second, then tried with half as much headroom again until it is refitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from weft.colocate.durations import Online
from weft.colocate.policy import MOST_IN_FLIGHT, Costs, Setting
from weft.kernels.scheduling import KEEP, OFF, Decision, Finished, Query, Recent, Situation

TICK_NS = 100_000_000
"""The controller decides so often."""
PENALTY_NS = 1_000_000_000
"""After a violation, and after a drift."""
OF_TARGET = 0.95
"""Predicted p99 stays below so much of the target."""
_TRIED = 1.5
"""Headroom for a variant that is being refitted, over what it needs."""
_MOST_LOAD = 0.97
_MARGIN_EVERY = 200
"""Queries by a variant; its margin costs more than all else that a decision does."""
_NO_CLOCK = 1980.0
"""Stands for a clock that is not known, and so does not change."""
_KEPT_OF_MIX = 0.8
"""Of the queries of each model, from one decision of the controller to the next."""
_FEW = 20
"""Arrivals in a window that say little."""


def predicted_p99(service: float, q99: float, rate: float, arrival_cv2: float) -> float:
    """p99 of the latency of a queue, in the unit of the service time; infinite at a load above `_MOST_LOAD`.

    The wait's tail is c * exp(-x t / service), where x solves Lundberg's equation for gamma gaps of this squared
    coefficient of variation and a constant service, E[exp(-x A / service)] exp(x) = 1; c is that of M/D/1
    (Asmussen, *Applied Probability and Queues*, XIII). `rate`: arrivals to that unit.
    """
    load = rate * service
    if load >= _MOST_LOAD:
        return math.inf
    if load <= 0.01:
        return q99
    v = max(arrival_cv2, 0.01)
    low, high = 0.0, 50.0
    for _ in range(40):
        x = (low + high) / 2
        low, high = (low, x) if x > math.log1p(x * v / load) / v else (x, high)
    x = max(low, 1e-9)
    tail = load * math.exp(x) - 1
    share = min(1.0, (1 - load) / tail) if tail > 0 else 1.0
    return q99 + max(0.0, math.log(100 * share)) * service / x


@final
class Weft:
    """As the module says."""

    name = "weft"

    def __init__(self, setting: Setting) -> None:
        self._costs = Costs(setting)
        self._most = max(len(m.variants) for m in setting.models) - 1
        self.cap = self._most
        self._models = {
            m.name: [Online(v.lc_us, v.margin_us, clock_mhz=m.clock_mhz or _NO_CLOCK) for v in m.variants]
            for m in setting.models
        }
        self._seen = {m.name: [0] * len(m.variants) for m in setting.models}
        self._barred = {m.name: [0] * len(m.variants) for m in setting.models}
        """Until when a variant is not used."""
        self._next = TICK_NS
        self._until = 0
        """End of a penalty."""
        self._is_off = setting.job is None
        self._unlearnt: list[Finished] = []
        self._now, self._recent = 0, Recent()
        self._target = self._costs.shortest_target_ns
        self._mix = {m.name: 1.0 for m in setting.models}
        """Queries that have ended lately, by model."""

    def decide(self, situation: Situation) -> Decision:
        """What is done now."""
        s, costs = situation, self._costs
        if s.finished:
            self._unlearnt += s.finished
        self._now, self._recent = s.now_ns, s.recent
        room = MOST_IN_FLIGHT - len(s.running)
        if not s.waiting or room <= 0:
            if s.waiting or s.job.form != OFF or s.job.is_done or self._is_off:
                return KEEP
            begin = costs.expected_free_ns(s) - costs.launch_ns
            return self._fill(s) if s.now_ns >= begin else Decision(wake_ns=begin)
        order = costs.ordered(s.waiting)
        starts = costs.stop_ns if s.job.form != OFF else costs.launch_ns
        free = costs.free_ns(s) + (0 if s.running else starts)
        found: list[tuple[Query, int]] = []
        least = costs.headroom(order, free)
        for q in (order[i] for i in range(min(room, len(order)))):
            variant = self._variant(q.model, least, s.now_ns)
            least -= costs.q99[q.model][variant] - costs.q99[q.model][0]
            found.append((q, variant))
        return Decision(tuple(found))

    def _fill(self, s: Situation) -> Decision:
        """The job in idle time: by whole kernels, which need no stop, where these keep the target."""
        costs = self._costs
        p99 = s.recent.p99_ns
        spent = costs.kernel_ns + costs.launch_ns
        fits = spent <= costs.tightest and p99 + spent <= OF_TARGET * self._target
        if costs.kernel_ns > costs.stop_ns and p99 > 0 and fits and s.now_ns >= self._until:
            return Decision(kernels_us=costs.kernel_us)
        return Decision(co_runner="on")

    def _variant(self, model: str, headroom: int, now: int) -> int:
        """The largest one that is allowed and fits."""
        q99, barred = self._costs.q99[model], self._barred[model]
        for k in range(min(self.cap, len(q99) - 1), 0, -1):
            extra = q99[k] - q99[0]
            needed = extra if barred[k] == 0 else extra * _TRIED
            if needed <= headroom and now >= barred[k]:
                return k
        return 0

    def learn(self) -> None:
        """Refit by what has ended, and set the cap."""
        if self._unlearnt:
            self._refit(self._unlearnt)
            self._unlearnt.clear()
        if self._now >= self._next:
            self._control(self._now, self._recent)

    def _refit(self, finished: Sequence[Finished]) -> None:
        for f in finished:
            if f.stops:
                continue
            model, k = f.query.model, f.variant
            self._mix[model] += 1
            online = self._models[model][k]
            mhz = f.clock_mhz or _NO_CLOCK
            online.observe((f.done_ns - f.begin_ns) / 1e3, clock_mhz=mhz)
            seen = self._seen[model]
            seen[k] += 1
            if not online.is_ready:
                if self._barred[model][k] == 0:
                    self._barred[model][k] = self._now + PENALTY_NS
            elif self._barred[model][k] and self._now >= self._barred[model][k]:
                self._barred[model][k] = 0
            if seen[k] % _MARGIN_EVERY == 0 and online.is_ready:
                us = online.predict_us(clock_mhz=mhz)
                self._costs.lc[model][k] = round(us * 1e3)
                self._costs.q99[model][k] = round(us * (1 + online.margin) * 1e3)

    def _control(self, now: int, recent: Recent) -> None:
        """The cap, by what was seen in the last window."""
        self._next = now + TICK_NS
        if recent.p99_ns > self._target:
            self._until = now + PENALTY_NS
            self.cap = 0
        if now >= self._until:
            self.cap = min(self._allowed(recent), self.cap + 1)
        for name in self._mix:
            self._mix[name] = max(1.0, _KEPT_OF_MIX * self._mix[name])

    def _allowed(self, recent: Recent) -> int:
        """The largest variant at which the predicted p99 of every model stays below its target."""
        if recent.arrivals < _FEW:
            return self._most
        rate = recent.arrivals / recent.length_ns
        for k in range(self._most, 0, -1):
            service, variation = self._service(k)
            if all(
                predicted_p99(service, q99[min(k, len(q99) - 1)], rate, recent.variation + variation)
                <= OF_TARGET * self._costs.target[name]
                for name, q99 in self._costs.q99.items()
            ):
                return k
        return 0

    def _service(self, k: int) -> tuple[float, float]:
        """Mean service time up to a variant over all models, and its squared coefficient of variation.

        Towards saturation a queue's tail depends on the sum of this and that of the gaps alone (Kingman).
        """
        lc = {name: own[min(k, len(own) - 1)] for name, own in self._costs.lc.items()}
        if len(lc) == 1:
            return float(*lc.values()), 0.0
        total = sum(self._mix.values())
        mean = sum(self._mix[name] * ns for name, ns in lc.items()) / total
        square = sum(self._mix[name] * ns * ns for name, ns in lc.items()) / total
        return mean, max(0.0, square / mean**2 - 1)
