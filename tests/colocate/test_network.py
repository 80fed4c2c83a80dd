"""A network as co-runner without a GPU: what is launched when, exact counts, stops, throttles, faults; budgets."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.runtime.fake_cuda import FakeCuda, Recorded, install
from tests.runtime.plans import library_plan

from weft.colocate import budgets as budgets_module
from weft.colocate import network as network_module
from weft.colocate.budgets import Budgets, budget_of, budgets, check_together, limited, shared_of_a_cta, whole
from weft.colocate.feeder import Feeder, Throttle
from weft.colocate.network import NetworkCoRunner, StageLane, check_plans, co_runner, digest, given_by, plan_on_gpu
from weft.device.cuda.cubin import Usage
from weft.device.cuda.facts import profile
from weft.device.cuda.occupancy import occupancy
from weft.device.cuda.tensor_map import encode_tensor_map
from weft.errors import DeviceError, InputError, OptionError
from weft.generate.bind import CudaDriver
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.source import CudaSource, Launch, Pointer, Schedule
from weft.options import Options
from weft.runtime import budgeted
from weft.runtime.budgeted import Budgeted, Residence
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Linked
from weft.sm_budget import SmBudget

H200 = profile("h200")
FACTS = {"gpu": "NVIDIA H200", "capability": "90"}
CPU = torch.device("cpu")


@dataclass
class Gate:
    """A mark that is passed when the test says so, or at once."""

    lane: Lane
    stage: int
    over: bool = False

    def ended(self) -> bool:
        if self.lane.broken:
            raise RuntimeError("an illegal memory access was encountered")
        return self.over or self.lane.instant

    def wait(self) -> None:
        if self.lane.broken:
            raise RuntimeError("an illegal memory access was encountered")
        self.over = True


@dataclass
class Lane:
    """Notes what is launched; an inference of input x gives x * 10 plus its number of stages."""

    kernels: list[int] = field(default_factory=lambda: [2, 3, 1])
    instant: bool = False
    broken: bool = False
    launched: list[tuple[int, int]] = field(default_factory=list)
    marks: list[Gate] = field(default_factory=list)
    value: int = -1

    def begin(self, given: int) -> None:
        if given < 0:
            raise InputError(position=0, problem="below nothing")
        self.value = given

    def launch(self, stage: int) -> None:
        self.launched.append((self.value, stage))

    def results(self) -> int | None:
        return self.value * 10 + len(self.kernels)

    def mark(self) -> Gate:
        self.marks.append(Gate(self, self.launched[-1][1]))
        return self.marks[-1]


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def feeder(lane: Lane, given: Callable[[], int | None], most: int = 6, **more: object) -> Feeder[int]:
    clock = more.pop("clock", Clock())
    return Feeder(lane, given, most_queued=most, clock=clock, **more)  # type: ignore[arg-type]


def ascending() -> Callable[[], int | None]:
    numbers = itertools.count()
    return lambda: next(numbers)


# -- what is launched when


def test_no_more_kernels_are_queued_than_allowed_and_all_run_in_order() -> None:
    lane, delivered = Lane(), []
    found = feeder(lane, ascending(), deliver=lambda n, value: delivered.append((n, value)))
    while found.step() == 0:
        pass
    assert lane.launched == [(0, 0), (0, 1), (0, 2)] and found.counts.queued_kernels == 6, "2 + 3 + 1 of 6"
    lane.marks[1].over = True
    assert found.step() == math.inf, "it is behind one that has not ended"
    lane.marks[0].over = True
    assert found.step() == 0 and lane.launched[-1] == (1, 0)
    assert found.counts.stages == 2 and found.counts.inferences == 0 and delivered == []
    lane.marks[2].over = True
    found.step()
    assert found.counts.inferences == 1 and delivered == [(0, 3)]
    assert found.counts.most_queued_kernels <= found.most_queued == 6


def test_a_stage_of_more_kernels_than_may_be_queued_runs_alone() -> None:
    lane = Lane([1, 9, 1])
    found = feeder(lane, ascending(), most=2)
    assert found.most_queued == 9
    assert [found.step(), found.step()] == [0, math.inf] and found.counts.queued_kernels == 1
    lane.marks[0].over = True
    assert [found.step(), found.step()] == [0, math.inf] and found.counts.queued_kernels == 9


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_exact_whatever_ends_when(seed: int) -> None:
    rng = random.Random(seed)
    lane = Lane([rng.randint(1, 4) for _ in range(rng.randint(1, 6))])
    most, total, delivered = rng.randint(1, 9), rng.randint(0, 12), []
    numbers = iter(range(total))
    found = feeder(lane, lambda: next(numbers), most, deliver=lambda n, value: delivered.append((n, value)))
    for _ in range(2000):
        found.step()
        own = [m for m in lane.marks if not m.over]
        assert sum(lane.kernels[m.stage] for m in own) <= found.counts.queued_kernels <= found.most_queued
        if own and rng.random() < 0.4:
            own[0].over = True
        if found.ended and not found.waits_for_room:
            break
    stages = len(lane.kernels)
    assert lane.launched == [(n, k) for n in range(total) for k in range(stages)]
    assert delivered == [(n, n * 10 + stages) for n in range(total)]
    assert found.counts.inferences == total and found.counts.stages == found.counts.launched == total * stages


def test_what_was_begun_goes_on_after_a_stop() -> None:
    lane = Lane()
    found = feeder(lane, ascending(), most=2)
    found.step()
    found.drain()
    assert found.counts.queued_kernels == 0 and lane.launched == [(0, 0)]
    for _ in range(8):
        found.step()
        found.drain()
    assert lane.launched == [(n, k) for n in range(3) for k in range(3)] and found.counts.inferences == 3


# -- throttles


@pytest.mark.parametrize("duty", [0.25, 0.5, 1.0])
def test_duty_is_the_share_of_time_in_which_stages_are_launched(duty: float) -> None:
    clock, lane = Clock(), Lane([1], instant=True)
    found = feeder(lane, ascending(), clock=clock, throttle=Throttle(duty=duty, period_s=0.01))
    launches = 0
    for _ in range(10_000):  # one turn each 10 us
        launches += found.step() == 0
        clock.now += 1e-5
    assert abs(launches / 10_000 - duty) < 0.01


def test_a_wait_is_as_long_as_the_throttle_says() -> None:
    clock, lane = Clock(), Lane([1, 1], instant=True)
    found = feeder(lane, ascending(), clock=clock, throttle=Throttle(duty=0.5, period_s=0.01))
    clock.now += 0.006
    assert found.step() == pytest.approx(0.004)
    found.throttle = Throttle(duty=0)
    assert found.step() == math.inf and not found.waits_for_room and not found.ended
    found.throttle = Throttle(inferences_per_s=10)
    assert [found.step(), found.step()] == [0, 0], "both stages of the first inference"
    assert found.step() == pytest.approx(0.1)
    found.throttle = Throttle(stages_per_s=100)
    assert found.step() == pytest.approx(0.01)
    clock.now += 0.0101
    assert found.step() == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"duty": 1.5}, "duty is 1.5"),
        ({"duty": math.nan}, "duty is nan"),
        ({"period_s": 0}, "period_s is 0"),
        ({"inferences_per_s": -1}, "inferences_per_s is -1"),
        ({"stages_per_s": math.nan}, "stages_per_s is nan"),
    ],
)
def test_a_throttle_that_is_none(more: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Throttle(**more)


# -- the thread


def runner(lane: Lane, given: Callable[[], int | None], most: int = 6, **more: object) -> NetworkCoRunner[int]:
    return NetworkCoRunner(feeder(lane, given, most, clock=time.perf_counter, **more))


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_it_runs_stops_and_goes_on() -> None:
    lane, delivered = Lane(), []
    with runner(lane, ascending(), deliver=lambda n, value: delivered.append((n, value))) as network:
        assert not network.running and network.counts.launched == 0
        network.start()
        network.start()
        until(lambda: network.counts.inferences >= 20)
        assert (network.running, network.stop() < 5, network.running) == (True, True, False)
        first = network.counts
        assert first.queued_kernels == 0 and first.stages == first.launched == len(lane.launched)
        assert network.counts == first, "nothing runs on"
        network.start()
        until(lambda: network.counts.inferences >= first.inferences + 20)
        network.stop()
        assert first.most_queued_kernels <= 6
    done = network.counts.inferences
    assert lane.launched == [(n // 3, n % 3) for n in range(len(lane.launched))] and len(lane.launched) // 3 == done
    assert delivered == [(n, n * 10 + 3) for n in range(done)]
    with pytest.raises(OptionError, match="closed"):
        network.start()


def test_it_ends_with_its_inputs() -> None:
    lane, numbers = Lane(), iter(range(5))
    network = runner(lane, lambda: next(numbers, None))
    network.start()
    network.wait(10)
    assert network.counts.inferences == 5 and not network.running
    network.start()
    network.wait(10)
    assert network.counts.inferences == 5


def test_a_paused_network_is_woken_by_a_throttle_and_by_a_stop() -> None:
    lane = Lane()
    network = runner(lane, ascending(), throttle=Throttle(duty=0))
    network.start()
    time.sleep(0.02)
    assert lane.launched == [] and network.running
    network.throttle = Throttle()
    until(lambda: network.counts.inferences > 3)
    network.throttle = Throttle(duty=0)
    assert network.throttle.duty == 0
    until(lambda: network.counts.queued_kernels == 0)
    assert network.stop() < 5


def test_a_stop_waits_for_what_is_queued_and_no_longer_than_it_is_told() -> None:
    lane, go = Lane([1]), threading.Event()

    class Slow(Gate):
        def wait(self) -> None:
            go.wait(10)
            self.over = True

    def mark() -> Gate:
        lane.marks.append(Slow(lane, 0))
        return lane.marks[-1]

    lane.mark = mark  # type: ignore[method-assign]
    network = runner(lane, ascending(), most=4)
    network.start()
    until(lambda: network.counts.queued_kernels == 4)
    with pytest.raises(DeviceError, match=r"not ended after 0\.05 s, 4 kernels are queued"):
        network.stop(0.05)
    with pytest.raises(DeviceError, match="cannot be started"):
        network.start()
    go.set()
    network.stop()
    assert network.counts.launched == network.counts.stages == 4


def test_what_the_inputs_raise_is_told_and_what_was_queued_is_counted() -> None:
    lane = Lane()

    def given() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the disk is gone")

    numbers = given()
    network = runner(lane, lambda: next(numbers))
    network.start()
    with pytest.raises(OSError, match="the disk is gone"):
        network.wait(10)
    assert network.counts.inferences == 2 and network.counts.queued_kernels == 0
    network.stop()  # told once


def test_wrong_inputs_are_told_and_the_next_ones_taken() -> None:
    lane, numbers = Lane(), iter([1, -1, 2])
    network = runner(lane, lambda: next(numbers, None))
    network.start()
    with pytest.raises(InputError, match="below nothing"):
        network.wait(10)
    network.start()
    network.wait(10)
    assert [x for x, stage in lane.launched if stage == 0] == [1, 2] and network.counts.inferences == 2


def test_what_the_receiver_raises_is_told_and_the_rest_is_delivered() -> None:
    lane, seen = Lane([1]), []

    def deliver(number: int, value: int) -> None:
        seen.append(number)
        if number == 1:
            raise RuntimeError("full")

    network = runner(lane, ascending(), deliver=deliver)
    network.start()
    with pytest.raises(RuntimeError, match="full"):
        network.wait(10)
    assert seen == list(range(network.counts.launched)) and network.counts.queued_kernels == 0


def test_a_fault_of_the_gpu_is_told() -> None:
    lane = Lane()
    network = runner(lane, ascending())
    network.start()
    until(lambda: network.counts.inferences > 1)
    lane.broken = True
    with pytest.raises(RuntimeError, match="illegal memory access"):
        network.wait(10)
    assert not network.running


def test_a_block_that_raises_tells_its_own_error() -> None:
    lane = Lane(broken=True)

    def block() -> None:
        with runner(lane, ascending()) as network:
            network.start()
            until(lambda: not network.running)
            raise KeyError

    with pytest.raises(KeyError):
        block()


def test_no_kernel_may_be_queued() -> None:
    with pytest.raises(ValueError, match="most_queued is 0"):
        feeder(Lane(), ascending(), 0)
    with pytest.raises(ValueError, match="without a kernel"):
        feeder(Lane([]), ascending())


# -- stages of a plan


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def chain() -> Graph:
    b = GraphBuilder()
    node = b.input(TensorType(DType.F32, (4, 8)))
    for _ in range(5):
        node = b.apply(Prim.TANH, node)
    return b.build([node])


def test_stages_of_a_plan_give_its_bits(cuda: FakeCuda) -> None:
    graph = chain()
    linked = Linked(graph, library_plan(graph), {}, None, None, 0, FACTS)
    alone = CudaExecutable(linked, device=CPU)
    staged = CudaExecutable(linked, device=CPU, stage_kernels=2)
    batches = [torch.randn(4, 8) for _ in range(7)]
    found: list[str] = []
    lane = StageLane(staged, cuda.current, results=True)  # type: ignore[arg-type]
    lane.mark = lambda: Gate(Lane(instant=True), 0)  # type: ignore[method-assign]
    given = given_by(iter([(x,) for x in batches]))
    one = Feeder(lane, given, most_queued=3, clock=time.perf_counter, deliver=lambda _, y: found.append(digest(y)))
    while not one.ended:
        one.step()
    one.drain()
    assert lane.kernels == [2, 2, 1] and found == [digest(alone(x)) for x in batches] and len(set(found)) == 7


def test_a_fixed_batch_is_placed_once(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain()
    staged = CudaExecutable(Linked(graph, library_plan(graph), {}, None, None, 0, FACTS), device=CPU, stage_kernels=2)
    placed: list[int] = []
    monkeypatch.setattr(CudaExecutable, "place", lambda self, *x: placed.append(len(x)))
    for fixed, times in ((True, 1), (False, 3)):
        placed.clear()
        lane = StageLane(staged, cuda.current, fixed=fixed)  # type: ignore[arg-type]
        for _ in range(3):
            lane.begin((torch.zeros(4, 8),))
        assert len(placed) == times and lane.results() is None


def test_digests_tell_bits_shapes_and_types_apart() -> None:
    x = torch.tensor([0.0, 1.0])
    assert digest([x]) == digest([x.clone()]) == digest([torch.stack([x, x], 1)[:, 0]])
    others = [torch.tensor([-0.0, 1.0]), x.reshape(2, 1), x.view(torch.int32)]
    assert len({digest([y]) for y in (x, *others)}) == 4


@pytest.mark.parametrize("given", [3, "abc", [1, 2]])
def test_inputs_that_are_none(given: object) -> None:
    with pytest.raises(OptionError, match="neither a batch of tensors"):
        given_by(given)  # type: ignore[arg-type]


def test_inputs_of_every_kind() -> None:
    x = torch.zeros(2)
    assert given_by(x)() == (x,) and given_by([x])() == [x]
    numbers = given_by(iter([(x,)]))
    assert numbers() == (x,) and numbers() is None
    assert given_by(lambda: (x,))() == (x,) and given_by(lambda: None)() is None
    assert given_by(lambda: x)() == (x,) and given_by(iter([x]))() == (x,), "not its rows"


# -- budgets


@pytest.mark.parametrize("ctas", [1, 2, 3, 5])
def test_two_budgets_fill_an_sm_and_the_limit_holds(ctas: int) -> None:
    found = budgets(H200, ctas=ctas)
    be, lc, of = found.best_effort, found.latency_critical, whole(H200)
    for name in ("registers", "shared", "threads", "ctas"):
        assert (be.of(name) or 0) + (lc.of(name) or 0) == of.of(name)
    check_together(be, lc, H200)
    each = shared_of_a_cta(H200, ctas)
    assert occupancy(H200, 128, each - H200.shared_reserved, 32) == ctas
    assert be.shared_bytes == ctas * each and not lc.problem() and not be.problem()
    assert Options(device="cuda", sm_budget=lc).sm_budget == lc


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ctas": 0}, "at least one CTA"),
        ({"ctas": 32}, "shared"),
        ({"registers": 70000}, "70000 registers of 65536"),
        ({"registers": 1000}, "no multiple of 256"),
        ({"registers": 65536}, "registers is 0"),
        ({"threads": 4096}, "4096 threads of 2048"),
    ],
)
def test_budgets_that_no_sm_gives(more: dict[str, int], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        budgets(H200, **more)


def test_budgets_that_do_not_fit_are_named_both() -> None:
    mine, theirs = SmBudget(24576, 64 << 10, 512, 4), SmBudget(49152, 100 << 10, 1536, 24)
    with pytest.raises(OptionError) as raised:
        check_together(mine, theirs, H200)
    text = str(raised.value)
    assert str(mine) in text and str(theirs) in text and "73728 registers of 65536" in text and "[W001]" in text
    with pytest.raises(OptionError, match=r"73728 registers of 65536, .*3584 threads"):
        check_together(SmBudget(24576), theirs, H200)  # what is not limited is the whole of it
    with pytest.raises(OptionError, match="registers is 131072"):
        check_together(SmBudget(131072), theirs, H200)


def source(threads: int = 128, shared: int = 0, entry: str = "k", co_resident: int = 1) -> CudaSource:
    launch = Launch(
        entry, (64, 1, 1), (threads, 1, 1), (Pointer("in", 0), Pointer("out", 0)), shared, co_resident=co_resident
    )
    return CudaSource(Schedule("cuda"), "text", (launch,))


def linked(folder: Path, kernel: CudaSource, budget: SmBudget | None) -> Linked:
    (folder / "k.cubin").write_bytes(b"a cubin")
    graph = chain()
    plan = library_plan(graph)
    plan = replace(plan, steps=tuple(replace(s, kernel=kernel) for s in plan.steps))
    facts = {**FACTS, **({"sm_budget": str(budget)} if budget is not None else {})}
    return Linked(graph, plan, {kernel.sha256: folder / "k.cubin"}, None, None, 0, facts)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, Usage]:
    found = {"k": Usage(64, 640)}
    monkeypatch.setattr(budgets_module, "usage", lambda data: found)
    return found


@pytest.mark.parametrize("ctas", [1, 2, 3])
def test_limited_launches_leave_the_plan_its_share(tmp_path: Path, taken: dict[str, Usage], ctas: int) -> None:
    shares = budgets(H200, ctas=ctas, registers=ctas * 8192, threads=ctas * 128)
    before = linked(tmp_path, source(shared=1000), shares.best_effort)
    found = limited(before, H200, ctas)
    launches = [x for s in found.plan.steps if isinstance(s.kernel, CudaSource) for x in s.kernel.launches]
    assert len(launches) == 5 and len({x.shared_bytes for x in launches}) == 1
    shared = launches[0].shared_bytes + taken["k"].shared_bytes
    assert occupancy(H200, 128, shared, 64) == ctas, "one more finds no room on an SM that is empty"
    assert {s.kernel.sha256 for s in found.plan.steps if isinstance(s.kernel, CudaSource)} < set(found.objects)
    assert all(before.plan.steps[k].kernel != s.kernel for k, s in enumerate(found.plan.steps))


@pytest.mark.parametrize(
    ("kernel", "ctas", "said"),
    [
        (source(256), 2, "2 CTAs of k take more .*32768 registers of 16384"),
        (source(1024), 1, "65536 registers of 16384"),
        (source(co_resident=100), 1, "100 CTAs of k must be co-resident"),
        (source(), 0, "at least one CTA"),
    ],
)
def test_limits_that_do_not_hold(
    tmp_path: Path, taken: dict[str, Usage], kernel: CudaSource, ctas: int, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        limited(linked(tmp_path, kernel, budgets(H200).best_effort), H200, ctas)


def test_a_kernel_of_which_nothing_is_known(tmp_path: Path, taken: dict[str, Usage]) -> None:
    with pytest.raises(DeviceError, match="no entry other"):
        limited(linked(tmp_path, source(entry="other"), budgets(H200).best_effort), H200, 1)


def test_a_cubin_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cannot be read"):
        limited(linked(tmp_path, source(), budgets(H200).best_effort), H200, 1)


# -- plans that cannot run beside each other


@dataclass
class Plan:
    linked: Linked
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))


def shares() -> Budgets:
    return budgets(H200)


def test_plans_that_cannot_be_together(tmp_path: Path) -> None:
    own, other = (Plan(linked(tmp_path, source(), x)) for x in (shares().best_effort, shares().latency_critical))
    check_plans(own, [other], H200)  # type: ignore[arg-type, list-item]
    bare = Plan(linked(tmp_path, source(), None))
    with pytest.raises(OptionError, match="option 'network': its plan was made without sm_budget"):
        check_plans(bare, [other], H200)  # type: ignore[arg-type, list-item]
    with pytest.raises(OptionError, match="option 'beside': its plan was made without sm_budget"):
        check_plans(own, [bare], H200)  # type: ignore[arg-type, list-item]
    with pytest.raises(OptionError, match="on cuda:1, the network's on cuda:0"):
        check_plans(own, [Plan(other.linked, torch.device("cuda", 1))], H200)  # type: ignore[arg-type, list-item]
    with pytest.raises(OptionError, match="do not fit an SM of NVIDIA H200 together"):
        check_plans(other, [other], H200)  # type: ignore[arg-type, list-item]


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(replace(linked(tmp_path, source(), None), made_for="cpu"), CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="needs a CUDA GPU"):
        co_runner(plan, torch.zeros(1), beside=plan)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(OptionError, match="option 'network': a plan for a GPU is needed, this is one for 'cpu'"):
        plan_on_gpu(plan, "network")  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{"stage_kernels": 0}, {"most_queued": -1}, {"ctas_per_sm": -1}])
def test_numbers_that_cannot_be(tmp_path: Path, more: dict[str, int]) -> None:
    plan = Plan(linked(tmp_path, source(), None))
    with pytest.raises(OptionError, match=next(iter(more))):
        co_runner(plan, torch.zeros(1), beside=plan, **more)  # type: ignore[arg-type]


# -- the whole of it on a driver that does nothing


@dataclass
class Driver:
    """Loads functions that launch nothing."""

    launched: int = 0
    shared: set[int] = field(default_factory=set)
    uploaded: int = 0
    attributes: Usage = field(default_factory=lambda: Usage(64, 640))

    def load(self, path: Path) -> Driver:
        return self

    def function(self, entry: str) -> Driver:
        return self

    def prepare(self, shared_bytes: int, cluster: tuple[int, int, int]) -> None:
        self.shared.add(shared_bytes)

    def bind(self, *_: object, **__: object) -> Driver:
        return self

    def launch(self, stream: int) -> None:
        self.launched += 1

    def upload(self, graph: int, stream: int) -> None:
        self.uploaded += 1


class Event:
    """Happens when it is recorded."""

    def __init__(self, **_: object) -> None:
        self.recorded = 0

    def record(self, stream: object) -> None:
        self.recorded += 1

    def query(self) -> bool:
        return self.recorded > 0

    def synchronize(self) -> None:
        assert self.recorded


@pytest.mark.parametrize("ctas", [0, 1])
def test_a_co_runner_is_made_checked_and_runs(
    cuda: FakeCuda, tmp_path: Path, taken: dict[str, Usage], monkeypatch: pytest.MonkeyPatch, ctas: int
) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Recorded, "raw_cuda_graph_exec", lambda self: 1, raising=False)
    monkeypatch.setattr(network_module, "gpu_facts", lambda *_, **__: H200)
    monkeypatch.setattr(budgeted, "usage", lambda data: taken)
    monkeypatch.setattr(budgeted, "real_driver", lambda: CudaDriver(cast("Any", driver.load), encode_tensor_map))
    monkeypatch.setattr(budgeted, "real_residence", lambda: Residence(lambda _: None, driver.upload))
    lc, be = (linked(tmp_path, source(), x) for x in (shares().latency_critical, shares().best_effort))
    plans = [CudaExecutable(x, device=CPU, budgeted=Budgeted(H200.within(budget_of(x, "x")))) for x in (lc, be)]
    driver.shared.clear()
    driver.uploaded = 0
    network = co_runner(
        plans[1], torch.zeros(4, 8), beside=[plans[0]], stage_kernels=2, most_queued=3, ctas_per_sm=ctas
    )
    assert driver.shared == ({shared_of_a_cta(H200, 1) - 1024 - 640} if ctas else {0}) and driver.uploaded == 3
    assert network.most_queued == 3
    with network:
        network.start()
        until(lambda: network.counts.inferences >= 50)
        network.stop()
        assert network.counts.most_queued_kernels <= 3 and network.counts.queued_kernels == 0
    with pytest.raises(OptionError, match="closed"):
        network.start()
    with pytest.raises(OptionError, match="option 'beside': no plan is given"):
        co_runner(plans[1], torch.zeros(4, 8), beside=[])
    with pytest.raises(OptionError, match="do not fit an SM"):
        co_runner(plans[0], torch.zeros(4, 8), beside=plans[0])
