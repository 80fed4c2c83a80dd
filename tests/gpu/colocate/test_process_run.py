"""A job in another process beside a model on the same GPU: every unit once, samples, every policy, kills in between."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from tests.gpu.colocate.test_network_run import compiled

from weft.colocate.arrivals import poisson
from weft.colocate.compare import target_of
from weft.colocate.gpu import BUDGET, GpuSession, Plans
from weft.colocate.job import read_job, resume
from weft.colocate.operating import prepare
from weft.colocate.policy import PolicyError
from weft.colocate.process_job import ProcessJob
from weft.colocate.process_words import Confinement
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts
from weft.kernels.samples import SampleRecord

pytestmark = pytest.mark.gpu
TEXT = 'name = "train"\nkind = "process"\nfile = "train.py"\nprogress = "p.json"\nsave_s = 0.2\nhang_s = 20\n'
PROGRAM = """
import json
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).cuda()
optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
done = []

def unit(number):
    assert number == len(done)
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(number)).cuda()
    loss = net(x).square().mean()
    yield
    optimiser.zero_grad()
    loss.backward()
    yield
    optimiser.step()
    done.append(number)

def save(path):
    with open(path, "w") as file:
        json.dump(done, file)

def load(path):
    with open(path) as file:
        done[:] = json.load(file)
"""
WAYS = ("co-runner 128", "green36", "priority", "priority-duty64")


@pytest.fixture(scope="module")
def session(stated: GpuFacts, shared_cache: Path) -> Iterator[GpuSession]:
    plans = [compiled("cnn", shared_cache, b)[0] for b in (None, BUDGET)]
    with primary_context(), ExitStack() as held:
        yield GpuSession("cnn", Plans(*plans), stated, held=held)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("process")
    (made / "train.py").write_text(PROGRAM)
    (made / "job.toml").write_text(TEXT)
    return made


@contextmanager
def job_on(session: GpuSession, folder: Path) -> Iterator[ProcessJob]:
    """Where it was left; at the end every unit is done once."""
    spec = read_job(folder / "job.toml")
    with ExitStack() as held:
        job = ProcessJob(spec, folder, held=held, progress=resume(folder / "p.json", spec))
        session.add_job(job)
        yield job
        job.finish()
        done = job.progress().passes
        assert resume(folder / "p.json", spec).passes == done == job.units
        found = json.loads((folder / "p.json.states" / f"{done}.state").read_text())
        assert found == list(range(done)), "one after the other, each once"


@pytest.fixture(scope="module")
def record(session: GpuSession, folder: Path) -> SampleRecord:
    with job_on(session, folder) as job:
        assert job.kernel_us < job.block_us < 100_000
        found, refused = session.record(WAYS, commit="test", driver="test", queries=60)
    assert "is a process" in refused["co-runner 128"] and not set(refused) - {"co-runner 128", "green36"}, refused
    assert found.jobs[0].kind == "process" and found.jobs[0].stop is not None
    for mode in found.modes:
        assert mode.lc.at(0.5) > 0.7 * found.models[0].solo.at(0.5) and mode.idle_rate > 0, mode
    return found


@pytest.mark.parametrize("policy", ["exclusive", "serial", "priority", "green:36", "timeslice", "weft", "tally"])
def test_policies_run_and_the_models_results_stay(
    policy: str, session: GpuSession, folder: Path, record: SampleRecord
) -> None:
    alone = session.results()
    target = target_of(record.models[0], 50.0)
    job_name = "" if policy == "exclusive" else "train"
    if policy == "tally":
        with pytest.raises(PolicyError, match="is a process"):
            prepare(record, policy, "cnn", job_name, target)
        return
    rate = 0.2e6 / record.models[0].solo.at(0.5)
    with job_on(session, folder) as job:
        try:
            prepared = prepare(record, policy, "cnn", job_name, target)
        except PolicyError:
            pytest.skip("no such part of this GPU")
        before = job.units
        out = session.run(prepared, poisson(rate, 300, seed=1))
        assert all(d > 0 for d in out.done_ns) and out.blocks == job.units - before
        assert not job.works, "it is paused behind the run"
    assert all(torch.equal(a, b) for a, b in zip(session.results(), alone, strict=True))


def test_a_kill_in_a_run_harms_no_query(session: GpuSession, folder: Path, record: SampleRecord) -> None:
    with job_on(session, folder) as job:
        prepared = prepare(record, "priority", "cnn", "train", target_of(record.models[0], 50.0))
        job.go(Confinement())
        os.kill(job.pid, signal.SIGKILL)
        out = session.run(prepared, poisson(0.2e6 / record.models[0].solo.at(0.5), 600, seed=2))
        assert all(d > 0 for d in out.done_ns)
        end = time.monotonic() + 120
        while job.lives < 2 or not job.is_ready:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert job.lives == 2
