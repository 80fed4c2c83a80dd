"""Modules whose layers become one kernel of `weft.compile`: skips, residuals, formulas, each layer its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from tests.generate.cuda.tensor_emulator import Emulated, run
from tests.slow import few
from torch import nn

from weft.frontends.torch import import_exported
from weft.generate.cuda import templates
from weft.generate.cuda.mlp import wide as mlp_wide
from weft.generate.cuda.mlp.match import Chain, chain
from weft.generate.cuda.mlp.shapes import MlpConfig
from weft.ir.graph import Graph, bits
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.source import CudaSource
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits

Function = Callable[[torch.Tensor], torch.Tensor]
ROWS = 40


class Radiance(nn.Module):
    """The input again beside the middle layer (arXiv:2003.08934, appendix A)."""

    def __init__(self, width: int, given: int = 15) -> None:
        super().__init__()
        self.below = nn.ModuleList([nn.Linear(given, width), nn.Linear(width, width)])
        self.above = nn.ModuleList([nn.Linear(width + given, width), nn.Linear(width, width)])
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for layer in self.below:
            h = torch.relu(layer(h))
        h = torch.cat([x, h], -1)
        for layer in self.above:
            h = torch.relu(layer(h))
        return self.last(h)


class Residual(nn.Module):
    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), act, nn.Linear(width, width)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)


class Own(nn.Module):
    """Functions between layers."""

    def __init__(self, *functions: Function, width: int = 32) -> None:
        super().__init__()
        sizes = (3, *(width,) * len(functions), 2)
        self.layers = nn.ModuleList(nn.Linear(k, n) for k, n in pairwise(sizes))
        self.functions = functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, f in zip(self.layers, self.functions, strict=False):
            x = f(layer(x))
        return self.layers[-1](x)


class Dense(nn.Module):
    """Every layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16 + 24 * i, 24) for i in range(3))
        self.last = nn.Linear(16 + 72, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for layer in self.layers:
            found.append(torch.relu(layer(torch.cat(found, -1))))
        return self.last(torch.cat(found, -1))


WAVE: Function = lambda x: x * torch.sin(30 * x)  # noqa: E731
BUMP: Function = lambda x: torch.exp(-x * x)  # noqa: E731
SNAKE: Function = lambda x: x + torch.sin(2 * x) ** 2 / 2  # noqa: E731
CASES: Function = lambda x: torch.where(x > 0, x, torch.exp(x) - 1)  # noqa: E731
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "radiance field": (lambda: Radiance(48), (ROWS, 15)),
    "radiance field, wide": (lambda: Radiance(272), (ROWS, 15)),
    "residual": (lambda: Residual(32, nn.SiLU()), (ROWS, 8)),
    "residual, wide, in batches": (lambda: Residual(288, nn.GELU()), (2, ROWS // 2, 8)),
    "a formula": (lambda: Own(WAVE, WAVE), (ROWS, 3)),
    "each its own": (lambda: Own(torch.relu, BUMP, SNAKE, CASES, torch.tanh, WAVE), (ROWS, 3)),
    "dense": (Dense, (ROWS, 16)),
}


@pytest.mark.parametrize("name", few(MODULES, 1))
def test_one_kernel_near_float64(name: str) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module = make().bfloat16().eval()
    x = torch.randn(shape).bfloat16()
    with torch.no_grad():
        program = torch.export.export(module, (x,))
        eager, wanted = module(x).double().numpy(), copy.deepcopy(module).double()(x.double()).numpy()
    problem, inputs = _whole(import_exported(program).graph, x.float().numpy())
    p = chain(problem)
    assert isinstance(p, Chain), p.reason
    wide = max(layer.n for layer in p.layers) > 256
    chosen = mlp_wide.MlpWideConfig(False, 1, 4, 64, 1) if wide else MlpConfig(False, 1, 1, 0, 0, 1, 1)
    source = templates.emit(problem, chosen.schedule())
    assert isinstance(source, CudaSource), source
    got = np.asarray(run(Emulated([source]), problem, source, inputs)[0], dtype=np.float64).reshape(wanted.shape)
    error, own = (float(np.sqrt(np.mean((y - wanted) ** 2))) for y in (got, eager))
    assert error <= 1.2 * own + 0.25 * 2.0**-8 * float(np.sqrt(np.mean(wanted**2))), (error, own)


def _whole(graph: Graph, x: np.ndarray) -> tuple[Problem, list[np.ndarray]]:
    """The one group that holds all products, with its inputs."""
    found = find_alternatives(clean_up(graph, strict=False).graph, strict=False)
    products = {i for i, n in enumerate(found.graph.nodes) if n.prim is Prim.MATMUL}
    for c in enumerate_candidates(found.graph, EnumerationLimits(attention=True), found).candidates:
        if products <= set(bits(c.members)) and len(products) > 1:
            cut = extract(found.graph, c, (Format.ROW,) * len(c.inputs), (Format.ROW,) * len(c.outputs))
            types = [cut.problem.graph.type_of(i) for i in cut.problem.graph.inputs]
            values = [
                x if found.graph.nodes[i].prim is Prim.INPUT else found.graph.constant(i).astype(np.float32)
                for i in cut.inputs
            ]
            return cut.problem, [v.reshape(t.shape) for v, t in zip(values, types, strict=True)]
    raise AssertionError("no group holds all products")
