"""Logits of a vocabulary that is no multiple of a vector, their loss and its gradients: the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from tests.typed import assert_allclose

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.prims import Prim
from weft.ir.reference import evaluate, round_to
from weft.ir.types import Array, DType, TensorType
from weft.ir.verify import verify_graph
from weft.orchestrate.alternatives import Alternatives, find_alternatives, odd_columns
from weft.orchestrate.enumerate import enumerate_candidates

ROWS, WIDTH, WORDS, WIDE = 5, 6, 13, 16


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are looked at as well."""
    monkeypatch.setattr(odd_columns, "LEAST_FLOPS", 0)
    monkeypatch.setattr(odd_columns, "LEAST_COLUMNS", 2)


def cross_entropy(
    *,
    bias: bool = False,
    words: int = WORDS,
    dtype: DType = DType.BF16,
    shaped: bool = False,
    turned: bool = True,
    constant: bool = False,
    also: Callable[[GraphBuilder, NodeId], list[NodeId]] = lambda b, logits: [],
) -> Graph:
    """Loss of each row, and the gradients of what is multiplied by the weight, of the weight and of the bias."""
    b = GraphBuilder()
    x = b.input(TensorType(dtype, (ROWS, WIDTH)))
    shape = (words, WIDTH) if turned else (WIDTH, words)
    w = b.input(TensorType(DType.F32, shape))
    if constant:
        w = b.constant(np.ones(shape, np.float32))
    index = b.input(TensorType(DType.I64, (ROWS, 1)))
    narrow = b.cast(w, dtype)
    logits = b.add(Prim.MATMUL, x, b.transpose(narrow, (1, 0)) if turned else narrow)
    if bias:
        more = b.cast(b.input(TensorType(DType.F32, (words,))), dtype)
        logits = b.apply(Prim.ADD, logits, more)
    rows = b.reshape(logits, (1, ROWS, words)) if shaped else logits
    flat = b.reshape(b.cast(rows, DType.F32), (ROWS, words))
    full, one = (ROWS, words), (1,)
    less = b.apply(Prim.SUB, flat, b.broadcast(b.reduce(Prim.REDUCE_MAX, flat, one), full))
    total = b.reduce(Prim.REDUCE_SUM, b.apply(Prim.EXP, less), one)
    logs = b.apply(Prim.SUB, less, b.broadcast(b.apply(Prim.LOG, total), full))
    loss = b.apply(Prim.NEG, b.add(Prim.TAKE_ALONG, logs, index, attrs=a.GatherAttrs(1)))
    hit = b.apply(Prim.EQ, b.iota(full, 1, DType.I64), b.broadcast(index, full))
    share = b.apply(Prim.SELECT, hit, b.broadcast(b.scalar(-0.25, DType.F32), full), 0.0)
    sums = b.broadcast(b.reduce(Prim.REDUCE_SUM, share, one), full)
    wide = b.apply(Prim.SUB, share, b.apply(Prim.MUL, b.apply(Prim.EXP, logs), sums))
    d = b.cast(wide, dtype)
    dx = b.add(Prim.MATMUL, d, narrow if turned else b.transpose(narrow, (1, 0)))
    dw = b.add(Prim.MATMUL, b.transpose(d, (1, 0)), x)
    db = [b.reduce(Prim.REDUCE_SUM, wide, (0,))] if bias else []
    return b.build([loss, dx, dw, *db, *also(b, logits)])


def given(graph: Graph, largest: float = 1.0) -> list[Array]:
    rng = np.random.default_rng(3)
    found: list[Array] = []
    for i in graph.inputs:
        t = graph.type_of(i)
        if t.dtype.is_float:
            found.append(round_to((largest * rng.normal(size=t.shape)).astype(np.float32), t.dtype))
        else:
            found.append(rng.integers(0, WORDS, t.shape))
    return found


def stand_ins(graph: Graph) -> Alternatives:
    found = find_alternatives(graph, on_gpu=True)
    verify_graph(found.graph)
    return found


def agree(found: Alternatives, inputs: list[Array]) -> None:
    """Every value is that which it stands for, whichever others are taken."""
    pairs = list(found.classes.items())
    whole = Graph(found.graph.nodes, found.graph.inputs, tuple(n for p in pairs for n in p), found.graph.constants)
    with np.errstate(all="ignore"):
        values = evaluate(whole, inputs, precise=True)
    for other, one in zip(values[::2], values[1::2], strict=True):
        assert_allclose(other, one, rtol=1e-12, atol=1e-12)


def prims_of(found: Alternatives) -> Counter[Prim]:
    """Of what others stand for."""
    return Counter(found.graph.nodes[original].prim for original in found.classes.values())


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_the_same_numbers(dtype: DType, bias: bool, shaped: bool, turned: bool) -> None:
    graph = cross_entropy(bias=bias, shaped=shaped, dtype=dtype, turned=turned)
    found = stand_ins(graph)
    expected = {Prim.MATMUL: 2, Prim.REDUCE_MAX: 1, Prim.REDUCE_SUM: 3 if bias else 2, Prim.TAKE_ALONG: 1}
    assert prims_of(found) == expected
    agree(found, given(graph))


def test_rows_without_a_number_stay_so_and_no_other() -> None:
    graph = cross_entropy()
    inputs = given(graph)
    inputs[0][1, 2], inputs[0][3, 0] = np.inf, np.nan
    agree(stand_ins(graph), inputs)


def test_what_is_far_from_zero() -> None:
    """The largest logit of a row is below the zeros behind it, or its exponential nothing beside theirs."""
    graph = cross_entropy(bias=True)
    inputs = given(graph, 20.0)
    inputs[3] = round_to(np.full(WORDS, -3e4, np.float32), DType.F32)
    agree(stand_ins(graph), inputs)


def test_who_wants_the_logits_gets_them() -> None:
    def also(b: GraphBuilder, logits: NodeId) -> list[NodeId]:
        return [logits, b.slice(logits, (0, 1), (ROWS, 2), (1, 1))]

    graph = cross_entropy(also=also)
    found = stand_ins(graph)
    (cut,) = (extra for extra, original in found.classes.items() if original == graph.outputs[3])
    assert found.graph.nodes[cut].prim is Prim.SLICE
    agree(found, given(graph))


def test_one_kernel_has_the_rows_and_writes_whole_vectors() -> None:
    graph = cross_entropy()
    found = stand_ins(graph)
    nodes = found.graph.nodes
    (product,) = (i for i in bits(found.extra) if nodes[i].prim is Prim.MATMUL and nodes[i].type.shape == (ROWS, WIDE))
    groups = enumerate_candidates(found.graph, alternatives=found).candidates
    rows = [c for c in groups if product in c.inputs and any(nodes[o].type.shape == (ROWS, WIDE) for o in c.outputs)]
    reductions = {sum(nodes[i].prim in (Prim.REDUCE_SUM, Prim.REDUCE_MAX) for i in bits(c.members)) for c in rows}
    assert max(reductions) == 3


@pytest.mark.parametrize(
    "graph",
    [cross_entropy(words=WIDE), cross_entropy(constant=True), cross_entropy(words=12, dtype=DType.F32)],
    ids=["whole vectors", "a constant", "whole vectors of f32"],
)
def test_where_it_is_not_offered(graph: Graph) -> None:
    found = find_alternatives(graph, on_gpu=True)
    assert not any(found.graph.nodes[original].prim is Prim.REDUCE_MAX for original in found.classes.values())


def test_neither_on_a_processor_nor_of_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not find_alternatives(cross_entropy()).classes
    monkeypatch.setattr(odd_columns, "LEAST_FLOPS", 1 << 30)
    assert not find_alternatives(cross_entropy(), on_gpu=True).classes
