"""Memory-bound operators on a real GPU: every schedule near the result in f32, equal bits again, state left zero."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.cases.memory import NETWORK_CASES, Case
from benchmarks.gpu_memory import TOLERANCE, Bench, Kernel, Prepared, prepare, sample

from weft.device.cuda.facts import GpuFacts

pytestmark = pytest.mark.gpu
RUNS = 20


@pytest.mark.parametrize("case", NETWORK_CASES, ids=lambda case: case.name)
def test_every_schedule(case: Case, stated: GpuFacts, tmp_path: Path, context: None) -> None:
    made = prepare(case, stated, 8, str(tmp_path))
    assert isinstance(made, Prepared), made
    assert made.spills == 0
    given = sample(case, "cuda")
    exact = case.function(*(x.float() if x.is_floating_point() else x for x in given))
    tensors = Bench(stated).tensors(made, given)
    for source, cubin in made.kernels:
        kernel = Kernel(made, source, cubin, [tensors])
        error = kernel.error(exact)
        assert error < TOLERANCE, (str(source.schedule), error)
        first = [x.clone() for x in kernel.outputs[0]]
        for _ in range(RUNS):
            for x in kernel.outputs[0]:
                x.fill_(0xFF)
            kernel.work.fill_(0xFF)
            kernel.run()
            torch.cuda.synchronize()
            assert all(torch.equal(x, y) for x, y in zip(first, kernel.outputs[0], strict=True)), str(source.schedule)
        assert not kernel.state.any(), str(source.schedule)
