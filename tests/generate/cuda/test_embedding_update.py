"""Embedding tables updated where their gradient is summed: numbers, results over operands, what is declined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from benchmarks.cases.embedding_gradient import embedding_problem, updated_problem
from tests.generate.cuda.products import BF16, F16, F32
from tests.generate.cuda.tensor_emulator import Emulated, emitted, rounded, run
from tests.generate.cuda.test_templates import A100, H200, compiled_well

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import CudaGenerator
from weft.generate.cuda.embedding_gradient.kernel import MANY, EmbeddingConfig
from weft.generate.cuda.embedding_gradient.match import EmbeddingGradient, embedding_gradient
from weft.generate.cuda.predict import predicted_us
from weft.generate.library.execute import TORCH_DTYPE
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.codec import kernel_from_json, kernel_to_json
from weft.kernels.formats import Format
from weft.kernels.measurement import Verdict
from weft.kernels.source import CudaSource
from weft.tune.inputs import roles
from weft.tune.verify import build_reference, compare

Array = npt.NDArray[np.generic]
CASES: dict[str, tuple[Problem, EmbeddingConfig]] = {
    "momentum": (updated_problem((4, 9), 50, 128), EmbeddingConfig(32, 4)),
    "momentum, padding": (updated_problem((3, 40), 20, 24, padding=0), EmbeddingConfig(8, 4)),
    "momentum, several turns": (updated_problem((33,), 17, 160), EmbeddingConfig(4, 4, 2)),
    "momentum, columns apart": (updated_problem((9, 9), 41, 100), EmbeddingConfig(8, 4, 2, 3)),
    "momentum, one column": (updated_problem((100,), 300, 1), EmbeddingConfig(1, 1)),
    "momentum, many of a row": (updated_problem((400,), 5, 40, padding=2), EmbeddingConfig(8, 4, 2, 2)),
    "momentum, more than are held": (updated_problem((1100,), 40, 8), EmbeddingConfig(2, 4, 1)),
    "momentum, f16": (updated_problem((60,), 75, 24, dtype=F16), EmbeddingConfig(2, 8, 3)),
    "momentum, bf16": (updated_problem((70,), 33, 40, dtype=BF16), EmbeddingConfig(8, 8)),
    "momentum, odd columns of bf16": (updated_problem((50,), 65, 7, dtype=BF16), EmbeddingConfig(8, 1)),
    "momentum, gradient of bf16": (updated_problem((50,), 23, 36, dtype=BF16, weights=F32), EmbeddingConfig(8, 4)),
    "adam": (updated_problem((2, 25), 31, 64, rule="adam"), EmbeddingConfig(16, 4)),
    "adam, tails": (updated_problem((40,), 13, 152, rule="adam"), EmbeddingConfig(4, 4)),
    "adam, many of a row": (updated_problem((300,), 2, 96, rule="adam", dtype=F16), EmbeddingConfig(2, 8)),
    "adam, tied weights": (updated_problem((2, 40), 37, 72, rule="adam", tied=True), EmbeddingConfig(8, 4, 2)),
    "adam, weights of bf16": (updated_problem((40,), 29, 24, rule="adam", weights=BF16), EmbeddingConfig(4, 4, 2)),
}


def drawn(problem: Problem, *, seed: int = 0) -> list[Array]:
    """Gradients that have exact sums, indices, tables, and the optimizer's numbers."""
    rng = np.random.default_rng(seed)
    found: list[Array] = []
    m = embedding_gradient(problem)
    assert isinstance(m, EmbeddingGradient), m
    for k, i in enumerate(problem.graph.inputs):
        t = problem.graph.type_of(i)
        if k == m.index:
            found.append(rng.integers(0, m.rows, t.shape))
        elif k == m.dy:
            found.append(rng.integers(-2, 3, t.shape).astype(np.float32))
        elif t.shape:
            found.append(rounded(np.abs(rng.standard_normal(t.shape)).astype(np.float32), t.dtype).astype(np.float32))
        else:
            found.append(np.asarray(rng.uniform(0.01, 1.0), np.float32))
    return found


def right(problem: Problem, inputs: list[Array]) -> list[Array]:
    """The framework's sums, rounded as the call would, and NumPy's update."""
    m = embedding_gradient(problem)
    assert isinstance(m, EmbeddingGradient)
    graph = problem.graph
    dy, index = torch.from_numpy(inputs[m.dy]).double(), torch.from_numpy(inputs[m.index])
    sums = torch.ops.aten.embedding_dense_backward(dy, index, m.rows, m.padding, False).numpy()
    b = GraphBuilder()
    moved: dict[NodeId, NodeId] = {}
    for i, n in enumerate(graph.nodes):
        plain = n.prim not in (Prim.INPUT, Prim.OPAQUE)
        moved[i] = b.add(n.prim, *(moved[j] for j in n.inputs), attrs=n.attrs) if plain else b.input(n.type)
    given = [*inputs, rounded(sums, m.dtype).astype(np.float32)]
    call = next(i for i, n in enumerate(graph.nodes) if n.prim is Prim.OPAQUE)
    order = sorted([*graph.inputs, call])
    places = {**{node: k for k, node in enumerate(graph.inputs)}, call: len(graph.inputs)}
    update = b.build([moved[o] for o in graph.outputs])
    values = [given[places[i]].astype(graph.type_of(i).dtype.numpy) for i in order]
    return [np.asarray(x) for x in evaluate(update, values)]


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return emitted(CASES)


@pytest.fixture(scope="module")
def kernels(sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(list(sources.values()))


def near(problem: Problem, got: list[Array], wanted: list[Array]) -> None:
    """Within a rounding or two of what is computed in f32."""
    unit = {F32: 2.0**-21, F16: 2.0**-10, BF16: 2.0**-7}
    assert len(got) == len(problem.graph.outputs)
    for x, y, o in zip(got, wanted, problem.graph.outputs, strict=True):
        one, other = np.asarray(x, np.float64), np.asarray(y, np.float64)
        scale = max(1.0, float(np.abs(other).max()))
        assert np.abs(one - other).max() <= unit[problem.graph.type_of(o).dtype] * scale


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_numpy(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES[name][0]
    inputs = drawn(problem)
    near(problem, run(kernels, problem, sources[name], inputs), right(problem, inputs))


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("name", CASES)
def test_results_may_be_written_over_operands(
    name: str, order: int, sources: dict[str, CudaSource], kernels: Emulated
) -> None:
    """Each over each, whichever warp is ahead; the numbers are the same bits."""
    problem, source = CASES[name][0], sources[name]
    inputs = drawn(problem, seed=1)
    plain = run(kernels, problem, source, inputs)
    count = len(problem.graph.outputs)
    for turned in range(count):
        over = {k: 2 + (k + turned) % count for k in range(count)}
        assert {(i, k) for k, i in over.items()} <= {*source.input_output_aliases}
        got = run(kernels, problem, source, inputs, order=order, over=over)
        for x, y in zip(got, plain, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_row_of_many_indices_is_updated_once() -> None:
    problem = CASES["momentum, many of a row"][0]
    assert np.bincount(drawn(problem)[1].reshape(-1)).max() > MANY


def test_the_gradient_itself_may_be_one_of_the_results() -> None:
    problem = updated_problem((60,), 11, 24)
    call = next(i for i, n in enumerate(problem.graph.nodes) if n.prim is Prim.OPAQUE)
    graph = replace(problem.graph, outputs=(call, *problem.graph.outputs))
    problem = Problem(graph, str(graph), problem.input_formats, (Format.ROW,) * 3)
    source = CudaGenerator().emit(problem, EmbeddingConfig(4, 4).schedule())
    assert isinstance(source, CudaSource)
    inputs = drawn(problem)
    near(problem, run(Emulated([source]), problem, source, inputs), right(problem, inputs))


@pytest.mark.parametrize("name", ["momentum, padding", "momentum, bf16", "adam", "adam, weights of bf16"])
def test_within_what_a_kernel_is_held_to(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    problem = CASES[name][0]
    m = embedding_gradient(problem)
    assert isinstance(m, EmbeddingGradient)
    assert roles(problem.graph)[m.index].index_below == m.rows, "all of the table is met"
    reference = build_reference(problem, seed=0)
    assert not reference.opaque
    for case in reference.cases:
        given = [x.float().numpy() if x.is_floating_point() else x.numpy() for x in case.inputs]
        results = run(kernels, problem, sources[name], given)
        for got, expected, o in zip(results, case.expected, problem.graph.outputs, strict=True):
            value = torch.from_numpy(np.ascontiguousarray(got)).to(TORCH_DTYPE[problem.graph.type_of(o).dtype])
            found = compare(value, expected, case.kind.value)
            assert found.verdict is Verdict.OK, found


def test_a_saved_kernel_says_what_may_be_written_over(sources: dict[str, CudaSource]) -> None:
    source = sources["adam"]
    assert source.input_output_aliases == tuple((i, k) for i in (2, 3, 4) for k in range(3))
    assert kernel_from_json(kernel_to_json(source)) == source
    for other in ("adam, weights of bf16", "adam, tied weights"):
        assert sources[other].input_output_aliases == source.input_output_aliases
    gradient = CudaGenerator().emit(embedding_problem((9,), 20, 8), EmbeddingConfig(2, 4).schedule())
    assert isinstance(gradient, CudaSource) and gradient.input_output_aliases == ()
    told = kernel_to_json(gradient)
    assert isinstance(told, dict) and "input_output_aliases" not in told


OF_NETWORKS = {
    "DLRM, momentum": updated_problem((2048,), 100_000, 64),
    "DLRM, adam": updated_problem((2048,), 100_000, 64, rule="adam"),
    "GPT-2, adam": updated_problem((8, 512), 50257, 768, rule="adam", tied=True),
    "BERT, adam": updated_problem((16, 128), 30522, 768, rule="adam", padding=0),
    "wide, bf16": updated_problem((8192,), 32000, 4096, dtype=BF16),
    "narrow": updated_problem((512,), 1_000_000, 16, dtype=F16, weights=F32),
}


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("name", OF_NETWORKS)
def test_tables_of_networks(name: str, facts: GpuFacts) -> None:
    problem = OF_NETWORKS[name]
    found = CudaGenerator().schedules(problem, facts)
    assert not isinstance(found, Declined), found.reason
    assert {s.param("template") for s in found} == {"embedding_gradient"}
    bytes_moved = sum(problem.graph.type_of(i).nbytes for i in (*problem.graph.inputs[2:4], *problem.graph.outputs))
    fastest = bytes_moved / facts.peak_bandwidth / 1e3
    assert all(0.8 * fastest < (predicted_us(problem, s, facts) or 0) < 3000 for s in found)
    made = [CudaGenerator().emit(problem, s) for s in found]
    sources = [x for x in made if isinstance(x, CudaSource)]
    assert sources == made
    compiled_well(sources, "sm_90a" if facts is H200 else "sm_80", facts)


def graph_of(build: str) -> Graph:
    """A call with something behind it that no update of a table is."""
    problem = embedding_problem((9,), 12, 8)
    b = GraphBuilder()
    table = TensorType(F32, (12, 8))
    dy, index = b.input(TensorType(F32, (9, 8))), b.input(TensorType(DType.I64, (9,)))
    g = b.add(Prim.OPAQUE, dy, index, attrs=problem.graph.nodes[-1].attrs)
    if build == "other order":
        turned = b.add(Prim.TRANSPOSE, b.input(TensorType(F32, (8, 12))), attrs=a.TransposeAttrs((1, 0)))
        return b.build([b.apply(Prim.ADD, g, turned)])
    if build == "by column":
        return b.build([b.apply(Prim.ADD, g, b.broadcast(b.input(TensorType(F32, (8,))), table.shape))])
    if build == "sum of rows":
        return b.build([b.add(Prim.REDUCE_SUM, g, attrs=a.ReduceAttrs((0,)))])
    if build == "mask":
        return b.build([b.apply(Prim.GT, g, b.input(table))])
    wide = b.apply(Prim.MUL, b.cast(g, DType.F64), b.input(TensorType(DType.F64, table.shape)))
    return b.build([b.cast(wide, F32)])


@pytest.mark.parametrize("build", ["other order", "by column", "sum of rows", "mask", "f64"])
def test_what_is_left_to_others(build: str) -> None:
    graph = graph_of(build)
    problem = Problem(graph, str(graph), (Format.ROW,) * len(graph.inputs), (Format.ROW,) * len(graph.outputs))
    found = embedding_gradient(problem)
    assert isinstance(found, Declined) and "update" in found.reason
    assert isinstance(CudaGenerator().schedules(problem, H200), Declined)


def test_vectors_fit_the_widest_operand() -> None:
    problem = CASES["momentum, gradient of bf16"][0]
    assert isinstance(CudaGenerator().emit(problem, EmbeddingConfig(8, 8).schedule()), Declined)
