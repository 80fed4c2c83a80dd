"""Several models beside one job: one decision for all, headroom over all that wait, each with its own target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.colocate.fake_device import FakeDevice, FakeJob, query
from tests.colocate.recorded import constant, samples
from tests.report.test_pairs_page import Cells

from weft.colocate import compare as c
from weft.colocate.arrivals import Arrivals
from weft.colocate.gpu_machine import Form, GpuMachine, Lane
from weft.colocate.live import LiveBackend
from weft.colocate.live import run as live
from weft.colocate.operating import Prepared, prepare, setting_of
from weft.colocate.outcome import Outcome, Targets, off_lindley_us
from weft.colocate.policies import NAMES, make
from weft.colocate.policies.papers import Orion
from weft.colocate.policies.weft import Weft, predicted_p99
from weft.colocate.policy import Admission, Costs, PolicyError, drive
from weft.colocate.queueing import latencies
from weft.colocate.recording import merged
from weft.colocate.simulate import SimulatedBackend
from weft.kernels.samples import SampleRecord
from weft.kernels.scheduling import OFF, Cursor, Finished, Query, Recent, Running, Situation
from weft.report.colocate import render_policies

US = 1000
ALL = [n for n in NAMES if n != "mps"] + ["green:16"]
TWO = ("net", "other")
TARGETS = {"net": 500 * US, "other": 1500 * US}


def both(record: SampleRecord | None = None) -> SampleRecord:
    """The samples of `net` also of `other`, which takes 60 us, and by other partitions."""
    made = record or samples(constant(100.0))
    modes = [replace(m, model="other", lc=m.lc.times(0.6)) for m in made.modes if m.name != "streams"]
    steps = [replace(s, model="other", lc_us=0.6 * s.lc_us) for s in made.steps]
    return replace(made, modes=(*made.modes, *modes), steps=(*made.steps, *steps))


RECORD = both()


def prepared(policy: str, record: SampleRecord = RECORD) -> list[Prepared]:
    job = "" if policy == "exclusive" else "work"
    return [prepare(record, policy, m, job, TARGETS[m], together=TWO) for m in TWO]


def simulated(policy: str, arrivals: Sequence[Arrivals], *, admit: bool = False, seed: int = 1) -> Outcome:
    p = prepared(policy)
    setting = setting_of(p)
    made = make(policy, setting)
    backend = SimulatedBackend(
        list(zip(p, arrivals, strict=True)), seed=seed, policy=made, trace=True,
        admission=Admission(setting) if admit else None,
    )  # fmt: skip
    drive(made, backend)
    return backend.outcome


def check(out: Outcome) -> None:
    assert all(d > 0 for d in out.done_ns), "a query is lost"
    order = np.argsort(np.array(out.begin_ns), kind="stable")
    begin, done = np.array(out.begin_ns)[order], np.array(out.done_ns)[order]
    assert (begin[1:] >= done[:-1]).all(), "two queries at a time"
    for model in TWO:
        own = [b for b, q in zip(out.begin_ns, out.queries, strict=True) if q.model == model]
        assert own == sorted(own), "a model's queries out of order"
    at = 0
    for piece in out.pieces:
        assert piece.first == at <= piece.last, "a block is lost or doubled"
        at = piece.last
    assert at == out.blocks


@st.composite
def traces(draw: st.DrawFn) -> Arrivals:
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 20, 90, 150, 400, 2500]), min_size=1, max_size=25))
    return Arrivals(np.cumsum(np.array(gaps, dtype=np.int64)) * US, "random")


@pytest.mark.parametrize("policy", [p for p in ALL if p != "streams"])
@settings(max_examples=20, deadline=None)
@given(one=traces(), other=traces(), seed=st.integers(0, 3))
def test_invariants_of_every_policy(policy: str, one: Arrivals, other: Arrivals, seed: int) -> None:
    check(simulated(policy, [one, other], seed=seed))


@settings(max_examples=60, deadline=None)
@given(one=traces(), other=traces())
def test_who_is_admitted_by_exact_times_is_never_late(one: Arrivals, other: Arrivals) -> None:
    out = simulated("exclusive", [one, other], admit=True)
    for q in out.queries:
        assert (q.number in out.refused) == (out.done_ns[q.number] < 0)
        assert out.done_ns[q.number] <= q.deadline_ns


def test_a_query_that_would_make_another_one_late_is_refused() -> None:
    admission = Admission(setting_of(prepared("exclusive")))
    loose = [Query("other", k, 0, 400 * US) for k in range(6)]  # 6 x 60 us
    urgent = Query("net", 6, 0, 300 * US)

    def admits(query: Query, waiting: Sequence[Query]) -> bool:
        return admission.admits(query, waiting, [], now_ns=0, last_done_ns=0, busy_until_ns=0)

    assert not admits(urgent, loose), "in time itself, but the last of those behind it would be late"
    assert admits(urgent, loose[:4]) and admits(urgent, [])
    late = [Query("other", 0, 0, 50 * US)]  # late already: that is no reason
    assert admits(Query("net", 6, 0, 300 * US), late)


def test_headroom_is_of_all_that_wait_whichever_model_they_are_of() -> None:
    costs = Costs(setting_of(prepared("weft")))
    urgent, loose = Query("net", 1, 0, 250 * US), Query("other", 0, 0, 1500 * US)
    order = costs.ordered([loose, urgent])
    assert order == [urgent, loose] and costs.first([loose, urgent]) is urgent
    assert costs.headroom(order, 0) == 150 * US and costs.headroom([loose], 0) == 1440 * US
    assert costs.headroom(order, 150 * US) == 0


def test_weft_spends_on_one_model_no_more_than_the_other_can_lose() -> None:
    policy = make("weft", setting_of(prepared("weft")))

    def variants(waiting: Sequence[Query]) -> list[tuple[str, int]]:
        found = policy.decide(Situation(0, [], waiting, Cursor(OFF, 0, 0, False), Recent())).launch
        return [(q.model, v) for q, v in found]

    loose, tight = Query("other", 0, 0, 1500 * US), Query("net", 1, 0, 106 * US)
    assert variants([loose])[0][1] > 0, "alone it has headroom"
    assert variants([loose, replace(tight, deadline_ns=1501 * US)])[0][1] > 0
    assert variants([loose, tight]) == [("net", 0), ("other", 0)], "the tighter one goes first, and nothing is spent"
    behind = replace(tight, deadline_ns=loose.deadline_ns + 1)
    late = replace(loose, deadline_ns=1366 * US)
    now = Situation(1300 * US, [], [late, behind], Cursor(OFF, 0, 0, False), Recent())
    assert [v for _, v in policy.decide(now).launch] == [0, 0], "what waits behind has none"


def test_the_controller_sees_each_latency_against_its_own_target() -> None:
    targets = Targets({p.model.name: p.target_ns for p in prepared("exclusive")})
    assert targets.scaled("net", 123) == 123
    for ns in (1, 1_499_999, 1_500_000, 1_500_001):
        assert (targets.scaled("other", ns) > TARGETS["net"]) == (ns > TARGETS["other"])


@pytest.mark.parametrize(("one", "other"), [(0.3, 0.3), (0.2, 0.5), (0.5, 0.2)])
def test_the_cap_s_queue_is_that_of_all_models(one: float, other: float) -> None:
    policy = make("weft", setting_of(prepared("weft")))
    assert isinstance(policy, Weft)
    gaps, count = np.random.default_rng(3), 200_000
    rates = np.array([one / 100_000, other / 60_000])
    which = gaps.random(count) < rates[0] / rates.sum()
    at = np.cumsum(gaps.exponential(1 / rates.sum(), count)).astype(np.int64)
    service = np.where(which, 100_000, 60_000)
    p99 = np.quantile(latencies(at, service)[which], 0.99)
    for k, is_net in enumerate(which[:2000]):
        q = Query("net" if is_net else "other", k, 0, 1 << 40)
        policy._mix[q.model] += 1
    mean, variation = policy._service(0)
    assert mean == pytest.approx(service.mean(), rel=0.05) and variation > 0
    assert predicted_p99(mean, 100_000, rates.sum(), 1 + variation) == pytest.approx(p99, rel=0.15)


def test_what_has_ended_of_each_model_is_learnt() -> None:
    policy = make("weft", setting_of(prepared("weft")))
    assert isinstance(policy, Weft)
    done = [Finished(Query("other", k, 0, 1), 0, 0, 60 * US, 1980) for k in range(9)]
    policy.decide(Situation(0, [], [], Cursor(OFF, 0, 0, False), Recent(), 0, done))
    policy.learn()
    assert policy._mix == {"net": 1.0, "other": 10.0}


def test_forms_beside_queries_of_any_model_are_those_that_all_have() -> None:
    record = both()
    assert [len(p.points) for p in prepared("priority", record)] == [2, 2]
    with pytest.raises(PolicyError, match="no samples of net beside work by streams"):
        prepared("streams", record)  # of `other` it was not recorded
    turned = replace(record, modes=tuple(
        replace(m, be_rate=0.9) if (m.model, m.name) == ("other", "green16") else m for m in record.modes
    ))  # fmt: skip
    one, other = prepared("green", turned)
    assert [p.variant.name for p in one.points] == [p.variant.name for p in other.points] == [
        "alone", "green36", "green16",
    ]  # fmt: skip


def test_orion_runs_beside_queries_only_where_every_model_keeps_its_target() -> None:
    p = prepared("orion")
    assert [len(x.points) for x in p] == [2, 2]
    policy = make("orion", setting_of(p))
    assert isinstance(policy, Orion) and policy._beside == 1
    tight = [p[0], replace(p[1], target_ns=70 * US)]
    made = make("orion", setting_of(tight))
    assert isinstance(made, Orion) and made._beside == 0


# -- comparisons


def cell(load: float = 0.3, queries: int = 500, **more: object) -> c.Cell:
    cells = [
        c.cell_of(RECORD, m, "work", qos_ms=TARGETS[m] / 1e6, load=load, of_peak=False, process="poisson", trace=None,
                  queries=queries, seed=1 + k)
        for k, m in enumerate(TWO)
    ]  # fmt: skip
    return replace(c.together(cells), **more)  # type: ignore[arg-type]


def test_a_comparison_has_a_run_of_each_model() -> None:
    found = c.compare(RECORD, ["tally", "weft", "mps"], cell(), [cell(0.4)])
    assert [(r.policy, r.model) for r in found.runs] == [(p, m) for p in ("exclusive", "tally", "weft") for m in TWO]
    assert len(found.over_load) == 6 and [r.policy for r in found.refused] == ["mps"]
    for r in found.runs:
        assert r.among == tuple(m for m in TWO if m != r.model) and r.latency.queries == 490
        assert r.target_us == TARGETS[r.model] / 1e3 and sum(v.queries for v in r.variants) == 500
        assert (r.over_exclusive == 1.0) or r.policy != "exclusive"
    one, other = found.runs[2:4]
    assert (one.be_throughput, one.system_throughput) == (other.be_throughput, other.system_throughput)
    solo = sum(500 * s / 1e6 for s in (100.0, 60.0))
    assert one.system_throughput == pytest.approx(one.be_throughput + solo / one.span_s)
    page = Cells(render_policies(found))
    assert page.tables[0][0][:2] == ["policy", "model"] and [row[1] for row in page.tables[0][1:]] == [*TWO] * 3
    text = render_policies(found)
    assert "Latencies against the target: net" in text and "p99 over load: other" in text


def test_a_model_twice_is_refused() -> None:
    with pytest.raises(PolicyError, match="the model 'net' twice"):
        c.together([cell(), cell()])


def test_refused_queries_are_of_their_model() -> None:
    found = c.compare(RECORD, ["tally"], cell(0.9, admit=True))
    for r in found.runs:
        assert r.refused > 0 and r.latency.queries == (500 - r.refused) - (500 - r.refused) // 50
        assert r.latency.quantile_us(0.99) <= r.target_us or r.policy != "exclusive"


# -- a machine


@settings(max_examples=8, deadline=None)
@given(one=traces(), other=traces(), policy=st.sampled_from(["exclusive", "tally", "weft", "priority", "serial"]))
def test_a_machine_with_two_models_loses_nothing(one: Arrivals, other: Arrivals, policy: str) -> None:
    p = prepared(policy)
    device = FakeDevice(look_ns=200)
    resident, plain = Form(2, device.persistent), Form(2, None)
    lanes = {
        x.model.name: [
            Lane(1, query(device, 1, y.lc.at(0.5)), plain if y.variant.sharing == "priority" else None)
            for y in x.points
        ]
        for x in p
    }
    job = {} if policy == "exclusive" else {"job": FakeJob(device), "idle": resident}
    machine = GpuMachine(device, lanes, copies=3, **job)  # type: ignore[arg-type]
    made = make(policy, setting_of(p))
    out = live(made, LiveBackend(machine, list(zip(p, (one, other), strict=True)), policy=made))
    assert sorted(q.number for q in out.queries) == list(range(len(one) + len(other)))
    check(replace(out, pieces=[], blocks=0))
    if policy == "exclusive":
        assert off_lindley_us(out) < 20


# -- records


def test_records_of_models_are_merged() -> None:
    one, other = (
        replace(RECORD, models=tuple(m for m in RECORD.models if m.name == name),
                modes=tuple(m for m in RECORD.modes if m.model == name),
                steps=tuple(s for s in RECORD.steps if s.model == name))
        for name in TWO
    )  # fmt: skip
    slow = replace(other, launch=constant(9.0), jobs=(replace(other.jobs[0], stop=constant(30.0)), other.jobs[1]))
    found = merged([one, slow])
    assert [m.name for m in found.models] == [*TWO] and found.modes == tuple(
        m if m.model == "net" else replace(m, lc=replace(m.lc, source=1)) for m in RECORD.modes
    )
    assert found.launch.at(0.5) == 9.0 and found.jobs[0].stop is not None and found.jobs[0].stop.at(0.5) == 30.0
    assert len(found.sources) == 2 and found.jobs[0].stop.source == 1 and merged([one]) == one
    for wrong in ([one, replace(other, gpu="another")], [one, replace(other, jobs=other.jobs[:1])], [one, one]):
        with pytest.raises(ValueError, match=r"several|twice|lacks"):
            merged(wrong)


def test_running_queries_of_several_models_bound_when_the_gpu_is_free() -> None:
    costs = Costs(setting_of(prepared("exclusive")))
    running = [Running(Query("net", 0, 0, 1), 0, 0), Running(Query("other", 1, 0, 1), 0, 0)]
    assert costs.free_ns(Situation(0, running, [], Cursor(OFF, 0, 0, False), Recent())) == 160 * US
