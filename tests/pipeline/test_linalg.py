"""Models with inverses and linear systems, compiled whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import weft


class Camera(nn.Module):
    """Points of an image in the frame of a camera, as networks for bird's-eye views have them (arXiv:2008.05711)."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Linear(3, 1)

    def forward(self, points: torch.Tensor, camera: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        rays = points @ torch.inverse(camera).transpose(1, 2)
        return torch.linalg.solve(turn, (rays * self.depth(points).exp()).transpose(1, 2)).relu()


@pytest.mark.parametrize("budget", [0.0, 12.0])
def test_a_camera_is_one_plan(budget: float, tmp_path: Path) -> None:
    model = Camera().eval()
    given = torch.randn(2, 5, 3), torch.eye(3) + torch.rand(2, 3, 3) / 9, torch.eye(3) + torch.rand(2, 3, 3) / 9
    options = weft.Options(budget_s=budget, cache_dir=tmp_path, in_parts=False)
    compiled = weft.compile(model, given, options=options)
    assert sorted(op for op, _, _ in compiled.record.opaque) == ["aten.inverse.default", "aten.linalg_solve.default"]
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), model(*given), rtol=1e-4, atol=1e-5)


def test_a_matrix_without_an_inverse_is_told_as_the_framework_does(tmp_path: Path) -> None:
    model = Camera().eval()
    given = torch.randn(1, 5, 3), torch.eye(3)[None], torch.eye(3)[None]
    compiled = weft.compile(model, given, options=weft.Options(budget_s=0.0, cache_dir=tmp_path))
    with pytest.raises(RuntimeError, match="singular"):
        compiled(given[0], torch.zeros(1, 3, 3), given[2])
    torch.testing.assert_close(compiled(*given), model(*given).detach())
