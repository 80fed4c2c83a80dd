"""Plans without measuring: distinct, right, and made of what their names say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.facts import cpu_facts
from weft.device.files import private_directory
from weft.frontends.torch import import_exported
from weft.kernels.candidate import Kind
from weft.kernels.source import CudaSource, KernelSource, LibraryCall
from weft.options import Options
from weft.pipeline.setting import Setting
from weft.pipeline.untuned import WAYS, Untuned, build
from weft.platform.cuda.platform import Cuda


@pytest.fixture(scope="module", autouse=True)
def stated_facts() -> Iterator[None]:
    """Nothing is timed here: what the system says about the processor is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.platform.cpu.cpu_facts", lambda cache, **_: cpu_facts(cache, calibrate=False))
        yield


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    return Options(cache_dir=private_directory(tmp_path_factory.mktemp("cache")))


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.nn.functional.silu(x), 1).mean(-1)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def block() -> torch.nn.Module:
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture(scope="module")
def built(block: torch.nn.Module, x: torch.Tensor, options: Options) -> Untuned:
    return build(import_exported(torch.export.export(block, (x,))), options)


def test_every_way_is_right(built: Untuned, block: torch.nn.Module, x: torch.Tensor) -> None:
    assert list(built.executables) == list(WAYS)
    for executable in built.executables.values():
        torch.testing.assert_close(executable(x)[0], block(x), rtol=1e-5, atol=1e-6)


def test_ways_are_what_they_say(built: Untuned) -> None:
    steps = {way: e.plan.steps for way, e in built.executables.items()}
    assert all(isinstance(s.kernel, LibraryCall) for s in steps["library"])
    assert {s.kind for s in steps["single"]} <= {Kind.SINGLE, Kind.CONVERT}
    assert len(steps["fused"]) < len(steps["single"])
    assert all(isinstance(s.kernel, KernelSource) for s in steps["fused"])
    assert built.generated >= len(steps["fused"])


def test_a_mixed_plan_comes_from_its_seed(block: torch.nn.Module, x: torch.Tensor, options: Options) -> None:
    imported = import_exported(torch.export.export(block, (x,)))
    first, again = (build(imported, options, ["mixed"]).executables["mixed"].plan for _ in range(2))
    assert [s.kernel for s in first.steps] == [s.kernel for s in again.steps]


def test_a_way_that_does_not_exist(block: torch.nn.Module, x: torch.Tensor, options: Options) -> None:
    with pytest.raises(ValueError, match="'fast' is none of"):
        build(import_exported(torch.export.export(block, (x,))), options, ["fast"])


def test_without_a_compiler_there_is_the_library(
    block: torch.nn.Module, x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_CXX", "none")
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        built = build(import_exported(torch.export.export(block, (x,))), Options(cache_dir=tmp_path), ["fused"])
    assert built.generated == 0
    torch.testing.assert_close(built.executables["fused"](x)[0], block(x), rtol=1e-5, atol=1e-6)


def test_plans_for_a_gpu_have_kernels_for_it(
    block: torch.nn.Module, x: torch.Tensor, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed to plan for one; the linker is given the plans as they are."""
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    setting = Setting(replace(options, device="cuda"), Cuda(GpuFacts(), nvrtc))
    monkeypatch.setattr("weft.pipeline.untuned.survey", lambda _: setting)
    monkeypatch.setattr("weft.pipeline.untuned.link", lambda graph, plan, _: SimpleNamespace(plan=plan))
    made = build(import_exported(torch.export.export(block, (x,))), setting.options)
    kinds = {way: {type(s.kernel) for s in e.plan.steps} for way, e in made.executables.items()}
    assert kinds["fused"] == kinds["single"] == {CudaSource} and kinds["library"] == {LibraryCall}
    assert made.generated >= len(made.executables["fused"].plan.steps)
    for step in made.executables["fused"].plan.steps:
        assert isinstance(step.kernel, CudaSource)
        compiled = nvrtc.compile(step.kernel.text, arch="sm_90a", flags=step.kernel.flags, cache_dir=options.cache)
        assert compiled.path.is_file()
