"""The attention template on the host: emulated kernels against float64, what compiles, what is declined."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.generate.cuda.attentions import BF16, F16, F32, Block, block, plain, problem_of
from tests.generate.cuda.tensor_emulator import Emulated, run

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc, gate
from weft.generate.cuda import templates
from weft.generate.cuda.templates.attention_match import attention
from weft.generate.cuda.templates.attention_shapes import Shape
from weft.generate.cuda.templates.prelude import prelude
from weft.ir.declined import Declined
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType, round_bf16
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

H200 = GpuFacts()
A100 = GpuFacts(capability=80, sms=108, shared_per_sm=167936, shared_per_block=166912)

CASES: dict[str, tuple[Problem, Shape]] = {
    # (problem, shape): wr, mi, wk, nb, stages
    "one tile": (plain((2, 3), 24, 24, 16), Shape(1, 1, 2, 16, 1)),
    "all tiles at once": (plain((1, 2), 20, 100, 32), Shape(1, 1, 2, 16, 4)),
    "ring of two": (plain((1, 2), 20, 150, 32), Shape(1, 1, 2, 16, 2)),
    "ring of three": (plain((1, 1), 40, 130, 16, 48), Shape(2, 1, 1, 16, 3)),
    "two tiles of rows": (plain((1, 2), 70, 40, 64), Shape(1, 2, 2, 32, 1)),
    "warps along rows": (plain((1, 2), 70, 40, 64), Shape(4, 1, 1, 16, 3)),
    "bf16": (plain((1, 2), 33, 40, 64, dtype=BF16), Shape(2, 1, 2, 32, 1)),
    "odd sizes": (plain((1, 3), 7, 13, 20, 12), Shape(1, 1, 2, 16, 1)),
    "odd columns": (plain((1, 2), 9, 19, 17, 5), Shape(1, 1, 2, 16, 1)),
    "half a chunk": (plain((1, 2), 9, 19, 24, 40), Shape(1, 1, 2, 16, 1)),
    "wide heads": (plain((1, 1), 17, 33, 144, 160), Shape(1, 1, 2, 16, 2)),
    "causal": (plain((1, 2), 37, 37, 16, causal=True), Shape(1, 1, 2, 16, 2)),
    "mask of keys": (plain((2, 2), 20, 40, 16, mask=(2, 1, 1, 40)), Shape(1, 1, 2, 16, 2)),
    "mask of all": (plain((2, 2), 20, 40, 16, mask=(20, 40)), Shape(1, 1, 2, 32, 1)),
    "bias": (plain((2, 2), 20, 40, 16, mask=(1, 2, 20, 40), mask_dtype=F16), Shape(1, 1, 2, 16, 2)),
    "causal bias, bf16": (
        plain((2, 2), 20, 20, 16, mask=(2, 1, 20, 20), mask_dtype=BF16, dtype=BF16, causal=True),
        Shape(1, 1, 2, 16, 1),
    ),
    "soft cap": (plain((1, 2), 20, 40, 32, softcap=2.0), Shape(1, 1, 2, 16, 2)),
    "negative scale": (plain((1, 2), 20, 40, 32, scale=-0.3), Shape(1, 1, 2, 16, 2)),
    "grouped heads": (plain((2, 2), 10, 24, 16, heads=6), Shape(1, 1, 2, 16, 1)),
    "grouped heads, mask": (plain((2, 2), 10, 24, 16, heads=6, mask=(2, 6, 10, 24)), Shape(2, 1, 1, 32, 1)),
    "merged": (block(Block(2, 20, 20, 3, 16)), Shape(1, 1, 2, 16, 1)),
    "merged, no bias": (block(Block(2, 20, 20, 3, 16, bias=False)), Shape(1, 1, 2, 16, 1)),
    "merged bf16": (block(Block(1, 36, 36, 2, 32, dtype=BF16)), Shape(1, 1, 2, 16, 2)),
    "fewer keys": (block(Block(2, 70, 24, 2, 32, merged=False)), Shape(4, 1, 1, 32, 1)),
    "odd heads": (block(Block(1, 20, 20, 3, 12)), Shape(1, 1, 2, 16, 1)),
}


def emitted(name: str) -> CudaSource:
    problem, shape = CASES[name]
    source = templates.emit(problem, shape.schedule())
    assert isinstance(source, CudaSource), source.reason
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: emitted(name) for name in CASES}


@pytest.fixture(scope="module")
def kernels(sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(list(sources.values()))


def inputs_of(problem: Problem, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    found = []
    for i in problem.graph.inputs:
        t = problem.graph.type_of(i)
        x = rng.integers(0, 4, t.shape) > 0 if t.dtype is DType.BOOL else rng.standard_normal(t.shape)
        found.append(round_bf16(x.astype(np.float32)) if t.dtype is DType.BF16 else x.astype(t.dtype.numpy))
    return found


def compare(got: np.ndarray, problem: Problem, inputs: list[np.ndarray], name: str) -> None:
    """Near the value in float64; NaN where that is."""
    with np.errstate(all="ignore"):
        want = evaluate(problem.graph, inputs, precise=True)[0]
    unit = {F16: 2.0**-11, BF16: 2.0**-8}[problem.graph.type_of(problem.graph.outputs[0]).dtype]
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
    finite = np.isfinite(want)
    rms = float(np.sqrt(np.mean(np.square(want[finite])))) + 1e-30
    error = float(np.abs(got.astype(np.float64) - want)[finite].max(initial=0.0))
    assert error <= 6 * unit * max(rms, float(np.abs(want[finite]).max(initial=0.0))), (name, error / unit, rms)


@pytest.mark.parametrize("defer", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("name", list(CASES))
def test_values(name: str, defer: bool, sources: dict[str, CudaSource], kernels: Emulated):
    problem = CASES[name][0]
    inputs = inputs_of(problem)
    got = run(kernels, problem, sources[name], inputs, defer=defer)[0]
    compare(got, problem, inputs, name)
