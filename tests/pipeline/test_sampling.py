"""Networks that sample images at computed points, compiled whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper
from torch import nn

import weft


class Transformer(nn.Module):
    """A spatial transformer (arXiv:1506.02025): an affine map of each image, told from the image."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, stride=2)
        self.place = nn.Linear(4, 6)
        self.head = nn.Conv2d(3, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        theta = self.place(self.features(x).relu().mean((2, 3))).reshape(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.head(F.grid_sample(x, grid, padding_mode="reflection", align_corners=False))


@pytest.mark.parametrize("budget", [0.0, 12.0])
def test_a_spatial_transformer(budget: float, tmp_path: Path) -> None:
    model, x = Transformer().eval(), torch.randn(2, 3, 12, 16)
    compiled = weft.compile(model, (x,), options=weft.Options(budget_s=budget, cache_dir=tmp_path))
    assert not compiled.record.opaque
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_the_file_of_a_sampler_is_data(tmp_path: Path) -> None:
    """What the framework calls for it is on the list of what runs without trust."""

    class Sampler(nn.Module):
        def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            return F.grid_sample(x, grid, align_corners=True)

    x, grid = torch.randn(1, 3, 6, 6), torch.rand(1, 4, 4, 2) * 2 - 1
    compiled = weft.compile(Sampler(), (x, grid), options=weft.Options(budget_s=0.0, cache_dir=tmp_path))
    compiled.save(tmp_path / "m.weft")
    loaded = weft.load(tmp_path / "m.weft")
    torch.testing.assert_close(loaded(x, grid), Sampler()(x, grid))


@pytest.mark.parametrize(("opset", "mode"), [(16, "bilinear"), (16, "nearest"), (20, "linear"), (20, "cubic")])
def test_grid_sample_of_onnx(opset: int, mode: str, tmp_path: Path) -> None:
    node = helper.make_node("GridSample", ["x", "g"], ["y"], mode=mode, padding_mode="border", align_corners=1)
    given: list[Any] = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [1, 2, 5, 4]), ("g", [1, 3, 3, 2]))
    ]
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", given, [made])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    compiled = weft.compile(model.SerializeToString(), options=weft.Options(budget_s=0.0, cache_dir=tmp_path))
    assert bool(compiled.record.opaque) is (mode == "cubic")
    rng = np.random.default_rng(0)
    x, grid = (torch.from_numpy(rng.uniform(-1.5, 1.5, s).astype(np.float32)) for s in ((1, 2, 5, 4), (1, 3, 3, 2)))
    torch_mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    torch.testing.assert_close(compiled(x, grid), F.grid_sample(x, grid, torch_mode, "border", align_corners=True))
