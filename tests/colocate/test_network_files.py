"""A job of kind network from its folder of inputs to that of its results, under policies and over interruptions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.colocate.fake_device import FakeDevice, query
from tests.colocate.host_network import alone, host_job, write_inputs
from tests.colocate.recorded import constant, samples

from weft.colocate.arrivals import poisson
from weft.colocate.gpu_machine import GpuMachine, Lane
from weft.colocate.job import JobError, read_job, resume, save_progress
from weft.colocate.live import LiveBackend, run
from weft.colocate.network_job import NetworkGpuJob
from weft.colocate.operating import prepare
from weft.colocate.policies import make
from weft.errors import ArtifactError
from weft.kernels.samples import JobSamples
from weft.kernels.scheduling import OFF, JobSpec, Query

HIGH, LOW, COPIES, PART, REST = 1, 2, 3, 4, 5
TEXT = 'name = "work"\nkind = "network"\nmodel = "n.onnx"\ninputs = "in"\noutputs = "out"\nprogress = "p.json"\n'


def job_toml(folder: Path, *, passes: int = 1) -> JobSpec:
    (folder / "n.onnx").write_bytes(b"")
    (folder / "in").mkdir(exist_ok=True)
    (folder / "job.toml").write_text(TEXT + (f"passes = {passes}\n" if passes else ""))
    return read_job(folder / "job.toml")


def machine_of(device: FakeDevice, job: NetworkGpuJob, sharing: Sequence[str]) -> GpuMachine:
    lanes = [Lane(HIGH, query(device, HIGH, 100.0))]
    for kind in sharing:
        form = job.form(REST, apart=True) if kind == "partition" else job.form(LOW)
        stream = PART if kind == "partition" else HIGH
        lanes.append(Lane(stream, query(device, stream, 110.0), form))
    idle = job.form(LOW, apart=True)
    return GpuMachine(device, {"net": lanes}, copies=COPIES, job=job.anew(), idle=idle)


@pytest.mark.parametrize("policy", ["serial", "timeslice", "priority", "green:16", "orion", "tally", "weft"])
def test_every_result_is_that_of_the_network_alone(policy: str, tmp_path: Path) -> None:
    spec, inputs, device = job_toml(tmp_path), write_inputs(tmp_path / "in", 40), FakeDevice()
    with ExitStack() as held:
        job = host_job(spec, tmp_path, device, held)
        steady = samples(constant(100.0))
        work = JobSamples("work", job.kernel_us, job.block_us, constant(80.0), 0)
        modes = tuple(m for m in steady.modes if m.sharing != "co-runner")
        p = prepare(replace(steady, jobs=(work,), modes=modes, steps=()), policy, "net", "work", 900_000)
        made = make(policy, p.setting)
        machine = machine_of(device, job, [x.variant.sharing for x in p.points[1:]])
        out = run(made, LiveBackend(machine, [(p, poisson(3000.0, 300, seed=2))], policy=made))
        assert out.work_us > 0
        job.finish()
        done = job.progress()
    for k in range(40 if done.passes else done.stage):
        with np.load(tmp_path / "out" / f"{k:03}.npz") as found:
            assert np.array_equal(found["y"], alone(inputs[k]))
    assert done.passes == 1 or done.stage == len(list((tmp_path / "out").iterdir()))


@pytest.mark.parametrize("seed", range(4))
def test_interrupted_again_and_again_all_results_are_there(seed: int, tmp_path: Path) -> None:
    """Whatever is stopped in the middle goes on by what was saved, in a process of its own."""
    rng = random.Random(seed)
    spec, inputs = job_toml(tmp_path, passes=2), write_inputs(tmp_path / "in", 5)
    for _ in range(60):
        progress = resume(tmp_path / "p.json", spec)
        if progress.passes == 2:
            break
        device = FakeDevice()
        with ExitStack() as held:
            job = host_job(spec, tmp_path, device, held, progress)
            machine = machine_of(device, job, ["priority", "partition"])
            for number in range(rng.randint(1, 6)):
                machine.set_form(rng.choice([OFF, 0, 1, 2]))
                machine.launch(Query("net", number, 0, 0), rng.choice([0, 1, 2]))
                while not machine.ended():
                    pass
            machine.close_job()
            job.finish()
            before = progress.passes * 15 + progress.stage * 3 + progress.blocks
            found = job.progress()
            assert found.passes * 15 + found.stage * 3 + found.blocks >= before
            save_progress(tmp_path / "p.json", found)
    assert resume(tmp_path / "p.json", spec).passes == 2
    for k, x in enumerate(inputs):
        with np.load(tmp_path / "out" / f"{k:03}.npz") as found_:
            assert np.array_equal(found_["y"], alone(x))


def test_a_broken_input_ends_the_job_and_what_was_done_is_kept(tmp_path: Path) -> None:
    spec, _ = job_toml(tmp_path), write_inputs(tmp_path / "in", 6)
    (tmp_path / "in" / "003.npz").write_bytes(b"broken")
    device = FakeDevice()
    with ExitStack() as held:
        job = host_job(spec, tmp_path, device, held)
        machine = machine_of(device, job, [])
        machine.set_form(0)
        while not job.is_done():
            machine.pause(device.now + 1_000_000)
        machine.close_job()
        with pytest.raises(JobError, match=r"work: inputs: 003\.npz: inputs: File is not a zip file"):
            job.finish()
        assert (job.progress().passes, job.progress().stage, job.progress().blocks) == (0, 3, 0)
    assert sorted(x.name for x in (tmp_path / "out").iterdir()) == ["000.npz", "001.npz", "002.npz"]


def test_results_that_cannot_be_written_are_told_and_do_not_count(tmp_path: Path) -> None:
    spec, _ = job_toml(tmp_path, passes=0), write_inputs(tmp_path / "in", 2)
    device = FakeDevice()
    with ExitStack() as held:
        job = host_job(spec, tmp_path, device, held)
        (tmp_path / "out").rmdir()
        for _ in range(4):
            job.plain(LOW, 0.0)
        job.network.wait()
        with pytest.raises(ArtifactError, match="results cannot be written"):
            job.finish()
        assert (job.progress().stage, job.progress().blocks) == (0, 0)
