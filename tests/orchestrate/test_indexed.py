"""Sums by index along any axis, as gradients of embedding tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.typed import assert_allclose

from weft.device.cuda.facts import profile
from weft.frontends.torch import import_exported
from weft.generate.cuda import CudaGenerator
from weft.ir.declined import Declined
from weft.ir.graph import Graph
from weft.ir.opaque import embedding_table, indexed_sum
from weft.ir.reference import evaluate
from weft.kernels.formats import Format
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices
from weft.torch_backend.engine import opaque_call

ROWS, COUNT = 400, 333


class Function(torch.nn.Module):
    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        return self.run(*x)


def imported(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Graph:
    return import_exported(torch.export.export(Function(run), inputs)).graph


def indices() -> torch.Tensor:
    drawn = torch.randint(-ROWS, ROWS, (COUNT,), generator=torch.Generator().manual_seed(1))
    drawn[::3] = 7
    return drawn


def along(axis: int, shape: tuple[int, ...], kind: torch.dtype = torch.float32) -> tuple[Graph, list[torch.Tensor]]:
    """Values are added into zeros of a shape, along an axis."""

    def run(at: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        where = [None] * axis + [at]
        return torch.ops.aten.index_put(torch.zeros(shape, dtype=kind), where, values, True)

    values = torch.randn((*shape[:axis], COUNT, *shape[axis + 1 :]), generator=torch.Generator().manual_seed(2)).to(
        kind
    )
    return imported(run, indices(), values), [indices(), values]


@pytest.mark.parametrize(("axis", "shape"), [(0, (ROWS, 6)), (1, (5, ROWS)), (1, (3, ROWS, 4)), (2, (2, 3, ROWS))])
def test_the_sum_of_rows_is_the_sum_by_index(axis: int, shape: tuple[int, ...]) -> None:
    graph, given = along(axis, shape)
    found = find_alternatives(graph, on_gpu=True)
    ((extra, original),) = found.classes.items()
    assert indexed_sum(graph.nodes[original].attrs) is not None
    tables = [t for n in found.graph.nodes if (t := embedding_table(n.attrs)) is not None]
    assert [(t.rows, t.padding) for t in tables] == [(ROWS, -1)]
    values = [x.numpy() for x in given]
    (expected,) = evaluate(replace(graph, outputs=(original,)), values, opaque=opaque_call)
    (result,) = evaluate(replace(found.graph, outputs=(extra,)), values, opaque=opaque_call)
    assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    assert not find_alternatives(graph).classes and not find_alternatives(graph, strict=True, on_gpu=True).classes


def test_others_are_left_as_they_are() -> None:
    at, values, x = indices(), torch.randn(COUNT, 6), torch.randn(ROWS, 6)
    put, zeros = torch.ops.aten.index_put, torch.zeros
    others = {
        "something is added to": imported(lambda x, at, v: put(x, [at], v, True), x, at, values),
        "values are written": imported(lambda at, v: put(zeros(ROWS, 6), [at], v, False), at, values),
        "two tensors of indices": imported(
            lambda at, v: put(zeros(ROWS, ROWS), [at, at], v, True), at, torch.randn(COUNT)
        ),
        "float64": imported(lambda at, v: put(zeros(ROWS, 6, dtype=torch.float64), [at], v, True), at, values.double()),
        "indices of two axes": imported(
            lambda at, v: put(zeros(ROWS, 6), [at], v, True), at.reshape(9, 37), torch.randn(9, 37, 6)
        ),
        "values that are spread": imported(lambda at, v: put(zeros(ROWS, 6), [at], v, True), at, torch.randn(1, 6)),
    }
    for name, graph in others.items():
        found = find_alternatives(graph, on_gpu=True)
        assert not any(embedding_table(n.attrs) for n in found.graph.nodes), name


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_a_kernel_of_an_embeddings_gradient_is_offered(kind: torch.dtype) -> None:
    graph, _ = along(1, (64, ROWS), kind)
    found = find_alternatives(graph, on_gpu=True)
    made = enumerate_candidates(found.graph, alternatives=found).candidates
    (call,) = [i for i, n in enumerate(found.graph.nodes) if embedding_table(n.attrs) is not None]
    (candidate,) = [c for c in made if c.members == 1 << call]
    (rows,) = [f for f in format_choices(found.graph, candidate) if {*f.inputs, *f.outputs} == {Format.ROW}]
    problem = extract(found.graph, candidate, rows.inputs, rows.outputs, found).problem
    offers = CudaGenerator().schedules(problem, profile("h200"))
    assert not isinstance(offers, Declined)
    assert {dict(s.params)["template"] for s in offers} == {"embedding_gradient"}
