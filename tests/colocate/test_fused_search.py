"""Steps worth fusing, on a device of the test's own: which are looked at, what is taken, what is told of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from tests.colocate import test_kernel_job as jobs
from tests.colocate.cuda_plans import H200, cuda_plan, products
from tests.colocate.test_kernel_job import Gpu, Made
from tests.tune.test_cuda_pair import Simulated

from weft.colocate import fused_search
from weft.colocate.fused_plan import FusedPlan, shapes_for
from weft.colocate.fused_search import POISON, Counters, FusedSearch, SteppedPlan
from weft.colocate.kernel_job import KernelJob
from weft.generate.bind import Addresses, BoundCuda, CudaDriver, Encode
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.kernels.plan import Plan
from weft.kernels.source import CudaSource
from weft.runtime.cuda_executable import Rebind
from weft.tune.cuda_pair import Machine, Memory, Moment, Pair, Wanted

folder, made = jobs.folder, jobs.made


@dataclass
class Stepped:
    """A plan on the device, whose steps are only called."""

    gpu: Gpu
    rebound: Mapping[int, Rebind]
    ran: list[int]
    graph: Graph
    plan: Plan

    def __post_init__(self) -> None:
        self.at: dict[int, Addresses] = {}
        for number, bind in self.rebound.items():
            step = self.plan.steps[number]
            assert isinstance(step.kernel, CudaSource)
            inputs, outputs = (
                [self.gpu.take(self.graph.type_of(node).nbytes) for node, _ in values]
                for values in (step.inputs, step.outputs)
            )
            packed = [self.gpu.take(n) for n in step.kernel.packed_bytes]
            work, state = (self.gpu.take(max(16, n)) for n in (step.kernel.workspace_bytes, step.kernel.state_bytes))
            driver = CudaDriver(lambda path: jobs.Loaded(self.gpu, "step"), cast("Encode", self.gpu.encode))
            self.at[number] = Addresses(inputs, outputs, packed, work, state)
            bind(BoundCuda(step.kernel, Path("/nowhere/step.cubin"), driver=driver), self.at[number], True)

    def run_steps(self, before: Callable[[int], None]) -> None:
        for number in range(len(self.plan.steps)):
            before(number)
            self.ran.append(number)
        before(len(self.plan.steps))


class Onto(Simulated):
    """A machine that reads and writes the device of a job."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.restored: list[int] = []

    def write(self, address: int, data: bytes) -> None:
        self.gpu.write(address, data)

    def read(self, address: int, size: int) -> bytes:
        return self.gpu.read(address, size)

    def restore(self, memory: Memory, kept: object) -> None:
        super().restore(memory, kept)
        self.restored.append(memory.address)


class Fixture:
    """A search, and what it was asked."""

    def __init__(self, made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        self.gpu = Gpu()
        self.job: KernelJob = made(folder, self.gpu, **more)
        self.fused = FusedPlan(products(), cuda_plan(), self.job, H200)
        self.machine = Onto(self.gpu)
        self.counters = Counters(self.gpu.take(64), self.gpu.take(64))
        self.now = 0.0
        self.pairs: list[Pair] = []
        self.wrong: Callable[[int], str] = lambda number: ""
        self.times: Callable[[int], Moment] = lambda number: Moment(10.0, 11.0, 10.2, 4.0)
        self.ran: list[int] = []
        monkeypatch.setattr(fused_search, "alone", lambda machine, pair: Wanted((), ()))
        monkeypatch.setattr(fused_search, "verify_drain", lambda machine, pair, want: "")
        monkeypatch.setattr(fused_search, "verify", self.verify)
        monkeypatch.setattr(fused_search, "moment", self.moment)

    def verify(self, machine: Machine, pair: Pair, want: Wanted) -> str:
        self.pairs.append(pair)
        for m in pair.be.memory:
            machine.write(m.address, bytes(m.size))
        return self.wrong(len(self.pairs) - 1)

    def moment(self, machine: Machine, pair: Pair, launches: int, rounds: int) -> Moment:
        assert launches == 64, "of steps of one microsecond"
        return self.times(len(self.pairs) - 1)

    def make(self, rebound: Mapping[int, Rebind]) -> SteppedPlan:
        self.plan = Stepped(self.gpu, rebound, self.ran, products(), cuda_plan())
        return self.plan

    def run(self, seconds: float = 60.0) -> tuple[Any, dict[str, str]]:
        search = FusedSearch(self.fused, self.machine, self.counters, H200, block_us=0.5, clock=lambda: self.now)
        return search.run("net", self.make, seconds), search.refused


@pytest.fixture
def fixture(made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    return Fixture(made, folder, monkeypatch)


def test_samples_have_the_shape_by_which_most_work_is_done(fixture: Fixture) -> None:
    fixture.times = lambda number: Moment(10.0, 12.0 - number, 10.1, 4.0)
    before = {a: fixture.gpu.read(a, n) for a, n in fixture.job.memory}
    found, refused = fixture.run()
    assert refused == {} and sorted(s.count for s in found) == [1, 2] and fixture.ran == [0, 1, 2]
    for one in found:
        step = fixture.fused.steps[one.step]
        assert (one.model, one.job, one.lc_us) == ("net", "two", 10.0) and one.pays
        assert one.fraction == pytest.approx(0.2) and one.idle == pytest.approx(0.01)
        assert one.shape in shapes_for(step, fixture.job, H200)
    of_first = sum(m.address == fixture.plan.at[0].outputs[0] for p in fixture.pairs for m in p.lc.memory)
    last = (of_first - 1, len(fixture.pairs) - 1)  # of each step the last was the fastest
    assert [s.slowdown for s in found] == pytest.approx([(12.0 - n) / 10.0 - 1 for n in last])
    assert {a: fixture.gpu.read(a, n) for a, n in fixture.job.memory} == before, "the job's buffers are put back"
    assert fixture.job.ended_blocks == 0


def test_what_is_compared_is_what_the_step_reads_and_writes_and_the_jobs_memory(fixture: Fixture) -> None:
    fixture.run()
    first = fixture.pairs[0]
    at = fixture.plan.at[0]
    lc = {m.address: m for m in first.lc.memory}
    assert set(lc) == {at.inputs[0], at.outputs[0]}, "weights stand elsewhere"
    written = lc[at.outputs[0]]
    assert written.before == POISON * (512 * 256 * 2) and written.size == 512 * 256 * 2
    assert {(m.address, m.size) for m in first.be.memory} == set(fixture.job.memory)
    assert (first.counter, first.fresh) == (fixture.counters.now, fixture.counters.fresh) and first.exact
    assert first.counter != fixture.job.counter and first.stages == fixture.job.stages


def test_comparisons_begin_with_what_the_job_had_at_first_though_passes_ran_before(fixture: Fixture) -> None:
    first = {a: fixture.gpu.read(a, n) for a, n in fixture.job.memory}
    for placed in fixture.job._placed.values():
        if placed.buffer.written:
            fixture.gpu.write(placed.address, bytes(placed.buffer.nbytes))  # as if a pass had run
    later = {a: fixture.gpu.read(a, n) for a, n in fixture.job.memory}
    assert first != later
    fixture.run()
    assert {m.address: m.before for m in fixture.pairs[0].be.memory} == first
    assert {a: fixture.gpu.read(a, n) for a, n in fixture.job.memory} == later


def test_one_that_is_wrong_or_does_no_work_is_told_of_and_another_taken(fixture: Fixture) -> None:
    fixture.wrong = lambda number: "" if number % 2 else "byte 7 differs"
    found, refused = fixture.run()
    assert len(found) + len(refused) == 2
    assert all("byte 7 differs" in r for r in refused.values())


@pytest.mark.parametrize(
    ("wrong", "moment", "said"),
    [
        ("byte 7 differs", Moment(10.0, 11.0, 10.0, 4.0), "byte 7 differs"),
        ("", Moment(10.0, 11.0, 10.0, 0.0), "none of the job's blocks run in it"),
    ],
)
def test_why_nothing_is_taken(fixture: Fixture, wrong: str, moment: Moment, said: str) -> None:
    fixture.wrong, fixture.times = lambda number: wrong, lambda number: moment
    found, refused = fixture.run()
    assert found == () and len(refused) == 2 and set(refused.values()) == {said}


def test_what_costs_more_than_it_gains_does_not_pay(fixture: Fixture) -> None:
    fixture.times = lambda number: Moment(10.0, 15.0, 10.0, 4.0)
    found, _ = fixture.run()
    assert found and not any(s.pays for s in found)


def test_kernels_alone_that_are_no_proof_decline_a_step(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_search, "verify_drain", lambda *_: "the drain loses a block")
    found, refused = fixture.run()
    assert found == () and set(refused.values()) == {"the drain loses a block"} and fixture.pairs == []


def test_when_the_seconds_are_spent_no_kernel_is_measured(fixture: Fixture) -> None:
    def later(number: int) -> Moment:
        fixture.now += 40.0
        return Moment(10.0, 11.0, 10.0, 4.0)

    fixture.times = later
    found, refused = fixture.run(60.0)
    assert len(fixture.pairs) == 2 and len(found) + len(refused) == 2
    fixture.now, late = 1e6, FusedSearch(fixture.fused, fixture.machine, fixture.counters, H200, block_us=0.5)
    assert late.run("net", fixture.make, 0.0) == () and len(fixture.pairs) == 2
    assert set(late.refused.values()) == {"there was no time to measure it"}


def test_what_does_not_compile_is_told_of(made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(given: Any) -> list[Any]:
        broken = "w_best_effort_0"
        return [
            Declined("x.cu(1): error: no") if broken in j.text and "w_lc" in j.text else jobs.compiled(j) for j in given
        ]

    fixture = Fixture(made, folder, monkeypatch, compiler=failing)
    found, refused = fixture.run()
    assert found == () and fixture.pairs == [] and all("error: no" in r for r in refused.values())


def test_only_the_costliest_are_looked_at(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_search, "MOST_STEPS", 1)
    found, refused = fixture.run()
    (one,) = found
    assert one.count == 2 and list(refused.values()) == ["the plan spends more time in 1 others"]
