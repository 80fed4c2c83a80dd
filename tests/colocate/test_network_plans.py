"""The benchmark's networks under their share of an SM: generated kernels alone, all within the limit of CTAs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.generate.cuda.test_budget_networks import Weighing, posed, taken

from weft.colocate.budgets import budgets, limited
from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import find_nvrtc
from weft.device.cuda.occupancy import occupancy
from weft.generate.protocol import Generator
from weft.generate.registry import generators
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource
from weft.options import Options
from weft.pipeline import untuned
from weft.pipeline.setting import Setting
from weft.platform.cuda.platform import Cuda
from weft.runtime.executable import Linked

H200 = profile("h200")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert_base", *(pytest.param(n, marks=pytest.mark.whole) for n in ("llama_4", "segformer_b0"))]
)
def test_one_cta_of_each_kernel_fits_beside_a_plan(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip("no NVRTC")
    weighing = Weighing(nvrtc, tmp_path)

    def asked(*, library: bool = True, generated: bool = True, device: str = "cpu") -> Sequence[Generator]:
        calls = generators(library=library, generated=False, device=device)
        return [*calls, weighing] if generated else calls

    monkeypatch.setattr(untuned, "generators", asked)
    share = budgets(H200).best_effort
    options, facts = Options(device="cuda", sm_budget=share), H200.within(share)
    found, problems = posed(name, 8, facts, options)
    plan = untuned.plan_in("fused", problems, found, Setting(options, Cuda(facts, nvrtc)))
    objects = {}
    for step in plan.steps:
        assert isinstance(step.kernel, CudaSource), f"{step.kernel.schedule} is a call"
        source = step.kernel
        made = nvrtc.compile(
            source.text, arch=facts.arch, flags=source.flags, max_registers=source.max_registers, cache_dir=tmp_path
        )
        objects[source.sha256] = made.path
    linked = Linked(found.graph, plan, objects, None, None, 0, {"sm_budget": str(facts.sm_budget)})
    for step in limited(linked, H200, 1).plan.steps:
        assert isinstance(step.kernel, CudaSource)
        own = taken(step.kernel, facts, nvrtc, tmp_path)
        for launch in step.kernel.launches:
            shared = launch.shared_bytes + own[launch.entry].shared_bytes
            registers = own[launch.entry].registers
            assert occupancy(H200, math.prod(launch.block), shared, registers) == 1, "on a whole SM"
