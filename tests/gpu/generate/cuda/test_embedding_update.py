"""Embedding tables updated with their gradients on a real GPU: near NumPy's numbers, and over what they read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.cases.embedding_gradient import updated_problem
from tests.generate.cuda.products import BF16, F16, F32
from tests.generate.cuda.tensor_emulator import offered, to_memory
from tests.generate.cuda.test_embedding_update import CASES, drawn, near, right
from tests.gpu.machine import Gpu, Known

from weft.device.cuda.facts import GpuFacts
from weft.generate.bind import Addresses, BoundCuda
from weft.kernels.candidate import Problem

pytestmark = pytest.mark.gpu
PROBLEMS: dict[str, Problem] = {
    **{name: problem for name, (problem, _) in CASES.items()},
    "DLRM": updated_problem((2048,), 100_000, 64),
    "DLRM, adam": updated_problem((2048,), 100_000, 64, rule="adam"),
    "4096 indices": updated_problem((8, 512), 5000, 768, rule="adam"),
    "few rows": updated_problem((2048,), 70, 64, padding=7, dtype=F16, weights=F32),
    "16384 indices": updated_problem((16384,), 2000, 96, dtype=BF16),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_kernel(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem = PROBLEMS[name]
    sources = offered(problem, facts)
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    inputs = drawn(problem)
    wanted = right(problem, inputs)
    for source in sources:
        near(problem, machine.run(problem, source, inputs), wanted)


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_over_operands_are_the_same_bits(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    """Each result where an operand lay: every time from the same memory as at first."""
    machine, facts = gpu
    problem = PROBLEMS[name]
    graph = problem.graph
    inputs = drawn(problem, seed=1)
    types = [graph.type_of(i) for i in graph.inputs]
    first = [
        torch.from_numpy(to_memory(x, t.dtype, f)).cuda()
        for x, t, f in zip(inputs, types, problem.input_formats, strict=True)
    ]
    count = len(graph.outputs)
    stream = torch.cuda.current_stream().cuda_stream
    for source in offered(problem, facts):
        compiled = machine.nvrtc.compile(source.text, arch=machine.arch, flags=source.flags)
        bound = BoundCuda(source, compiled.path)
        work = torch.full((source.workspace_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
        results = []
        for shift in (None, *range(count)):
            ins = [x.clone() for x in first]
            outs = [
                torch.full((graph.type_of(o).nbytes,), 0xFF, dtype=torch.uint8, device="cuda")
                if shift is None
                else ins[2 + (k + shift) % count]
                for k, o in enumerate(graph.outputs)
            ]
            at = Addresses([x.data_ptr() for x in ins], [x.data_ptr() for x in outs], [], work.data_ptr(), 0)
            bound.prepare(at)(stream)
            torch.cuda.synchronize()
            results.append([x.cpu().numpy() for x in outs])
        for again in results[1:]:
            for x, y in zip(results[0], again, strict=True):
                np.testing.assert_array_equal(x, y, err_msg=str(source.schedule))


def test_the_sums_are_those_of_the_gradient(gpu: tuple[Gpu, GpuFacts]) -> None:
    """With momentum, decay and rate of 0, 0 and 1 from a momentum of zeros: what is kept is the gradient itself."""
    machine, facts = gpu
    problem = PROBLEMS["DLRM"]
    inputs = drawn(problem)
    inputs[3] = np.zeros_like(inputs[3])
    inputs[4:] = [np.asarray(x, np.float32) for x in (0.0, 0.0, 1.0)]
    dy, index = torch.from_numpy(inputs[0]).double(), torch.from_numpy(inputs[1])
    sums = torch.ops.aten.embedding_dense_backward(dy, index, 100_000, -1, False).numpy()
    for source in offered(problem, facts):
        kept, weights = machine.run(problem, source, inputs)
        np.testing.assert_array_equal(kept, sums.astype(np.float32))
        np.testing.assert_array_equal(weights, np.asarray(inputs[2], np.float32) - sums.astype(np.float32))
