"""Policies: what each decides in given situations, what it promises, and what it is refused for."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.colocate.recorded import constant, samples

from weft.colocate.operating import prepare
from weft.colocate.policies import NAMES, make, note_of
from weft.colocate.policies.baselines import SLICE_US, Green
from weft.colocate.policies.weft import PENALTY_NS, TICK_NS, Weft, predicted_p99
from weft.colocate.policy import Costs, ModelFacts, Policy, PolicyError, Setting
from weft.colocate.queueing import latencies
from weft.kernels.scheduling import OFF, Cursor, Decision, Finished, Query, Recent, Running, Situation, Variant

US = 1000
TARGET = 500 * US


def setting(policy: str = "weft", *, target: int = TARGET) -> Setting:
    return prepare(samples(constant(100.0)), policy, "net", "work", target).setting


def query(number: int, at_us: float = 0.0, *, model: str = "net", target: int = TARGET) -> Query:
    return Query(model, number, round(at_us * US), round(at_us * US) + target)


def situation(
    now_us: float = 0.0, waiting: Sequence[Query] = (), running: Sequence[Running] = (), *, form: int = OFF,
    busy_us: float = -1.0, recent: Recent | None = None, finished: Sequence[Finished] = (), is_done: bool = False,
) -> Situation:  # fmt: skip
    cursor = Cursor(form, round(busy_us * US), 0, is_done)
    return Situation(round(now_us * US), running, waiting, cursor, recent or Recent(), 0, finished)


def runs(number: int, variant: int = 0, since_us: float = 0.0) -> Running:
    return Running(query(number, since_us), variant, round(since_us * US))


ALL = [n for n in NAMES if n != "mps"] + ["green:36"]


@pytest.mark.parametrize("name", ALL)
def test_no_policy_launches_more_than_two_or_out_of_order(name: str) -> None:
    policy = make(name, setting(name))
    waiting = [query(i) for i in range(5)]
    for running in ([], [runs(9)], [runs(8), runs(9)]):
        found = policy.decide(situation(10.0, waiting, running)).launch
        assert len(found) <= 2 - len(running)
        assert [q for q, _ in found] == waiting[: len(found)]


def test_exclusive_never_runs_the_job() -> None:
    policy = make("exclusive", setting("exclusive"))
    assert policy.decide(situation()).co_runner == "keep" and policy.decide(situation()).kernels_us == 0
    assert policy.decide(situation(0, [query(0)])).launch == ((query(0), 0),)


def test_serial_puts_a_kernel_in_front_only_with_headroom() -> None:
    policy = make("serial", setting("serial"))
    idle = policy.decide(situation())
    assert idle.kernels_us == 300.0  # 500 - 100 of a query that comes now
    assert policy.decide(situation(0, busy_us=100.0)).kernels_us == 0  # one at a time
    both = policy.decide(situation(0, [query(0)]))
    assert both.kernels_us == 0 and both.launch  # 300 + 100 of it and 100 of the next one: over 500
    long = make("serial", setting("serial", target=1000 * US))
    assert long.decide(situation(0, [query(0, target=1000 * US)])).kernels_us == 300.0
    assert long.decide(situation(450, [query(0, target=1000 * US)] * 3)).kernels_us == 0
    assert long.decide(situation(0, is_done=True)).kernels_us == 0


@pytest.mark.parametrize("name", ["streams", "priority", "green:36", "green:16"])
def test_one_form_is_on_all_the_time(name: str) -> None:
    policy = make(name, setting(name))
    first = policy.decide(situation(0, [query(0)]))
    assert (first.co_runner, first.form, first.launch) == ("on", 1, ((query(0), 1),))
    assert policy.decide(situation(0, form=1)).co_runner == "keep"


def test_the_controller_of_partitions_yields_near_the_target_and_grows_when_calm() -> None:
    policy = make("green", setting("green"))
    assert isinstance(policy, Green) and policy.cap == 1
    tick = 100_000.0
    policy.decide(situation(tick, recent=Recent(p99_ns=int(TARGET * 0.96))))
    assert policy.cap == 0 and policy.decide(situation(tick + 1, form=1)).co_runner == "off"
    for k in range(2, 12):
        policy.decide(situation(tick * k, recent=Recent(p99_ns=int(TARGET * 0.5))))
    assert policy.cap == 2
    policy.decide(situation(tick * 13, recent=Recent(p99_ns=int(TARGET * 0.9))))  # between both: it stays
    assert policy.cap == 2


def test_time_slices_alternate_while_both_have_work() -> None:
    policy = make("timeslice", setting("timeslice"))
    assert policy.decide(situation()).kernels_us == SLICE_US
    assert policy.decide(situation(100, [query(0)], busy_us=2000)).launch == ()
    turn = policy.decide(situation(2000, [query(0, 100)], busy_us=2000))
    assert turn.launch and turn.wake_ns == 4000 * US
    assert policy.decide(situation(4000, [query(5)])).kernels_us == SLICE_US
    assert policy.decide(situation(6000, [query(5)], busy_us=6000)).launch


def test_orion_runs_kernels_in_idle_time_and_beside_queries_where_that_was_recorded() -> None:
    policy = make("orion", setting("orion"))
    assert policy.decide(situation()).kernels_us == 300.0
    assert policy.decide(situation(0, [query(0)])).launch == ((query(0), 1),)
    tight = make("orion", setting("orion", target=150 * US))  # 200 us beside the job would miss it
    assert tight.decide(situation(0, [query(0)])).launch == ((query(0), 0),)
    alone = make("orion", prepare(samples(constant(100.0)), "orion", "net", "still", TARGET).setting)
    assert alone.decide(situation(0, [query(0)])).launch == ((query(0), 0),)


def test_tally_runs_the_job_in_idle_time_alone() -> None:
    policy = make("tally", setting("tally"))
    assert policy.decide(situation()).co_runner == "on"
    assert policy.decide(situation(0, [query(0)], form=0)).launch == ((query(0), 0),)
    assert policy.decide(situation(0, [], [runs(0)])).co_runner == "keep"
    assert policy.decide(situation(is_done=True)).co_runner == "keep"


def test_tacker_looks_at_the_query_at_hand_and_weft_at_all_behind_it() -> None:
    """One that was waiting long, and a fresh one: who spends the first one's headroom delays the other."""
    slow = Variant(1, "role", "role", 350.0, 350.0, 200.0)
    facts = (ModelFacts("net", TARGET, (Variant(0, "alone", "none", 100.0, 100.0), slow)),)
    own = Setting(facts, setting().job, 0.0)
    waiting = [query(0, 0.0), query(1, -150.0)]  # the second one's deadline is the nearer
    assert make("tacker", own).decide(situation(0.0, waiting)).launch[0] == (waiting[0], 1)
    assert [k for _, k in make("weft", own).decide(situation(0.0, waiting)).launch] == [0, 0]
    assert make("weft", own).decide(situation(0.0, waiting[:1])).launch[0][1] == 1


def test_aker_splits_a_kernel_that_tacker_cannot_run() -> None:
    tight = 350 * US
    assert make("tacker", setting("tacker", target=tight)).decide(situation()).kernels_us == 0
    split = make("aker", setting("aker", target=tight)).decide(situation()).kernels_us
    assert 0 < split <= 250.0


def test_weft_never_spends_more_than_the_headroom() -> None:
    rng = np.random.default_rng(3)
    own = setting()
    lc = Costs(own).q99["net"]
    assert len(lc) > 2
    spent = 0
    for _ in range(500):
        policy = Weft(own)
        count = int(rng.integers(1, 8))
        at = np.sort(rng.uniform(-600, 0, count))
        waiting = [query(i, float(t)) for i, t in enumerate(at)]
        running = [runs(99, int(rng.integers(0, len(lc))), -50.0)] if rng.random() < 0.5 else []
        found = policy.decide(situation(0.0, waiting, running)).launch
        for i, (_, variant) in enumerate(found):
            if variant == 0:
                continue
            spent += 1
            end = max(0, -50 * US + lc[running[0].variant]) if running else 0
            for j, q in enumerate(waiting):  # all of them keep their deadlines, though the chosen ones take longer
                end += lc[found[j][1]] if j < len(found) else lc[0]
                assert end <= q.deadline_ns, (i, variant, at)
    assert spent > 50


def test_weft_launches_the_earliest_deadline_first() -> None:
    facts = tuple(ModelFacts(n, TARGET, (Variant(0, "alone", "none", 100.0, 100.0),)) for n in ("net", "other"))
    policy = make("weft", Setting(facts, setting().job, 0.0))
    late, soon = query(0, model="net", target=TARGET), query(1, model="other", target=200 * US)
    assert [q.number for q, _ in policy.decide(situation(0, [late, soon])).launch] == [1, 0]


def step(policy: Weft, given: Situation) -> Decision:
    """A decision, and what is learnt behind it."""
    made = policy.decide(given)
    policy.learn()
    return made


def test_weft_steps_back_when_p99_is_over_the_target_and_comes_back_one_by_one() -> None:
    policy = Weft(setting())
    top = policy.cap
    assert top >= 2
    calm = Recent(0, 100, 100_000_000, 1.0, 150 * US)
    step(policy, situation(TICK_NS / US, recent=Recent(0, 100, 100_000_000, 1.0, TARGET + 1)))
    assert policy.cap == 0
    caps = []
    for k in range(2, 16):
        step(policy, situation(k * TICK_NS / US, recent=calm))
        caps.append(policy.cap)
    quiet = PENALTY_NS // TICK_NS
    assert caps[: quiet - 1] == [0] * (quiet - 1) and caps[quiet - 1 : quiet + 1] == [1, 2] and caps[-1] == top


def test_weft_fills_idle_time_by_whole_kernels_only_where_p99_leaves_room_for_one() -> None:
    def filled(p99_us: float, target_us: float = 500.0, *, busy_us: float = -1.0) -> tuple[str, float]:
        policy = Weft(setting(target=round(target_us * US)))
        found = step(policy, situation(10.0, recent=Recent(p99_ns=round(p99_us * US)), busy_us=busy_us))
        return found.co_runner, found.kernels_us

    assert filled(120.0) == ("keep", 300.0)
    assert filled(171.0) == ("on", 0.0)  # 171 and 305 are over 475
    assert filled(0.0) == ("on", 0.0)  # nothing is known yet
    assert filled(120.0, 400.0) == ("on", 0.0)  # a query of 100 could not wait for 305
    assert filled(120.0, busy_us=20.0) == ("keep", 0.0)
    short = setting()
    assert short.job is not None
    stages = Weft(replace(short, job=replace(short.job, kernel_us=9.0)))  # a stop takes 10: it loses nothing
    assert stages.decide(situation(10.0, recent=Recent(p99_ns=120 * US))).co_runner == "on"


def test_weft_caps_variants_by_the_rate_that_it_sees() -> None:
    low, high = Weft(setting()), Weft(setting())
    for k in range(1, 12):
        step(low, situation(k * TICK_NS / US, recent=Recent(0, 100, 100_000_000, 1.0, 100 * US)))
        step(high, situation(k * TICK_NS / US, recent=Recent(0, 900, 100_000_000, 1.0, 100 * US)))
    assert low.cap > high.cap == 0


def test_a_variant_that_drifts_is_not_used_until_it_is_refitted() -> None:
    policy = Weft(setting())
    top = policy.cap
    assert step(policy, situation(0.0, [query(0)])).launch[0][1] == top
    ended = [Finished(query(i), top, 0, 200 * US, 1980) for i in range(5)]
    step(policy, situation(1.0, finished=ended))
    now = 10.0
    assert step(policy, situation(now, [query(0, now)])).launch[0][1] == top - 1
    again = PENALTY_NS / US + 20
    more = [Finished(query(i), top, 0, 200 * US, 1980) for i in range(60)]
    step(policy, situation(again, finished=more))
    assert step(policy, situation(again, [query(0, again)])).launch[0][1] == top


@pytest.mark.parametrize(("load", "cv2"), [(0.3, 1.0), (0.5, 1.0), (0.7, 1.0), (0.8, 1.0), (0.5, 9.0), (0.3, 4.0)])
def test_the_predicted_p99_is_near_that_of_the_queue(load: float, cv2: float) -> None:
    n, service = 400_000, 100_000
    gaps = np.random.default_rng(1).gamma(1 / cv2, service / load * cv2, n)
    arrivals = np.rint(np.cumsum(gaps)).astype(np.int64)
    true = float(np.quantile(latencies(arrivals, np.full(n, service, dtype=np.int64)), 0.99))
    assert predicted_p99(service, service, load / service, cv2) == pytest.approx(true, rel=0.15)


def test_an_overload_has_no_p99() -> None:
    assert predicted_p99(1.0, 1.0, 1.0, 1.0) == float("inf") and predicted_p99(1.0, 1.2, 0.001, 1.0) == 1.2


def test_what_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(PolicyError, match=r"policy 'magic': there is none of this name \[W206\]"):
        make("magic", setting())
    with pytest.raises(PolicyError, match="green:x"):
        make("green:x", setting())
    with pytest.raises(PolicyError, match="it shares the GPU with a job"):
        make("weft", prepare(samples(), "exclusive", "net", "", TARGET).setting)
    record = samples()
    for name, job, said in [
        ("mps", "work", "no samples of net beside work by mps"), ("green:24", "work", "no samples of net beside work"),
        ("tacker", "still", "no fused kernels"), ("tally", "still", "no stop latencies"),
        ("weft", "still", "no stop latencies"), ("weft", "none", "no samples of the job 'none'"),
    ]:  # fmt: skip
        with pytest.raises(PolicyError, match=said):
            prepare(record, name, "net", job, TARGET)
    with pytest.raises(PolicyError, match="no samples of the model 'nets'"):
        prepare(record, "exclusive", "nets", "", TARGET)


def test_our_implementations_of_papers_say_so() -> None:
    for name in ("serial", "orion", "tally", "tacker", "aker"):
        assert note_of(name).startswith("our implementation of")
    assert note_of("weft") == note_of("green:36") == ""


def test_wefts_variants_gain_more_than_they_cost() -> None:
    made = prepare(samples(constant(100.0)), "weft", "net", "work", TARGET)
    alone, *others = [p.variant for p in made.points]
    assert others and all(v.be_us > v.lc_us - alone.lc_us for v in others)
    assert "co-runner 256" not in {v.name for v in others}  # it loses 60 us for 32
    steps = [a.step for v in others for a in v.steps]
    assert "c" not in steps  # it did not beat its best peer


@pytest.mark.parametrize("name", ["exclusive", "tally", "weft"])
def test_how_long_a_decision_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, not asserted: times are of a quiet machine. It must grow no faster than the queue."""
    policy: Policy = make(name, setting(name))
    took = {}
    for count in (1, 10, 1000):
        s = situation(0.0, [query(i) for i in range(count)])
        found = []
        for _ in range(50):
            begin = time.perf_counter_ns()
            policy.decide(s)
            found.append(time.perf_counter_ns() - begin)
        took[count] = sorted(found)[25]
    with capsys.disabled():
        said = ", ".join(f"{n} waiting {t / 1e3:.1f} us" for n, t in took.items())
        sys.stdout.write(f"\n{name}: {said}\n")
    assert took[1000] < 1000 * max(took[1], 1000.0)
