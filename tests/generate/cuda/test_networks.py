"""Without a GPU: every kernel of the ten networks compiles for sm_80 and sm_90a, and hardly any spills registers.

`make test-all` does three of the networks, `make kernels` all.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from benchmarks.models import NETWORKS
from tests.generate.cuda.mlps import mlp, random_net
from tests.generate.cuda.networks import graph_of, plan_of, texts_of
from tests.gpu.small_networks import EMPTY
from tests.slow import few

from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, Nvrtc, find_nvrtc, gate
from weft.device.cuda.resources import MAX_SPILL_BYTES
from weft.frontends.torch import import_exported
from weft.generate.cuda.mlp import template as mlp_template
from weft.ir.declined import Declined
from weft.ir.passes import clean_up
from weft.kernels.source import CudaSource
from weft.orchestrate.alternatives import find_alternatives

GPUS = {"sm_80": "a100", "sm_90a": "h200"}
SPILLS = {"halo": 2, "mma": 2}
"""Template -> kernels of a network that may spill a few bytes; the gate declines more than MAX_SPILL_BYTES."""
FEW_BYTES = 32
LIMIT_S = 300.0
QUICK = ("candy", "bert_base", "efficientvit_b1")
GENERATED = 0.95
"""Share of the steps of such a plan that are generated kernels, at least."""


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if isinstance(found, Declined):
        pytest.skip(found.reason)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.whole) for n in NETWORKS])
def test_every_kernel_compiles_and_few_spill(name: str, nvrtc: Nvrtc) -> None:
    graph = graph_of(name)
    for arch, gpu in GPUS.items():
        facts = profile(gpu)
        assert facts.arch == arch
        plan = plan_of(graph, facts, nvrtc)
        sources = texts_of(plan)
        own = sum(isinstance(s.kernel, CudaSource) for s in plan.steps)
        assert own >= GENERATED * len(plan.steps), (arch, own, len(plan.steps))
        spilled = check(list(sources.values()), arch, nvrtc)
        for template in {t for t, _, _ in spilled}:
            those = [x for x in spilled if x[0] == template]
            assert len(those) <= SPILLS.get(template, 0), (arch, those)
            assert max(bytes_ for _, bytes_, _ in those) <= FEW_BYTES <= MAX_SPILL_BYTES, (arch, those)


def check(sources: list[CudaSource], arch: str, nvrtc: Nvrtc) -> list[tuple[str, int, str]]:
    """Template, bytes and schedule of those that spill; all compile, and nothing warns."""
    results = nvrtc.compile_many([CompileJob(s.text, arch, s.flags) for s in sources], threads=2, timeout_s=LIMIT_S)
    spilled = []
    for source, result in zip(sources, results, strict=True):
        assert isinstance(result, CompiledCubin), (str(source.schedule), result)
        assert result.warnings == (), (str(source.schedule), result.warnings)
        for launch in source.launches:
            used = result.of(launch.entry)
            if lost := used.spill_stores + used.spill_loads:
                spilled.append((str(dict(source.schedule.params).get("template")), lost, str(source.schedule)))
            assert used.stack_bytes <= lost, (str(source.schedule), used)
    return spilled


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", few(EMPTY, 2))
def test_networks_of_nothing_have_plans(name: str, nvrtc: Nvrtc) -> None:
    make, shape = EMPTY[name]
    with torch.no_grad():
        program = torch.export.export(make().eval().half(), (torch.zeros(shape).half(),))
    found = find_alternatives(clean_up(import_exported(program).graph, strict=False).graph, strict=False)
    for way in ("fused", "single"):
        plan = plan_of(found, profile("h200"), nvrtc, way)
        assert plan.steps
        check(list(texts_of(plan).values()), "sm_90a", nvrtc)


RANDOM, EACH, MOST_REFUSED = 200, 10, 0.1


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=pytest.mark.slow if n == 0 else pytest.mark.whole) for n in range(0, RANDOM, EACH)],
)
def test_random_layers_compile(first: int, nvrtc: Nvrtc, record_property: Callable[[str, object], None]) -> None:
    """Chains of layers drawn as for `test_mlp_gpu`: their texts compile; what spills or is serialised is reported."""
    refused = []
    for arch, gpu in GPUS.items():
        sources: list[tuple[int, CudaSource]] = []
        for seed in range(first, first + EACH):
            problem = mlp(random_net(seed))
            found = mlp_template.schedules(problem, profile(gpu))
            if isinstance(found, Declined):
                assert "do not fit" in found.reason or "several layers read" in found.reason, found.reason
                continue
            source = mlp_template.emit(problem, found[seed % len(found)])
            assert isinstance(source, CudaSource), source
            sources.append((seed, source))
        assert len(sources) >= 0.8 * EACH
        results = nvrtc.compile_many(
            [CompileJob(s.text, arch, s.flags) for _, s in sources], threads=2, timeout_s=LIMIT_S
        )
        for (seed, source), result in zip(sources, results, strict=True):
            assert isinstance(result, CompiledCubin), (seed, result)
            if no := gate(result, source.launches[0], profile(gpu)):
                refused.append((arch, seed, no.reason))
    record_property("refused", refused)
    assert len(refused) <= MOST_REFUSED * 2 * EACH, refused
