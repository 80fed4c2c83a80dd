"""Variants with fused steps: recorded once, compared with the plan bit by bit, measured whole before they are taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.colocate.fake_device import FakeDevice, FakeJob, query
from tests.colocate.recorded import constant, samples, spread

from weft.colocate.gpu_machine import Form, GpuMachine, Lane
from weft.colocate.operating import Point, Prepared, Whole, prepare, settle
from weft.colocate.policy import PolicyError
from weft.colocate.role_lanes import Recorded, RoleLanes, measured_whole
from weft.ir.declined import Declined
from weft.kernels.colocation import FusionShape
from weft.kernels.samples import StepSamples
from weft.kernels.scheduling import Assignment, Variant

HIGH, LOW, COPIES = 1, 2, 3
SHAPE = FusionShape("extra", 128, 4, 1024)
STEPS = tuple(StepSamples("net", "work", name, 1, 10.0, 0.1, 0.5, 0.0, True, 0, SHAPE) for name in ("tma 0a", "tma 1b"))


def variant(*names: str) -> Variant:
    return Variant(
        1, "role", "role", 100.0, 104.0, 5.0, steps=tuple(Assignment(n, "role", "", 1.0, 5.0) for n in names)
    )


class World:
    """A plan whose one output counts, a job that is armed or not, and fused plans that are wrong as told."""

    def __init__(self, wrong: str = "", declined: str = "") -> None:
        self.wrong, self.declined = wrong, declined
        self.armed = False
        self.recorded: list[Mapping[int, object]] = []
        self.log: list[str] = []
        self.ends = ExitStack()
        self.asked: list[tuple[tuple[str, ...], bool]] = []
        self.runs = 0
        job = SimpleNamespace(
            begin=lambda stream: self.set(True), stop=lambda stream: self.set(False), ends=self.ends,
            snapshot=lambda stream: self.log.append("snapshot"), read=lambda: self.log.append("read"),
        )  # fmt: skip
        fused: Any = SimpleNamespace(job=job, rebound=self.rebound)
        self.lanes = RoleLanes(fused, self.plan(lambda: False), self.record, lambda: self.log.append("waited"))

    def set(self, armed: bool) -> None:
        self.armed = armed
        self.log.append("armed" if armed else "stopped")

    def rebound(self, chosen: Mapping[str, FusionShape], *, whole: bool) -> Any:
        self.asked.append((tuple(chosen), whole))
        return Declined(self.declined) if self.declined else {0: "a fused kernel"}

    def record(self, rebound: Mapping[int, Any]) -> Recorded:
        self.recorded.append(rebound)
        return self.plan(lambda: self.wrong == "always" or (self.wrong == "armed" and self.armed))

    def plan(self, is_wrong: Callable[[], bool]) -> Recorded:
        output = torch.full((4,), float("nan"))

        def launch() -> None:
            self.runs += 1
            output[:3] = torch.tensor([1.0, 2.0, 5.0 if is_wrong() else 3.0])
            if self.wrong == "plan":
                output[0] = self.runs

        return Recorded(Lane(HIGH, launch), (output,))


def test_a_lane_is_recorded_and_compared_once_and_has_the_form_of_roles() -> None:
    world = World()
    lane = world.lanes.of(variant("tma 1b", "tma 0a"), STEPS)
    assert isinstance(lane, Lane) and lane.form == Form(HIGH, None, inside=True) and lane.stream == HIGH
    assert world.log == ["waited"] * 6 + ["armed", "stopped", "snapshot", "waited", "read"]
    assert world.lanes.of(variant("tma 0a", "tma 1b"), STEPS) is lane and len(world.recorded) == 1
    other = world.lanes.of(variant("tma 0a"), STEPS)
    whole = world.lanes.of(variant("tma 0a"), STEPS, whole=True)
    assert isinstance(other, Lane) and isinstance(whole, Lane)
    assert other.form is whole.form is lane.form, "from one to the other the job need not be told to stop"
    assert world.asked == [(("tma 0a", "tma 1b"), False), (("tma 0a",), False), (("tma 0a",), True)]
    world.ends.close()
    assert world.lanes.of(variant("tma 0a"), STEPS) is not other, "with the job its kernels are gone"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("always", "the results differ from the plan's, with nothing to draw"),
        ("armed", "the results differ from the plan's, beside the job"),
        ("plan", "the plan's own results differ from run to run"),
    ],
)
def test_one_bit_that_differs_declines_a_variant(wrong: str, said: str) -> None:
    found = World(wrong).lanes.of(variant("tma 0a"), STEPS)
    assert isinstance(found, Declined) and found.reason == f"tma 0a: {said}"


def test_what_cannot_be_fused_is_declined() -> None:
    found = World(declined="tma 0a: it spills").lanes.of(variant("tma 0a"), STEPS)
    assert found == Declined("tma 0a: it spills")
    unsaid = [replace(s, shape=None) for s in STEPS]
    for steps in (unsaid, ()):
        missing = World().lanes.of(variant("tma 0a"), steps)
        assert isinstance(missing, Declined) and "do not say in which shape" in missing.reason


def machine_of(device: FakeDevice, lane_us: float) -> GpuMachine:
    lanes = [
        Lane(HIGH, query(device, HIGH, 100.0)),
        Lane(HIGH, query(device, HIGH, lane_us, draws=True), Form(HIGH, None, inside=True)),
    ]
    idle = Form(LOW, device.persistent)
    return GpuMachine(device, {"net": lanes}, copies=COPIES, job=FakeJob(device), idle=idle)


def test_a_variant_is_measured_whole_with_the_work_of_a_query() -> None:
    found = measured_whole(machine_of(FakeDevice(blocks_ns=10_000), 120.0), "net", 40)
    assert found.lc.at(0.5) == pytest.approx(120, abs=3) and found.clock_mhz == 1980
    assert found.be_us == pytest.approx(12, abs=0.5), "a block of 1 us each 10 us"


def test_a_variant_is_measured_once() -> None:
    world, machines = World(), list[Lane]()

    def machine(lane: Lane) -> GpuMachine:
        machines.append(lane)
        return machine_of(FakeDevice(), 110.0)

    one = world.lanes.measured(variant("tma 0a"), STEPS, machine, "net")
    assert isinstance(one, Whole) and world.lanes.measured(variant("tma 0a"), STEPS, machine, "net") is one
    assert machines == [world.lanes.of(variant("tma 0a"), STEPS)]
    declined = World("always").lanes.measured(variant("tma 0a"), STEPS, machine, "net")
    assert isinstance(declined, Declined) and len(machines) == 1
    assert isinstance(world.lanes.measured(variant("gone"), STEPS, machine, "net"), Declined)


# -- what is taken of them


def prepared(policy: str) -> Prepared:
    record = samples(constant(100.0))
    short = replace(record, jobs=tuple(replace(j, kernel_us=20.0) for j in record.jobs))
    return prepare(short, policy, "net", "work", 500_000)


def as_predicted(point: Point, off: float = 1.0, gain: float = 1.0) -> Whole:
    us = point.variant.lc_us * off
    return Whole(spread((0.5, us), (0.99, us * 1.02)), point.variant.be_us * gain, 1900)


@pytest.mark.parametrize("policy", ["tacker", "aker", "weft"])
def test_what_comes_out_as_predicted_is_taken_with_its_own_times(policy: str) -> None:
    before = prepared(policy)
    after = settle(before, lambda p: as_predicted(p, 1.01, 0.9))
    roles = [p for p in after.points if p.variant.sharing == "role"]
    assert roles and after.points[0] == before.points[0] and after.steps == before.steps
    assert [p.variant.number for p in after.points] == list(range(len(after.points)))
    work = [p.variant.be_us for p in after.points]
    assert work == sorted(work) and len(set(work)) == len(work)
    for p in roles:
        assert p.variant.measured and p.clock_mhz == 1900 and p.lc.at(0.5) == p.variant.lc_us
        assert p.variant.lc_q99_us == pytest.approx(p.variant.lc_us * 1.02)
    assert any(p.variant.sharing != "role" for p in after.points[1:]) == (policy == "weft")


def test_policies_without_fused_steps_are_as_they_were() -> None:
    def never(point: Point) -> Whole:
        raise AssertionError(point)

    for policy in ("green", "priority", "serial", "tally"):
        before = prepared(policy)
        assert settle(before, never) is before


@pytest.mark.parametrize("policy", ["tacker", "aker"])
def test_a_policy_that_needs_fused_steps_and_gets_none_says_why(policy: str) -> None:
    with pytest.raises(PolicyError, match=r"\+10\.0% of what was predicted"):
        settle(prepared(policy), lambda p: as_predicted(p, 1.1))
    with pytest.raises(PolicyError, match="it spills"):
        settle(prepared(policy), lambda p: Declined("it spills"))
    with pytest.raises(PolicyError, match="do no work"):
        settle(prepared(policy), lambda p: as_predicted(p, gain=0.0))


def test_of_weft_only_what_gains_more_than_it_costs_is_taken() -> None:
    before = prepared("weft")
    after = settle(before, lambda p: as_predicted(p, gain=0.01))
    assert not any(p.variant.sharing == "role" for p in after.points) and len(after.points) > 1
    assert any(p.variant.sharing == "role" for p in before.points)
