"""Products as problems, and their calls by recorded algorithms of cuBLASLt."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from benchmarks.cases.linear import Sizes, linear, problem_of
from tests.runtime.plans import step_of

from weft import fission
from weft.device.cuda.facts import GpuFacts
from weft.generate.library import LibraryGenerator
from weft.generate.library.algorithm import with_room
from weft.generate.library.execute import TORCH_DTYPE, BoundCall
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.plan import Plan
from weft.kernels.source import LibraryCall
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices

__all__ = ["linear", "problem_of"]
FACTS = GpuFacts()
M, N, K = 5, 8, 6


def expected(
    inputs: list[torch.Tensor],
    *,
    bias: bool = False,
    residual: bool = False,
    activation: str = "",
    turned: bool = False,
    right: str = "constant",
) -> torch.Tensor:
    """In float64."""
    x, w, *others = (t.double() for t in inputs)
    y = ((x.T if turned else x[0]) @ (w.T if right == "t" else w))[None]
    for _ in range(bias + residual):
        y = y + others.pop(0)
    if activation == "gelu":
        return torch.nn.functional.gelu(y, approximate="tanh")
    return y.relu() if activation else y


def calls(problem: Problem, facts: GpuFacts = FACTS) -> list[LibraryCall]:
    """By every algorithm that is offered."""
    found = LibraryGenerator().schedules(problem, facts)
    assert not isinstance(found, Declined)
    made = [LibraryGenerator().emit(problem, s) for s in found if dict(s.params)["form"] == "lt"]
    assert all(isinstance(x, LibraryCall) for x in made), made
    return [x for x in made if isinstance(x, LibraryCall)]


def inputs_of(problem: Problem, seed: int = 0, device: str = "cpu") -> list[torch.Tensor]:
    """Normal numbers."""
    chance = torch.Generator(device).manual_seed(seed)
    types = [problem.graph.type_of(i) for i in problem.graph.inputs]
    return [torch.randn(t.shape, generator=chance, device=device).to(TORCH_DTYPE[t.dtype]) for t in types]


def launcher(
    problem: Problem,
    call: LibraryCall,
    inputs: list[torch.Tensor],
    room: torch.Tensor | None = None,
    order: torch.memory_format = torch.contiguous_format,
) -> Any:
    """What runs the call, and the result that it writes."""
    graph = problem.graph
    weights = {
        k: inputs[k]
        for k, i in enumerate(graph.inputs)
        if isinstance(at := graph.nodes[i].attrs, a.InputAttrs) and at.is_weight
    }
    t = graph.type_of(graph.outputs[0])
    out = torch.full(t.shape, torch.nan, device=inputs[0].device).to(TORCH_DTYPE[t.dtype], memory_format=order)
    if room is not None:
        call = with_room(call, len(inputs))
    given = [*inputs, *([room] if room is not None else [])]
    return BoundCall(call, weights, device=inputs[0].device).launcher(given, [out]), out


def run(
    problem: Problem, call: LibraryCall, inputs: list[torch.Tensor], room: torch.Tensor | None = None
) -> torch.Tensor:
    """Its result."""
    launch, out = launcher(problem, call, inputs, room)
    launch()
    return out


def network(dtype: DType = DType.F32, sizes: Sizes = (M, N, K)) -> Graph:
    """relu(x · w + bias + residual) with constant weights."""
    m, n, k = sizes
    chance = np.random.default_rng(3)
    b = GraphBuilder()
    x, residual = b.input(TensorType(dtype, (m, k))), b.input(TensorType(dtype, (m, n)))
    w, bias = (b.constant(chance.normal(size=s).astype(dtype.numpy)) for s in ((k, n), (n,)))
    y = b.add(Prim.ADD, b.add(Prim.MATMUL, x, w), b.broadcast(bias, (m, n)))
    (y,) = fission.apply(b, "relu", (b.add(Prim.ADD, y, residual),), {})  # type: ignore[misc]
    return b.build([y])


def network_value(graph: Graph, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """In float64."""
    bias, w = sorted((torch.from_numpy(c).double().to(x.device) for c in graph.constants.values() if c.ndim), key=len)
    w, bias = (w, bias) if w.dim() == 2 else (bias, w)
    return (x.double() @ w + bias + residual.double()).relu()


def plan_of(graph: Graph, number: int, facts: GpuFacts = FACTS) -> Plan:
    """The whole graph as one call by the algorithm of that number (-1: the last)."""
    candidate = max(enumerate_candidates(graph).candidates, key=lambda c: c.members.bit_count())
    choice = format_choices(graph, candidate)[0]
    cut = extract(graph, candidate, choice.inputs, choice.outputs)
    call = calls(cut.problem, facts)[number]
    step = step_of(candidate, cut, call)
    return Plan("library", (step,))
