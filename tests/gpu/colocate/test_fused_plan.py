"""Fused steps in a plan's graph on a real GPU: the plan's bits, every block counted, whole kernels to the block."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.colocate import test_run

from weft.colocate.fused_plan import shapes_for
from weft.colocate.gpu import GpuSession
from weft.colocate.gpu_machine import Lane
from weft.colocate.kernel_job import KernelJob
from weft.colocate.live import Machine
from weft.colocate.operating import Whole
from weft.colocate.recording import back_to_back
from weft.colocate.role_lanes import RoleLanes
from weft.kernels.samples import SampleRecord, StepSamples
from weft.kernels.scheduling import Assignment, Variant

pytestmark = pytest.mark.gpu
pytest.importorskip("tree_sitter")
LIMIT_S = 240
QUERIES = 50
session, record = test_run.session, test_run.record
Both = tuple[GpuSession, KernelJob]


def roles_of(gpu: GpuSession) -> RoleLanes:
    roles = gpu._models[gpu.name].roles
    assert roles is not None
    return roles


def variant(*names: str) -> Variant:
    return Variant(
        1, "role", "role", 100.0, 100.0, 1.0, steps=tuple(Assignment(n, "role", "", 1.0, 1.0) for n in names)
    )


def lane_of(gpu: GpuSession, steps: list[StepSamples], *, whole: bool = False) -> Lane:
    lane = roles_of(gpu).of(variant(*(s.step for s in steps)), steps, whole=whole)
    assert isinstance(lane, Lane), lane.reason
    return lane


def ran(gpu: GpuSession, lane: Lane, queries: int = QUERIES) -> tuple[Machine, int]:
    """Queries by the lane, and the blocks that ran in them."""
    machine = gpu._machine({gpu.name: [lane]})
    back_to_back(machine, gpu.name, 1, queries)
    return machine, machine.close_job().blocks


def test_most_kernels_of_the_plan_are_roles(session: Both) -> None:
    fused = roles_of(session[0]).fused
    assert len(fused.steps) > len(fused.refused), fused.refused


def test_steps_were_found_and_measured(session: Both, record: SampleRecord) -> None:
    assert record.steps, "no step of the plan was fused: see what `record` refused"
    fused = roles_of(session[0]).fused
    for s in record.steps:
        step = fused.steps[s.step]
        assert s.count == len(step.steps) and s.shape in shapes_for(step, fused.job, session[0]._facts)
        assert s.slowdown > -0.5 and s.fraction > 0


def test_each_step_and_all_together_give_the_plans_bits_and_lose_no_block(session: Both, record: SampleRecord) -> None:
    gpu, job = session
    before = gpu.results()
    for steps in (*([s] for s in record.steps), list(record.steps)):
        _, blocks = ran(gpu, lane_of(gpu, steps))
        assert job.check() == "" and blocks > 0, [s.step for s in steps]
    for x, y in zip(before, gpu.results(), strict=True):
        assert torch.equal(x, y)


def test_a_query_that_is_not_armed_draws_nothing(session: Both, record: SampleRecord) -> None:
    gpu, job = session
    lane = lane_of(gpu, list(record.steps))
    assert job.check() == ""
    blocks = job.ended_blocks
    for _ in range(10):
        lane.launch()
    gpu.device.drain()
    torch.cuda.synchronize()
    assert job.check() == "" and job.ended_blocks == blocks


def test_whole_kernels_are_a_pass_to_each_fused_step(session: Both, record: SampleRecord) -> None:
    gpu, job = session
    one = max(record.steps, key=lambda s: s.lc_us)
    if gpu.plain.order.width > 1:
        pytest.skip("the plan runs in several streams")
    queries = 5
    _, blocks = ran(gpu, lane_of(gpu, [one], whole=True), queries)
    assert blocks == queries * one.count * job.pass_blocks and job.check() == ""


def test_queries_with_roles_and_without_in_turn(session: Both, record: SampleRecord) -> None:
    gpu, job = session
    machine = gpu._machine({gpu.name: [lane_of(gpu, list(record.steps))]})
    for _ in range(10):
        for number in (1, 0, 1):
            back_to_back(machine, gpu.name, number, 3)
        machine.set_form(0)
        machine.set_form(-1)
    assert machine.close_job().blocks > 0 and job.check() == ""


def test_a_variant_is_measured_near_its_prediction(session: Both, record: SampleRecord) -> None:
    gpu, _ = session
    found = roles_of(gpu).measured(
        variant(*(s.step for s in record.steps)), record.steps, lambda lane: gpu._machine({gpu.name: [lane]}), gpu.name
    )
    assert isinstance(found, Whole), found.reason
    predicted = record.models[0].solo.at(0.5) + sum(s.count * s.slowdown * s.lc_us for s in record.steps)
    assert found.lc.at(0.5) == pytest.approx(predicted, rel=0.3) and found.be_us > 0
