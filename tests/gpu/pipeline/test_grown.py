"""What stands around a product or convolution inside its kernel, on a real GPU: plans of many forms against float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tests.gpu.grown import GROWN, grown

import weft
from weft.frontends.torch import import_exported
from weft.frontends.torch.dtypes import FROM_TORCH
from weft.kernels.source import CudaSource
from weft.pipeline import finish, reference, untuned

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", list(GROWN))
def test_plans_of_many_forms_are_right(name: str, shared_cache: Path) -> None:
    """Few large kernels, and random ones, in the three types that have kernels of their own."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        module, x = grown(name, dtype, "cuda")
        with torch.no_grad():
            imported = import_exported(torch.export.export(module, (x,), strict=False), device="cuda")
        options = weft.Options(device="cuda", cache_dir=shared_cache)
        made = untuned.build(imported, options, ("fused", "mixed"))
        expected = reference.outputs(imported.graph, (x,), None)
        for way, exe in made.executables.items():
            contender = finish.Contender(way, partial(exe, x), 0, 0.0, baseline=False, executable=None)
            for _ in range(2):
                found = finish.verify(contender, expected, FROM_TORCH[dtype])
                assert found.ok, (dtype, way, found, [str(s.kernel.schedule) for s in exe.plan.steps])
        if dtype is torch.float16:
            steps = made.executables["fused"].plan.steps
            assert all(isinstance(s.kernel, CudaSource) for s in steps)
            assert len(steps) <= GROWN[name][2]
