"""Our implementations of published schedulers, as far as their rules are; labelled so wherever they are shown.

Orion (eth-easl/orion, EuroSys 2024), Tally (arXiv:2410.07381), Tacker (HPCA 2022), Aker (TC 2024, its abstract).
"""

from __future__ import annotations

from typing import final

from weft.colocate.policies.baselines import launches
from weft.colocate.policy import MOST_IN_FLIGHT, Costs, Setting
from weft.kernels.scheduling import KEEP, OFF, Decision, Query, Situation

ORION_SHARE = 0.025
"""Outstanding BE time over LC's latency, at most: `DUR_THRESHOLD` of Orion's code. One kernel is always let through."""


@final
class Orion:
    """BE kernels where no query runs or waits, or beside one on a stream of lower priority if their profiles differ.

    Outstanding BE kernels are bounded by a share of LC's latency. Orion searches the number of SMs up to which a BE
    kernel may run beside a query; here that search is a question to the samples: whether a query beside the job's
    kernels keeps the target by itself. Where none was recorded, none runs beside one.
    """

    name = "orion"
    cap = -1

    def __init__(self, setting: Setting) -> None:
        self._costs = Costs(setting)
        keeps = all(len(m.variants) > 1 and m.variants[1].lc_q99_us * 1e3 <= m.target_ns for m in setting.models)
        self._beside = int(keeps)
        us = min(m.variants[0].lc_us for m in setting.models)
        kernel = self._costs.kernel_us
        self._kernels_us = max(kernel, ORION_SHARE * us // kernel * kernel) if kernel else 0.0

    def decide(self, situation: Situation) -> Decision:
        """What is done now."""
        s = situation
        found = launches(self._costs, s, self._beside)
        idle = not s.waiting and not s.running
        if idle and not s.job.is_done and s.job.busy_until_ns <= s.now_ns:
            return Decision(kernels_us=self._kernels_us)
        return Decision(found) if found else KEEP


@final
class Tally:
    """BE as preemptible persistent blocks where no query runs; stopped at the end of a block when one comes."""

    name = "tally"
    cap = -1

    def __init__(self, setting: Setting) -> None:
        self._costs = Costs(setting)

    def decide(self, situation: Situation) -> Decision:
        """What is done now."""
        s = situation
        found = launches(self._costs, s, 0)
        if not found and not s.running and s.job.form == OFF and not s.job.is_done:
            return Decision(co_runner="on")
        return Decision(found) if found else KEEP


class _Fusing:
    """A variant by the headroom of the query at hand alone, BE kernels by headroom where no query waits."""

    cap = -1

    def __init__(self, setting: Setting, *, split: bool) -> None:
        self._costs = Costs(setting)
        self._split = split and setting.job is not None and setting.job.cuts
        """Whether a BE kernel may be cut, so that what fits runs."""

    def decide(self, situation: Situation) -> Decision:
        """What is done now."""
        s, costs = situation, self._costs
        free = costs.free_ns(s)
        found: list[tuple[Query, int]] = []
        order = costs.ordered(s.waiting)
        for q in (order[i] for i in range(min(MOST_IN_FLIGHT - len(s.running), len(order)))):
            variant = self._variant(q, free)
            free += costs.q99[q.model][variant]
            found.append((q, variant))
        if found or s.waiting or s.running or s.job.is_done or s.job.busy_until_ns > s.now_ns:
            return Decision(tuple(found)) if found else KEEP
        room = costs.tightest - costs.launch_ns
        if room >= costs.kernel_ns:
            return Decision(kernels_us=costs.kernel_us)
        return Decision(kernels_us=room / 1e3) if self._split and room > 0 else KEEP

    def _variant(self, q: Query, begin_ns: int) -> int:
        """T_hr = T_qos - T_queue - T_solo - what runs: the largest variant whose median costs no more."""
        lc = self._costs.lc[q.model]
        room = q.deadline_ns - begin_ns
        return next((k for k in range(len(lc) - 1, 0, -1) if lc[k] <= room), 0)


@final
class Tacker(_Fusing):
    """Whole BE kernels fused into LC kernels, by a prediction of two lines and the headroom of the newest query."""

    name = "tacker"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, split=False)


@final
class Aker(_Fusing):
    """BE kernels split at the opportune ratio of each pair, so that a fused kernel ends when LC does."""

    name = "aker"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, split=True)
