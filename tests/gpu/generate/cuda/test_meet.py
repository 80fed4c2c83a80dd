"""Kernels whose blocks meet through memory, on a real GPU that is short of room for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.cases.memory import NETWORK_CASES
from benchmarks.gpu_memory import TOLERANCE, Bench, Kernel, Prepared, problem_of, sample, timed

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import Nvrtc
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.loops.forms import Form
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu
CASE = next(c for c in NETWORK_CASES if c.name == "candy norm+relu+pad 32x224")
FORMS = (Form(512, columns=2, single_pass=True, cross_cta=66), Form(256, columns=2, single_pass=True, cross_cta=132))
STREAMS, LAUNCHES, REPLAYS = 8, 20, 40


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_many_at_once(form: Form, stated: GpuFacts, nvrtc: Nvrtc, tmp_path: Path, context: None) -> None:
    """Eight chains side by side, each of which could fill the machine by itself: none waits for ever, all are right."""
    problem, given = problem_of(CASE)
    source = CudaGenerator().emit(problem, form.schedule())
    assert isinstance(source, CudaSource), source.reason
    assert "w_meet<" in source.text
    cubin = str(nvrtc.compile(source.text, arch=stated.arch, cache_dir=tmp_path).path)
    made = Prepared(problem, given, ((source, cubin),), 0, 0.0)
    data = sample(CASE, "cuda")
    exact = CASE.function(*(x.float() for x in data))
    tensors = Bench(stated).tensors(made, data)
    kernels = [Kernel(made, source, cubin, [tensors]) for _ in range(STREAMS)]
    for kernel in kernels:
        assert kernel.error(exact) < TOLERANCE
    wanted = kernels[0].outputs[0][0].clone()
    graphs = []
    for kernel in kernels:
        kernel.outputs[0][0].fill_(0xFF)
        timed(kernel.run, 1)()  # warm
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                kernel.run()
        graphs.append((graph, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(REPLAYS):
        for graph, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for kernel in kernels:
        assert torch.equal(kernel.outputs[0][0], wanted)
        assert not kernel.state.any()
