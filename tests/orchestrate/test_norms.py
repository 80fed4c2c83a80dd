"""Norms in the kernels of products: which candidates there are, and that their problems mean what the graph means."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from weft.fission.layer_norm import layer_norm
from weft.fission.rms_norm import rms_norm
from weft.fission.softmax import softmax
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate
from weft.kernels.formats import Format
from weft.orchestrate import norms as groups
from weft.orchestrate.alternatives import Alternatives, find_alternatives, norms
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract
from weft.orchestrate.legality import EnumerationLimits

F16 = DType.F16
M, K, N = 6, 96, 24


def block(kind: str = "layer", *, length: int = K, read_again: bool = False) -> Graph:
    """x = a @ w + b + residual; norm(x) @ w + b; `read_again`: norm(x) + residual is a result, too."""
    rng = np.random.default_rng(1)
    b = GraphBuilder()
    a, residual = (b.input(TensorType(F16, (1, M, length))) for _ in range(2))

    def weight(*shape: int) -> NodeId:
        return b.constant(rng.standard_normal(shape).astype(np.float16))

    def product(x: NodeId, columns: int) -> NodeId:
        y = b.add(Prim.MATMUL, b.reshape(x, (M, b.type_of(x).shape[-1])), weight(b.type_of(x).shape[-1], columns))
        return b.apply(Prim.ADD, b.reshape(y, (1, M, columns)), weight(columns))

    x = b.apply(Prim.ADD, residual, product(a, length))
    if kind == "layer":
        y = layer_norm(b, x, weight(length), weight(length), axes=(2,), eps=1e-5)
    elif kind == "rms":
        y = rms_norm(b, x, weight(length), axes=(2,), eps=1e-5)
    else:
        y = softmax(b, x, axis=2)
    assert isinstance(y, int)
    z = product(y, N)
    return b.build([x, z, b.apply(Prim.ADD, residual, y)] if read_again else [x, z])


def candidates(graph: Graph, *, own: bool = False) -> tuple[Alternatives, list[Candidate]]:
    """All, and those that hold a product and a norm or its sums."""
    found = find_alternatives(graph, on_gpu=True)
    whole = enumerate_candidates(found.graph, EnumerationLimits(attention=True), found)
    nodes = found.graph.nodes

    def with_sums(c: Candidate) -> bool:
        prims = {nodes[m].prim for m in bits(c.members)}
        products = sum(nodes[m].prim is Prim.MATMUL for m in bits(c.members))
        return products == 1 and Prim.REDUCE_SUM in prims

    assert own or not any(_own(found.graph, c) for c in whole.candidates if with_sums(c))
    return found, [c for c in whole.candidates if with_sums(c)]


def _own(graph: Graph, c: Candidate) -> bool:
    sums = [graph.nodes[m] for m in bits(c.members) if graph.nodes[m].prim is Prim.REDUCE_SUM]
    return any(graph.type_of(n.inputs[0]).shape == (1, M, K) for n in sums)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "OFFERED", True)


def values(alternatives: Alternatives, given: Mapping[NodeId, np.ndarray], c: Candidate) -> dict[NodeId, np.ndarray]:
    """What a candidate's problem computes from values of the graph."""
    cut = extract(alternatives.graph, c, [Format.ROW] * len(c.inputs), [Format.ROW] * len(c.outputs), alternatives)
    results = evaluate(cut.problem.graph, [given[i] for i in cut.inputs])
    return dict(zip(cut.outputs, results, strict=True))


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize("read_again", [False, True])
def test_sums_of_pieces_and_the_norm_on_the_way_mean_what_the_graph_means(read_again: bool) -> None:
    graph = block(read_again=read_again)
    found, kept = candidates(graph)
    leaving = [c for c in kept if len(c.outputs) == 3]
    reading = [c for c in kept if len(c.outputs) < 3]
    assert len(leaving) == 1
    stored = [c for c in reading if len(c.outputs) == 2]
    assert bool(stored) == read_again
    assert any(len(c.outputs) == 1 for c in reading)  # the product does not need the norm's result written
    rng = np.random.default_rng(2)
    inputs = [rng.standard_normal((1, M, K)).astype(np.float16) + np.float16(1000 * i) for i in range(2)]
    probes = tuple(dict.fromkeys(o for c in reading for o in c.outputs if o < len(graph)))
    whole = Graph(graph.nodes, graph.inputs, (graph.outputs[0], *probes), graph.constants)
    exact = dict(zip((graph.outputs[0], *probes), evaluate(whole, inputs), strict=True))
    given = dict(zip(graph.inputs, inputs, strict=True))
    given |= {i: np.asarray(graph.constant(i)) for i, n in enumerate(graph.nodes) if n.prim is Prim.CONSTANT}
    given |= values(found, given, leaving[0])
    assert np.array_equal(given[graph.outputs[0]], exact[graph.outputs[0]])
    for c in reading:
        for node, got in values(found, given, c).items():
            if node in exact:
                want = exact[node].astype(np.float64)
                assert np.abs(got.astype(np.float64) - want).max() <= 2e-3 * np.abs(want).max()


@pytest.mark.usefixtures("offered")
def test_other_lengths_norms_and_types_have_none() -> None:
    for graph in (block("softmax"), block("rms"), block(length=72)):
        found, kept = candidates(graph)
        assert not kept
        assert not found.apart


def test_nothing_is_offered_that_has_not_won() -> None:
    found, kept = candidates(block(read_again=True))
    assert not kept
    assert not found.apart


def test_norms_of_short_rows_are_those_of_their_product() -> None:
    for kind in ("layer", "rms"):
        graph = block(kind, length=groups.OWN_LONGEST, read_again=True)
        _, kept = candidates(graph, own=True)
        assert {len(c.outputs) for c in kept} == {1, 2}
    _, kept = candidates(block("softmax", length=32), own=True)
    assert not kept


@pytest.mark.usefixtures("offered")
def test_sets_are_not_grown_from_sums_of_pieces() -> None:
    graph = block()
    found, kept = candidates(graph)
    whole = enumerate_candidates(found.graph, EnumerationLimits(attention=True), found)
    plain = enumerate_candidates(graph, EnumerationLimits(attention=True))
    apart = [c for c in whole.candidates if c.members & found.apart]
    assert found.apart
    assert len(apart) == len(kept) <= 4
    assert len(whole.candidates) <= len(plain.candidates) + 60  # merged products have sets of their own
