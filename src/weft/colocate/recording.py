"""Samples of one model and one job on a machine: what policies are told of, and what a simulation replays.

All of it is measured through the machine that policies run on, by the same thread and clock: a query's time is from the
end of the one before to its own, two in flight; a launch is what a query on an idle GPU takes longer, from the call to
its end; a stop is what one takes longer that finds the job there, from the decision to stop it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.colocate.live import Ended, Machine, quietly
from weft.colocate.policy import MOST_IN_FLIGHT
from weft.errors import DeviceError
from weft.kernels.samples import FORMAT, JobSamples, ModelSamples, ModeSamples, SampleRecord, Source, Spread
from weft.kernels.scheduling import OFF, JobKind, Query, Sharing

QUERIES = 400
"""Of each mode."""
SMALL = 200
"""Launches, and stops."""
IDLE_NS = 40_000_000
"""In which the job has the GPU alone in a form."""
REST_NS = 1_000_000
"""After which the GPU is idle; half of it, and as much again by chance, the job runs before it is stopped."""
WARM_UP = 20
LEAST, LONG_NS = 40, 2_000_000_000
"""Queries that are measured in any case; after so long no further one is begun."""
_LIMIT_NS = 30_000_000_000
_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.995, 1.0)


@dataclass(frozen=True, slots=True)
class Mode:
    """A way in which a model's queries run beside the job: variant 1, 2, ... of the machine."""

    name: str
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class What:
    """What the samples are of."""

    gpu: str
    driver: str
    commit: str
    """Of Weft's sources."""
    model: str
    kernels: int
    """Of its plan."""
    job: str
    """Empty: none."""
    kernel_us: float = 0.0
    """All the job's kernels once, alone; of a process its longest segment."""
    block_us: float = 0.0
    kind: JobKind = "kernels"
    """Of the job."""


class RecordInterruptedError(KeyboardInterrupt):
    """Ctrl-C while ways of sharing were measured: `record` has those that were."""

    def __init__(self, record: SampleRecord) -> None:
        super().__init__()
        self.record = record


def spread(us: Sequence[float], source: int) -> Spread:
    """Quantiles of times.

    Raises:
        ValueError: there are none.
    """
    if not us:
        raise ValueError("no times")
    return Spread(tuple((q, float(np.quantile(us, q))) for q in _QUANTILES), source)


def back_to_back(machine: Machine, model: str, variant: int, count: int) -> tuple[list[float], list[int]]:
    """Microseconds of so many queries, each from the end of the one before, and the clock of the SMs at their ends.

    Of fewer, but `LEAST`, where they take over `LONG_NS`.

    Raises:
        DeviceError: one does not end [W301].
    """
    found: list[Ended] = []
    launched = 0
    begun = machine.now_ns()
    until = begun + _LIMIT_NS
    while len(found) < count:
        if count > LEAST and machine.now_ns() - begun > LONG_NS:
            count = max(LEAST, launched)
        while launched < count and launched - len(found) < MOST_IN_FLIGHT:
            machine.launch(Query(model, launched, 0, 0), variant)
            launched += 1
        found += machine.ended()
        if machine.now_ns() > until:
            raise DeviceError(problem=f"{model}: {len(found)} of {count} queries have ended in half a minute")
    us, before = [], 0
    for x in found:
        us.append((x.done_ns - max(x.begin_ns, before)) / 1e3)
        before = x.done_ns
    return us, [x.clock_mhz for x in found]


def longer(machine: Machine, model: str, count: int, solo_us: float, prepare: Callable[[int], int]) -> list[float]:
    """Microseconds that queries take over `solo_us`, from instants that `prepare` gives by the number of the try."""
    found = []
    for number in range(count):
        asked = prepare(number)
        machine.launch(Query(model, number, 0, 0), 0)
        until = machine.now_ns() + _LIMIT_NS
        while not (ended := machine.ended()):
            if machine.now_ns() > until:
                raise DeviceError(problem=f"{model}: a query has not ended in half a minute")
        found.append(max(0.0, (ended[0].done_ns - asked) / 1e3 - solo_us))
    return found


def recorded(
    machine: Machine, what: What, modes: Sequence[Mode] = (), *, queries: int = QUERIES, small: int = SMALL,
    seed: int = 0,
) -> SampleRecord:  # fmt: skip
    """Samples of a model alone, of the job alone, and of both in every mode.

    Args:
        machine: whose variants are the model alone, and then the modes.
        what: names, and the times that were measured before.
        modes: empty where there is no job.
        queries: of each.
        small: launches, and stops.
        seed: of how long the job runs before it is stopped.

    Raises:
        DeviceError: something does not end, or a kernel fails [W301, W302].
        RecordInterruptedError: Ctrl-C, once both were measured alone.
    """
    found: list[ModeSamples] = []
    interrupted = False
    with quietly():
        back_to_back(machine, what.model, 0, WARM_UP)
        solo, clocks = back_to_back(machine, what.model, 0, queries)
        alone = float(np.median(solo))
        launch = longer(machine, what.model, small, alone, lambda _: _rest(machine, REST_NS))
        job = (_job(machine, what, alone, small, seed),) if what.job else ()
        try:
            found += (_mode(machine, what, number, mode, queries) for number, mode in enumerate(modes, 1))
        except KeyboardInterrupt:
            interrupted = True
    clock = round(float(np.median(clocks)))
    model = ModelSamples(what.model, spread(solo, 0), what.kernels, clock)
    source = Source("", what.model, what.commit, "measured by `weft colocate prepare` on this GPU")
    record = SampleRecord(
        FORMAT, what.gpu, what.driver, (model,), job, tuple(found), (), spread(launch, 0), (source,)
    )  # fmt: skip
    if interrupted:
        raise RecordInterruptedError(record)
    return record


def _rest(machine: Machine, ns: int) -> int:
    """Let so much time pass; when it has."""
    until = machine.now_ns() + ns
    while machine.now_ns() < until:
        machine.pause(until)
    return machine.now_ns()


def _job(machine: Machine, what: What, solo_us: float, count: int, seed: int) -> JobSamples:
    times = np.random.default_rng(seed).integers(REST_NS // 2, REST_NS, count)

    def stopped(number: int) -> int:
        machine.set_form(0)
        asked = _rest(machine, int(times[number]))
        machine.set_form(OFF)
        return asked

    stops = longer(machine, what.model, count, solo_us, stopped)
    alone = _Rate(machine, 0)
    _rest(machine, IDLE_NS)
    return JobSamples(what.job, what.kernel_us, what.block_us, spread(stops, 0), 0, alone.ended(), what.kind)


def _mode(machine: Machine, what: What, variant: int, mode: Mode, queries: int) -> ModeSamples:
    idle = _Rate(machine, variant)
    _rest(machine, IDLE_NS)
    idle_rate = idle.ended()
    both = _Rate(machine, variant)
    us, clocks = back_to_back(machine, what.model, variant, WARM_UP + queries)
    rate = both.ended()
    us = us[min(WARM_UP, len(us) // 2) :]  # the first ones ran while the job found its places
    clock = round(float(np.median(clocks)))
    return ModeSamples(what.model, what.job, mode.name, mode.sharing, spread(us, 0), rate, idle_rate, clock)


class _Rate:
    """The job in a form, from now on: its work alone to a second, when it has been told to stop."""

    def __init__(self, machine: Machine, form: int) -> None:
        self._machine = machine
        self._before = machine.close_job().work_us
        self._begun = machine.now_ns()
        machine.set_form(form)

    def ended(self) -> float:
        """Tell it to stop, and wait for its end: kernels that nothing stops count with their time."""
        work = self._machine.close_job().work_us - self._before
        return work * 1e3 / (self._machine.now_ns() - self._begun)
