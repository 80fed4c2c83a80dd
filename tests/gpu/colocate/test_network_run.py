"""A network as the job on a model's GPU: results of every inference, exact progress, samples, every policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.gpu.small_networks import DTYPES, network

import weft
from weft.colocate.arrivals import poisson
from weft.colocate.compare import target_of
from weft.colocate.gpu import BUDGET, GpuSession, Plans
from weft.colocate.job import read_job, resume, save_progress
from weft.colocate.network import plan_on_gpu
from weft.colocate.network_job import NetworkGpuJob
from weft.colocate.operating import prepare
from weft.colocate.policy import PolicyError
from weft.colocate.staged_plan import StagedPlan, network_job
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts
from weft.kernels.samples import SampleRecord
from weft.kernels.scheduling import JobProgress, JobSpec
from weft.runtime.cuda_executable import CudaExecutable
from weft.sm_budget import SmBudget

pytestmark = pytest.mark.gpu
WAYS = ("co-runner 128", "green36", "priority", "streams")
FILES = 7
TEXT = 'name = "transformer"\nkind = "network"\nmodel = "n.onnx"\ninputs = "in"\noutputs = "out"\nprogress = "p.json"\n'
STAGE_US = 30.0


@dataclass
class World:
    """A model, a network, inputs of the network and what it gives alone."""

    facts: GpuFacts
    folder: Path
    spec: JobSpec
    session: GpuSession
    plan: CudaExecutable
    wanted: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = field(default_factory=list)

    def job(self, held: ExitStack) -> NetworkGpuJob:
        """Where it was left."""
        progress = resume(self.folder / "p.json", self.spec)
        made = network_job(
            self.spec, self.folder, self.plan, device=self.session.device, stream=self.session.low, held=held,
            progress=progress, stage_us=STAGE_US,
        )  # fmt: skip
        self.session.add_job(made)
        return made

    def check(self) -> int:
        """All results that are there are those alone; how many there are."""
        files = sorted((self.folder / "out").glob("*.npz"))
        for file in files:
            with np.load(file) as found:
                (name,) = found.files
                assert np.array_equal(found[name], self.wanted[int(file.stem)]), file
        return len(files)


def compiled(name: str, cache: Path, budget: SmBudget | None) -> tuple[CudaExecutable, tuple[torch.Tensor, ...]]:
    module, inputs = network(name, DTYPES["f16"])
    options = weft.Options(device="cuda", budget_s=40.0, cache_dir=cache, sm_budget=budget, keep_worker=False)
    found = plan_on_gpu(weft.compile(module, inputs, options=options), "model")
    for static, given in zip(found.static_inputs, inputs, strict=True):
        static.copy_(given)
    return found, inputs


@pytest.fixture(scope="module")
def world(stated: GpuFacts, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("network")
    (folder / "in").mkdir()
    (folder / "n.onnx").write_bytes(b"")
    (folder / "job.toml").write_text(TEXT)
    spec = read_job(folder / "job.toml")
    plans = [compiled("cnn", shared_cache, b)[0] for b in (None, BUDGET)]
    plan, (x,) = compiled("transformer", shared_cache, None)
    with primary_context(), ExitStack() as held:
        session = GpuSession("cnn", Plans(*plans), stated, held=held)
        made = World(stated, folder, spec, session, plan)
        for k in range(FILES):
            given = torch.randn(x.shape, generator=torch.Generator().manual_seed(k)).half()
            np.savez(folder / "in" / f"{k}.npz", given.numpy())
            # the same kernels in the same order: the plan by itself, all its steps one after another
            made.wanted.append(plan(given.cuda())[0].cpu().numpy())
        yield made


@pytest.fixture(scope="module")
def record(world: World) -> SampleRecord:
    with ExitStack() as held:
        job = world.job(held)
        found, refused = world.session.record(WAYS, commit="test", driver="test", queries=100)
        job.finish()
        assert job.progress() == resume(world.folder / "p.json", world.spec), "measuring counts for nothing"
    assert "it has no persistent kernel" in refused["co-runner 128"]
    assert not set(refused) - {"co-runner 128", "green36"}, refused
    return found


def test_stages_are_short_and_all_recordings_give_the_same_bits(world: World) -> None:
    network = StagedPlan(world.plan, world.session.low, world.session.device, stage_us=STAGE_US)
    assert sum(network.lengths) >= len(world.plan.plan.steps) and len(network.stage_us) == len(network.lengths) > 1
    assert all(0 < us < 10 * STAGE_US for us in network.stage_us)
    high = torch.cuda.Stream(priority=-1)
    assert network.add(high.cuda_stream) and not network.add(high.cuda_stream)
    given = np.load(world.folder / "in" / "3.npz")["arr_0"]
    own = network.executable
    for streams in ((network.base,), (high.cuda_stream,), (network.base, high.cuda_stream)):
        own.static_inputs[0].copy_(torch.from_numpy(given))
        torch.cuda.synchronize()
        for k in range(len(network.stage_us)):  # an inference goes on wherever its next stage is launched
            network.launch(k, streams[k % len(streams)])
            network.wait()
        assert np.array_equal(own.static_outputs[0].cpu().numpy(), world.wanted[3])
    network.close()


def test_what_is_recorded_can_be(world: World, record: SampleRecord) -> None:
    (model,), (job,) = record.models, record.jobs
    assert job.name == "transformer" and job.stop is not None
    assert job.kernel_us > 0 and 0 < job.stop.at(0.5) < 4 * job.kernel_us + 200
    for mode in record.modes:
        assert mode.lc.at(0.5) > 0.7 * model.solo.at(0.5), mode
        assert 0 <= mode.be_rate <= 1.1 and 0 < mode.idle_rate <= 1.1, mode


@pytest.mark.parametrize(
    "policy", ["exclusive", "serial", "timeslice", "priority", "streams", "green:36", "tally", "orion", "weft"]
)
def test_every_policy_runs_and_every_result_is_right(policy: str, world: World, record: SampleRecord) -> None:
    session = world.session
    if policy == "green:36" and not any(m.name == "green36" for m in record.modes):
        pytest.skip("this GPU has no such part, or the plans have library calls")
    before = session.results()
    target = target_of(record.models[0], None) + round(2e3 * record.jobs[0].kernel_us)
    arrivals = poisson(0.3 * 1e6 / record.models[0].solo.at(0.5), 600, seed=3)
    with ExitStack() as held:
        job = world.job(held)
        began = job.progress()
        prepared = prepare(record, policy, "cnn", "" if policy == "exclusive" else job.name, target)
        out = session.run(prepared, arrivals)
        job.finish()
        ended = job.progress()
    stages = sum(1 for _ in job.network.stage_us)

    def position(p: JobProgress) -> int:
        return (p.passes * FILES + p.stage) * stages + p.blocks

    done = position(ended) - position(began)
    us = job.network.stage_us
    first = began.blocks
    assert out.work_us == pytest.approx(sum(us[(first + k) % stages] for k in range(done)), rel=1e-6)
    assert (done > 0) == (policy != "exclusive") and all(d > 0 for d in out.done_ns)
    save_progress(world.folder / "p.json", ended)
    assert world.check() >= min(FILES, ended.passes * FILES + ended.stage)
    for x, y in zip(before, session.results(), strict=True):
        assert torch.equal(x, y), "the model's results are those alone"


def test_what_was_interrupted_in_the_middle_goes_on(world: World) -> None:
    (world.folder / "p.json").unlink(missing_ok=True)
    for file in (world.folder / "out").glob("*.npz"):
        file.unlink()
    for _ in range(200):
        with ExitStack() as held:
            job = world.job(held)
            machine = world.session.machine(["priority"])
            machine.set_form(0)
            machine.pause(machine.now_ns() + 50_000)  # a stage or two
            machine.close_job()
            job.finish()
            save_progress(world.folder / "p.json", job.progress())
            if job.progress().passes:
                break
    assert world.check() == FILES


def test_fused_steps_are_refused_by_name(world: World, record: SampleRecord) -> None:
    with pytest.raises(PolicyError, match="no fused kernels"):
        prepare(record, "tacker", "cnn", "transformer", 10**9)
