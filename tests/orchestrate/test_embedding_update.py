"""Gradients of embedding tables with the optimizer's update as one candidate: where it is offered, and where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.cases.embedding_gradient import embedding_problem
from tests.generate.cuda.test_templates import H200
from torch import nn

import weft
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.embedding_gradient.match import EmbeddingGradient, embedding_gradient
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.opaque import embedding_table
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices
from weft.orchestrate.legality import EnumerationLimits
from weft.orchestrate.select import select_by_windows
from weft.pipeline.problems import collect
from weft.pipeline.search.prices import Known, priced_offers
from weft.platform.cuda.platform import Cuda
from weft.training import step

F32 = DType.F32
ROWS, WIDTH, COUNT = 3000, 16, 40
WITH = EnumerationLimits(attention=True)


def is_gradient(graph: Graph, node: NodeId) -> bool:
    return embedding_table(graph.nodes[node].attrs) is not None


def fused(graph: Graph) -> list[Candidate]:
    """Candidates of a gradient of a table with more behind it."""
    found = enumerate_candidates(graph, WITH).candidates
    return [
        c
        for c in found
        if any(is_gradient(graph, m) for m in bits(c.members))
        and any(graph.nodes[m].prim is Prim.ADD for m in bits(c.members))
    ]


def trained(case: str = "") -> tuple[Graph, NodeId]:
    """A table is read, its gradient comes back through a product, and SGD with momentum updates it; and the gradient.

    `case`: what else reads a value, or lies otherwise.
    """
    b = GraphBuilder()
    of = TensorType(F32, (ROWS, WIDTH))
    table, moment = b.input(of), b.input(of)
    index = b.input(TensorType(DType.I64, (COUNT,)))
    matrix = b.input(TensorType(F32, (WIDTH, WIDTH)))
    rates = [b.broadcast(b.input(TensorType(F32, ())), of.shape) for _ in range(3)]
    read = b.add(Prim.GATHER, table, index, attrs=a.GatherAttrs(0))
    dy = b.add(Prim.MATMUL, read, matrix)
    call = embedding_problem((COUNT,), ROWS, WIDTH).graph.nodes[-1].attrs
    gradient = b.add(Prim.OPAQUE, dy, index, attrs=call)
    used, results = gradient, list[NodeId]()
    if case == "clipped":
        norm = b.apply(Prim.SQRT, _total(b, b.apply(Prim.MUL, gradient, gradient)))
        used = b.apply(Prim.DIV, gradient, b.broadcast(norm, of.shape))
    if case == "read by others":
        results.append(_total(b, gradient))
    if case == "a result":
        results.append(gradient)
    if case == "tied":
        left, right = (b.input(TensorType(DType.BF16, shape)) for shape in ((ROWS, 8), (8, WIDTH)))
        product = b.add(Prim.MATMUL, left, right)
        used = b.apply(Prim.ADD, b.cast(product, F32), gradient)
    if case == "by column":
        rates[0] = b.broadcast(b.input(TensorType(F32, (WIDTH,))), of.shape)
    g = b.apply(Prim.ADD, used, b.apply(Prim.MUL, rates[0], table))
    kept = b.apply(Prim.ADD, b.apply(Prim.MUL, rates[1], moment), g)
    change = b.apply(Prim.MUL, rates[2], kept)
    if case == "not convex":
        change = b.apply(Prim.MUL, change, b.broadcast(_total(b, kept), of.shape))
    if case == "summed behind":
        results.append(_total(b, kept))
    return b.build([kept, b.apply(Prim.SUB, table, change), *results]), gradient


def _total(b: GraphBuilder, x: NodeId) -> NodeId:
    return b.reshape(b.add(Prim.REDUCE_SUM, x, attrs=a.ReduceAttrs((0, 1))), ())


@pytest.mark.parametrize("case", ["", "summed behind"])
def test_a_gradient_and_the_update_of_its_table_are_one_candidate(case: str) -> None:
    graph, gradient = trained(case)
    (found,) = fused(graph)
    kept, weights, *_ = graph.outputs
    assert found.members >> gradient & 1 and found.outputs == (kept, weights)
    assert sorted(graph.nodes[m].prim.value for m in bits(found.members)) == [
        "add", "add", "mul", "mul", "mul", "opaque", "sub",
    ]  # fmt: skip
    (formats,) = format_choices(graph, found)
    problem = extract(graph, found, formats.inputs, formats.outputs).problem
    m = embedding_gradient(problem)
    assert isinstance(m, EmbeddingGradient) and m.update is not None
    assert (m.count, m.rows, m.width) == (COUNT, ROWS, WIDTH)
    assert len(m.update.results) == len(m.update.tables) == 2 and len(m.update.scalars) == 3
    assert not isinstance(CudaGenerator().schedules(problem, H200), Declined)


def test_the_gradient_of_a_product_of_the_same_weights_is_read_as_it_lies() -> None:
    graph, _ = trained("tied")
    (found,) = fused(graph)
    (product,) = (i for i, n in enumerate(graph.nodes) if n.prim is Prim.MATMUL and n.type.dtype is DType.BF16)
    assert product in found.inputs
    (formats,) = format_choices(graph, found)
    m = embedding_gradient(extract(graph, found, formats.inputs, formats.outputs).problem)
    assert isinstance(m, EmbeddingGradient) and m.update is not None
    assert sorted(x.dtype.value for x in m.update.tables) == ["bf16", "f32", "f32"]


@pytest.mark.parametrize("case", ["clipped", "read by others", "a result", "by column", "not convex"])
def test_it_is_not_where(case: str) -> None:
    assert not fused(trained(case)[0])


def test_a_processor_has_no_such_candidates() -> None:
    graph, gradient = trained()
    found = enumerate_candidates(graph, EnumerationLimits()).candidates
    assert [c.members for c in found if c.members >> gradient & 1] == [1 << gradient]


class Tables(nn.Module):
    """Three tables that are read by index, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20_000, WIDTH) for _ in range(3))
        self.layer = nn.Linear(3 * WIDTH, 1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(torch.cat([t(index[:, k]) for k, t in enumerate(self.tables)], 1))
        return found


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda x: torch.optim.SGD(x, lr=0.1, momentum=0.9, weight_decay=1e-4),
    "adam": lambda x: torch.optim.Adam(x, lr=1e-3),
    "adamw": lambda x: torch.optim.AdamW(x, lr=1e-3, weight_decay=1e-2),
}


class _Stopped(Exception):
    """Carries what is to be compiled."""


def step_graph(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> Graph:
    """Of a training step, as a search is given it."""

    def stop(imported: Any, *args: Any, **more: Any) -> None:
        raise _Stopped(imported)

    monkeypatch.setattr(step, "compile_imported", stop)
    monkeypatch.setattr(step, "EagerStep", lambda *a, **k: None)
    model = Tables()
    with pytest.raises(_Stopped) as stopped:
        weft.compile_step(
            model, nn.functional.mse_loss, OPTIMIZERS[optimizer](model.parameters()),
            torch.randint(0, 20_000, (512, 3)), torch.zeros(512, 1), options=weft.Options(budget_s=10),
        )  # fmt: skip
    imported: Any = stopped.value.args[0]
    graph: Graph = clean_up(imported.graph).graph
    return graph


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_plan_of_a_training_step_updates_tables_with_their_gradients(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By estimates alone: each table by one kernel, which writes the weights and the optimizer's state."""
    alternatives = Cuda.find_alternatives(step_graph(optimizer, monkeypatch))
    graph = alternatives.graph
    limits = Cuda.limits(weft.Options(), H200)
    found = enumerate_candidates(graph, limits, alternatives)
    problems = collect(graph, found.candidates, alternatives, H200, most_at_once=4000)
    offers, _ = priced_offers(problems, Known())
    solution, _ = select_by_windows(graph, offers, alternatives=alternatives, seconds=10)
    chosen = [offers[i].candidate for i in solution.chosen]
    updates = [c for c in chosen if any(is_gradient(graph, m) for m in bits(c.members))]
    assert len(updates) == 3
    for c in updates:
        assert len(c.outputs) == (2 if optimizer == "sgd" else 3)
        assert all(graph.type_of(o).shape == (20_000, WIDTH) for o in c.outputs)
