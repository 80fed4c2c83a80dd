"""Kinds of devices: every part that the table names is what its package asks for, and a new kind is a line in it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from tests.platform.vendor import XPU, estimate
from tests.platform.vendor.executable import XpuExecutable
from tests.platform.vendor.facts import XpuFacts
from tests.platform.vendor.generator import XpuGenerator
from tests.platform.vendor.platform import Xpu

import weft
from weft.device import kinds
from weft.device.cuda.facts import GpuFacts
from weft.device.facts import CpuFacts
from weft.device.kinds import KINDS, Kind, kind_of, kind_with, part
from weft.errors import ArtifactError, OptionError
from weft.frontends.imported import Imported
from weft.generate.registry import generators
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.options import Options
from weft.pipeline.compile import compile_imported
from weft.platform.protocol import Platform
from weft.platform.table import platform_of, policy_for
from weft.runtime import artifact
from weft.runtime.any import AnyExecutable
from weft.runtime.timeline import timeline
from weft.tune.site import HostSite, Site
from weft.tune.sites import site_of, worker_of

ALL = {**KINDS, "xpu": XPU}
NAMES = [f.name for f in fields(Kind)]


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is known."""
    monkeypatch.setattr(kinds, "KINDS", ALL)
    for module in ("weft.api", "weft.generate.registry", "weft.runtime.artifact"):
        monkeypatch.setattr(f"{module}.KINDS", ALL)


def small() -> Graph:
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (8, 16))), b.input(TensorType(DType.F32, (16, 16)))
    return b.build([b.apply(Prim.TANH, b.apply(Prim.ADD, b.add(Prim.MATMUL, b.apply(Prim.EXP, x), w), 0.5))])


def inputs(seed: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 16, generator=chance), torch.randn(16, 16, generator=chance)]


def expected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.exp(x) @ w + 0.5)


# --- the table


@pytest.mark.usefixtures("xpu")
@pytest.mark.parametrize("name", sorted(ALL))
def test_every_part_of_a_kind_is_what_its_package_asks_for(name: str) -> None:
    kind = ALL[name]
    places = {f: part(getattr(kind, f)) for f in NAMES}
    platform, facts = places["platform"], places["facts"]
    asked = {m for m in dir(Platform) if not m.startswith("_")} | set(Platform.__annotations__)
    instance = set(getattr(platform, "__annotations__", {}))
    assert platform.kind == name and {m for m in asked if not hasattr(platform, m) and m not in instance} == set()
    assert kind_with(facts()) is kind, "whose facts they are is told by their class"
    assert facts().name and facts().source_of("name")
    assert callable(places["generator"]().schedules) and callable(places["generator"]().emit)
    for function, wanted in (("estimate", 2), ("bound", 2), ("site", 4), ("worker", 2), ("saved", 1)):
        assert len(inspect.signature(places[function]).parameters) == wanted, function


def test_kinds_are_found_by_name_and_by_facts() -> None:
    assert kind_of("cuda:3") is kind_of("cuda") is KINDS["cuda"] and kind_of("cpu") is KINDS["cpu"]
    assert kind_with(GpuFacts()) is KINDS["cuda"] and kind_with(CpuFacts()) is KINDS["cpu"]
    with pytest.raises(KeyError):
        kind_of("xpu")
    with pytest.raises(TypeError, match=r"tests\.platform\.vendor\.facts:XpuFacts are the facts of no kind"):
        kind_with(XpuFacts())


@pytest.mark.parametrize("place", ["weft.device.kinds:no_such", "weft.no_such_module:a"])
def test_a_part_that_is_not_there_is_an_error_that_names_it(place: str) -> None:
    with pytest.raises(ImportError, match=r"no_such"):
        part(place)


def test_what_is_loaded_for_a_cpu_has_no_part_of_a_gpu() -> None:
    program = "import sys; from weft.platform.table import platform_of; platform_of('cpu'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "weft.platform.cpu" in loaded and not {x for x in loaded if x.startswith("weft.platform.cuda")}


# --- a new kind


@pytest.mark.usefixtures("xpu")
def test_a_line_makes_a_kind_known_everywhere() -> None:
    assert platform_of("xpu:0") is Xpu and policy_for(XpuFacts()) is Xpu.policy
    assert [type(g) for g in generators(library=False, device="xpu")] == [XpuGenerator]
    site: Site = site_of(Options(device="xpu"), XpuFacts(), None)
    assert isinstance(site, HostSite) and worker_of(Options(device="xpu:1"), 1).about
    with pytest.raises(KeyError):
        worker_of(Options(device="npu"), 1)
    with pytest.raises(TypeError, match="the facts of no kind"):
        site_of(Options(device="xpu"), Options(), None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("xpu")
def test_a_graph_is_compiled_saved_and_loaded_for_a_new_kind(tmp_path: Path) -> None:
    """By library calls alone: nothing is measured."""
    options = Options(device="xpu", budget_s=0.0, cache_dir=tmp_path)
    made = compile_imported(Imported(small(), 2), options, example_inputs=inputs(1))
    executable: AnyExecutable | None = made.plan
    assert isinstance(executable, XpuExecutable)
    torch.testing.assert_close(made.run(*inputs(2))[0], expected(*inputs(2)))
    assert [s.step for s in timeline(executable, inputs(3)).spans] == list(range(len(executable.plan.steps)))


@pytest.mark.usefixtures("xpu")
def test_kernels_of_a_new_kind_are_estimated_written_measured_and_chosen(tmp_path: Path) -> None:
    estimate.asked.clear()
    options = Options(device="xpu", budget_s=300.0, cache_dir=tmp_path, allow_library=False)
    made = compile_imported(Imported(small(), 2), options, example_inputs=inputs(1))
    executable: AnyExecutable | None = made.plan
    assert isinstance(executable, XpuExecutable) and estimate.asked
    torch.testing.assert_close(made.run(*inputs(2))[0], expected(*inputs(2)))
    steps = executable.plan.steps
    assert {s.kernel.schedule.generator for s in steps} == {"xpu"} and all(s.measured for s in steps)


@pytest.mark.usefixtures("xpu")
def test_a_plan_for_a_new_kind_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(device="xpu", budget_s=0.0, cache_dir=tmp_path)
    made = compile_imported(Imported(small(), 2), options, example_inputs=inputs(1)).plan
    assert made is not None
    artifact.save(made.linked, tmp_path / "model.weft", trust_dir=options.cache)
    loaded = weft.load(tmp_path / "model.weft", options=options)
    assert isinstance(loaded.executable, XpuExecutable)
    assert loaded.executable.linked.facts["target"] == "xpu-1"
    torch.testing.assert_close(loaded(*inputs(2)), expected(*inputs(2)))
    monkeypatch.setattr("weft.runtime.artifact.KINDS", KINDS)
    with pytest.raises(ArtifactError, match="is for 'xpu'; this Weft knows cpu, cuda"):
        weft.load(tmp_path / "model.weft", options=options)


@pytest.mark.usefixtures("xpu")
def test_a_device_of_no_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(OptionError, match="'npu': 'cpu', 'cuda' or 'cuda:N', 'xpu' or 'xpu:N'"):
        weft.compile(torch.nn.Linear(2, 2), (torch.randn(1, 2),), device="npu")
