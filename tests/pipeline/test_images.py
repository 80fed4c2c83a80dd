"""Networks whose images grow: upsampling inside a convolution's kernel, transposed convolutions as convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from weft.device.facts import cpu_facts
from weft.device.files import private_directory
from weft.frontends.torch import import_exported
from weft.kernels.source import KernelSource
from weft.options import Options
from weft.pipeline.untuned import build
from weft.runtime.any import AnyExecutable


@pytest.fixture(scope="module", autouse=True)
def stated_facts() -> Iterator[None]:
    """Nothing is timed here: what the system says about the processor is enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.pipeline.cpu_facts", partial(cpu_facts, calibrate=False), raising=False)
        yield


class Enlarged(nn.Module):
    """relu(conv(reflected(doubled(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return torch.relu(self.conv(F.pad(x, (1, 1, 1, 1), mode="reflect")))


class Decoder(nn.Module):
    """relu(transposed convolution)."""

    def __init__(self, kernel: int, stride: int, padding: int = 0, extra: int = 0) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(16, 24, kernel, stride, padding, extra)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


def planned(module: nn.Module, x: torch.Tensor, cache: Path) -> AnyExecutable:
    """The plan of few large kernels; what it computes was compared with the module."""
    imported = import_exported(torch.export.export(module.eval(), (x,)))
    found = build(imported, Options(cache_dir=private_directory(cache)), ["fused"]).executables["fused"]
    with torch.no_grad():
        torch.testing.assert_close(found(x)[0], module(x), rtol=1e-4, atol=1e-5)
    return found


def test_upsampling_is_part_of_the_kernel_of_its_convolution(tmp_path: Path) -> None:
    torch.manual_seed(0)
    (step,) = planned(Enlarged(), torch.randn(1, 16, 12, 14), tmp_path).plan.steps
    assert isinstance(step.kernel, KernelSource)
    assert all(name in step.problem_key for name in ("gather(", "pad(", "conv(", "max("))
    assert len(step.inputs) == 3  # the image, the weight and the bias: no table


@pytest.mark.parametrize(("attributes", "kernels"), [((4, 2, 1), 2), ((2, 2), 2), ((3, 1, 1), 1), ((3, 2, 1, 1), 5)])
def test_transposed_convolutions_are_generated_kernels(
    attributes: tuple[int, ...], kernels: int, tmp_path: Path
) -> None:
    """Convolutions by phases, and one kernel that puts their results in place and does what follows."""
    torch.manual_seed(0)
    steps = planned(Decoder(*attributes), torch.randn(1, 16, 9, 11), tmp_path).plan.steps
    assert all(isinstance(s.kernel, KernelSource) for s in steps)
    assert not any("transposed=True" in s.problem_key for s in steps)
    assert len(steps) == kernels
