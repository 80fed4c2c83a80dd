"""Samples through the machine that policies run on, against what the machine is known to take."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.colocate.fake_device import FakeDevice, FakeJob, query
from tests.colocate.recorded import samples

from weft.colocate.arrivals import poisson
from weft.colocate.gpu_machine import Form, GpuMachine, Lane
from weft.colocate.live import LiveBackend, run
from weft.colocate.operating import prepare
from weft.colocate.policies import make
from weft.colocate.recording import Mode, What, back_to_back, recorded, spread
from weft.errors import DeviceError
from weft.kernels.colocation import FusionShape, RoleRegisters
from weft.kernels.samples import read, write

HIGH, LOW, COPIES, PART, REST = 1, 2, 3, 4, 5
MODES = (Mode("priority", "priority"), Mode("co-runner 128", "co-runner"), Mode("green36", "partition"))
WHAT = What("NVIDIA H200", "580", "abc", "net", 12, "work", 300.0, 2.0)


def machine_of(device: FakeDevice) -> GpuMachine:
    lanes = [
        Lane(HIGH, query(device, HIGH, 100.0)),
        Lane(HIGH, query(device, HIGH, 120.0), Form(LOW, None)),
        Lane(HIGH, query(device, HIGH, 100.0), Form(LOW, device.persistent)),
        Lane(PART, query(device, PART, 130.0), Form(REST, device.persistent)),
    ]
    return GpuMachine(
        device, {"net": lanes}, copies=COPIES, job=FakeJob(device, block_us=2.0, kernel_us=300.0),
        idle=Form(LOW, device.persistent),
    )  # fmt: skip


def test_what_is_recorded_is_what_the_machine_takes() -> None:
    device = FakeDevice(look_ns=300, stop_ns=9_000, blocks_ns=4_000, slow=1.1)
    found = recorded(machine_of(device), WHAT, MODES, queries=50, small=20)
    (model,), (job,) = found.models, found.jobs
    assert (model.name, model.kernels, found.gpu) == ("net", 12, "NVIDIA H200")
    assert model.solo.at(0.5) == pytest.approx(100.0, abs=2.0)
    # looks at the clock, each of 0.3 us, notice an arrival and time a decision; then the job ends
    assert job.stop is not None and 9.0 <= job.stop.at(0.0) <= job.stop.at(1.0) < 14.0 and job.kernel_us == 300.0
    assert job.idle_rate == pytest.approx(0.5, abs=0.02)
    assert 0.3 < found.launch.at(0.01) < found.launch.at(0.99) < 5.0
    priority, resident, part = found.modes
    assert [m.name for m in found.modes] == ["priority", "co-runner 128", "green36"]
    assert priority.lc.at(0.5) == pytest.approx(120.0, abs=2.0) and priority.be_rate == pytest.approx(1.0, abs=0.3)
    # a block of 2 us of the whole GPU each 4 us; queries take a tenth longer beside it
    assert resident.lc.at(0.5) == pytest.approx(110.0, abs=2.0) and resident.be_rate == pytest.approx(0.5, abs=0.02)
    assert resident.idle_rate == pytest.approx(0.5, abs=0.02)
    assert part.lc.at(0.5) == pytest.approx(143.0, abs=2.0) and part.sharing == "partition"
    assert device.resident == 0 and read(json.loads(write(found))) == found


def test_policies_run_by_what_was_recorded() -> None:
    device = FakeDevice(slow=1.1, blocks_ns=4_000)
    machine = machine_of(device)
    record = recorded(machine, WHAT, MODES, queries=50, small=20)
    p = prepare(record, "green:36", "net", "work", 700_000)
    assert [x.variant.name for x in p.points] == ["alone", "green36"]
    policy = make("green:36", p.setting)
    part = Lane(PART, query(device, PART, 130.0), Form(REST, device.persistent))
    lanes = {"net": [Lane(HIGH, query(device, HIGH, 100.0)), part]}
    job = FakeJob(device, block_us=2.0)
    own = GpuMachine(device, lanes, copies=COPIES, job=job, idle=Form(LOW, device.persistent))
    before = device.blocks
    out = run(policy, LiveBackend(own, [(p, poisson(3000.0, 200, seed=1))]))
    assert set(out.variants) == {1} and out.work_us == pytest.approx(2.0 * round(device.blocks), abs=4.0)
    assert device.blocks > before


def test_a_model_alone_has_no_job() -> None:
    device = FakeDevice()
    machine = GpuMachine(device, {"net": [Lane(HIGH, query(device, HIGH, 50.0))]}, copies=COPIES)
    found = recorded(machine, What("gpu", "1", "abc", "net", 3, ""), queries=30, small=5)
    assert not found.jobs and not found.modes and found.models[0].solo.at(0.5) == pytest.approx(50.0, abs=2.0)


def test_a_query_that_does_not_end_is_told() -> None:
    device = FakeDevice(look_ns=1_000_000)
    machine = GpuMachine(device, {"net": [Lane(HIGH, query(device, HIGH, 1e9))]}, copies=COPIES)
    with pytest.raises(DeviceError, match="0 of 2 queries"):
        back_to_back(machine, "net", 0, 2)


def test_spreads_are_of_times() -> None:
    assert spread([3.0, 1.0, 2.0], 0).at(0.5) == 2.0 and spread([3.0, 1.0, 2.0], 0).at(1.0) == 3.0
    with pytest.raises(ValueError, match="no times"):
        spread([], 0)


def test_a_step_says_in_which_shape_it_was_fused() -> None:
    """Records from before, which do not, are read as ever."""
    record = samples()
    assert "shape" not in write(record) and read(json.loads(write(record))) == record
    shape = FusionShape("extra", 128, 4, 1024, registers=RoleRegisters(24, 200, 104))
    told = replace(record, steps=tuple(replace(s, shape=shape) for s in record.steps))
    assert read(json.loads(write(told))) == told and prepare(told, "aker", "net", "work", 500_000).steps == told.steps
