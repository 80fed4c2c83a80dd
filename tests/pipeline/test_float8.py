"""8-bit floats through the whole compiler on a CPU, whose own generator declines them: constants, inputs, outputs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import weft

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: torch.Tensor
        self.scale: torch.Tensor
        self.register_buffer("weight", torch.randn(96, 64).to(E4))
        self.register_buffer("scale", torch.tensor(0.05))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax() / 448
        q = (x / scale).to(E4)
        return torch._scaled_mm(q, self.weight.T, scale, self.scale, out_dtype=torch.bfloat16), q


class Product(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(a, b.T, s, t, out_dtype=torch.float32)


def test_a_plan_is_saved_with_its_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Quantised().eval(), torch.randn(48, 64)
    options = weft.Options(budget_s=0, cache_dir=tmp_path)
    with torch.inference_mode():
        run = weft.compile(model, (x,), options=options)
        found, wanted = run(x), model(x)
        run.save(tmp_path / "plan.weft")
        again = weft.load(tmp_path / "plan.weft", options=options)(x)
    assert [y.dtype for y in found] == [torch.bfloat16, E4]
    torch.testing.assert_close(found[0], wanted[0], rtol=2**-7, atol=1e-3)
    assert torch.equal(found[1].view(torch.uint8), wanted[1].view(torch.uint8))
    for y, z in zip(again, found, strict=True):
        assert torch.equal(y.view(torch.uint8), z.view(torch.uint8))


def test_bytes_as_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(32, 64).to(E5), torch.randn(16, 64).to(E4), torch.tensor(0.5), torch.tensor(2.0))
    with torch.inference_mode():
        run = weft.compile(Product(), inputs, options=weft.Options(budget_s=0, cache_dir=tmp_path))
        torch.testing.assert_close(run(*inputs), Product()(*inputs), rtol=1e-5, atol=1e-5)
