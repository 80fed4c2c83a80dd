"""A plan for a GPU that an earlier version saved runs with right numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.saved_before import numbers, unpacked
from tests.typed import narrow

import weft

pytestmark = pytest.mark.gpu


def test_a_plan_of_then_gives_the_same_in_every_run(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its kernels are for compute capability 9.0")
    path, digest = unpacked("cuda", tmp_path)
    loaded = weft.load(path, trust=digest, options=weft.Options(device="cuda", cache_dir=tmp_path / "cache"))
    x, expected = numbers("cuda")
    for _ in range(2):
        got = narrow(torch.Tensor, loaded(x.cuda())).cpu()
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.double(), expected, rtol=2e-2, atol=2e-3)
