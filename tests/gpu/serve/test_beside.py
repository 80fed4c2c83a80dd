"""A co-location bundle served on a real GPU: queries are those of the plan alone, the job gets on and is resumed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.small_networks import DTYPES, network

import weft
from weft.colocate.bundle import BUDGETED, PLAN, write_bundle
from weft.colocate.gpu import BUDGET, GpuSession, Plans
from weft.colocate.job import read_job
from weft.colocate.kernel_job import KernelJob
from weft.colocate.network import plan_on_gpu
from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import GpuFacts
from weft.serve import ServeOptions, Server

pytestmark = pytest.mark.gpu
pytest.importorskip("tree_sitter")
JOBS = Path(__file__).parents[3] / "benchmarks" / "best_effort"
LIMIT_S = 300


@pytest.fixture(scope="module")
def made(
    stated: GpuFacts, shared_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, list[weft.Compiled]]:
    """A bundle; its plan alone; that and the one under a budget, which may add up in other orders."""
    folder = tmp_path_factory.mktemp("bundle")
    shutil.copytree(JOBS / "mandelbrot", folder / "job" / "mandelbrot")
    toml = folder / "job" / "job.toml"
    toml.write_text('name = "m"\nkind = "kernels"\nstages = ["mandelbrot/kernel.toml"]\nprogress = "p.json"\n')
    module, inputs = network("cnn", DTYPES["f16"])
    compiled = [
        weft.compile(
            module, inputs,
            options=weft.Options(device="cuda", budget_s=60.0, cache_dir=shared_cache, sm_budget=b, keep_worker=False),
        )
        for b in (None, BUDGET)
    ]  # fmt: skip
    with primary_context(), ExitStack() as held:
        session = GpuSession("cnn", Plans(*(plan_on_gpu(c, "model") for c in compiled)), stated, held=held)
        session.add_job(KernelJob(read_job(toml), toml.parent, facts=stated, held=held))
        samples, _ = session.record(("co-runner 128", "priority"), commit="test", driver="test", queries=100)
    save = {PLAN: compiled[0].save, BUDGETED: compiled[1].save}
    bundle = folder / "cnn.colocate"
    write_bundle(
        bundle, model="cnn", target_ns=50_000_000, samples=samples, job=toml, save=save, trust_dir=shared_cache
    )
    compiled[0].save(folder / "cnn.weft")
    return bundle, folder / "cnn.weft", compiled


def _same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found, wanted, strict=True))


def test_queries_beside_a_job(
    made: tuple[Path, Path, list[weft.Compiled]], shared_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle, alone, compiled = made
    options = ServeOptions(cache=shared_cache)
    rng = np.random.default_rng(0)
    with Server({"beside": [str(bundle)], "alone": [str(alone)]}, options) as server:
        spec = server.model("alone").signature.inputs[0]
        rows = server.model("alone").signature.max_rows
        before = server.model("beside").backend.restarts
        for k in range(300):
            x = rng.standard_normal((rows, *spec.shape) if server.model("alone").signature.packs else spec.shape)
            x = x.astype(spec.dtype)
            found = server.submit(x, model="beside").result(30)
            without = server.submit(x, model="alone").result(30)
            allowed = [(c(torch.from_numpy(x).cuda()).cpu().numpy(),) for c in compiled]
            assert _same(without, allowed[0]), f"query {k} of the plan alone"
            assert any(_same(found, one) for one in allowed), f"query {k}"
        time.sleep(2.5)
        job = server.model("beside").backend.job
        assert job is not None and job.runs and job.queries >= 300 and sum(job.variants.values()) == job.queries
        assert server.model("beside").backend.restarts == before
    progress = json.loads((bundle / "job" / "p.json").read_text())["progress"]
    assert progress["passes"] > 0, "the job got on, and that was kept"
    assert "terminate called" not in capfd.readouterr().err, "the worker ended as it should"
    assert torch.cuda.is_available()
