"""Every width to 64 and some to 512, every remainder of rows to a million, every activation, on a GPU.

The error against float64 is at most 1.2 times that of the framework's operators in the same type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from tests.generate.cuda.mlps import BF16, F16, Net, mlp
from tests.gpu.machine import Gpu, Known
from torch.nn import functional

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu

LIMIT_S = 300
ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu, "silu": functional.silu, "gelu": functional.gelu, "tanh": torch.tanh,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid, "sin": torch.sin,
    "none": lambda x: x,
}  # fmt: skip
TYPES = {F16: torch.float16, BF16: torch.bfloat16}
WIDTHS = (*range(1, 65), *range(72, 257, 8), *range(67, 257, 19), *range(272, 513, 40), 257, 511, 512)
TILE, MILLION = 64, 1_000_000
"""Rows of a warpgroup."""


def _rows(i: int) -> int:
    whole = MILLION // TILE * TILE if i % 8 == 3 or i == 0 else (0, 5 * TILE, 65 * TILE)[(i - 1) % 3]
    return max(1, whole + i % TILE)


def nets() -> list[Net]:
    """One network of two layers for each width, all remainders of a tile among their rows."""
    names = list(ACTS)
    return [
        Net(_rows(i), (w, w, max(1, w - i % 3)), names[i % len(names)], (F16, BF16)[i // len(names) % 2])
        for i, w in enumerate(WIDTHS)
    ]


def test_the_sweep_holds_what_it_says() -> None:
    found = nets()
    assert {n.rows % TILE for n in found} == set(range(TILE))
    assert {n.act for n in found} == set(ACTS) and {n.dtype for n in found} == {F16, BF16}
    assert {1, MILLION} <= {n.rows for n in found}


@pytest.fixture(scope="module")
def sources(gpu: tuple[Gpu, GpuFacts]) -> tuple[list[tuple[Net, Problem, CudaSource]], Gpu]:
    machine, facts = gpu
    made = [emitted(i, n, facts) for i, n in enumerate(nets())]
    return made, Gpu(Known(machine.nvrtc, machine.arch, [s for _, _, s in made]), machine.arch)


def emitted(i: int, net: Net, facts: GpuFacts) -> tuple[Net, Problem, CudaSource]:
    """One of the schedules of a network, each in its turn."""
    problem = mlp(net)
    found = templates.schedules(problem, facts)
    assert not isinstance(found, Declined), (net, found.reason)
    source = templates.emit(problem, found[i % len(found)])
    assert isinstance(source, CudaSource), source
    return net, problem, source


@pytest.mark.parametrize("part", range(4))
def test_near_float64(part: int, sources: tuple[list[tuple[Net, Problem, CudaSource]], Gpu]) -> None:
    made, machine = sources
    wrong = {}
    for net, problem, source in made[part::4]:
        inputs = given(net, problem, "cuda")
        (got,) = machine.run(problem, source, [x.float().cpu().numpy() for x in inputs], 1)
        error, own, size = errors(net, inputs, got)
        unit = 2.0**-8 if net.dtype is BF16 else 2.0**-11
        if not error <= 1.2 * own + 0.25 * unit * size:
            wrong[str(net)] = source.schedule.params, error, own, size
    assert not wrong, wrong


def given(net: Net, problem: Problem, device: str) -> list[torch.Tensor]:
    """Random inputs and weights of a problem in its type."""
    chance = torch.Generator(device).manual_seed(net.rows)
    found = []
    for i in problem.graph.inputs:
        t = problem.graph.type_of(i)
        x = torch.randn(t.shape, generator=chance, device=device)
        if getattr(problem.graph.nodes[i].attrs, "is_weight", False):
            x *= 1.4 / t.shape[0] ** 0.5 if t.rank == 2 else 0.3
        found.append(x.to(TYPES[net.dtype]))
    return found


def errors(net: Net, inputs: Sequence[torch.Tensor], got: np.ndarray) -> tuple[float, float, float]:
    """Roots of mean squares: error of a result, that of torch's operators in the same type, and the exact result."""
    x, *held = inputs
    exact, own = x.double(), x
    left = iter(held)
    for k, n in zip(net.widths, net.widths[1:], strict=False):
        if k * n <= 16:  # the graph holds small constants itself
            data = torch.from_numpy(np.linspace(-1, 1, k * n).reshape(k, n).astype(np.float32))
            weight = data.to(x.device, x.dtype)
        else:
            weight = next(left)
        bias = next(left)
        assert isinstance(net.act, str)
        exact = ACTS[net.act](exact @ weight.double() + bias.double())
        own = ACTS[net.act](functional.linear(own, weight.t(), bias))
    found = torch.from_numpy(np.ascontiguousarray(got, dtype=np.float32)).to(x.device).double().reshape(exact.shape)

    def root(y: torch.Tensor) -> float:
        return float(y.square().mean().sqrt())

    return root(found - exact), root(own.double() - exact), root(exact)
