"""Policies on the same arrivals: cells of load and target, and what each policy came to, simulated or measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from weft.colocate.arrivals import Arrivals, ArrivalsError, Spike, gamma, poisson, rate_of_load, spikes
from weft.colocate.latency import Latencies, be_throughput, over_exclusive, system_throughput
from weft.colocate.operating import Prepared, model_of, prepare, setting_of
from weft.colocate.outcome import Outcome, off_lindley_us
from weft.colocate.policies import make, note_of
from weft.colocate.policy import Admission, PolicyError, drive
from weft.colocate.queueing import TargetError, peak_load
from weft.colocate.simulate import SimulatedBackend, drawn_ns
from weft.kernels.policy_run import Chosen, Comparison, PolicyRun, Refused, VariantShare
from weft.kernels.samples import ModelSamples, SampleRecord

QUERIES = 20_000
"""Of a run, where arrivals are drawn."""
TIGHT = 5.0
"""Solo times that a target is, where none is given."""
RELATIVE = "service rate"
ABSOLUTE = "peak load"
TRACE = "trace"
_WARM_UP = 50
"""One query of so many is left out, at the begin."""
_SAMPLES = 10_000
_WINDOWS = 60
_POINTS = 240
_RESAMPLES = 200


class ComparisonInterruptedError(KeyboardInterrupt):
    """Ctrl-C while policies ran: `comparison` has those that had ended."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__()
        self.comparison = comparison


@dataclass(frozen=True, slots=True)
class Cell:
    """What all policies of a comparison share."""

    model: str
    job: str
    """Empty: none."""
    target_ns: int
    load: float
    load_of: str
    arrivals: Arrivals
    seed: int
    admit: bool = False
    """Whether queries that would miss the target are refused as they come."""
    beside: tuple[Cell, ...] = ()
    """Of further models in the same run, each with its own target, load and arrivals."""

    @property
    def every(self) -> tuple[Cell, ...]:
        """One to each model."""
        return self, *self.beside


def together(cells: Sequence[Cell], drawn: Sequence[bool] = ()) -> Cell:
    """Cells of several models beside the same job as one run.

    `drawn`: whose arrivals were drawn: these end where the first of them does, so that all models run to the end.

    Raises:
        PolicyError: a model twice [W206].
    """
    names = [c.model for c in cells]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise PolicyError(policy="any", reason=f"the model {twice[:80]!r} twice", remedy="name each model once")
    ends = [int(c.arrivals.times_ns[-1]) for c, is_drawn in zip(cells, drawn, strict=False) if is_drawn]
    if len(ends) > 1:
        cells = [_until(c, min(ends)) if is_drawn else c for c, is_drawn in zip(cells, drawn, strict=True)]
    return replace(cells[0], beside=tuple(cells[1:]))


def _until(cell: Cell, end_ns: int) -> Cell:
    """Its arrivals up to then, the first one in any case."""
    a = cell.arrivals
    count = max(1, int(np.searchsorted(a.times_ns, end_ns, side="right")))
    return cell if count == len(a) else replace(cell, arrivals=Arrivals(a.times_ns[:count], a.process, a.seed))


def target_of(model: ModelSamples, qos_ms: float | None) -> int:
    """The latency target in nanoseconds: what is given, else `TIGHT` solo times.

    Raises:
        TargetError: none that can be, or below what the model takes alone [W017].
    """
    if qos_ms is None:
        return round(TIGHT * model.solo.at(0.5) * 1e3)
    if not (math.isfinite(qos_ms) and 0 < qos_ms <= 60_000):
        raise TargetError(problem=f"{qos_ms} ms", remedy="give one above 0 ms, and up to a minute")
    if qos_ms * 1e3 < model.solo.at(0.99):
        problem = f"{qos_ms:g} ms, where {model.name} alone takes {model.solo.at(0.99) / 1e3:.4g} ms (p99)"
        raise TargetError(problem=problem, remedy="give a longer target")
    return round(qos_ms * 1e6)


def cell_of(
    record: SampleRecord, model: str, job: str, *, qos_ms: float | None, load: float | None, of_peak: bool,
    process: str, trace: Arrivals | None, queries: int = QUERIES, seed: int = 0, admit: bool = False,
) -> Cell:  # fmt: skip
    """A cell: the target, and arrivals fixed before any policy runs.

    Args:
        record: whose model and job are meant.
        model: its name.
        job: its name; empty: none.
        qos_ms: the target; None: `TIGHT` solo times.
        load: fraction of the service rate, or of the peak load; None: 0.8, or a trace as it is.
        of_peak: which of both.
        process: `poisson`, `gamma:CV` or `spikes:FACTOR`.
        trace: in place of a process; scaled to the load, if one is given.
        queries: how many are drawn.
        seed: of all that is drawn.
        admit: refuse queries that would miss the target as they come.

    Raises:
        TargetError: a target that cannot be kept [W017].
        ArrivalsError: a load or process that cannot be [W016].
        PolicyError: no such model [W206].
    """
    samples = model_of(record, model)
    target = target_of(samples, qos_ms)
    if trace is not None and load is None:
        rate = trace.rate_hz * samples.solo.at(0.5) / 1e6
        return Cell(model, job, target, rate if math.isfinite(rate) else 0.0, TRACE, trace, seed, admit)
    load = 0.8 if load is None else load
    solo = np.array(drawn_ns(samples.solo, ((np.arange(_SAMPLES) + 0.5) / _SAMPLES).tolist()), dtype=np.int64)
    rate_of_load(load, 1.0)  # told before the peak is looked for
    of_hz = _peak_hz(solo.tobytes(), target, seed) if of_peak else 1e9 / float(solo.mean())
    rate = rate_of_load(load, of_hz)
    arrivals = trace.scaled(rate) if trace is not None else drawn(process, rate, queries, seed)
    return Cell(model, job, target, load, ABSOLUTE if of_peak else RELATIVE, arrivals, seed, admit)


@lru_cache(maxsize=16)
def _peak_hz(solo: bytes, target_ns: int, seed: int) -> float:
    """Looked for once, however many loads are taken of it."""
    return peak_load(np.frombuffer(solo, dtype=np.int64), target_ns, seed=seed).rate_hz


def drawn(process: str, rate_hz: float, queries: int, seed: int) -> Arrivals:
    """Arrivals of a process by its name.

    Raises:
        ArrivalsError: there is none of this name, or its number cannot be [W016].
    """
    kind, _, number = process.partition(":")
    try:
        value = float(number) if number else math.nan
    except ValueError:
        value = math.nan
    if kind == "poisson" and not number:
        return poisson(rate_hz, queries, seed=seed)
    if kind == "gamma" and math.isfinite(value):
        return gamma(rate_hz, queries, cv=value, seed=seed)
    if kind == "spikes" and math.isfinite(value):
        whole = queries / rate_hz
        return spikes(rate_hz, queries, [Spike(whole * at, whole / 100, value) for at in (0.25, 0.5)], seed=seed)
    raise ArrivalsError(
        problem=f"no process {process[:40]!r}", remedy="poisson, gamma:CV, spikes:FACTOR, or a trace file"
    )


def simulated(prepared: Prepared, cell: Cell, *, trace: bool = False, most_blocks: int = 0) -> Outcome:
    """One policy on the arrivals of a cell of one model.

    Raises:
        PolicyError: the policy needs a job [W206].
    """
    return simulated_all([prepared], cell, trace=trace, most_blocks=most_blocks)


def simulated_all(
    prepared: Sequence[Prepared], cell: Cell, *, trace: bool = False, most_blocks: int = 0
) -> Outcome:  # fmt: skip
    """One policy on the arrivals of a cell, with what was prepared of each of its models.

    Raises:
        PolicyError: the policy needs a job [W206].
    """
    setting = setting_of(prepared)
    policy = make(prepared[0].policy, setting)
    given = [(p, c.arrivals) for p, c in zip(prepared, cell.every, strict=True)]
    backend = SimulatedBackend(
        given, seed=cell.seed, trace=trace, policy=policy, most_blocks=most_blocks,
        admission=Admission(setting) if cell.admit else None,
    )  # fmt: skip
    drive(policy, backend)
    return backend.outcome


CarryOut = Callable[[Sequence[Prepared], Cell], Outcome]
"""Runs a policy on the arrivals of a cell, one `Prepared` to each of its models: a simulation, or a GPU."""
Settle = Callable[[Prepared], Prepared]
"""What is run of prepared variants: a GPU measures those first that were only predicted."""


def _as_prepared(prepared: Prepared) -> Prepared:
    return prepared


def run(
    record: SampleRecord,
    policy: str,
    cell: Cell,
    *,
    exclusive: PolicyRun | None = None,
    carry_out: CarryOut = simulated_all,
    settle: Settle = _as_prepared,
) -> PolicyRun:
    """One policy with the model of a cell, and what it came to.

    Raises:
        PolicyError: it cannot run with this model and job [W206].
    """
    (made,) = run_all(
        record, policy, cell, exclusive=[exclusive] if exclusive else [], carry_out=carry_out, settle=settle
    )
    return made


def run_all(
    record: SampleRecord,
    policy: str,
    cell: Cell,
    *,
    exclusive: Sequence[PolicyRun] = (),
    carry_out: CarryOut = simulated_all,
    settle: Settle = _as_prepared,
) -> list[PolicyRun]:
    """One policy with all models of a cell at once, and what it came to for each.

    Raises:
        PolicyError: it cannot run with these models and the job [W206].
    """
    names = [c.model for c in cell.every]
    job = "" if policy == "exclusive" else cell.job
    prepared = [settle(prepare(record, policy, c.model, job, c.target_ns, together=names)) for c in cell.every]
    return summed_up(prepared, cell, carry_out(prepared, cell), exclusive)


def summed_up(
    prepared: Sequence[Prepared], cell: Cell, out: Outcome, exclusive: Sequence[PolicyRun] = ()
) -> list[PolicyRun]:
    """The figures of a run, model by model: what the job got is the same in each."""
    refused = np.zeros(len(out.queries), dtype=np.bool_)
    refused[out.refused] = True
    whose = np.array([q.model for q in out.queries])
    solo_s = sum(
        int((~refused[whose == c.model]).sum()) * p.model.solo.at(0.5) / 1e6
        for p, c in zip(prepared, cell.every, strict=True)
    )
    off_us = off_lindley_us(out) if out.sent_ns and prepared[0].policy == "exclusive" else None
    found = []
    for p, c in zip(prepared, cell.every, strict=True):
        own = whose == c.model
        among = tuple(x.model for x in cell.every if x is not c)
        against = next((e for e in exclusive if e.model == c.model), None)
        made = _of_model(p, c, out, own & ~refused, int((own & refused).sum()), solo_s, against)
        found.append(replace(made, among=among, off_lindley_us=off_us))
    return found


def _of_model(
    prepared: Prepared, cell: Cell, out: Outcome, answered: npt.NDArray[np.bool_], refused: int, solo_s: float,
    exclusive: PolicyRun | None,
) -> PolicyRun:  # fmt: skip
    """Of the queries of one model that were answered. `solo_s`: what those of all models take alone."""
    n = int(answered.sum())
    scheduled = _taken(answered, [q.scheduled_ns for q in out.queries])
    sent = _taken(answered, out.sent_ns) if out.sent_ns else None
    found = Latencies(scheduled, _taken(answered, out.done_ns), sent, warm_up=n // _WARM_UP)
    span_s = out.span_ns / 1e9
    counts = np.bincount(_taken(answered, out.variants), minlength=len(prepared.points))
    made = PolicyRun(
        policy=prepared.policy, note=note_of(prepared.policy), model=cell.model,
        job=prepared.job.name if prepared.job else "", simulated=sent is None, load=cell.load, load_of=cell.load_of,
        rate_hz=cell.arrivals.rate_hz, arrivals=cell.arrivals.process, arrivals_digest=cell.arrivals.digest,
        seed=cell.seed, target_us=cell.target_ns / 1e3,
        latency=found.summary(cell.target_ns, seed=cell.seed, resamples=_RESAMPLES),
        over_exclusive=math.nan, be_throughput=be_throughput(out.work_us / 1e6, span_s),
        system_throughput=system_throughput(1, solo_s, out.work_us / 1e6, span_s), span_s=span_s,
        variants=tuple(VariantShare(p.variant.number, p.variant.name, int(c))
                       for p, c in zip(prepared.points, counts, strict=True)),
        cdf=_thinned(found.histogram.cdf()), chosen=_chosen(out, answered),
        decision_us=float(np.quantile(out.decision_ns, 0.99)) / 1e3 if out.decision_ns else None,
        refused=refused,
    )  # fmt: skip
    against = exclusive or (made if prepared.policy == "exclusive" else None)
    if against is None:
        return made
    ratio = over_exclusive(made.p99_us, made.arrivals_digest, against.p99_us, against.arrivals_digest)
    return replace(made, over_exclusive=ratio)


def compare(
    record: SampleRecord,
    policies: Sequence[str],
    cell: Cell,
    others: Sequence[Cell] = (),
    *,
    carry_out: CarryOut = simulated_all,
    settle: Settle = _as_prepared,
) -> Comparison:
    """Policies on the same arrivals, `exclusive` always among them; those that cannot run are told, with the reason.

    Args:
        record: the samples.
        policies: by name.
        cell: of the comparison.
        others: the same at other loads.
        carry_out: what runs a policy.
        settle: what it runs of the variants that were prepared.

    Raises:
        PolicyError: no such policy, model or job [W206].
        ComparisonInterruptedError: Ctrl-C, once one of them has ended.
    """
    names = list(dict.fromkeys(["exclusive", *policies]))
    found, refused = list[PolicyRun](), list[Refused]()
    try:
        _cell(record, names, cell, carry_out, settle, found, refused)
    except KeyboardInterrupt:
        if not found:
            raise
        raise ComparisonInterruptedError(
            Comparison(record.gpu, record.digest, tuple(found), tuple(refused), ())
        ) from None
    ran = list(dict.fromkeys(r.policy for r in found))
    over_load: list[PolicyRun] = []
    for other in others:
        _cell(record, ran, other, carry_out, settle, over_load, [])
    return Comparison(record.gpu, record.digest, tuple(found), tuple(refused), tuple(over_load))


def _cell(
    record: SampleRecord, names: Sequence[str], cell: Cell, carry_out: CarryOut, settle: Settle,
    found: list[PolicyRun], refused: list[Refused],
) -> None:  # fmt: skip
    """Runs of a cell as they end, and policies that cannot run."""
    alone = run_all(record, "exclusive", cell, carry_out=carry_out)
    found += alone
    for name in names:
        if name == "exclusive":
            continue
        try:
            found += run_all(record, name, cell, exclusive=alone, carry_out=carry_out, settle=settle)
        except PolicyError as error:
            if error.details["policy"] != name or error.details["reason"] == "there is none of this name":
                raise
            refused.append(Refused(name, str(error.details["reason"])))


def _thinned(cdf: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """As many points as a drawing shows, in microseconds; the tail, which matters, is kept."""
    if len(cdf) <= _POINTS:
        return tuple((ns / 1e3, share) for ns, share in cdf)
    shares = np.array([share for _, share in cdf])
    body, tail = np.linspace(0, 0.9, _POINTS // 2), 1 - np.geomspace(0.1, 1e-6, _POINTS // 2)
    at = sorted({min(int(i), len(cdf) - 1) for i in np.searchsorted(shares, np.concatenate([body, tail, [1.0]]))})
    return tuple((cdf[i][0] / 1e3, cdf[i][1]) for i in at)


def _taken(which: npt.NDArray[np.bool_], values: Sequence[int]) -> npt.NDArray[np.int64]:
    """Those of some queries."""
    found: npt.NDArray[np.int64] = np.array(values, dtype=np.int64)[which]
    return found


def _chosen(out: Outcome, answered: npt.NDArray[np.bool_]) -> tuple[Chosen, ...]:
    """Variants over time."""
    if not out.span_ns:
        return ()
    width = out.span_ns / _WINDOWS
    begin, variants, caps = (_taken(answered, x) for x in (out.begin_ns, out.variants, out.caps))
    at = np.minimum((begin / width).astype(np.int64), _WINDOWS - 1)
    found = []
    for k in range(_WINDOWS):
        here = at == k
        mean = float(variants[here].mean()) if here.any() else math.nan
        found.append(Chosen(k * width / 1e9, mean, int(caps[here][-1]) if here.any() else -1))
    return tuple(found)
