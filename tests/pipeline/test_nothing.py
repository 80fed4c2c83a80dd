"""Networks some of whose values have no elements: compiled for the CPU, they give what eager gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.small_networks import EMPTY

import weft


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors", "ignore:Weft has no plan for this model")
@pytest.mark.parametrize(("name", "budget"), [*((name, 0.0) for name in EMPTY), ("no columns", 0.5)])
def test_networks_of_nothing(name: str, budget: float, tmp_path: Path) -> None:
    make, shape = EMPTY[name]
    module, x = make().eval(), torch.zeros(shape)
    with torch.no_grad():
        want = module(x)
    got = weft.compile(module, x, options=weft.Options(budget_s=budget, cache_dir=tmp_path))(x)
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got, want)
