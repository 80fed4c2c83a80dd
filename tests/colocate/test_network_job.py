"""A network as the job of a machine: stages in order on whatever stream, exact counts, stops, progress, policies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from tests.colocate.fake_device import FakeDevice, query
from tests.colocate.recorded import constant, samples

from weft.colocate.arrivals import poisson
from weft.colocate.gpu_machine import AHEAD, Form, GpuMachine, Lane
from weft.colocate.job import JobError, digest, parse_job
from weft.colocate.live import LiveBackend, run
from weft.colocate.network_job import APART_AHEAD, NetworkGpuJob, Position
from weft.colocate.operating import prepare
from weft.colocate.outcome import Outcome
from weft.colocate.policies import NAMES, make
from weft.colocate.recording import Mode, What, recorded
from weft.device.cuda.facts import GpuFacts
from weft.errors import ArtifactError
from weft.ir.declined import Declined
from weft.kernels.samples import JobSamples
from weft.kernels.scheduling import OFF, JobProgress, Query

US = 1000
HIGH, LOW, COPIES, PART, REST, OTHER = 1, 2, 3, 4, 5, 6
STAGES = (40.0, 25.0, 60.0)
TEXT = 'name = "net2"\nkind = "network"\nmodel = "n.onnx"\ninputs = "in"\noutputs = "out"\n'
ENDLESS, TWICE = parse_job(TEXT), parse_job(TEXT + "passes = 2\n")
FILES = 3
ALL = [n for n in NAMES if n not in ("mps", "tacker", "aker", "exclusive")] + ["green:16"]


@dataclass
class FakeNetwork:
    device: FakeDevice
    stage_us: Sequence[float] = STAGES
    base: int = LOW
    streams: list[int] = field(default_factory=lambda: [LOW])

    def add(self, stream: int) -> bool:
        if stream in self.streams:
            return False
        self.streams.append(stream)
        return True

    def launch(self, stage: int, stream: int) -> None:
        slower = 3.0 if stream == REST else 1.0
        self.device.work(stream, round(self.stage_us[stage] * slower * 1e3), f"stage {stage}")

    def fill(self, places: Sequence[int], stream: int) -> None:
        self.device.call(stream, "fill", places[0])

    def fetch(self, places: Sequence[int], stream: int) -> None:
        self.device.call(stream, "fetch", places[0])

    def wait(self) -> None:
        while any(self.device.queues.values()):
            self.device.sleep(10_000)

    def fits(self, facts: GpuFacts, sms: int) -> Declined | None:
        return None


@dataclass
class FakeFeed:
    """Inputs and results of inference n have the place n."""

    ready: int = 1 << 60
    """So many have come."""
    slots: int = 4
    gives: bool = True
    given: list[int] = field(default_factory=list)
    put_: int = 0
    fails: bool = False

    def is_ready(self, number: int) -> bool:
        return number < self.ready and number - self.put_ < self.slots

    def inputs(self, number: int) -> Sequence[int]:
        return (number,)

    def results(self, number: int) -> Sequence[int]:
        return (number,) if self.gives else ()

    def release(self, number: int) -> None:
        self.given.append(number)

    def put(self, number: int) -> None:
        self.put_ = number + 1

    def wait_ready(self, number: int) -> None:
        assert self.is_ready(number)

    @property
    def written(self) -> int:
        return self.put_ - 2 if self.fails else self.put_

    def finish(self) -> None:
        if self.fails:
            raise ArtifactError(where="out", problem="results cannot be written: full", remedy="")


@dataclass
class World:
    """A job on a machine whose variants are alone, priority and a part."""

    spec_passes: int = 0
    progress: JobProgress | None = None
    stage_us: Sequence[float] = STAGES
    feed: FakeFeed = field(default_factory=FakeFeed)
    device: FakeDevice = field(default_factory=FakeDevice)

    def __post_init__(self) -> None:
        spec = TWICE if self.spec_passes else ENDLESS
        self.network = FakeNetwork(self.device, self.stage_us)
        self.job = NetworkGpuJob(spec, self.network, self.feed, self.device, files=FILES, progress=self.progress)
        self.idle = self.job.form(LOW, apart=True)

    def machine(self, kinds: Sequence[str] = ()) -> GpuMachine:
        device, lanes = self.device, [Lane(HIGH, query(self.device, HIGH, 100.0))]
        for kind in kinds:
            if kind == "partition":
                lanes.append(Lane(PART, query(device, PART, 120.0), self.job.form(REST, apart=True)))
            else:
                lanes.append(Lane(HIGH, query(device, HIGH, 110.0), self.job.form(LOW)))
        return GpuMachine(device, {"net": lanes}, copies=COPIES, job=self.job.anew(), idle=self.idle)

    def work(self) -> list[str]:
        """What was done of the job, in order; a stage that begins before the one before has ended is wrong."""
        found, running = [], 0
        for _, what, value in self.device.log:
            if what in ("fill", "fetch"):
                assert running == 0
                found.append(f"{what} {value}")
            elif what.startswith("stage"):
                running += 1 if value == "begin" else -1
                assert running in (0, 1), "one stage at a time"
                if value == "begin":
                    found.append(what)
        return found

    def right(self, first: int = 0) -> float:
        """Every inference in order and whole, up to the last stage; its time alone."""
        work, us = self.work(), 0.0
        wanted: list[str] = []
        number = first
        while len(wanted) < len(work):
            wanted += [f"fill {number}", *(f"stage {k}" for k in range(len(STAGES))), f"fetch {number}"]
            number += 1
        assert work == wanted[: len(work)]
        for what in work:
            if what.startswith("stage"):
                us += STAGES[int(what[-1])]
        return us


def queries(n: int) -> list[Query]:
    return [Query("net", i, 0, 500 * US) for i in range(n)]


# -- stages


def test_stages_follow_each_other_and_are_counted_by_their_times() -> None:
    w = World()
    assert w.job.kernel_us == 60.0 and w.job.block_us == pytest.approx(125 / 3)
    assert [w.job.plain(LOW, 0.0) for _ in range(4)] == [40.0, 25.0, 60.0, 40.0]
    w.network.wait()
    assert w.job.blocks() == 0 and w.right() == 165.0 and w.job.inferences == 1
    assert w.job.progress() == JobProgress(digest(ENDLESS), 0, 1, 1) and w.feed.given == [0]


def test_as_many_stages_are_launched_as_fit() -> None:
    w = World()
    assert w.job.plain(LOW, 64.0) == 40.0 and w.job.plain(LOW, 85.0) == 85.0, "25 and 60"
    assert w.job.plain(LOW, 1.0) == 40.0, "one in any case"
    assert w.job.plain(LOW, 249.0) == 25.0 + 60.0 + 125.0, "and no 40 more"
    w.network.wait()
    w.right()


def test_a_stage_on_another_stream_waits_for_the_one_before() -> None:
    w = World()
    for k in range(30):
        w.job.form((LOW, HIGH, REST)[k % 3])
        w.feed.put_ = w.job.inferences  # as if all were written
        assert w.job.plain((LOW, HIGH, REST)[k % 3], 0.0) > 0
    w.network.wait()
    assert w.right() == 10 * 125.0


def test_what_is_not_there_is_not_launched() -> None:
    w = World(feed=FakeFeed(ready=1))
    assert [w.job.plain(LOW, 0.0) for _ in range(4)] == [40.0, 25.0, 60.0, 0.0] and not w.job.is_done()
    w.feed.ready = 2
    assert w.job.plain(LOW, 0.0) == 40.0
    full = World(feed=FakeFeed(slots=0))
    assert full.job.plain(LOW, 0.0) == 0.0, "no room for results"


def test_a_job_of_two_passes_ends() -> None:
    w = World(spec_passes=2)
    us = 0.0
    for _ in range(20):
        us += w.job.plain(LOW, 1e9)
        w.network.wait()
    assert us == 6 * 125.0 == w.right() and w.job.is_done()
    w.job.finish()
    assert w.job.progress() == JobProgress(digest(TWICE), 2, 0, 0) and w.feed.given == list(range(6))
    again = World(spec_passes=2, progress=w.job.progress())
    assert again.job.is_done() and again.job.plain(LOW, 1e9) == 0.0


def test_results_that_nobody_asks_for_are_not_copied() -> None:
    w = World(feed=FakeFeed(gives=False))
    for _ in STAGES:
        w.job.plain(LOW, 0.0)
    w.network.wait()
    assert w.work() == ["fill 0", "stage 0", "stage 1", "stage 2"]


def test_nothing_of_it_draws() -> None:
    w = World()
    with pytest.raises(ValueError, match="nothing of it draws"):
        w.job.arm(LOW, duty=256, period_ns=0)
    with pytest.raises(ValueError, match="no further stage"):
        w.job.stop(LOW)


# -- progress


@pytest.mark.parametrize("done", range(8))
def test_a_job_goes_on_where_it_was(done: int) -> None:
    w = World()
    for _ in range(done):
        w.job.plain(LOW, 0.0)
    w.job.finish()
    saved = w.job.progress()
    assert saved == JobProgress(digest(ENDLESS), *divmod(done // 3, FILES), done % 3)
    other = World(progress=saved)
    other.job.anew()
    before = other.work()
    assert before == ([] if done % 3 == 0 else ["fill 0", *(f"stage {k}" for k in range(done % 3))])
    assert other.job.progress() == saved, "what is run again counts for nothing"
    assert other.job.plain(LOW, 0.0) == STAGES[done % 3]
    other.network.wait()
    other.right()
    other.job.anew()
    assert len(other.work()) == len(before) + 1 + (done % 3 == 0) + (done % 3 == 2), "run again once"


def test_a_plan_of_fewer_stages_begins_the_inference_anew() -> None:
    w = World(progress=JobProgress(digest(ENDLESS), 4, 1, 7))
    assert w.job.progress() == JobProgress(digest(ENDLESS), 4, 1, 0)


@pytest.mark.parametrize(
    ("progress", "says"),
    [
        (JobProgress("another", 0, 0, 0), "of another job"),
        (JobProgress(digest(TWICE), 0, 3, 0), "input 3; the folder has 3"),
        (JobProgress(digest(TWICE), 2, 0, 1), "behind the last of 2 passes"),
        (JobProgress(digest(TWICE), 3, 0, 0), "behind the last of 2 passes"),
    ],
)
def test_progress_that_cannot_be(progress: JobProgress, says: str) -> None:
    with pytest.raises(JobError, match=says):
        World(spec_passes=2, progress=progress)


def test_results_that_are_not_written_do_not_count() -> None:
    w = World()
    for _ in range(10):
        w.job.plain(LOW, 0.0)
        w.network.wait()
    w.feed.fails = True
    with pytest.raises(ArtifactError, match="full"):
        w.job.finish()
    assert w.job.progress() == JobProgress(digest(ENDLESS), 0, 1, 0), "of three inferences one is written"


def test_a_rehearsal_counts_for_nothing_and_what_was_begun_goes_on() -> None:
    w = World()
    for _ in range(4):
        w.job.plain(LOW, 0.0)
    w.network.wait()
    w.job.blocks()
    saved = w.job.progress()
    with w.job.rehearsal():
        w.job.anew()
        for _ in range(7):
            assert w.job.plain(LOW, 0.0) > 0
        w.job.blocks()
    assert w.job.progress() == saved and w.feed.given == [0] and w.feed.put_ == 1
    done = len(w.work())
    assert w.work()[7:12] == ["fill -1", "stage 0", "stage 1", "stage 2", "fetch -1"]
    w.job.anew()
    w.job.plain(LOW, 0.0)
    w.network.wait()
    assert w.work()[done:] == ["fill 1", "stage 0", "stage 1"]


def test_a_new_recording_overwrites_what_was_begun() -> None:
    w = World()
    w.job.plain(LOW, 0.0)
    w.network.wait()
    for stream, again in ((LOW, False), (OTHER, True), (OTHER, False)):
        before = len(w.work())
        w.job.form(stream)
        w.job.anew()
        assert len(w.work()) - before == 2 * again


# -- on a machine


def lived(policy: str, sharing: Sequence[str] = ("priority", "streams", "partition")) -> tuple[Outcome, World]:
    w = World()
    steady = samples(constant(100.0), launch_us=5.0)
    job = JobSamples("work", w.job.kernel_us, w.job.block_us, constant(80.0), 0)
    record = replace(steady, jobs=(job,), modes=tuple(m for m in steady.modes if m.sharing in sharing), steps=())
    p = prepare(record, policy, "net", "work", 700 * US)
    made = make(policy, p.setting)
    machine = w.machine([x.variant.sharing for x in p.points[1:]])
    return run(made, LiveBackend(machine, [(p, poisson(3000.0, 300, seed=5))], policy=made)), w


@pytest.mark.parametrize("policy", ALL)
def test_every_policy_runs_and_every_stage_once(policy: str) -> None:
    out, w = lived(policy)
    assert all(d > 0 for d in out.done_ns)
    assert out.work_us == pytest.approx(w.right()) and out.work_us > 0 and out.blocks == 0
    w.job.finish()
    stages = sum(x.startswith("stage") for x in w.work())
    assert w.job.progress() == JobProgress(digest(ENDLESS), *divmod(stages // 3, FILES), stages % 3)


@pytest.mark.parametrize("policy", ["tally", "serial", "timeslice", "orion", "weft"])
def test_no_query_runs_beside_a_stage_on_the_whole_gpu(policy: str) -> None:
    _, w = lived(policy, ())
    running = 0
    for _, what, value in w.device.log:
        if what.startswith("stage"):
            running += 1 if value == "begin" else -1
        if (what, value) == ("query", "begin"):
            assert running == 0


def test_idle_time_is_filled_and_a_stop_takes_the_stages_that_are_queued() -> None:
    w = World()
    machine = w.machine()
    machine.set_form(0)
    end = w.device.now + 20_000_000
    while w.device.now < end:
        machine.pause(end + 1_000_000)
    assert w.right() > 0.95 * 20_000
    asked = w.device.now
    machine.set_form(OFF)
    machine.launch(queries(1)[0], 0)
    while not machine.ended():
        pass
    (begin,) = [at for at, what, value in w.device.log if (what, value) == ("query", "begin")]
    assert begin - asked <= APART_AHEAD * max(STAGES) * US
    assert machine.close_job().work_us == w.right()


def test_beside_queries_no_more_stages_are_queued_than_allowed() -> None:
    w = World()
    machine = w.machine(["priority"])
    machine.set_form(1)
    for q in queries(40):
        machine.launch(q, 1)
        while not machine.ended():
            queued = sum(op.kind.startswith("stage") for op in w.device.queues[LOW])
            assert queued <= AHEAD
    assert machine.close_job().work_us == pytest.approx(w.right()) and w.right() > 40 * 90


def test_a_part_is_fed_beside_queries_of_its_variant_alone() -> None:
    w = World()
    machine = w.machine(["partition"])
    done = 0
    for q in queries(30):
        variant = 1 if q.number % 10 < 5 else 0
        machine.launch(q, variant)
        while q.number - done >= 1:
            done += len(machine.ended())
    while done < 30:
        done += len(machine.ended())
    running = fed = 0
    numbers = iter(range(30))
    for _, what, value in w.device.log:
        if what.startswith("stage"):
            running += 1 if value == "begin" else -1
        if (what, value) == ("query", "begin"):
            beside = next(numbers) % 10 < 5
            assert beside or running == 0, "a query of the whole GPU waits for the stages of the part"
            fed += beside and running > 0
    assert fed >= 10
    assert machine.close_job().work_us == w.right()


def test_what_is_measured_of_a_network_alone_and_beside() -> None:
    w = World()
    with w.job.rehearsal():
        machine = w.machine(["priority", "partition"])
        what = What("NVIDIA H200", "580", "test", "net", 5, w.job.name, w.job.kernel_us, w.job.block_us)
        modes = [Mode("priority", "priority"), Mode("green36", "partition")]
        found = recorded(machine, what, modes, queries=60, small=20)
    (job,) = found.jobs
    assert (job.name, job.kernel_us) == ("net2", 60.0) and job.stop is not None
    assert 0 < job.stop.at(0.99) <= APART_AHEAD * max(STAGES) + 10
    beside, part = found.modes
    assert beside.be_rate == pytest.approx(1.0, abs=0.1) and part.be_rate == pytest.approx(1 / 3, abs=0.05)
    assert w.job.progress() == JobProgress(digest(ENDLESS), 0, 0, 0) and w.feed.given == []


def test_an_input_that_fails_ends_the_job_and_all_before_counts() -> None:
    w = World()

    def is_ready(number: int) -> bool:
        if number >= 7:
            raise JobError(where="7.npz", key="inputs", problem="broken", remedy="")
        return FakeFeed.is_ready(w.feed, number)

    w.feed.is_ready = is_ready  # type: ignore[method-assign]
    machine = w.machine()
    machine.set_form(0)

    while not w.job.is_done():
        machine.pause(w.device.now + 1_000_000)
    machine.launch(Query("net", 0, 0, 0), 0)
    while not machine.ended():
        pass
    machine.close_job()
    with pytest.raises(JobError, match="broken"):
        w.job.finish()
    assert w.job.progress() == JobProgress(digest(ENDLESS), 2, 1, 0) and w.job._ended == Position(7, 0)


def test_a_run_that_would_begin_with_an_input_that_fails_goes_on_without_the_job() -> None:
    w = World()

    def wait_ready(number: int) -> None:
        raise JobError(where=f"{number}.npz", key="inputs", problem="broken", remedy="")

    w.feed.wait_ready = wait_ready  # type: ignore[method-assign]
    assert not w.job.is_done() and w.job.anew() is w.job and w.job.is_done()
    with pytest.raises(JobError, match="broken"):
        w.job.finish()
    assert w.job.progress() == JobProgress(digest(ENDLESS), 0, 0, 0)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_no_stage_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    w = World()
    done = launched = 0
    for _ in range(rng.randint(1, 4)):
        machine = w.machine(["priority", "partition"])
        for _ in range(60):
            what = rng.choice(["form", "query", "kernels", "wait"])
            if what == "form":
                machine.set_form(rng.choice([OFF, 0, 1, 2]))
            elif what == "kernels":
                machine.set_form(OFF)
                machine.kernels(rng.uniform(1.0, 300.0))
            elif what == "query" and launched - done < 2:
                machine.launch(Query("net", launched, 0, 0), rng.choice([0, 1, 2]))
                launched += 1
            else:
                w.device.sleep(rng.randint(1, 200_000))
            done += len(machine.ended())
        while done < launched:
            done += len(machine.ended())
        machine.close_job()
    w.job.finish()
    w.right()
    stages = sum(x.startswith("stage") for x in w.work())
    assert w.job.progress() == JobProgress(digest(ENDLESS), *divmod(stages // 3, FILES), stages % 3)


@pytest.mark.parametrize("where", ["fill", "launch", "fetch"])
def test_an_interrupt_leaves_no_inference_without_its_results(where: str) -> None:
    w = World()
    for _ in range(2):
        w.job.plain(LOW, 0.0)
    inner = getattr(w.network, where)

    def interrupted(*args: object) -> None:
        inner(*args)
        raise KeyboardInterrupt

    setattr(w.network, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        w.job.plain(LOW, 1e9)
    w.job.finish()
    found = w.job.progress()
    assert found.stage == w.feed.put_, "an inference counts when its results were put"
    assert (found.stage, found.blocks) == {"fill": (1, 0), "launch": (0, 2), "fetch": (0, 2)}[where]


def test_a_form_of_a_network_is_fed() -> None:
    w = World()
    assert w.idle == Form(LOW, None, ahead=APART_AHEAD, apart=True)
    assert w.job.form(HIGH) == Form(HIGH, None, ahead=AHEAD)
