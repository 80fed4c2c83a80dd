"""Two models beside one job on a real GPU: every query of both ends, in order, with the results that it has alone."""

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
from weft.colocate.compare import RELATIVE, Cell, summed_up, target_of, together
from weft.colocate.gpu import BUDGET, GpuSession, Plans
from weft.colocate.job import parse_job
from weft.colocate.kernel_job import KernelJob
from weft.colocate.network import plan_on_gpu
from weft.colocate.operating import prepare
from weft.colocate.policy import PolicyError
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts
from weft.kernels.samples import SampleRecord

pytestmark = pytest.mark.gpu
pytest.importorskip("tree_sitter")
JOBS = Path(__file__).parents[3] / "benchmarks" / "best_effort"
LIMIT_S = 240
WAYS = ("co-runner 128", "green36", "priority")
MODELS = ("cnn", "transformer")
LOAD = 0.2
Both = tuple[GpuSession, KernelJob]


def plans_of(name: str, cache: Path) -> Plans:
    module, inputs = network(name, DTYPES["f16"])
    plans = []
    for budget in (None, BUDGET):
        options = weft.Options(device="cuda", budget_s=60.0, cache_dir=cache, sm_budget=budget, keep_worker=False)
        found = plan_on_gpu(weft.compile(module, inputs, options=options), "model")
        for static, given in zip(found.static_inputs, inputs, strict=True):
            static.copy_(given)
        plans.append(found)
    return Plans(*plans)


@pytest.fixture(scope="module")
def session(stated: GpuFacts, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("job")
    shutil.copytree(JOBS / "mandelbrot", folder / "mandelbrot")
    spec = parse_job('name = "mandelbrot"\nkind = "kernels"\nstages = ["mandelbrot/kernel.toml"]\n')
    first, second = (plans_of(name, shared_cache) for name in MODELS)
    with primary_context(), ExitStack() as held:
        made = GpuSession(MODELS[0], first, stated, held=held)
        made.add_model(MODELS[1], second)
        job = KernelJob(spec, folder, facts=stated, held=held)
        made.add_job(job)
        yield made, job
        assert job.check() == ""


@pytest.fixture(scope="module")
def record(session: Both) -> SampleRecord:
    found, refused = session[0].record(WAYS, commit="test", driver="test", queries=100, fuse_s=40.0)
    assert not {r for r in refused if r.partition(", ")[2] in WAYS and "green36" not in r}, refused
    assert [m.name for m in found.models] == list(MODELS)
    return found


@pytest.mark.parametrize(
    "policy", ["exclusive", "serial", "timeslice", "priority", "green:36", "tally", "orion", "weft", "aker"]
)
def test_every_policy_runs_both_and_nothing_is_wrong(policy: str, session: Both, record: SampleRecord) -> None:
    gpu, job = session
    if policy == "green:36" and {m.model for m in record.modes if m.name == "green36"} != set(MODELS):
        pytest.skip("this GPU has no such part")
    before = {name: [x.clone() for x in gpu.results(name)] for name in MODELS}
    cells, prepared = [], []
    for k, model in enumerate(record.models):
        target = target_of(model, None) + round(2e3 * record.jobs[0].kernel_us)
        arrivals = poisson(LOAD * 1e6 / model.solo.at(0.5), 400, seed=3 + k)
        cells.append(Cell(model.name, job.name, target, LOAD, RELATIVE, arrivals, 0))
        name = "" if policy == "exclusive" else job.name
        try:
            prepared.append(gpu.settled(prepare(record, policy, model.name, name, target, together=MODELS)))
        except PolicyError as error:
            pytest.skip(f"no variant is left: {error.details['reason']}")
    out = gpu.run_all(prepared, [c.arrivals for c in cells])
    assert all(d > 0 for d in out.done_ns)
    for name in MODELS:
        ends = [d for d, q in zip(out.done_ns, out.queries, strict=True) if q.model == name]
        assert ends == sorted(ends)
    assert job.check() == "" and (out.work_us > 0) == (policy != "exclusive")
    for name in MODELS:
        for x, y in zip(before[name], gpu.results(name), strict=True):
            assert torch.equal(x, y), f"{name}: the results are those alone"
    for found in summed_up(prepared, together(cells), out):
        assert not found.simulated and found.latency.queries == 392 and found.be_throughput <= 1.1
