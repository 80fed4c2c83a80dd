"""Updates and casts that have nothing to do with each other, in one launch."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir.attrs import ConcatAttrs, TransposeAttrs
from weft.ir.graph import Graph, GraphBuilder, Origin, bits
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Candidate, Kind
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.legality import EnumerationLimits
from weft.orchestrate.stored import Stored
from weft.orchestrate.unions import SMALL, TOGETHER

F32, BF16 = DType.F32, DType.BF16


def training(layers: int, width: int = 64) -> Graph:
    """Products by cast weights one after another, then an update of every weight and its momentum."""
    b = GraphBuilder()
    x, rate = b.input(TensorType(BF16, (8, width))), b.input(TensorType(F32, ()))
    weights = [b.input(TensorType(F32, (width, width))) for _ in range(layers)]
    momenta = [b.input(TensorType(F32, (width, width))) for _ in range(layers)]
    outputs = []
    for w in weights:
        x = b.add(Prim.MATMUL, x, b.cast(w, BF16))
    for w, m in zip(weights, momenta, strict=True):
        gradient = b.cast(b.add(Prim.MATMUL, b.add(Prim.TRANSPOSE, x, attrs=TransposeAttrs((1, 0))), x), F32)
        new = b.apply(Prim.ADD, b.apply(Prim.MUL, m, b.scalar(0.9, F32)), gradient)
        outputs += [new, b.apply(Prim.SUB, w, b.apply(Prim.MUL, new, rate))]
    return b.build([x, *outputs])


def joined(graph: Graph) -> list[Candidate]:
    limits = EnumerationLimits(unions=True)
    without = {(c.members, c.outputs) for c in enumerate_candidates(graph, EnumerationLimits()).candidates}
    found = enumerate_candidates(graph, limits).candidates
    assert without <= {(c.members, c.outputs) for c in found}
    return [c for c in found if (c.members, c.outputs) not in without]


@pytest.mark.parametrize("layers", [4, 5, TOGETHER // 2 + 1, TOGETHER])
def test_all_updates_and_all_casts(layers: int) -> None:
    graph = training(layers)
    found = joined(graph)
    results = set(graph.outputs[1:])
    ends = [c for c in found if set(c.outputs) <= results]
    starts = [c for c in found if c not in ends]
    alone = results - {o for c in ends for o in c.outputs}
    assert len(alone) == 2 * (2 * layers % TOGETHER == 2), "one that is left stays a group by itself"
    assert sorted(o for c in starts for o in c.outputs) == [i for i, n in enumerate(graph.nodes) if is_cast(graph, i)]
    assert all(len(c.outputs) <= TOGETHER and c.kind is Kind.GROUP for c in found)
    stored = Stored.of(graph)
    for c in found:
        assert not stored.dag.missing(c.members), "a plan with it would wait for itself"
        assert c.outputs == tuple(bits(stored.dag.written(c.members, stored.results)))


def is_cast(graph: Graph, i: int) -> bool:
    return graph.nodes[i].prim is Prim.CAST and graph.nodes[graph.nodes[i].inputs[0]].prim is Prim.INPUT


def test_few_or_large_ones_stay_apart() -> None:
    assert not joined(training(1))
    assert not joined(training(6, width=int(np.sqrt(SMALL / 2)) + 16))


def test_an_update_that_somebody_reads_ends_nothing() -> None:
    b = GraphBuilder()
    inputs = [b.input(TensorType(F32, (64,))) for _ in range(8)]
    rates = b.input(TensorType(F32, (64,)))
    seen = b.apply(Prim.TANH, b.reduce(Prim.REDUCE_SUM, rates, (0,)))
    updates = [b.apply(Prim.SUB, x, b.broadcast(seen, (64,))) for x in inputs]
    read = b.reduce(Prim.REDUCE_SUM, updates[0], (0,))
    graph = b.build([*updates, read])
    (c,) = joined(graph)
    assert updates[0] not in c.outputs and set(c.outputs) == set(updates[1:])


def test_inference_has_none() -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(F32, (8, 64))), b.input(TensorType(F32, (64, 64)), is_weight=True)
    y = b.apply(Prim.TANH, b.add(Prim.MATMUL, x, w))
    assert not joined(b.build([y, b.apply(Prim.EXP, y)]))


def sums(b: GraphBuilder, x: int) -> int:
    """Over rows, in one dimension."""
    return b.reshape(b.reduce(Prim.REDUCE_SUM, x, (0,)), (b.type_of(x).shape[1],))


def of_pieces(*, whole: bool) -> tuple[Graph, list[int], list[int], list[int]]:
    """Updates by sums, and some by gradients that an operator joins of nine pieces in f32 and rounds.

    Also the outputs by sums, the joined values, and what the operators give: the rounded ones, or, if the operator is
    the `whole` of the update, its result.
    """
    b = GraphBuilder()
    weights = [b.input(TensorType(F32, (72,))) for _ in range(10)]
    plain = [b.apply(Prim.SUB, w, sums(b, b.input(TensorType(F32, (16, 72))))) for w in weights[:6]]
    pieces = [[b.input(TensorType(F32, (16, 8))) for _ in range(9)] for _ in weights[6:]]
    inside, given, others = [], [], []
    for w, images in zip(weights[6:], pieces, strict=True):
        with b.origin(Origin("gradient", (), tuple(images))) as index:
            inside.append(b.add(Prim.CONCAT, *(sums(b, x) for x in images), attrs=ConcatAttrs(0)))
            given.append(b.cast(inside[-1], BF16))
            if whole:
                given[-1] = b.apply(Prim.SUB, w, b.cast(given[-1], F32))
        b.set_origin_results(index, (given[-1],))
        others.append(given[-1] if whole else b.apply(Prim.SUB, w, b.cast(given[-1], F32)))
    return b.build([*plain, *others]), plain, inside, given


def test_groups_begin_behind_operators() -> None:
    graph, _, inside, given = of_pieces(whole=False)
    (c,) = joined(graph)
    assert set(c.outputs) == set(graph.outputs)
    assert set(given) <= set(c.inputs)
    assert not set(inside) & set(c.inputs), "a library gives what its operator does, and stores nothing inside"


def test_groups_that_begin_inside_operators_are_joined_among_themselves() -> None:
    graph, plain, inside, given = of_pieces(whole=True)
    found = {frozenset(c.outputs): c for c in joined(graph)}
    assert set(found) == {frozenset(plain), frozenset(given)}
    assert set(inside) <= set(found[frozenset(given)].inputs)
