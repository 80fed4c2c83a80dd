"""Networks with recurrences, compiled whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.cases.mamba import Mamba, inputs
from torch import nn

import weft


class Decayed(nn.Module):
    """A gated average of what was seen, by a loop over time, and a running sum."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, time, width) twice."""
        keep = torch.sigmoid(gate)
        state, found = torch.zeros(x.shape[0], x.shape[2]), []
        for t in range(x.shape[1]):
            state = keep[:, t] * state + (1 - keep[:, t]) * x[:, t]
            found.append(torch.relu(state))
        return torch.stack(found, 1), x.cumsum(1)


@pytest.mark.parametrize("budget", [0.0, 20.0])
def test_a_loop_over_time(budget: float, tmp_path: Path) -> None:
    model, given = Decayed(), tuple(torch.randn(2, 24, 20) for _ in range(2))
    compiled = weft.compile(model, given, options=weft.Options(budget_s=budget, cache_dir=tmp_path))
    assert sum(n.prim == "scan" for n in compiled.record.graph) == 2
    assert compiled.record.primitives < 24  # fewer than steps
    torch.testing.assert_close(tuple(compiled(*given)), model(*given))


def test_a_small_mamba_is_a_scan_a_layer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, x = Mamba(layers=1, width=16), inputs(tokens=12, width=16)
    with torch.no_grad():
        compiled = weft.compile(model, (x,), options=weft.Options(budget_s=0.0, cache_dir=tmp_path))
        want = model(x)
    assert sum(n.prim == "scan" for n in compiled.record.graph) == 1
    assert not any(n.prim == "concat" for n in compiled.record.graph)
    torch.testing.assert_close(compiled(x), want, rtol=1e-4, atol=1e-5)
