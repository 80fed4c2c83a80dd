"""Contractions on a real GPU: every template and schedule, exact on integers and near float64 on random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.generate.cuda.conv.test_group_conv import CASES as GROUPS
from tests.generate.cuda.conv.test_group_conv import LAYERS
from tests.generate.cuda.conv.test_halo import CASES as HALO
from tests.generate.cuda.conv.test_pooled import CASES as POOLED
from tests.generate.cuda.conv.test_separable import CASES as PAIRS
from tests.generate.cuda.conv.test_stacked import CASES as STACKED
from tests.generate.cuda.products import BF16, F16, F32, ROW, convolution, pair, pooled_convolution, product
from tests.generate.cuda.tensor_emulator import rounded, small_integers
from tests.generate.cuda.test_templates import CASES, TF32
from tests.gpu.machine import TF32_ERROR, Gpu, Known, normal
from tests.typed import assert_allclose, numbers

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu

LIMIT_S = 300
SHAPES: dict[str, Problem] = {
    **{name: problem for name, (problem, _) in CASES.items()},
    **{
        f"resnet 3x3 at 14, {d.value}": convolution(1, 256, 14, 14, 256, 3, 1, 1, dtype=d, residual=True)
        for d in (F16, BF16, F32)
    },
    "resnet 1x1 at 7": convolution(1, 512, 7, 7, 2048, 1, residual=True),
    "resnet 3x3 at 7, 16 images": convolution(16, 512, 7, 7, 512, 3, 1, 1),
    "stem": convolution(2, 3, 112, 112, 64, 7, 2, 3, fin=ROW),
    "last of candy": convolution(1, 32, 64, 64, 3, 9, before="reflect", fout=ROW, relu=False),
    **{f"halo, {name}": problem for name, (problem, _) in HALO.items()},
    **{f"groups, {name}": problem for name, problem in LAYERS.items()},
    **{f"pair, {name}": problem for name, (problem, _) in PAIRS.items()},
    **{f"pooled, {name}": POOLED[name][0] for name in ("2x2", "odd sizes, ceil", "3x3 strided", "stem", "a residual")},
    "pooled stem": pooled_convolution(2, 3, 112, 112, 64, 7, 2, 3, pool=(3, 2, 1), fin=ROW),
    "pooled at 14": pooled_convolution(1, 256, 14, 14, 256, 3, 1, 1),
    "pair at 7": pair(1, 1024, 7, 7, 256, residual=True),
    "pair at 14, 5x5, 4 images": pair(4, 384, 14, 14, 128, 5, 1, 2),
    "pair at 56, strided bf16": pair(2, 128, 56, 56, 64, 3, 2, 1, dtype=BF16),
    "resnet 3x3 at 7": convolution(1, 512, 7, 7, 512, 3, 1, 1),
    "first of candy": convolution(1, 3, 72, 72, 32, 9, before="reflect", relu=False),
    "upsampled 3x3": convolution(1, 64, 28, 28, 32, 3, before="up reflect", relu=False),
    "depthwise 7x7": convolution(1, 96, 28, 28, 96, 7, 1, 3, groups=96),
    **{
        f"gemm {m}x{n}x{k} {d.value}": product((m, k), (n, k), turn_right=True, dtype=d)
        for d in (F16, BF16, F32)
        for m, n, k in ((128, 768, 768), (197, 768, 3072), (1000, 1000, 1000), (3, 1000, 2048), (513, 72, 264))
    },
    "gelu": product((128, 768), (768, 3072), gelu=True),
    "attention scores": product((12, 128, 64), (12, 128, 64), turn_right=True, weight=False, bias=False),
    "attention values": product((12, 128, 128), (12, 128, 64), weight=False, bias=False),
    "large": product((2048, 3072), (768, 3072), turn_right=True),
}


ROUNDED: dict[str, Problem] = {
    **{name: problem for name, (problem, _) in TF32.items()},
    **{name: p for name, p in SHAPES.items() if p.graph.type_of(p.graph.inputs[0]).dtype is F32},
    "pooled": POOLED["tf32"][0],
    "3x3 strided": convolution(4, 96, 29, 29, 64, 3, 2, 1, dtype=F32),
    "1x1": convolution(4, 64, 28, 28, 256, 1, residual=True, dtype=F32),
    "3x3 at 28": convolution(4, 64, 28, 28, 96, 3, 1, 1, residual=True, dtype=F32),
    "nt": product((3, 200, 72), (3, 136, 72), weight=False, turn_right=True, bias=False, dtype=F32),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_schedule(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    check(machine, SHAPES[name], facts, exact=name != "gelu")


@pytest.mark.parametrize("name", list(ROUNDED))
def test_every_schedule_in_tf32(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    check(machine, ROUNDED[name], replace(facts, tf32=True), exact=True)


def check(machine: Gpu, problem: Problem, facts: GpuFacts, *, exact: bool) -> None:
    """Integers exactly; random numbers near float64."""
    found = templates.schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    whole, random = small_integers(problem), normal(problem)
    right = evaluate(problem.graph, whole, precise=True)
    near = evaluate(problem.graph, random, precise=True)
    k = max(int(np.prod(problem.graph.type_of(i).shape[1:])) for i in problem.graph.inputs)
    sources = [templates.emit(problem, schedule) for schedule in found]
    made = [source for source in sources if isinstance(source, CudaSource)]
    assert made == sources
    machine = Gpu(Known(machine.nvrtc, machine.arch, made), machine.arch)
    for schedule, source in zip(found, made, strict=True):
        rounds = facts.tf32 and schedule.param("template") in templates.TENSOR
        for x, y, node in zip(machine.run(problem, source, whole), right, problem.graph.outputs, strict=True):
            dtype = problem.graph.type_of(node).dtype
            if exact:
                np.testing.assert_array_equal(x, rounded(y, dtype), err_msg=str(schedule))
        for x, y, node in zip(machine.run(problem, source, random), near, problem.graph.outputs, strict=True):
            dtype = problem.graph.type_of(node).dtype
            unit = {DType.F16: 2.0**-11, DType.BF16: 2.0**-8, DType.F32: 2.0**-24}[dtype]
            rms = float(np.sqrt(np.mean(np.square(y)))) + 1e-30
            error = float(np.sqrt(np.mean(np.square(x.astype(np.float64) - numbers(y))))) / rms
            assert error <= (TF32_ERROR if rounds else unit) + 2.0**-24 * k**0.5, (str(schedule), error)


EMULATED: dict[str, Mapping[str, Any]] = {
    "halo": HALO, "groups": GROUPS, "pair": PAIRS, "pooled": POOLED, "stacked": STACKED,
}  # fmt: skip


@pytest.mark.parametrize("name", [f"{kind}, {x}" for kind, cases in EMULATED.items() for x in cases])
def test_shapes_of_the_emulation(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    kind, _, case = name.partition(", ")
    problem, shape = EMULATED[kind][case]
    source = templates.emit(problem, shape.schedule())
    assert isinstance(source, CudaSource), source
    if source.capability > facts.capability:
        pytest.skip("no clusters")
    whole = small_integers(problem, most=2 if kind in ("halo", "groups", "pair") else 1)
    exact = evaluate(problem.graph, whole, precise=True)
    for x, y, node in zip(machine.run(problem, source, whole), exact, problem.graph.outputs, strict=True):
        dtype = problem.graph.type_of(node).dtype
        if "mean" in case:  # the inverse of a count is rounded
            assert_allclose(x, y, rtol=8e-3 if dtype is BF16 else 1e-3)
        else:
            np.testing.assert_array_equal(x, rounded(y, dtype))
