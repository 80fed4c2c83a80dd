"""Attention as a training step calls it on a real GPU: near float64, as FlashAttention-2's, and what gradients read."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from benchmarks.cases.attention_gradient import gradient_problem
from benchmarks.cases.called_attention import called_attention_problem
from tests.generate.cuda.attention.test_called_attention import CASES, SIZES
from tests.generate.cuda.calls_of_attention import Array, drawn, exact
from tests.generate.cuda.products import BF16, F16
from tests.generate.cuda.tensor_emulator import offered
from tests.gpu.machine import Gpu, Known

from weft.device.cuda.facts import GpuFacts
from weft.generate.library import trained_attention
from weft.ir.types import DType
from weft.kernels.candidate import Problem

pytestmark = pytest.mark.gpu
PROBLEMS: dict[str, Problem] = {
    **{name: problem for name, (problem, _) in CASES.items()},
    **{name: p for name, p in SIZES.items() if "ViT" not in name},
    "197 positions": called_attention_problem(3, 197, 12, 64, packed=True),
    **{
        f"{positions}, {width}, {dtype.value}{', causal' if causal else ''}": called_attention_problem(
            2, positions, 3, width, dtype=dtype, causal=causal, packed=positions == 200, scale=width**-0.5
        )
        for positions in (197, 200, 256)
        for width in (64, 128)
        for dtype in (F16, BF16)
        for causal in (False, True)
    },
}


def unit_of(problem: Problem) -> float:
    return 2.0**-8 if problem.graph.type_of(problem.graph.inputs[0]).dtype is BF16 else 2.0**-11


def near(found: list[Array], right: list[Array], problem: Problem, told: object) -> None:
    for got, want, node in zip(found, right, problem.graph.outputs, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want)
        if problem.graph.type_of(node).dtype is DType.F32:
            assert np.abs(got - want).max() <= 2.0**-19 * max(4.0, float(np.abs(want).max())), told
        else:
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error <= unit_of(problem), (told, error)


@pytest.mark.parametrize("name", PROBLEMS)
def test_near_float64(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem = PROBLEMS[name]
    sources = offered(problem, facts)
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    inputs = drawn(problem)
    right = exact(problem, inputs)
    for source in sources:
        near(machine.run(problem, source, inputs), right, problem, str(source.schedule))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_logarithms_are_the_librarys(dtype: DType, causal: bool, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem = called_attention_problem(2, 197, 3, 64, dtype=dtype, causal=causal)
    inputs = drawn(problem)
    kind = torch.float16 if dtype is F16 else torch.bfloat16
    q, k, v = (torch.from_numpy(np.array(x)).to("cuda", kind) for x in inputs)
    assert trained_attention.is_taken(*(x.transpose(1, 2) for x in (q, k, v)))
    theirs = [x.double().cpu().numpy() for x in trained_attention.attention(q, k, v, causal, 0.125)]
    sources = offered(problem, facts)
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    for source in sources:
        out, sums = (np.asarray(x, np.float64) for x in machine.run(problem, source, inputs))
        assert np.abs(sums - theirs[1]).max() <= 2.0**-18 * np.abs(theirs[1]).max(), str(source.schedule)
        assert np.linalg.norm(out - theirs[0]) <= 2 * unit_of(problem) * np.linalg.norm(theirs[0]), str(source.schedule)


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize(("positions", "width", "causal"), [(197, 64, False), (256, 64, True), (100, 128, True)])
def test_gradients_of_what_it_gives(
    positions: int, width: int, causal: bool, packed: bool, gpu: tuple[Gpu, GpuFacts]
) -> None:
    """The gradient's kernels read the result and the logarithms that the forward kernel wrote."""
    machine, facts = gpu
    forward = called_attention_problem(2, positions, 3, width, causal=causal, packed=packed)
    backward = gradient_problem(2, positions, 3, width, causal=causal, packed=packed, joined=packed)
    sources = [offered(p, facts)[0] for p in (forward, backward)]
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    inputs = drawn(backward)
    given, written = machine.run(forward, sources[0], inputs[1:-2]), inputs[-2:]
    assert [x.shape for x in given] == [x.shape for x in written]
    right = exact(backward, inputs)
    found = machine.run(backward, sources[1], [*inputs[:-2], *(np.asarray(x, np.float32) for x in given)])
    for got, want in zip(found, right, strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - np.asarray(want)) / np.linalg.norm(want)
        assert error <= 2.0**-7, (json.dumps([positions, width, causal]), error)
