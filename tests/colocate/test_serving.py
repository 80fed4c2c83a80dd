"""Policies on a machine whose queries come from a server: every query once, in order, and the job beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.colocate.test_live import US, lived, machine_of, prepared, traces
from tests.colocate.virtual_machine import VirtualMachine

from weft.colocate.arrivals import Arrivals, poisson
from weft.colocate.live import SILENT_NS, Ended, quietly
from weft.colocate.operating import longer
from weft.colocate.policies import make
from weft.colocate.policy import drive
from weft.colocate.serving import IDLE_NS, TICK_NS, Come, Served, ServingBackend
from weft.errors import DeviceError

POLICIES = ["exclusive", "tally", "weft", "green:16", "orion", "serial"]


@dataclass
class Script:
    """An inbox whose queries come at given instants of the machine's clock, and which notes what it is told."""

    machine: VirtualMachine
    times: Sequence[int]
    waited: int = 0
    until: int = 0
    """It is closed then, or behind the last query."""
    sent: int = 0
    ended: list[tuple[int, Ended]] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)
    last: tuple[Served, int] | None = None

    def __post_init__(self) -> None:
        pause, self.machine.pause = self.machine.pause, self.pause  # type: ignore[method-assign]
        self.pause_of = pause

    def pause(self, until_ns: int) -> None:
        """While something is under way: no further than to the next query."""
        if self.machine.flying or self.machine.kernels_end > self.machine.now:
            self.pause_of(min([until_ns, *self.times[self.sent : self.sent + 1]]))

    @property
    def is_open(self) -> bool:
        return self.sent < len(self.times) or self.machine.now < self.until

    def take(self) -> list[Come]:
        first = self.sent
        while self.sent < len(self.times) and self.times[self.sent] <= self.machine.now:
            self.sent += 1
        return [Come(n, self.waited) for n in range(first, self.sent)]

    def wait(self, ns: int) -> None:
        assert 0 <= ns <= IDLE_NS
        coming = self.times[self.sent] if self.sent < len(self.times) else self.machine.now + ns
        self.machine.now = max(self.machine.now, min(self.machine.now + max(ns, 1), coming))

    def done(self, number: int, ended: Ended) -> None:
        self.ended.append((number, ended))

    def tick(self, served: Served, cap: int) -> None:
        self.ticks.append(self.machine.now)
        self.last = served, cap


def served(
    policy: str, arrivals: Arrivals, *, waited: int = 0, until: int = 0
) -> tuple[Script, VirtualMachine, ServingBackend]:
    p = prepared(policy)
    machine = machine_of(p)
    start = machine.now
    inbox = Script(machine, [start + int(t) for t in arrivals.times_ns], waited, until)
    made = make(policy, p.setting)
    backend = ServingBackend(machine, p, inbox, policy=made)
    with quietly():
        drive(made, backend)
    return inbox, machine, backend


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(arrivals=traces(), until=st.sampled_from([0, 3_000_000]))
def test_every_query_runs_once_in_order(policy: str, arrivals: Arrivals, until: int) -> None:
    inbox, machine, backend = served(policy, arrivals, until=until)
    count = len(arrivals)
    assert [n for n, _ in inbox.ended] == list(range(count))
    for number, ended in inbox.ended:
        assert inbox.times[number] <= ended.begin_ns <= ended.done_ns
    assert backend.served.queries == count == sum(backend.served.variants)
    assert machine.form == -1, "the job has stopped"
    assert inbox.last is not None and inbox.last[0] is backend.served
    launched = Counter(v for what, v in machine.log if what == "launch")
    assert [launched[k] for k in range(len(backend.served.variants))] == backend.served.variants


@pytest.mark.parametrize("policy", ["exclusive", "tally", "weft", "green:16"])
def test_it_decides_as_in_a_run_of_given_arrivals(policy: str) -> None:
    arrivals = poisson(4000.0, 2000, seed=5)
    wanted, _ = lived(policy, arrivals)
    inbox, _, backend = served(policy, arrivals)
    counts = Counter(wanted.variants)
    for k, n in enumerate(backend.served.variants):
        assert abs(n - counts[k]) <= 0.01 * len(arrivals), "the windows of its controller begin at another instant"
    took = np.array([e.done_ns - inbox.times[n] for n, e in inbox.ended])
    there = np.array(wanted.done_ns) - np.array([q.scheduled_ns for q in wanted.queries])
    assert np.quantile(took, 0.5) == pytest.approx(np.quantile(there, 0.5), rel=0.02)
    assert np.quantile(took, 0.99) == pytest.approx(np.quantile(there, 0.99), rel=0.05)


@pytest.mark.parametrize("policy", ["tally", "weft"])
def test_the_job_begins_before_the_first_query(policy: str) -> None:
    arrivals = Arrivals(np.array([2_000 * US], dtype=np.int64), "given")
    _, machine, _ = served(policy, arrivals)
    assert machine.log[0][0] in ("form", "kernels")
    assert machine.work_us > 1_500, "it had the GPU until then"


def test_a_target_counts_from_where_a_query_began_to_wait() -> None:
    arrivals = Arrivals(np.array([0, 1_000 * US, 2_000 * US], dtype=np.int64), "given")
    assert served("exclusive", arrivals)[2].served.late == 0
    inbox, _, backend = served("exclusive", arrivals, waited=450 * US)
    assert backend.served.late == 3 and len(inbox.ended) == 3, "500 us are the target, 105 a query"


def test_it_says_how_it_stands_about_once_a_second() -> None:
    arrivals = Arrivals(np.array([0], dtype=np.int64), "given")
    inbox, _, _ = served("weft", arrivals, until=5 * TICK_NS)
    gaps = np.diff(inbox.ticks[:-1])
    assert 4 <= len(gaps) + 1 <= 6 and (gaps >= TICK_NS).all() and (gaps < 1.1 * TICK_NS).all()


def test_it_says_so_under_load_too() -> None:
    every = Arrivals(np.arange(0, 11_000_000 * US, 110 * US, dtype=np.int64), "given")
    inbox, _, backend = served("exclusive", every)
    assert backend.served.queries == len(every) and len(inbox.ticks) >= 2


def test_a_job_that_would_run_dry_is_looked_after_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    wait = Script.wait

    def noted(self: Script, ns: int) -> None:
        waits.append(ns)
        wait(self, ns)

    monkeypatch.setattr(Script, "wait", noted)
    arrivals = Arrivals(np.array([500 * US], dtype=np.int64), "given")
    served("tally", arrivals)
    assert max(waits) == IDLE_NS
    waits.clear()
    monkeypatch.setattr(VirtualMachine, "rest_ns", lambda _: 60_000)
    served("tally", arrivals)
    assert max(waits) == 60_000


def test_copies_make_every_variant_longer() -> None:
    p = prepared("weft")
    made = longer(p, 7.0)
    for before, after in zip(p.points, made.points, strict=True):
        assert after.variant.lc_us == before.variant.lc_us + 7.0
        assert after.variant.lc_q99_us == before.variant.lc_q99_us + 7.0
        assert after.variant.be_us == before.variant.be_us
    assert longer(p, 0.0) == p


def test_a_machine_that_stands_still_ends_it() -> None:
    p = prepared("exclusive")
    machine = machine_of(p, stands_still=True)
    policy = make("exclusive", p.setting)
    inbox = Script(machine, [machine.now])
    backend = ServingBackend(machine, p, inbox, policy=policy)

    def jump(until_ns: int) -> None:
        machine.now = max(machine.now, until_ns) + SILENT_NS // 4

    inbox.pause_of = jump
    with pytest.raises(DeviceError, match="nothing has happened for 30 s"):
        drive(policy, backend)
