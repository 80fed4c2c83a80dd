"""A model and a job under policies on a real GPU: samples, runs, results that stay, and progress that is exact."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.gpu.small_networks import DTYPES, network

import weft
from weft.colocate.arrivals import poisson
from weft.colocate.compare import RELATIVE, Cell, summed_up, target_of
from weft.colocate.gpu import BUDGET, GpuSession, Plans
from weft.colocate.job import parse_job
from weft.colocate.kernel_job import KernelJob
from weft.colocate.network import plan_on_gpu
from weft.colocate.operating import prepare
from weft.colocate.outcome import Outcome
from weft.colocate.policy import PolicyError
from weft.device.cuda.dispatch import Direct, Dispatcher
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts
from weft.kernels.samples import SampleRecord

pytestmark = pytest.mark.gpu
pytest.importorskip("tree_sitter")
JOBS = Path(__file__).parents[3] / "benchmarks" / "best_effort"
LIMIT_S = 240
WAYS = ("co-runner 128", "co-runner 128-duty90", "green36", "priority", "streams")
LOAD = 0.3


@pytest.fixture(scope="module")
def session(
    stated: GpuFacts, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[GpuSession, KernelJob]]:
    folder = tmp_path_factory.mktemp("job")
    shutil.copytree(JOBS / "mandelbrot", folder / "mandelbrot")
    spec = parse_job('name = "mandelbrot"\nkind = "kernels"\nstages = ["mandelbrot/kernel.toml"]\n')
    module, inputs = network("cnn", DTYPES["f16"])
    plans = []
    for budget in (None, BUDGET):
        options = weft.Options(
            device="cuda", budget_s=60.0, cache_dir=shared_cache, sm_budget=budget, keep_worker=False
        )
        found = plan_on_gpu(weft.compile(module, inputs, options=options), "model")
        for static, given in zip(found.static_inputs, inputs, strict=True):
            static.copy_(given)
        plans.append(found)
    with primary_context(), ExitStack() as held:
        made = GpuSession("cnn", Plans(*plans), stated, held=held)
        job = KernelJob(spec, folder, facts=stated, held=held)
        made.add_job(job)
        yield made, job
        assert job.check() == ""


@pytest.fixture(scope="module")
def record(session: tuple[GpuSession, KernelJob]) -> SampleRecord:
    found, refused = session[0].record(WAYS, commit="test", driver="test", queries=100, fuse_s=60.0)
    assert not set(refused) & set(WAYS) - {"green36"}, refused
    assert found.steps, refused  # why no step of the plan was fused
    return found


def test_what_is_recorded_can_be(session: tuple[GpuSession, KernelJob], record: SampleRecord) -> None:
    (model,), (job,) = record.models, record.jobs
    assert model.solo.at(0.5) == pytest.approx(session[0].query_us, rel=0.5) and job.stop is not None
    assert 0 < record.launch.at(0.5) < 200 and 0 < job.stop.at(0.99) < 5_000
    for mode in record.modes:
        assert mode.lc.at(0.5) > 0.7 * model.solo.at(0.5), mode
        assert 0 <= mode.be_rate <= 1.1 and 0 <= mode.idle_rate <= 1.1, mode
    assert max(m.be_rate for m in record.modes) > 0


@pytest.mark.parametrize(
    "policy",
    ["exclusive", "serial", "timeslice", "priority", "streams", "green:36", "tally", "orion", "weft", "tacker", "aker"],
)
def test_every_policy_runs_and_nothing_is_wrong(
    policy: str, session: tuple[GpuSession, KernelJob], record: SampleRecord
) -> None:
    gpu, job = session
    if policy == "green:36" and not any(m.name == "green36" for m in record.modes):
        pytest.skip("this GPU has no such part")
    before = [x.clone() for x in gpu.results()]
    # whole kernels of the job find a place, too
    target = target_of(record.models[0], None) + round(2e3 * record.jobs[0].kernel_us)
    arrivals = poisson(LOAD * 1e6 / record.models[0].solo.at(0.5), 600, seed=3)
    prepared = prepare(record, policy, "cnn", "" if policy == "exclusive" else job.name, target)
    try:
        prepared = gpu.settled(prepared)
    except PolicyError as error:
        pytest.skip(f"no variant is left: {error.details['reason']}")
    blocks = job.ended_blocks
    out = gpu.run(prepared, arrivals)
    whole(out)
    assert job.check() == "" and job.ended_blocks - blocks >= out.blocks
    assert (out.work_us > 0) == (policy != "exclusive")
    for x, y in zip(before, gpu.results(), strict=True):
        assert torch.equal(x, y), "the model's results are those alone"
    found = summed_up([prepared], Cell("cnn", job.name, target, LOAD, RELATIVE, arrivals, 0), out)[0]
    assert not found.simulated and found.decision_us is not None
    assert found.be_throughput <= 1.1, "more than the whole GPU"


def whole(out: Outcome) -> None:
    for q, begin, done, sent in zip(out.queries, out.begin_ns, out.done_ns, out.sent_ns, strict=True):
        assert q.scheduled_ns <= sent <= done and begin <= done
    assert all(a <= b for a, b in zip(out.done_ns, out.done_ns[1:], strict=False))


def test_without_a_compiler_the_caller_puts_work_on_streams(
    session: tuple[GpuSession, KernelJob], stated: GpuFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CXX", "none")
    with primary_context(), ExitStack() as held:
        alone = GpuSession("cnn", Plans(session[0].plain), stated, held=held)
        assert isinstance(alone.device, Direct) and isinstance(session[0].device, Dispatcher)
        found, _ = alone.record(commit="test", driver="test", queries=50)
        arrivals = poisson(LOAD * 1e6 / found.models[0].solo.at(0.5), 300, seed=4)
        whole(alone.run(prepare(found, "exclusive", "cnn", "", 10**9), arrivals))
        for x, y in zip(session[0].results(), alone.results(), strict=True):
            assert torch.equal(x, y)
