"""Whatever hangs, measuring ends when its time is up, and nobody is blamed for what was not waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from tests.faults.fake import FakeTransport, fake_trial
from tests.tune.cuda_fake import Act, FakeCudaTransport, source, trial

from weft.device.cuda.facts import GpuFacts
from weft.device.facts import CpuFacts
from weft.device.toolchain import HostCompiler
from weft.kernels.measurement import Measurement, Verdict
from weft.kernels.source import KernelSource, Schedule
from weft.options import Options
from weft.tune.messages import Message
from weft.tune.site import Built, HostSite
from weft.tune.store import Database
from weft.tune.thread_pool import DaemonThreadPool
from weft.tune.transport import Fault, WorkerFault
from weft.tune.tuner import ProblemTrial, Tuner

PAIR = [Schedule("library"), Schedule("cpp")]
AT_ONCE_S = 15.0
"""More than what is done after the time is up, on a busy machine too; much less than any time-out of a worker."""


@dataclass
class Silent:
    """A worker that starts and reads, and answers only the first so many times; its successors always do."""

    inner: FakeTransport
    answers: int = 0
    asked_s: list[float] = field(default_factory=list)
    started: int = 0
    killed: int = 0

    def start(self) -> None:
        self.started += 1
        if self.started > 1:
            self.answers = 1000
        self.inner.start()

    def send(self, message: Message, timeout_s: float) -> None:
        if self.answers > 0:
            self.inner.send(message, timeout_s)

    def receive(self, timeout_s: float) -> Message:
        if self.answers > 0:
            self.answers -= 1
            return self.inner.receive(timeout_s)
        self.asked_s.append(timeout_s)
        time.sleep(timeout_s)
        raise WorkerFault(Fault.HANG, "no answer in time")

    def running(self) -> int:
        return 1

    def kill(self) -> None:
        self.killed += 1
        self.inner.kill()


def timed(measure: Callable[[], list[Measurement]]) -> tuple[list[Measurement], float]:
    began = time.monotonic()
    found = measure()
    return found, time.monotonic() - began


def uncompiled(number: int) -> ProblemTrial:
    """A trial whose generated kernel must be compiled."""
    known = fake_trial(number, PAIR)
    call, (schedule, kernel, _) = known.kernels
    assert isinstance(kernel, KernelSource)
    return replace(known, kernels=[call, (schedule, replace(kernel, text=f"// {number}"), None)])


def test_a_worker_that_never_answers_is_not_waited_for() -> None:
    database, transport = Database.open(None), Silent(FakeTransport({}))
    with Tuner(Options(), CpuFacts(), database, transport=transport) as tuner:
        now = time.monotonic()
        measure = partial(tuner.measure, [fake_trial(k, PAIR) for k in range(5)], deadline=now + 60, ready_by=now + 0.3)
        found, seconds = timed(lambda: list(measure()))
        assert found == [] and seconds < 0.3 + AT_ONCE_S
        assert tuner.gave_up and transport.killed >= 1
        assert len(transport.asked_s) == 1, "nobody waits for it a second time"
    assert database.stats().rows == 0


def test_what_is_known_is_answered_without_a_worker() -> None:
    database = Database.open(None)
    with Tuner(Options(), CpuFacts(), database, transport=FakeTransport({})) as tuner:
        first = list(tuner.measure([fake_trial(1, PAIR)]))
    with Tuner(Options(), CpuFacts(), database, transport=Silent(FakeTransport({}))) as tuner:
        now = time.monotonic()
        trials = [fake_trial(2, PAIR), fake_trial(1, PAIR)]
        assert list(tuner.measure(trials, deadline=now + 60, ready_by=now + 0.1)) == first


def test_a_trial_that_hangs_ends_with_the_time_and_has_no_verdict() -> None:
    database, transport = Database.open(None), Silent(FakeTransport({}), answers=1)  # it greets
    with Tuner(Options(), CpuFacts(), database, transport=transport) as tuner:
        trials = [fake_trial(k, PAIR) for k in range(3)]
        measure = partial(tuner.measure, trials, deadline=time.monotonic() + 0.2, grace_s=0.2)
        found, seconds = timed(lambda: list(measure()))
        assert found == [] and seconds < 0.4 + AT_ONCE_S
        assert not tuner.gave_up, "it was ready"
    assert database.stats().rows == 0 and transport.killed >= 1


def test_a_hang_with_time_left_is_the_kernels_fault() -> None:
    transport = Silent(FakeTransport({}), answers=1)
    with Tuner(Options(trial_timeout_s=0.1), CpuFacts(), Database.open(None), transport=transport) as tuner:
        found = list(tuner.measure([fake_trial(1, PAIR)], deadline=time.monotonic() + 60))
    assert [m.verdict for m in found] == [Verdict.OK, Verdict.HANG]


class Stuck:
    """A compiler that never ends, for whoever asks it."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.asked_s: list[float] = []

    def __call__(self, kernel: object, left_s: float) -> Built:
        self.asked_s.append(left_s)
        self.release.wait()
        return Built("", 0.0)


def test_a_compiler_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    with Tuner(Options(build_jobs=2), CpuFacts(), Database.open(None), transport=FakeTransport({})) as tuner:
        monkeypatch.setattr(tuner._site, "build", stuck)
        measure = partial(
            tuner.measure, [uncompiled(k) for k in range(9)], deadline=time.monotonic() + 0.2, grace_s=0.2
        )
        found, seconds = timed(lambda: list(measure()))
    stuck.release.set()
    assert seconds < 0.4 + AT_ONCE_S and not [m for m in found if m.schedule == PAIR[1]]
    assert len(stuck.asked_s) == 2 and max(stuck.asked_s) <= 0.4


def test_a_compiler_that_never_ends_is_left_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck()
    options = Options(device="cuda", build_jobs=2)
    with Tuner(options, GpuFacts(), Database.open(None), transport=FakeCudaTransport()) as tuner:
        monkeypatch.setattr(tuner._site, "build", stuck)
        made = [source(Act.OK, k) for k in range(9)]
        trials = [replace(trial([]), kernels=[(m.schedule, m, None)]) for m in made]
        measure = partial(tuner.measure, trials, deadline=time.monotonic() + 0.2, grace_s=0.2)
        found, seconds = timed(lambda: list(measure()))
    stuck.release.set()
    assert seconds < 0.4 + AT_ONCE_S and found == []


def test_trials_that_never_come_are_not_waited_for() -> None:
    release = threading.Event()

    def trials() -> Iterator[ProblemTrial]:
        release.wait()
        yield from ()

    with Tuner(Options(device="cuda"), GpuFacts(), Database.open(None), transport=FakeCudaTransport()) as tuner:
        measure = partial(tuner.measure, trials(), deadline=time.monotonic() + 0.1, grace_s=0.1)
        found, seconds = timed(lambda: list(measure()))
    release.set()
    assert found == [] and seconds < 0.2 + AT_ONCE_S


def test_a_real_compiler_is_killed_with_the_time(tmp_path: Path) -> None:
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o700)
    compiler = HostCompiler(str(script), "sleeps", "here")
    options = Options(build_jobs=2, cache_dir=tmp_path / "cache")
    with Tuner(options, CpuFacts(), Database.open(None), compiler=compiler, transport=FakeTransport({})) as tuner:
        measure = partial(
            tuner.measure, [uncompiled(k) for k in range(4)], deadline=time.monotonic() + 0.3, grace_s=0.1
        )
        found, seconds = timed(lambda: list(measure()))
    assert seconds < 0.4 + AT_ONCE_S
    assert not [m for m in found if m.verdict is Verdict.COMPILE], "it is not the kernel's fault"


def test_a_crew_does_all_and_passes_on_what_is_raised() -> None:
    with DaemonThreadPool(3) as pool:
        squares = [pool.submit(pow, k, 2) for k in range(50)]
        wrong = pool.submit(lambda: 1 // 0)
    assert [f.result() for f in squares] == [k * k for k in range(50)]
    with pytest.raises(ZeroDivisionError):
        wrong.result()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(int)


def test_a_crew_that_is_left_with_an_error_does_not_begin_the_rest() -> None:
    release, begun = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        release.wait()

    pool = DaemonThreadPool(1, lambda: 0.05)
    first, second = pool.submit(hang), pool.submit(int)
    begun.wait()
    pool.__exit__(KeyError, KeyError(), None)
    release.set()
    assert second.cancelled() and first.result(5) is None


@pytest.mark.parametrize("cost_ns", [60_000_000, 3_000_000_000], ids=["while it is timed", "while it is verified"])
def test_a_trial_ends_by_itself_when_the_time_is_up_and_its_worker_stays(cost_ns: int) -> None:
    """Whoever comes next would wait for another worker to load, for longer than is left."""
    transport = FakeTransport({}, costs_ns=dict.fromkeys(PAIR, cost_ns))
    trials = [fake_trial(n, PAIR) for n in range(3)]
    with Database.open(None) as database, Tuner(Options(), CpuFacts(), database, transport=transport) as tuner:
        assert list(tuner.measure(trials, deadline=time.monotonic() + 1.0)) == []
        assert (transport.started, transport.killed) == (1, 0)
        transport.costs_ns = {}
        assert {m.verdict for m in tuner.measure(trials)} == {Verdict.OK}
        assert transport.started == 1


def test_while_kernels_are_compiled_calls_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is compiled while something is timed."""
    stuck, transport = Stuck(), FakeTransport({})
    monkeypatch.setattr(HostSite, "build", lambda self, kernel, left_s: stuck(kernel, left_s))
    calls = [replace(fake_trial(n, PAIR[:1]), timed=False) for n in range(10, 14)]
    heard: list[Measurement] = []

    def meanwhile() -> Iterator[ProblemTrial]:
        for k, call in enumerate(calls):
            if k == 2:
                stuck.release.set()
                time.sleep(1.0)  # until all of it is there
            yield call

    with Database.open(None) as database, Tuner(Options(), CpuFacts(), database, transport=transport) as tuner:
        trials = [uncompiled(1)]
        heard += tuner.measure(trials, meanwhile=meanwhile())
    keys = [m.problem_key for m in heard]
    assert keys[:2] == [c.problem.key for c in calls[:2]] and keys[-1] == trials[0].problem.key
    assert len(keys) < len(calls) + 2, "what was built is measured before the rest is verified"
    assert not heard[0].samples_us and heard[-1].samples_us
