"""Networks whose images grow: upsampling inside a convolution's kernel, transposed convolutions as convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.gpu.grown import GROWN, Decoder, Enlarged, grown
from torch import nn

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.device.facts import cpu_facts
from weft.device.files import private_directory
from weft.frontends.torch import import_exported
from weft.kernels.source import CudaSource, KernelSource
from weft.options import Options
from weft.pipeline.setting import Setting
from weft.pipeline.untuned import build
from weft.platform.cuda.platform import Cuda
from weft.runtime.any import AnyExecutable


@pytest.fixture(scope="module", autouse=True)
def stated_facts() -> Iterator[None]:
    """Nothing is timed here: what the system says about the processor is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.platform.cpu.cpu_facts", lambda cache, **_: cpu_facts(cache, calibrate=False))
        yield


def planned(module: nn.Module, x: torch.Tensor, cache: Path) -> AnyExecutable:
    """The plan of few large kernels; what it computes was compared with the module."""
    imported = import_exported(torch.export.export(module.eval(), (x,)))
    found = build(imported, Options(cache_dir=private_directory(cache)), ["fused"]).executables["fused"]
    with torch.no_grad():
        torch.testing.assert_close(found(x)[0], module(x), rtol=1e-4, atol=1e-5)
    return found


def test_upsampling_is_part_of_the_kernel_of_its_convolution(tmp_path: Path) -> None:
    torch.manual_seed(0)
    (step,) = planned(Enlarged("reflect"), torch.randn(1, 32, 12, 14), tmp_path).plan.steps
    assert isinstance(step.kernel, KernelSource)
    assert all(name in step.problem_key for name in ("gather(", "pad(", "conv(", "max("))
    assert len(step.inputs) == 3  # the image, the weight and the bias: no table


@pytest.mark.parametrize(("attributes", "kernels"), [((4, 2, 1), 2), ((2, 2), 2), ((3, 1, 1), 1), ((3, 2, 1, 1), 5)])
def test_transposed_convolutions_are_generated_kernels(
    attributes: tuple[int, ...], kernels: int, tmp_path: Path
) -> None:
    """Convolutions by phases, and one kernel that puts their results in place and does what follows."""
    torch.manual_seed(0)
    steps = planned(Decoder(*attributes), torch.randn(1, 32, 9, 11), tmp_path).plan.steps
    assert all(isinstance(s.kernel, KernelSource) for s in steps)
    assert not any("transposed=True" in s.problem_key for s in steps)
    assert len(steps) == kernels


@pytest.mark.parametrize("name", list(GROWN))
def test_plans_for_a_gpu_have_few_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed to plan for one; `tests/gpu/pipeline/test_grown.py` runs them."""
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    options = Options(device="cuda", cache_dir=private_directory(tmp_path))
    setting = Setting(options, Cuda(GpuFacts(), nvrtc))
    monkeypatch.setattr("weft.pipeline.untuned.survey", lambda _: setting)
    monkeypatch.setattr("weft.pipeline.untuned.link", lambda graph, plan, _: SimpleNamespace(plan=plan))
    module, x = grown(name, torch.float16, "cpu")
    steps = (
        build(import_exported(torch.export.export(module, (x,))), options, ["fused"]).executables["fused"].plan.steps
    )
    assert len(steps) <= GROWN[name][2]
    for step in steps:
        assert isinstance(step.kernel, CudaSource)
        assert "transposed=True" not in step.problem_key
        made = nvrtc.compile(step.kernel.text, arch="sm_90a", flags=step.kernel.flags, cache_dir=tmp_path)
        assert not any(r.spill_stores for _, r in made.resources)
