"""Policies on a machine that runs by itself: the same as simulated where times are those of the simulation."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.colocate.recorded import constant, samples
from tests.colocate.virtual_machine import VirtualMachine

from weft.colocate import compare as c
from weft.colocate.arrivals import Arrivals, poisson
from weft.colocate.live import LEAD_NS, SILENT_NS, LiveBackend, quietly, run
from weft.colocate.operating import Prepared, prepare
from weft.colocate.outcome import WINDOW_NS, Outcome, Window, off_lindley_us
from weft.colocate.policies import NAMES, make
from weft.colocate.policy import MOST_IN_FLIGHT
from weft.colocate.simulate import drawn_ns
from weft.errors import DeviceError
from weft.kernels.samples import SampleRecord
from weft.kernels.scheduling import KEEP, Decision, Situation

US = 1000
ALL = [n for n in NAMES if n != "mps"] + ["green:16"]
STEADY = samples(constant(100.0), launch_us=5.0, stop_us=10.0)


def prepared(policy: str, record: SampleRecord = STEADY, target_ns: int = 500 * US) -> Prepared:
    return prepare(record, policy, "net", "" if policy == "exclusive" else "work", target_ns)


def machine_of(p: Prepared, **more: object) -> VirtualMachine:
    made = VirtualMachine(
        [round(x.lc.at(0.5) * 1e3) for x in p.points],
        [x.variant.idle_rate for x in p.points],
        [x.variant.be_us / x.variant.lc_us for x in p.points],
        launch_ns=5 * US,
        stop_ns=10 * US,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def lived(policy: str, arrivals: Arrivals, machine: VirtualMachine | None = None) -> tuple[Outcome, VirtualMachine]:
    p = prepared(policy)
    machine = machine or machine_of(p)
    made = make(policy, p.setting)
    return run(made, LiveBackend(machine, [(p, arrivals)], policy=made)), machine


def check(out: Outcome) -> None:
    assert all(d > 0 for d in out.done_ns), "a query is lost"
    scheduled, begins = np.array([q.scheduled_ns for q in out.queries]), np.array(out.begin_ns)
    assert (np.array(out.sent_ns) >= scheduled).all() and (begins >= scheduled).all(), "begun before it came"
    assert (np.diff(begins) >= 0).all() and (begins[1:] >= np.array(out.done_ns)[:-1]).all(), "not one after another"
    assert len(out.decision_ns) == out.decisions > 0 and min(out.variants) >= 0


@st.composite
def traces(draw: st.DrawFn) -> Arrivals:
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 20, 90, 150, 400, 2500]), min_size=1, max_size=40))
    return Arrivals(np.cumsum(np.array(gaps, dtype=np.int64)) * US, "random")


@pytest.mark.parametrize("policy", ALL)
@settings(max_examples=15, deadline=None)
@given(arrivals=traces(), look_ns=st.sampled_from([0, 300]), most=st.sampled_from([1e9, 900.0]))
def test_invariants_of_every_policy(policy: str, arrivals: Arrivals, look_ns: int, most: float) -> None:
    out, machine = lived(policy, arrivals, machine_of(prepared(policy), look_ns=look_ns, most_us=most))
    check(out)
    assert out.work_us == machine.work_us <= most and machine.form == -1
    launched = [v for what, v in machine.log if what == "launch"]
    assert launched == out.variants, "in the order of arrival, by the variants that were chosen"


@pytest.mark.parametrize("policy", ALL)
def test_it_is_what_the_simulation_says(policy: str) -> None:
    """With constant times nothing is drawn: the same decisions at the same instants."""
    arrivals = poisson(4000.0, 3000, seed=5)
    cell = c.Cell("net", "work", 500 * US, 0.4, c.RELATIVE, arrivals, 1)
    wanted = c.simulated(prepared(policy), cell)
    out, _ = lived(policy, arrivals)
    check(out)
    assert out.variants == wanted.variants
    np.testing.assert_allclose(out.done_ns, wanted.done_ns, atol=1)
    assert out.work_us == pytest.approx(wanted.work_us, rel=1e-3, abs=1.0)


def test_exclusive_is_lindleys_recursion() -> None:
    record = samples(launch_us=0.0)
    p = prepared("exclusive", record)
    arrivals = poisson(8000.0, 2000, seed=3)
    draws = np.random.default_rng(4).random(2000).tolist()
    machine = machine_of(p, draws=[drawn_ns(record.models[0].solo, draws)], launch_ns=0)
    out = run(make("exclusive", p.setting), LiveBackend(machine, [(p, arrivals)]))
    assert off_lindley_us(out) == 0.0
    late = machine_of(p, draws=machine.draws, launch_ns=7 * US)
    out = run(make("exclusive", p.setting), LiveBackend(late, [(p, arrivals)]))
    assert off_lindley_us(out) == 0.0, "a launch is part of what a query takes"
    slow = machine_of(p, draws=machine.draws, look_ns=4 * US)
    out = run(make("exclusive", p.setting), LiveBackend(slow, [(p, arrivals)]))
    assert 7.0 <= off_lindley_us(out) < 200.0
    assert off_lindley_us(Outcome([], [], [], [], [])) == 0.0


def test_a_thread_that_looks_late_sends_late() -> None:
    arrivals = Arrivals(np.array([0, 50 * US, 60 * US], dtype=np.int64), "given")
    out, _ = lived("exclusive", arrivals, machine_of(prepared("exclusive"), look_ns=4 * US))
    late = np.array(out.sent_ns) - arrivals.times_ns
    assert (late >= 0).all() and late.max() >= 4 * US and min(out.decision_ns) >= 4 * US


def test_the_run_begins_with_a_lead() -> None:
    p = prepared("exclusive")
    machine = machine_of(p, now=123_456)
    out = run(make("exclusive", p.setting), LiveBackend(machine, [(p, Arrivals(np.zeros(1, dtype=np.int64), "one"))]))
    assert list(out.sent_ns) == [0] and list(out.begin_ns) == [5 * US] and machine.now >= 123_456 + LEAD_NS


def test_a_machine_that_stands_still_ends_the_run() -> None:
    p = prepared("exclusive")
    machine = machine_of(p, stands_still=True)
    backend = LiveBackend(machine, [(p, Arrivals(np.zeros(3, dtype=np.int64), "three"))])
    with pytest.raises(DeviceError, match="2 queries were launched and 1 wait"):
        run(make("exclusive", p.setting), backend)
    assert machine.now > SILENT_NS


@settings(max_examples=10, deadline=None)
@given(at=st.integers(1, 400), policy=st.sampled_from(["exclusive", "serial", "timeslice", "weft"]))
def test_a_sender_that_dies_ends_the_run(at: int, policy: str) -> None:
    p = prepared(policy)
    machine = machine_of(p, look_ns=50 * US)
    sent = machine.sent
    machine.sent = lambda: min(at, sent())  # type: ignore[method-assign]
    made = make(policy, p.setting)
    backend = LiveBackend(machine, [(p, poisson(4000.0, 401, seed=5))], policy=made)
    with pytest.raises(DeviceError, match=rf"query {at} was not sent, [12]\.\d s behind its instant"):
        run(made, backend)
    assert all(d > 0 for d in backend.outcome.done_ns[:at]) and not any(d > 0 for d in backend.outcome.done_ns[at:])


@settings(max_examples=30, deadline=None)
@given(
    at=st.integers(0, 3000),
    jump=st.sampled_from([10**6, 3 * 10**8, 5 * 10**9]),
    policy=st.sampled_from(["tally", "weft"]),
)
def test_a_clock_that_jumps_loses_no_query_and_one_that_goes_back_ends_the_run(at: int, jump: int, policy: str) -> None:
    arrivals = poisson(4000.0, 200, seed=6)
    p = prepared(policy)
    for sign in (1, -1):
        machine, looks = machine_of(p, look_ns=100), iter(range(10**9))
        now = machine.now_ns

        def later(now=now, looks=looks, machine=machine, sign=sign) -> int:  # type: ignore[no-untyped-def]
            if next(looks) == at:
                machine.now += sign * jump
            return int(now())

        machine.now_ns = later  # type: ignore[method-assign]
        made = make(policy, p.setting)
        backend = LiveBackend(machine, [(p, arrivals)], policy=made)
        if sign > 0:
            out = run(made, backend)
            check(out)
            late = np.array(out.sent_ns) - arrivals.times_ns > 20_000
            cell = c.Cell("net", "work", 500 * US, 0.4, c.RELATIVE, arrivals, 1)
            assert late[4:].mean() < 0.02 or c.summed_up([p], cell, out)[0].latency.void, (
                "a jump that delays queries is told"
            )
        elif at > 2:
            ended = ""
            try:
                run(made, backend)
            except DeviceError as error:
                ended = str(error)
            assert "clock went back" in ended or next(looks) <= at or jump <= 10**6, "it was not seen"


def test_an_interrupt_leaves_the_runs_that_had_ended() -> None:
    arrivals, runs = poisson(4000.0, 100, seed=5), iter(range(100))

    def carry_out(p: Sequence[Prepared], cell: c.Cell) -> Outcome:
        if next(runs) == 2:
            raise KeyboardInterrupt
        return lived(p[0].policy, cell.arrivals)[0]

    cell = c.Cell("net", "work", 500 * US, 0.4, c.RELATIVE, arrivals, 1)
    with pytest.raises(KeyboardInterrupt) as ended:
        c.compare(STEADY, ["tally", "weft"], cell, carry_out=carry_out)
    assert isinstance(ended.value, c.ComparisonInterruptedError)
    assert [r.policy for r in ended.value.comparison.runs] == ["exclusive", "tally"]
    runs = iter([2])
    with pytest.raises(KeyboardInterrupt) as ended:
        c.compare(STEADY, ["tally"], cell, carry_out=carry_out)
    assert not isinstance(ended.value, c.ComparisonInterruptedError), "there is nothing to keep"


class Wrong:
    """Launches what it is told to."""

    name, cap = "wrong", -1

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def decide(self, situation: Situation) -> Decision:
        if len(situation.waiting) < 3:
            return KEEP
        return Decision(tuple((situation.waiting[n], 0) for n in self.numbers))


@pytest.mark.parametrize(("numbers", "says"), [([1], "another of net came before"), ([0, 1, 2], "one more than")])
def test_a_policy_that_is_wrong_is_told(numbers: list[int], says: str) -> None:
    p = prepared("exclusive")
    backend = LiveBackend(machine_of(p), [(p, Arrivals(np.zeros(3, dtype=np.int64), "three"))])
    with pytest.raises(ValueError, match=says):
        run(Wrong(numbers), backend)
    assert MOST_IN_FLIGHT == 2 and gc.isenabled()


def test_nothing_is_collected_during_a_run() -> None:
    assert gc.isenabled()
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        with quietly():
            assert not gc.isenabled() and gc.get_freeze_count() > 0
        assert gc.isenabled() and gc.get_freeze_count() == 0
        gc.disable()
        with quietly():
            pass
        assert not gc.isenabled(), "as it was before"
        gc.freeze()
        with quietly():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() > 0, "what others froze stays frozen"
    finally:
        gc.enable()
        if not frozen:
            gc.unfreeze()


def test_what_a_run_on_a_machine_came_to() -> None:
    arrivals, p = poisson(4000.0, 300, seed=5), prepared("exclusive")
    cell = c.Cell("net", "work", 500 * US, 0.4, c.RELATIVE, arrivals, 1)
    found = c.summed_up([p], cell, lived("exclusive", arrivals)[0])[0]
    assert not found.simulated and found.decision_us == 0.0 and found.latency.void == ""
    assert found.off_lindley_us == 0.0
    late = c.summed_up([p], cell, lived("exclusive", arrivals, machine_of(p, look_ns=9 * US))[0])[0]
    assert "send delay" in late.latency.void and not late.kept
    simulated = c.summed_up([p], cell, c.simulated(p, cell))[0]
    assert simulated.simulated and simulated.decision_us is simulated.off_lindley_us is None


@given(st.lists(st.lists(st.integers(1, 10**9), max_size=400), min_size=1, max_size=8))
def test_p99_of_a_window_is_that_of_all_that_ended(windows: list[list[int]]) -> None:
    window = Window()
    for number, latencies in enumerate(windows):
        for x in latencies:
            window.ended(x, late=False)
        seen = sorted(x for w in windows[max(0, number - 4) : number + 1] for x in w)
        want = seen[max(0, math.ceil(0.99 * len(seen)) - 1)] if seen else 0
        assert window.turn((number + 1) * WINDOW_NS).p99_ns == want
