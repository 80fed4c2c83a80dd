"""The plan variants of each policy, from recorded samples; and why a policy cannot run with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.colocate.durations import two_lines
from weft.colocate.front import Choice, front, front_of_measured, settled
from weft.colocate.policies import NEEDS_BLOCKS, checked
from weft.colocate.policy import JobFacts, ModelFacts, PolicyError, Setting
from weft.ir.declined import Declined
from weft.kernels.samples import JobSamples, ModelSamples, ModeSamples, SampleRecord, Spread, StepSamples
from weft.kernels.scheduling import Assignment, Sharing, Variant

_ONE_FORM: dict[str, Sharing] = {"streams": "streams", "priority": "priority", "mps": "mps"}
_MOST_SLACK = 1.0
"""Slowdown that variants are made for, at most."""
_RECORDED = "record it, or leave this policy out"


@dataclass(frozen=True, slots=True)
class Point:
    """A plan variant, and the times that it is simulated with."""

    variant: Variant
    lc: Spread
    clock_mhz: int


@dataclass(frozen=True, slots=True)
class Whole:
    """A plan variant as it was measured as a whole."""

    lc: Spread
    be_us: float
    """The job's work in a query, in its time alone."""
    clock_mhz: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a policy needs to be simulated with one model and job."""

    policy: str
    model: ModelSamples
    job: JobSamples | None
    target_ns: int
    points: tuple[Point, ...]
    launch: Spread
    steps: tuple[StepSamples, ...] = ()
    """Of the fused steps that variants may have."""

    @property
    def setting(self) -> Setting:
        """What the policy itself is told."""
        return setting_of([self])


def longer(made: Prepared, us: float) -> Prepared:
    """The same where every query takes so much longer: its inputs and results are copied, too."""
    points = tuple(
        replace(p, variant=replace(p.variant, lc_us=p.variant.lc_us + us, lc_q99_us=p.variant.lc_q99_us + us))
        for p in made.points
    )
    return replace(made, points=points)


def setting_of(prepared: Sequence[Prepared]) -> Setting:
    """What a policy is told of several models beside the same job."""
    first = prepared[0]
    job = first.job
    stop = job.stop.at(0.99) if job is not None and job.stop is not None else 0.0
    facts = None if job is None else JobFacts(job.name, job.kernel_us, stop)
    models = tuple(
        ModelFacts(p.model.name, p.target_ns, tuple(x.variant for x in p.points), p.model.clock_mhz) for p in prepared
    )
    return Setting(models, facts, first.launch.at(0.99))


def model_of(record: SampleRecord, name: str) -> ModelSamples:
    """By name.

    Raises:
        PolicyError: the record has no such model [W206].
    """
    found = next((m for m in record.models if m.name == name), None)
    if found is None:
        known = ", ".join(m.name for m in record.models[:60])
        raise PolicyError(policy="any", reason=f"no samples of the model {name[:80]!r}", remedy=f"recorded are {known}")
    return found


def job_of(record: SampleRecord, model: str, name: str) -> JobSamples:
    """By name, of those that were recorded beside the model or whose own times are known.

    Raises:
        PolicyError: the record has no such job [W206].
    """
    found = next((j for j in record.jobs if j.name == name), None)
    if found is None:
        beside = {m.job for m in record.modes if m.model == model} | {s.job for s in record.steps if s.model == model}
        known = ", ".join(sorted(beside) or [j.name for j in record.jobs[:60]])
        raise PolicyError(policy="any", reason=f"no samples of the job {name[:80]!r}", remedy=f"recorded are {known}")
    return found


def prepare(
    record: SampleRecord, policy: str, model: str, job: str, target_ns: int, *, together: Sequence[str] = ()
) -> Prepared:
    """The variants of a policy, and the samples that they replay. An empty `job`: none.

    `together`: all models of a run. A job that stays in one form beside queries of any of them has the ways that were
    recorded for each, in one order.

    Raises:
        PolicyError: what it needs was not recorded; or there is no such policy, model or job [W206].
    """
    checked(policy)
    alone = model_of(record, model)
    facts = job_of(record, model, job) if job else None
    idle = 1.0 if facts is None else facts.idle_rate
    variant = replace(_variant(0, "alone", "none", alone.solo, 0.0), idle_rate=idle)
    first = Point(variant, alone.solo, alone.clock_mhz)
    made = Prepared(policy, alone, facts, target_ns, (first,), record.launch)
    if facts is None or policy in ("exclusive", "serial", "timeslice"):
        return made
    if facts.kind == "process" and policy in NEEDS_BLOCKS:
        reason = f"{NEEDS_BLOCKS[policy]}, and {job} is a process: its segments end by themselves"
        raise PolicyError(policy=policy, reason=reason, remedy="choose another policy, such as weft or green:N")
    if policy in ("tally", "weft") and facts.stop is None:
        raise _lacks(policy, f"no stop latencies of {job} were recorded")
    modes = [m for m in record.modes if (m.model, m.job) == (model, job)]
    rates = {m.name: m.be_rate for m in modes}
    if len(together) > 1 and policy != "weft":
        rates = _common(record, job, together)
        modes = [m for m in modes if m.name in rates]
    steps = [s for s in record.steps if (s.model, s.job) == (model, job)]
    return replace(made, points=(first, *_points(policy, made, modes, steps, rates)), steps=tuple(steps))


def _common(record: SampleRecord, job: str, together: Sequence[str]) -> dict[str, float]:
    """Ways that every model was recorded in, with the sum of the job's rates beside them."""
    rates: dict[str, dict[str, float]] = {}
    for m in record.modes:
        if m.job == job and m.model in together:
            rates.setdefault(m.name, {})[m.model] = m.be_rate
    return {name: sum(own.values()) for name, own in rates.items() if len(own) == len(set(together))}


Measure = Callable[[Point], Whole | Declined]
"""How a variant runs as a whole, or why it cannot."""


def settle(made: Prepared, measure: Measure) -> Prepared:
    """The variants with fused steps as they are once they were measured whole, the others as they were.

    Not taken is what is off its prediction (`front.settled`), what does no more work than a cheaper one, and of `weft`
    what gains no more than it costs.

    Raises:
        PolicyError: none is left of a policy that needs one [W206].
    """
    first, *more = made.points
    if not any(p.variant.sharing == "role" for p in more):
        return made
    found, reasons = list[Point](), list[str]()
    for point in more:
        whole = _settled(made, point, measure) if point.variant.sharing == "role" else point
        if isinstance(whole, Declined):
            reasons.append(whole.reason)
        else:
            found.append(whole)
    front_: list[Point] = [first]
    for point in sorted(found, key=lambda p: (p.variant.lc_us, -p.variant.be_us)):
        if point.variant.be_us > front_[-1].variant.be_us:
            front_.append(replace(point, variant=replace(point.variant, number=len(front_))))
    if len(front_) == 1 and made.policy in ("tacker", "aker"):
        reason = "; ".join(dict.fromkeys(reasons)) or "its variants do no work"
        raise PolicyError(policy=made.policy, reason=reason[:600], remedy="choose another policy")
    return replace(made, points=tuple(front_))


def _settled(made: Prepared, point: Point, measure: Measure) -> Point | Declined:
    whole = measure(point)
    if isinstance(whole, Declined):
        return whole
    variant = settled(point.variant, whole.lc.at(0.5), whole.lc.at(0.99))
    if isinstance(variant, Declined):
        return variant
    cost_us = variant.lc_us - made.points[0].variant.lc_us
    if made.policy == "weft" and whole.be_us <= cost_us:
        return Declined(f"{variant.name} gains {whole.be_us:.1f} us and costs {cost_us:.1f}")
    return Point(replace(variant, be_us=whole.be_us), whole.lc, whole.clock_mhz)


def _points(
    policy: str, made: Prepared, modes: Sequence[ModeSamples], steps: Sequence[StepSamples], rates: Mapping[str, float]
) -> Iterable[Point]:
    """Behind variant 0. `rates`: of the job, by which the sizes of a partition rise."""
    assert made.job is not None
    beside = f"{made.model.name} beside {made.job.name}"
    if policy == "tally":
        return ()
    if policy in _ONE_FORM or policy == "orion":
        sharing = _ONE_FORM.get(policy, "priority")
        found = [_of_mode(1, m) for m in modes if m.sharing == sharing]
        if not found and policy != "orion":
            raise _lacks(policy, f"no samples of {beside} by {sharing}")
        return found[:1]
    if policy.startswith("green"):
        parts = sorted((m for m in modes if m.sharing == "partition"), key=lambda m: rates[m.name])
        if policy != "green":
            parts = [m for m in parts if m.name == policy.replace(":", "")]
        if not parts:
            raise _lacks(policy, f"no samples of {beside} in such a partition")
        return [_of_mode(number, m) for number, m in enumerate(parts, 1)]
    if policy in ("tacker", "aker") and not steps:
        raise _lacks(policy, f"no fused kernels of {beside}")
    if policy in ("tacker", "aker"):
        return _fused(made, [_choice(i, s, policy, made) for i, s in enumerate(steps)])
    return _of_weft(made, modes, steps)


def _of_weft(made: Prepared, modes: Sequence[ModeSamples], steps: Sequence[StepSamples]) -> list[Point]:
    """Those that gain more than they cost: idle time is free, so nothing else pays."""
    alone = made.points[0].variant
    fused = _fused(made, [_choice(i, s, "weft", made) for i, s in enumerate(steps) if s.pays])
    whole = [_of_mode(1, m) for m in modes if m.sharing in ("co-runner", "partition") or _is_throttled(m)]
    pays = [p for p in (*fused, *whole) if p.variant.be_us > p.variant.lc_us - alone.lc_us]
    dearest = max((p.variant.lc_us / alone.lc_us - 1 for p in pays), default=0.0)
    by_name = {p.variant.name: p for p in pays}
    found = front_of_measured(alone, [p.variant for p in pays], slack=min(_slack(made), max(dearest, 0.0)))[1:]
    return [replace(by_name[v.name], variant=replace(v, resident=False, idle_rate=1.0)) for v in found]


def _is_throttled(m: ModeSamples) -> bool:
    """Whether the job runs in it only so much of the time: then it may be beside queries that can lose a little."""
    return "-duty" in m.name


def _fused(made: Prepared, choices: Sequence[Choice]) -> list[Point]:
    """The front of fused steps. Their times are those alone, as much longer as the sum of the steps says."""
    alone = made.points[0]
    whole = sum(max(c.assignment.cost_us, 0.0) for c in choices) / alone.variant.lc_us
    found = front(alone.variant, choices, slack=min(_slack(made), whole * (1 + 1e-9)))[1:]
    return [Point(v, alone.lc.times(v.lc_us / alone.variant.lc_us), alone.clock_mhz) for v in found]


def _slack(made: Prepared) -> float:
    """What a query can lose that waits for nobody."""
    alone = made.points[0].variant
    return min(_MOST_SLACK, max(0.0, (made.target_ns / 1e3 - alone.margin_us) / alone.lc_us - 1))


def _choice(position: int, s: StepSamples, policy: str, made: Prepared) -> Choice:
    """A fused step, all launches of the plan. Tacker's takes a whole BE kernel in each."""
    assert made.job is not None
    cost, work = s.slowdown * s.lc_us, s.fraction * s.lc_us
    if policy == "tacker":
        whole = made.job.kernel_us / s.lc_us
        idle = s.idle if s.idle == s.idle else 0.0
        model = two_lines(s.lc_us, s.slowdown, s.fraction, min(idle, s.slowdown))
        cost, work = model.us(whole) - s.lc_us, made.job.kernel_us
    return Choice((position,), Assignment(s.step, "role", s.job, s.count * cost, s.count * work))


def _of_mode(number: int, m: ModeSamples) -> Point:
    work = m.be_rate * m.lc.at(0.5)
    made = _variant(number, m.name, m.sharing, m.lc, work)
    return Point(replace(made, idle_rate=m.idle_rate, resident=True), m.lc, m.clock_mhz)


def _variant(number: int, name: str, sharing: Sharing, lc: Spread, be_us: float) -> Variant:
    return Variant(number, name, sharing, lc.at(0.5), lc.at(0.99), be_us)


def _lacks(policy: str, reason: str) -> PolicyError:
    return PolicyError(policy=policy, reason=reason, remedy=_RECORDED)
