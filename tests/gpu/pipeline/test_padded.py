"""Networks with odd channels on a real GPU: right with padded tensors in every type, and no slower for having them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.cases.padded import CASES, DTYPES, compiled
from tests.gpu.conftest import Tell
from tests.gpu.small_networks import check

import weft
from weft.frontends.torch import import_exported
from weft.frontends.torch.dtypes import FROM_TORCH
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.kernels.candidate import Problem
from weft.kernels.plan import Plan
from weft.orchestrate.alternatives import Alternatives, find_alternatives, padded
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.select import select
from weft.pipeline import choose, finish, reference, untuned
from weft.pipeline.link import link
from weft.pipeline.problems import collect
from weft.pipeline.setting import Setting, limits_of, survey
from weft.platform.cuda import platform as gpu
from weft.runtime.cuda_executable import CudaExecutable

pytestmark = pytest.mark.gpu
SMALL = {
    "residual 35": (2, 16, 24, 24),
    "head 255": (2, 128, 20, 20),
    "neck 3": (1, 64, 40, 40),
    "chain 35": (2, 64, 20, 20),
    "layers 255 35": (256, 512),
    "words 300": (256, 300),
}


PLANS = [(name, dtype) for name in SMALL for dtype in DTYPES if (name, dtype) != ("words 300", "f32")]
"""300 floats are whole vectors."""


def small(name: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Tensor]:
    """The network of a case with fixed weights, and a small input."""
    torch.manual_seed(0)
    module = CASES[name][0]().eval().to(dtype).cuda()
    return module, torch.randn(SMALL[name]).to(dtype).cuda()


def odd(problem: Problem) -> bool:
    """Whether a product reads channels that are no whole vectors."""
    graph = problem.graph
    weights = [graph.type_of(n.inputs[1]) for n in graph.nodes if n.prim in (Prim.MATMUL, Prim.CONV)]
    return any(t.shape[t.rank == 4] % (16 // t.dtype.itemsize) for t in weights)


def padded_plan(found: Alternatives, setting: Setting) -> Plan:
    """The plan of few kernels by estimates in which no product reads odd channels where there is a way around it."""
    candidates = enumerate_candidates(found.graph, limits_of(setting.options), found).candidates
    problems = collect(found.graph, candidates, found, setting.platform.facts)
    maker = untuned._Maker(setting, "fused")
    prices = {k: e.estimate_us * (50.0 if odd(e.problem) else 1.0) for k, e in problems.tasks.items()}
    for _ in range(untuned.ROUNDS):
        ranked = [
            choose.Ranked(e, maker.kernels.get(k, ()), (prices[k],), measured=False, rejected=0)
            for k, e in problems.tasks.items()
            if maker.kernels.get(k) != ()
        ]
        offers = choose.offers(ranked)
        chosen = select(found.graph, [o.priced for o in offers], alternatives=found, plans=1)[0].chosen
        fresh = [offers[i].ranked.task for i in chosen if offers[i].ranked.task.problem.key not in maker.kernels]
        if not fresh:
            return choose.assemble("padded", offers, chosen, found, None)
        for task in fresh:
            maker.make(task)
    raise AssertionError("no plan")


@pytest.mark.parametrize(("name", "dtype"), PLANS)
def test_plans_of_padded_tensors_are_right(
    name: str, dtype: str, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unmeasured, so that padded kernels run whether or not they are faster."""
    monkeypatch.setattr(padded, "LEAST_FLOPS", 0)
    module, x = small(name, DTYPES[dtype])
    with torch.no_grad():
        imported = import_exported(torch.export.export(module, (x,), strict=False), device="cuda")
    options = weft.Options(device="cuda", cache_dir=shared_cache, allow_tf32=name == "residual 35")
    setting = survey(options)
    found = find_alternatives(clean_up(imported.graph, strict=False).graph, on_gpu=True)
    plan = padded_plan(found, setting)
    assert sum(bool(found.extra >> v & 1) for s in plan.steps for v, _ in s.outputs) >= 1
    exe = link(found.graph, plan, setting)
    expected = reference.outputs(imported.graph, (x,), None, allow_tf32=options.allow_tf32)
    contender = finish.Contender("padded", partial(exe, x), 0, 0.0, baseline=False, executable=None)
    for _ in range(2):
        verdict = finish.verify(contender, expected, FROM_TORCH[DTYPES[dtype]])
        assert verdict.ok, (verdict, [str(s.kernel.schedule) for s in plan.steps])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_compiled_network_takes_the_faster_form(dtype: str, tmp_path: Path, tell: Tell) -> None:
    """Residual blocks of 35 channels, batch 8: the tuned plan against the one that knows no padded tensors."""
    make, shape = CASES["residual 35"]
    torch.manual_seed(0)
    module = make().eval().to(DTYPES[dtype]).cuda()
    x = torch.randn(shape).to(DTYPES[dtype]).cuda()
    options = weft.Options(device="cuda", cache_dir=tmp_path, budget_s=15)
    us = {}
    for way in ("plain", "padded"):
        exe = compiled(module, x, options, padded=way == "padded").executable
        assert isinstance(exe, CudaExecutable)
        check(exe(x)[0], module, (x,))
        exe.replay()
        us[way] = min(gpu.sample_us(exe.replay, 50) for _ in range(5))
        wide = any(n.prim is Prim.SELECT for n in exe.graph.nodes)
        assert wide == (way == "padded")
    tell(f"residual 35 {dtype}: plain {us['plain']:.1f} us, padded {us['padded']:.1f} us")
    assert us["padded"] <= 1.1 * us["plain"]
