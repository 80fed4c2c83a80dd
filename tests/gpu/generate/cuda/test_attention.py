"""Attention on a real GPU: every schedule of many shapes against float64, on normal and on adversarial inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.generate.cuda.attention.test_attention import CASES, inputs_of
from tests.generate.cuda.attention.test_attention_linear import CASES as LINEAR
from tests.generate.cuda.attention.test_attention_tma import CASES as WARPGROUPS
from tests.generate.cuda.attentions import BF16, F16, F32, Block, Heads, block, linear, plain
from tests.gpu.machine import Gpu, Known
from tests.typed import numbers

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.attention.shapes import SplitAttentionConfig
from weft.generate.library.execute import TORCH_DTYPE
from weft.ir.declined import Declined
from weft.ir.reference import evaluate
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource
from weft.tune.verify import build_reference, compare

pytestmark = pytest.mark.gpu

LIMIT_S = 300
SHAPES: dict[str, Problem] = {
    **{name: problem for name, (problem, _) in CASES.items()},
    **{
        f"heads of {size}, {d.value}{', causal' if causal else ''}": plain(
            (2, 3), 130, 130 if causal else 201, size, dtype=d, causal=causal
        )
        for size in (16, 32, 64, 80, 128)
        for d in (F16, BF16, F32)
        for causal in (False, True)
    },
    "heads of 256": plain((1, 2), 70, 150, 256),
    "odd everything": plain((3, 5), 61, 67, 23, 29, dtype=BF16),
    "mask of keys": plain((2, 4), 100, 300, 64, mask=(2, 1, 1, 300)),
    "mask of all": plain((2, 4), 100, 300, 64, mask=(2, 4, 100, 300)),
    "bias of heads": plain((2, 4), 49, 49, 32, mask=(1, 4, 49, 49), mask_dtype=F16),
    "grouped heads": plain((2, 2), 65, 190, 64, heads=8, causal=False),
    "bert": block(Block(2, 128, 128, 12, 64)),
    "bert bf16": block(Block(1, 128, 128, 12, 64, dtype=BF16)),
    "bert f32": block(Block(1, 128, 128, 12, 64, dtype=F32)),
    "vit": block(Block(1, 197, 197, 12, 64)),
    "segformer": block(Block(1, 1024, 256, 5, 32, merged=False)),
    "one row": plain((2, 4), 1, 777, 64),
    "long": plain((1, 2), 1024, 1024, 64),
    **{f"linear, {name}": problem for name, (problem, _) in LINEAR.items()},
    "linear, efficientvit 14": linear(Heads(2, (8, 8), 16, 14, 14, format=Format.LAST)),
    "linear, efficientvit 7": linear(Heads(1, (16, 16), 16, 7, 7)),
    "linear, many tokens": linear(Heads(1, (2, 2), 32, 64, 64, dtype=F32)),
}


def kernels_of(name: str, facts: GpuFacts) -> list[CudaSource]:
    """Every schedule."""
    found = templates.schedules(SHAPES[name], facts)
    assert not isinstance(found, Declined), (name, found.reason)
    sources = [templates.emit(SHAPES[name], s) for s in found]
    assert all(isinstance(s, CudaSource) for s in sources), name
    return [s for s in sources if isinstance(s, CudaSource)]


@pytest.mark.parametrize(
    "name", [n for n, p in SHAPES.items() if not n.startswith("linear") and p.graph.type_of(0).dtype is F32]
)
def test_tf32(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    problem, sources = SHAPES[name], kernels_of(name, replace(facts, tf32=True))
    sources = [s for s in sources if s.schedule.param("template") == "attention_tf32"]
    assert sources
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    inputs = inputs_of(problem)
    want = numbers(evaluate(problem.graph, inputs, precise=True)[0])
    for source in sources:
        got = machine.run(problem, source, inputs, 2)[0].astype(np.float64)
        error = float(np.sqrt(np.mean(np.square(got - want)) / np.mean(np.square(want))))
        assert error <= 6e-4, (str(source.schedule), error)


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_schedule(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    judged(SHAPES[name], kernels_of(name, facts), machine)


GIVEN = {f"warpgroups, {name}": case for name, case in WARPGROUPS.items()} | {
    name: case for name, case in CASES.items() if isinstance(case[1], SplitAttentionConfig)
}
"""Problems with shapes that a model might not offer."""


@pytest.mark.parametrize("name", list(GIVEN))
def test_given_shapes(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    if facts.capability != 90:
        pytest.skip("warpgroups and clusters are Hopper's")
    problem, shape = GIVEN[name]
    source = templates.emit(problem, shape.schedule())
    assert isinstance(source, CudaSource), source.reason
    judged(problem, [source], machine)


def judged(problem: Problem, sources: list[CudaSource], machine: Gpu) -> None:
    """Every kernel on every input set of the tuner."""
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    types = [problem.graph.type_of(i).dtype for i in problem.graph.inputs]
    out = TORCH_DTYPE[problem.graph.type_of(problem.graph.outputs[0]).dtype]
    cases = build_reference(problem, seed=5).cases
    wrong = []
    for source in sources:
        for case in cases:
            inputs = [x.float().numpy() if t is BF16 else x.numpy() for x, t in zip(case.inputs, types, strict=True)]
            got = torch.from_numpy(np.ascontiguousarray(machine.run(problem, source, inputs, 2)[0])).to(out)
            finding = compare(got, case.expected[0], case.kind.value)
            if finding.verdict is not Verdict.OK:
                wrong.append((str(source.schedule), finding))
    assert not wrong, wrong
