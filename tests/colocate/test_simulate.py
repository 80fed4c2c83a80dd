"""The simulator: invariants over random traces, closed forms that it must meet, the same run for the same seed."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.colocate.recorded import constant, samples, spread

from weft.colocate import compare as c
from weft.colocate.arrivals import Arrivals, poisson
from weft.colocate.operating import prepare
from weft.colocate.outcome import Outcome
from weft.colocate.policies import NAMES, make
from weft.colocate.policy import PolicyError, drive
from weft.colocate.queueing import batch_mean, lindley, md1_mean_wait
from weft.colocate.simulate import SimulatedBackend, drawn_ns
from weft.errors import ArtifactError
from weft.kernels.samples import SampleRecord, Spread, read, write
from weft.kernels.scheduling import Decision, Situation

US = 1000
ALL = [n for n in NAMES if n != "mps"] + ["green:16"]
INVENTED = samples()


def cell(
    load: float = 0.5, queries: int = 2000, *, record: SampleRecord = INVENTED, seed: int = 1,
    process: str = "poisson", qos_ms: float | None = None,
) -> c.Cell:  # fmt: skip
    return c.cell_of(
        record, "net", "work", qos_ms=qos_ms, load=load, of_peak=False, process=process, trace=None, queries=queries,
        seed=seed,
    )  # fmt: skip


def simulated(policy: str, at: c.Cell, *, record: SampleRecord = INVENTED, most_blocks: int = 0) -> Outcome:
    return c.simulated(prepare(record, policy, "net", at.job, at.target_ns), at, trace=True, most_blocks=most_blocks)


def check(out: Outcome, most_blocks: int = 0) -> None:
    """What holds of every run."""
    assert all(d > 0 for d in out.done_ns), "a query is lost"
    begins = np.array(out.begin_ns)
    assert (begins >= np.array([q.scheduled_ns for q in out.queries])).all(), "begun before it came"
    assert (np.diff(begins) >= 0).all(), "not first come, first served"
    assert (begins[1:] >= np.array(out.done_ns)[:-1]).all(), "two queries at a time"
    assert out.span_ns == max(out.done_ns)
    at = 0
    for piece in out.pieces:
        assert piece.begin_ns <= piece.end_ns and piece.first == at <= piece.last, "a block is lost or doubled"
        at = piece.last
    assert at == out.blocks and (not most_blocks or at <= most_blocks)
    apart = sorted((p.begin_ns, p.end_ns) for p in out.pieces)
    assert all(b >= e for (_, e), (b, _) in itertools.pairwise(apart)), "the job runs twice at a time"
    alone = [p for p in out.pieces if p.origin != "beside"]
    for p in alone:
        k = int(np.searchsorted(begins, p.begin_ns, side="right")) - 1
        assert k < 0 or out.done_ns[k] <= p.begin_ns, "the whole GPU is the job's while a query runs"


@st.composite
def traces(draw: st.DrawFn) -> Arrivals:
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 20, 90, 150, 400, 2500]), min_size=1, max_size=40))
    return Arrivals(np.cumsum(np.array(gaps, dtype=np.int64)) * US, "random")


@pytest.mark.parametrize("policy", ALL)
@settings(max_examples=25, deadline=None)
@given(arrivals=traces(), seed=st.integers(0, 5), most=st.sampled_from([0, 0, 40, 400]))
def test_invariants_of_every_policy(policy: str, arrivals: Arrivals, seed: int, most: int) -> None:
    out = simulated(policy, replace(cell(queries=1), arrivals=arrivals, seed=seed), most_blocks=most)
    check(out, most)
    if policy == "exclusive":
        assert out.blocks == 0 and out.work_us == 0 and not out.pieces


@pytest.mark.parametrize("policy", ALL)
def test_a_longer_run_of_every_policy(policy: str) -> None:
    out = simulated(policy, cell(0.4, 3000))
    check(out)
    busy = sum(d - b for b, d in zip(out.begin_ns, out.done_ns, strict=True))
    assert out.busy_ns == busy and (policy == "exclusive" or out.blocks > 0)


@pytest.mark.parametrize("launch_us", [0.0, 5.0])
def test_exclusive_is_lindleys_recursion_bit_by_bit(launch_us: float) -> None:
    record = samples(launch_us=launch_us)
    at = cell(0.8, 5000, record=record)
    out = simulated("exclusive", at, record=record)
    draws = np.random.default_rng(at.seed).random(5000).tolist()
    service = np.array(drawn_ns(record.models[0].solo, draws), dtype=np.int64)
    wanted = lindley(at.arrivals.times_ns + round(launch_us * US), service)
    assert out.done_ns == wanted.tolist()


def test_exclusive_is_md1_within_its_standard_error() -> None:
    record = samples(constant(100.0), launch_us=0.0)
    for load, seed in ((0.5, 1), (0.8, 2)):
        at = cell(load, 60_000, record=record, seed=seed)
        out = simulated("exclusive", at, record=record)
        wait = np.array(out.begin_ns) - at.arrivals.times_ns
        mean, error = batch_mean(wait, 40)
        assert abs(mean - md1_mean_wait(load, 100_000)) < 4 * error and error < 0.15 * mean


@pytest.mark.slow
def test_exclusive_is_md1_over_many_queries() -> None:
    record = samples(constant(100.0), launch_us=0.0)
    at = cell(0.8, 1_000_000, record=record)
    out = c.simulated(prepare(record, "exclusive", "net", "", at.target_ns), at)
    mean, error = batch_mean(np.array(out.begin_ns) - at.arrivals.times_ns)
    assert abs(mean - md1_mean_wait(0.8, 100_000)) < 4 * error and error < 0.02 * mean


@pytest.mark.parametrize("policy", ALL)
def test_a_seed_fixes_a_run(policy: str) -> None:
    runs = [simulated(policy, cell(0.5, 400, seed=s)) for s in (3, 3, 4)]
    assert runs[0] == runs[1]
    assert runs[0].done_ns != runs[2].done_ns


def test_every_policy_sees_the_same_arrivals_and_draws() -> None:
    at = cell(0.3, 500)
    alone, tally = simulated("exclusive", at), simulated("tally", at)
    took = [[d - b for b, d in zip(o.begin_ns, o.done_ns, strict=True)] for o in (alone, tally)]
    assert took[0] == took[1] and alone.done_ns != tally.done_ns


def test_idle_time_is_filled_and_a_stop_costs_its_latency() -> None:
    record = samples(constant(100.0), launch_us=5.0, stop_us=40.0)
    arrivals = Arrivals(np.array([0, 1_000_000, 2_000_000], dtype=np.int64), "three")
    out = simulated("tally", replace(cell(queries=1, record=record), arrivals=arrivals), record=record)
    assert out.begin_ns == [5_000, 1_040_000, 2_040_000]
    idle = [(p.begin_ns, p.end_ns) for p in out.pieces]
    assert idle == [(110_000, 1_000_000), (1_145_000, 2_000_000)]  # launched at 105, stopped at the arrival
    assert out.work_us == pytest.approx(890 + 855)


def test_a_variants_work_is_counted_by_its_share_of_the_query() -> None:
    record = samples(constant(100.0), launch_us=0.0)
    arrivals = Arrivals(np.array([0], dtype=np.int64), "one")
    at = replace(cell(queries=1, record=record), arrivals=arrivals)
    out = c.simulated(prepare(record, "green:36", "net", "work", at.target_ns), at, trace=True)
    assert out.done_ns == [112_000] and out.work_us == pytest.approx(0.25 * 112)


def test_wefts_launches_stay_within_the_headroom() -> None:
    """With durations as predicted, nobody is late by a variant above 0 of its own."""
    record = samples(constant(100.0), launch_us=0.0, stop_us=0.0)
    for seed in range(3):
        at = cell(0.6, 4000, record=record, seed=seed, qos_ms=0.6)
        out = simulated("weft", at, record=record)
        chosen = np.array(out.variants) > 0
        assert 0.05 < chosen.mean() < 1.0
        late = [k for k, q in enumerate(out.queries) if out.done_ns[k] > q.deadline_ns]
        for (
            k
        ) in late:  # late are only those that no choice of ours delayed: who came while a chosen one was ahead of them
            spent = out.variants[k]
            assert spent == 0


def test_weft_keeps_a_target_that_greedy_ones_miss() -> None:
    at = cell(0.445, 8000)
    runs = {n: c.run(INVENTED, n, at) for n in ("exclusive", "tally", "aker", "weft")}
    assert runs["exclusive"].kept and runs["weft"].kept and not runs["aker"].kept
    assert runs["weft"].be_throughput > runs["tally"].be_throughput > 0.4
    assert runs["weft"].system_throughput > 1.0


def test_several_models_share_one_gpu_each_first_come_first_served() -> None:
    setting, arrivals = [], []
    for name, seed in (("net", 1), ("other", 2)):
        setting.append(prepare(INVENTED, "exclusive", name, "", 500 * US))
        arrivals.append(poisson(3000.0, 500, seed=seed))
    backend = SimulatedBackend(list(zip(setting, arrivals, strict=True)), seed=1)
    both = setting[0].setting
    policy = make("exclusive", replace(both, models=(*both.models, *setting[1].setting.models)))
    drive(policy, backend)
    out = backend.outcome
    assert all(d > 0 for d in out.done_ns)
    for name in ("net", "other"):
        own = [b for q, b in zip(out.queries, out.begin_ns, strict=True) if q.model == name]
        assert len(own) == 500 and own == sorted(own)


def backwards(situation: Situation) -> Decision:
    return Decision(tuple((q, 0) for q in list(situation.waiting)[::-1]))


def too_many(situation: Situation) -> Decision:
    return Decision(tuple((q, 0) for q in situation.waiting))


def test_weft_serves_two_models_and_fills_the_rest() -> None:
    made = [prepare(INVENTED, "weft", "net", "work", 500 * US), prepare(INVENTED, "exclusive", "other", "", 300 * US)]
    both = replace(made[0].setting, models=(*made[0].setting.models, *made[1].setting.models))
    policy = make("weft", both)
    arrivals = [poisson(2000.0, 600, seed=1), poisson(2500.0, 600, seed=2)]
    backend = SimulatedBackend(list(zip(made, arrivals, strict=True)), seed=1, trace=True)
    drive(policy, backend)
    out = backend.outcome
    for name in ("net", "other"):
        own = [b for q, b in zip(out.queries, out.begin_ns, strict=True) if q.model == name]
        assert len(own) == 600 and own == sorted(own)
    ran = sorted(zip(out.begin_ns, out.done_ns, strict=True))
    assert all(done <= begin for (_, done), (begin, _) in itertools.pairwise(ran))
    numbers = [q.number for _, q in sorted(zip(out.begin_ns, out.queries, strict=True), key=lambda p: p[0])]
    assert numbers != sorted(numbers)  # the nearer deadline overtook
    assert {k for q, k in zip(out.queries, out.variants, strict=True) if q.model == "other"} == {0}
    assert out.work_us > 0.3 * out.span_ns / 1e3


def test_an_overload_is_simulated_in_time_that_grows_with_the_queries() -> None:
    at = cell(2.0, 6000)
    for name in ("serial", "weft", "aker"):
        begin = time.process_time()
        out = simulated(name, at)
        assert all(out.done_ns) and time.process_time() - begin < 20


class Wrong:
    """A policy that does what it is told to."""

    name, cap = "wrong", -1

    def __init__(self, *decisions: Decision, last: Callable[[Situation], Decision] = backwards) -> None:
        self.left, self.last = list(decisions), last

    def decide(self, situation: Situation) -> Decision:
        return self.left.pop(0) if self.left else self.last(situation)


def driven(policy: Wrong, times: Sequence[int]) -> None:
    given = prepare(INVENTED, "exclusive", "net", "", 500 * US)
    drive(policy, SimulatedBackend([(given, Arrivals(np.array(times, dtype=np.int64), "given"))], seed=1))


def test_a_policy_that_breaks_the_rules_is_stopped() -> None:
    with pytest.raises(ValueError, match="does not wait, or another of net came before"):
        driven(Wrong(Decision()), [0, 0])
    with pytest.raises(ValueError, match="one more than 2 in flight"):
        driven(Wrong(Decision(), Decision(), last=too_many), [0, 0, 0])
    with pytest.raises(ValueError, match="wait for ever"):
        driven(Wrong(*[Decision()] * 5), [0, 10])
    given = prepare(INVENTED, "exclusive", "net", "", 500 * US)
    with pytest.raises(ValueError, match="each once"):
        SimulatedBackend([], seed=1)
    with pytest.raises(ValueError, match="each once"):
        SimulatedBackend([(given, poisson(1.0, 1, seed=1))] * 2, seed=1)


def test_a_million_queries_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed; asserted is a quarter of it, as other work may run beside."""
    at = cell(0.5, 20_000)
    made = prepare(INVENTED, "tally", "net", "work", at.target_ns)
    begin = time.process_time()
    c.simulated(made, at)
    rate = 20_000 / (time.process_time() - begin) * 60
    with capsys.disabled():
        sys.stdout.write(f"\n{rate / 1e6:.2f} million queries a minute\n")
    assert rate > 250_000


def test_a_comparison_has_exclusive_and_tells_who_was_refused() -> None:
    at = cell(0.4, 1000)
    found = c.compare(INVENTED, ["mps", "weft", "tally", "weft"], at, [cell(0.2, 500)])
    assert [r.policy for r in found.runs] == ["exclusive", "weft", "tally"]
    assert [(r.policy, r.reason) for r in found.refused] == [("mps", "no samples of net beside work by mps")]
    assert [(r.policy, r.load) for r in found.over_load] == [("exclusive", 0.2), ("weft", 0.2), ("tally", 0.2)]
    assert all(r.simulated and r.arrivals_digest == at.arrivals.digest for r in found.runs)
    assert found.runs[0].over_exclusive == 1.0 and found.runs[1].over_exclusive > 1.0
    for r in found.runs:
        assert sum(v.queries for v in r.variants) == 1000 and r.cdf[-1][1] == 1.0 and len(r.chosen) == 60
    with pytest.raises(PolicyError, match="there is none"):
        c.compare(INVENTED, ["magic"], at)
    with pytest.raises(PolicyError, match="no samples of the job"):
        c.compare(INVENTED, ["tally"], replace(at, job="none"))


def test_cells_by_peak_load_and_by_trace() -> None:
    peak = c.cell_of(
        INVENTED, "net", "work", qos_ms=0.5, load=0.8, of_peak=True, process="poisson", trace=None, queries=500
    )  # fmt: skip
    assert peak.load_of == "peak load" and 0.3 < peak.arrivals.rate_hz * 1e-4 < 0.6
    trace = Arrivals(np.arange(100, dtype=np.int64) * 200 * US, "trace t")
    as_is = c.cell_of(INVENTED, "net", "", qos_ms=None, load=None, of_peak=False, process="", trace=trace)
    assert as_is.load_of == "trace" and as_is.arrivals is trace and as_is.load == pytest.approx(0.5)
    scaled = c.cell_of(INVENTED, "net", "", qos_ms=None, load=0.25, of_peak=False, process="", trace=trace)
    assert scaled.arrivals.rate_hz == pytest.approx(2500, rel=0.01)


@pytest.mark.parametrize(("more", "said"), [
    ({"qos_ms": 0.09}, "alone takes 0.104 ms"), ({"qos_ms": -1.0}, "-1.0 ms"), ({"qos_ms": float("nan")}, "nan ms"),
    ({"load": 0.0}, "a load of 0"), ({"process": "magic"}, "no process"), ({"process": "gamma"}, "no process"),
    ({"process": "gamma:x"}, "no process"), ({"process": "poisson:3"}, "no process"), ({"queries": 0}, "0 arrivals"),
])  # fmt: skip
def test_cells_that_cannot_be_are_refused(more: dict[str, object], said: str) -> None:
    given: dict[str, object] = {"qos_ms": None, "load": 0.5, "process": "poisson", "queries": 10, **more}
    with pytest.raises(Exception, match=said) as refused:
        c.cell_of(INVENTED, "net", "work", of_peak=False, trace=None, **given)  # type: ignore[arg-type]
    assert type(refused.value).__name__ in ("TargetError", "ArrivalsError")


def test_bursts_and_spikes_have_their_violations_beside_exclusives_own() -> None:
    for process in ("gamma:3", "spikes:10"):
        at = cell(0.3, 4000, process=process)
        found = c.compare(INVENTED, ["weft"], at)
        alone, weft = found.runs
        assert alone.latency.violations > 0 and weft.latency.violations >= alone.latency.violations


def test_a_record_as_a_text_there_and_back() -> None:
    assert read(json.loads(write(INVENTED))) == INVENTED and INVENTED.digest == samples().digest
    assert samples(stop_us=11.0).digest != INVENTED.digest


@pytest.mark.parametrize(("old", "new"), [
    ('"format": 1', '"format": 2'), ('"model": "net"', '"model": "no"'), ('"job": "work"', '"job": "no"'),
    ("[0.5, 100.0]", "[0.5, 90.0]"), ("[0.5, 100.0]", "[1.5, 100.0]"), ("[0.5, 100.0]", '["a", 100.0]'),
    ('"source": 0', '"source": 9'), ('"sharing": "streams"', '"sharing": "magic"'),
    ('"kernel_us": 300.0', '"kernel_us": 0.0'),
    ('"name": "other"', '"name": "net"'), ('"count": 3', '"count": 0'), ('"be_rate": 0.8', '"be_rate": -1.0'),
    ('"gpu"', '"gpus"'),
])  # fmt: skip
def test_a_record_that_cannot_be_is_refused(old: str, new: str) -> None:
    text = write(INVENTED)
    assert old in text
    with pytest.raises(ArtifactError, match=r"malformed SampleRecord .*|W401"):
        read(json.loads(text.replace(old, new)))


def test_spreads_are_interpolated_and_held_at_their_ends() -> None:
    s = spread((0.1, 10.0), (0.5, 20.0), (0.9, 40.0))
    assert [s.at(q) for q in (0.0, 0.1, 0.3, 0.7, 1.0)] == pytest.approx([10, 10, 15, 30, 40])
    assert drawn_ns(s, [0.0, 0.3, 1.0]) == [10_000, 15_000, 40_000]
    for bad in ((), ((0.5, 1.0), (0.5, 2.0)), ((0.1, 2.0), (0.5, 1.0)), ((0.1, float("nan")),)):
        with pytest.raises(ValueError, match="quantile"):
            Spread(bad, 0)
