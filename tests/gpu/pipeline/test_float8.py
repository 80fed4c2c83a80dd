"""A network with 8-bit floats compiled for a real GPU: quantised activations, products with scales and a bias."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from weft.frontends.torch import import_exported
from weft.kernels.source import CudaSource
from weft.pipeline.untuned import WAYS, build

pytestmark = pytest.mark.gpu

E4 = torch.float8_e4m3fn
MOST = 448.0


class Linear(nn.Module):
    """Quantises its input by the largest value of each row, or of all; the weight is e4m3 with a scale per column."""

    def __init__(self, width: int, out: int, *, rows: bool) -> None:
        super().__init__()
        w = torch.randn(out, width) / width**0.5
        scale = w.abs().amax(1, keepdim=True) / MOST if rows else w.abs().amax() / MOST
        self.weight: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("weight", (w / scale).to(E4))
        self.register_buffer("scale", scale.reshape(1, -1).contiguous() if rows else scale)
        self.bias = nn.Parameter(torch.randn(out, dtype=torch.bfloat16))
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        most = wide.abs().amax(-1, keepdim=True) if self.rows else wide.abs().amax()
        scale = most / MOST
        return torch._scaled_mm(
            (wide / scale).to(E4), self.weight.T, scale, self.scale, bias=self.bias, out_dtype=torch.bfloat16
        )


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root of the mean square over that of what is wanted."""
    difference = found.double() - wanted.double()
    return float((difference.square().mean() / wanted.double().square().mean()).sqrt())


NEAR = 0.02
"""A value that is quantised may fall either way; anything else is far smaller."""


@pytest.mark.parametrize("rows", [False, True], ids=["one scale", "a scale per row and column"])
def test_two_layers(rows: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Linear(1024, 2048, rows=rows), nn.GELU(), Linear(2048, 512, rows=rows)).cuda().eval()
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    options = weft.Options(device="cuda", budget_s=30.0, cache_dir=tmp_path)
    with torch.inference_mode():
        wanted = model(x)
        found = weft.compile(model, (x,), options=options)(x)
        assert isinstance(found, torch.Tensor)
        assert error(found, wanted) < NEAR
        made = build(import_exported(torch.export.export(model, (x,)), device="cuda"), options, WAYS)
        for way, plan in made.executables.items():
            assert error(plan(x)[0], wanted) < NEAR, way
    kernels = [s.kernel for plan in made.executables.values() for s in plan.plan.steps]
    assert any(isinstance(k, CudaSource) and "w_product_e4m3e4m3" in k.text for k in kernels)
