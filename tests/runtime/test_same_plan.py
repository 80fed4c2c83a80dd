"""An executable made anew for a graph with other constants: the plan, its device and its facts are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.runtime.fake_cuda import install
from tests.runtime.plans import library_plan

from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.runtime.any import AnyExecutable
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Executable, Linked

WEIGHTS = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)


def product(weights: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (3, 4)))
    return b.build([b.apply(Prim.EXP, b.add(Prim.MATMUL, x, b.constant(weights)))])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_plan_runs_with_the_constants_of_another_graph(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = product(WEIGHTS)
    linked = Linked(graph, library_plan(graph), {}, None, None, 1, {"capability": "90"})
    first: AnyExecutable = Executable(linked)
    if device == "cuda":
        install(monkeypatch)
        first = CudaExecutable(linked, device=torch.device("cpu"))  # what stands in for the GPU
    again = first.with_graph(product(WEIGHTS**2))
    assert type(again) is type(first) and again.device == first.device == torch.device("cpu")
    assert again.plan is first.plan and again.linked.facts == first.linked.facts
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for executable, weights in ((first, WEIGHTS), (again, WEIGHTS**2)):
        torch.testing.assert_close(executable(x)[0], (x @ torch.from_numpy(weights)).exp())
