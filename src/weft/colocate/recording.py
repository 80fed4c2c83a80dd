"""Samples of one model and one job on a machine: what policies are told of, and what a simulation replays.

All of it is measured through the machine that policies run on, by the same thread and clock: a query's time is from the
end of the one before to its own, two in flight. A launch is what a query on an idle GPU takes longer from its arrival
to its end, a stop what one takes longer that finds the job there: policies run meanwhile, `exclusive` and `tally`, so
what the arrival's notice and a decision take is in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from weft.colocate.arrivals import Arrivals
from weft.colocate.live import Ended, LiveBackend, Machine, quietly, run
from weft.colocate.operating import prepare
from weft.colocate.policies import make
from weft.colocate.policy import MOST_IN_FLIGHT
from weft.errors import DeviceError
from weft.kernels.samples import FORMAT, JobSamples, ModelSamples, ModeSamples, SampleRecord, Source, Spread
from weft.kernels.scheduling import JobKind, Query, Sharing

QUERIES = 400
"""Of each mode."""
SMALL = 200
"""Launches, and stops."""
IDLE_NS = 40_000_000
"""In which the job has the GPU alone in a form."""
REST_NS = 1_000_000
"""Half of it, and as much again by chance, the GPU is idle, or the job runs, before a query comes."""
_APART, _TARGET = 3.0, 5.0
"""Times alone that such queries come later besides, and that they may take."""
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
        # ends are stamped by the host: where it was held up, two are seen at once
        us.append(max(1, x.done_ns - max(x.begin_ns, before)) / 1e3)
        before = x.done_ns
    return us, [x.clock_mhz for x in found]


def longer(machine: Machine, record: SampleRecord, policy: str, count: int, seed: int) -> list[float]:
    """Microseconds that queries take over the median alone, from their arrivals, far apart, to their ends.

    Raises:
        DeviceError: one does not end [W301].
    """
    (model,) = record.models
    solo_us = model.solo.at(0.5)
    apart = np.random.default_rng(seed).integers(REST_NS // 2, REST_NS, 1 + count) + round(_APART * solo_us * 1e3)
    made = prepare(
        record, policy, model.name, record.jobs[0].name if record.jobs else "", round(_TARGET * solo_us * 1e3)
    )
    chosen = make(policy, made.setting)
    out = run(chosen, LiveBackend(machine, [(made, Arrivals(np.cumsum(apart), "far apart", seed))], policy=chosen))
    times = [(done - q.scheduled_ns) / 1e3 for q, done in zip(out.queries, out.done_ns, strict=True)]
    return [max(0.0, us - solo_us) for us in times[1:]]  # the first one finds no job: nothing was decided before it


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
    source = Source("", what.model, what.commit, "measured by `weft colocate prepare` on this GPU")
    none = spread([0.0], 0)
    with quietly():
        back_to_back(machine, what.model, 0, WARM_UP)
        solo, clocks = back_to_back(machine, what.model, 0, queries)
        model = ModelSamples(what.model, spread(solo, 0), what.kernels, round(float(np.median(clocks))))
        record = SampleRecord(FORMAT, what.gpu, what.driver, (model,), (), (), (), none, (source,))
        record = replace(record, launch=spread(longer(machine, record, "exclusive", small, seed), 0))
        if what.job:
            job = JobSamples(what.job, what.kernel_us, what.block_us, none, 0, _idle_rate(machine, 0), what.kind)
            stoppable = replace(job, kind="kernels")  # of a process too, whose segments end by themselves
            stop = longer(machine, replace(record, jobs=(stoppable,)), "tally", small, seed + 1)
            record = replace(record, jobs=(replace(job, stop=spread(stop, 0)),))
        try:
            found += (_mode(machine, what, number, mode, queries) for number, mode in enumerate(modes, 1))
        except KeyboardInterrupt:
            interrupted = True
    record = replace(record, modes=tuple(found))
    if interrupted:
        raise RecordInterruptedError(record)
    return record


def merged(records: Sequence[SampleRecord]) -> SampleRecord:
    """Samples of several models beside the same job as one record: of launches and stops the slower ones.

    Raises:
        ValueError: no record, of several GPUs or jobs, or a model twice.
    """
    first, *others = records
    if any((r.gpu, r.driver, [j.name for j in r.jobs]) != (first.gpu, first.driver, [j.name for j in first.jobs])
           for r in others):  # fmt: skip
        raise ValueError("samples of several GPUs or jobs")
    made = first
    for r in others:
        shift = len(made.sources)
        jobs = []
        for one, other in zip(made.jobs, r.jobs, strict=True):
            stops = [s for s in (one.stop, _moved(other.stop, shift)) if s is not None]
            jobs.append(replace(one, stop=max(stops, key=lambda s: s.at(0.99), default=None)))
        made = replace(
            made, jobs=tuple(jobs), launch=max(made.launch, _moved(r.launch, shift), key=lambda s: s.at(0.99)),
            models=(*made.models, *(replace(m, solo=_moved(m.solo, shift)) for m in r.models)),
            modes=(*made.modes, *(replace(m, lc=_moved(m.lc, shift)) for m in r.modes)),
            steps=(*made.steps, *(replace(s, source=s.source + shift) for s in r.steps)),
            sources=(*made.sources, *r.sources),
        )  # fmt: skip
    return made


@overload
def _moved(found: Spread, shift: int) -> Spread: ...
@overload
def _moved(found: Spread | None, shift: int) -> Spread | None: ...
def _moved(found: Spread | None, shift: int) -> Spread | None:
    """With its source so much further behind."""
    return None if found is None else replace(found, source=found.source + shift)


def _rest(machine: Machine, ns: int) -> int:
    """Let so much time pass; when it has."""
    until = machine.now_ns() + ns
    while machine.now_ns() < until:
        machine.pause(until)
    return machine.now_ns()


def _idle_rate(machine: Machine, form: int) -> float:
    """Of the job alone in a form."""
    alone = _Rate(machine, form)
    _rest(machine, IDLE_NS)
    return alone.ended()


def _mode(machine: Machine, what: What, variant: int, mode: Mode, queries: int) -> ModeSamples:
    idle_rate = _idle_rate(machine, variant)
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
