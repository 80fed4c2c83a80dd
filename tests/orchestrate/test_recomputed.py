"""Gradients that compute forward values again: which sets, and that none waits for itself."""

from __future__ import annotations

import numpy as np
import pytest
from tests.orchestrate.graphs import residual_net

from weft.ir.attrs import ConvAttrs, ReduceAttrs, TransposeAttrs
from weft.ir.graph import Graph, GraphBuilder, Mask, NodeId, bits, mask_of
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType, TensorType
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.legality import EnumerationLimits, Legality
from weft.orchestrate.recomputed import TOGETHER, recomputed
from weft.orchestrate.stored import Stored

F32, BF16 = DType.F32, DType.BF16
ROWS, WIDTH = 512, 64
TURNED = TransposeAttrs((1, 0))


def normed(layers: int = 1, *, scaled: bool = False) -> tuple[Graph, dict[str, NodeId]]:
    """Products with a norm over their rows behind each, and its gradient; nodes of the first by name.

    With `scaled` sums the gradient reads vectors that are computed from them, by one and by two primitives.
    """
    b = GraphBuilder()
    x = b.input(TensorType(BF16, (ROWS, WIDTH)))
    weights = [b.input(TensorType(BF16, (WIDTH, WIDTH))) for _ in range(layers + 1)]
    over, named, saved = ReduceAttrs((0,)), dict[str, NodeId](), []
    for k in range(layers):
        y = b.add(Prim.MATMUL, x, weights[k])
        wide = b.cast(y, F32)
        mean = b.apply(Prim.MUL, b.add(Prim.REDUCE_SUM, wide, attrs=over), b.scalar(1 / ROWS, F32))
        away = b.apply(Prim.SUB, wide, mean)
        x = b.cast(b.apply(Prim.MAX, away, b.scalar(0.0, F32)), BF16)
        saved.append(away)
        named.setdefault("y", y)
        named.setdefault("away", away)
    g = b.add(Prim.MATMUL, x, weights[-1])
    outputs = []
    for k in reversed(range(layers)):
        g = b.add(Prim.MATMUL, g, b.add(Prim.TRANSPOSE, weights[k + 1], attrs=TURNED))
        wide = b.cast(g, F32)
        first = b.add(Prim.REDUCE_SUM, wide, attrs=over)
        second = b.add(Prim.REDUCE_SUM, b.apply(Prim.MUL, wide, saved[k]), attrs=over)
        named.update(g=g, first=first, second=second)
        if scaled:
            outputs += [first, second]
            first, second = (b.apply(Prim.MUL, x, b.scalar(1 / ROWS, F32)) for x in (first, second))
            second = b.apply(Prim.MUL, second, b.scalar(0.5, F32))
            named.update(mean=first, along=second)
        inner = b.apply(Prim.SUB, b.apply(Prim.SUB, wide, b.apply(Prim.MUL, saved[k], second)), first)
        g = b.cast(inner, BF16)
        named["dx"] = g
        outputs += [] if scaled else [first, second]
    return b.build([g, *outputs]), named


def found_in(graph: Graph) -> list[tuple[Mask, tuple[NodeId, ...]]]:
    stored = Stored.of(graph)
    return list(recomputed(graph, stored, Legality.of(graph, stored, EnumerationLimits())))


def test_a_norms_gradient_reads_what_products_left() -> None:
    graph, at = normed()
    stored, found = Stored.of(graph), found_in(graph)
    sums = [m for m, written in found if written == (at["first"], at["second"])]
    results = [m for m, written in found if written == (at["dx"],)]
    large = {i for i, n in enumerate(graph.nodes) if n.type.size == ROWS * WIDTH}
    for sets in (sums, results):
        assert sets and all(m >> at["away"] & 1 for m in sets)
        assert any(large & set(bits(stored.inputs_of(m))) == {at["y"], at["g"]} for m in sets)


def test_vectors_that_a_gradient_reads_are_one_kernel() -> None:
    graph, at = normed(scaled=True)
    stored = Stored.of(graph)
    candidates = enumerate_candidates(graph, EnumerationLimits()).candidates
    readers = [c for c in candidates if c.outputs == (at["dx"],) and {at["mean"], at["along"]} <= set(c.inputs)]
    assert any(c.members >> at["away"] & 1 for c in readers)
    sums = {at["first"], at["second"]}
    (alone,) = (c for c in candidates if c.outputs == (at["along"],) and c.members.bit_count() > 1)
    (both,) = (c for c in candidates if c.outputs == tuple(sorted((at["mean"], at["along"]))))
    assert alone.members.bit_count() == 2 and both.members.bit_count() == 3
    assert sums & set(alone.inputs) == {at["second"]} and sums <= set(both.inputs)
    assert not stored.dag.missing(both.members)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_no_set_waits_for_itself_or_holds_what_must_stand_alone(layers: int) -> None:
    graph, _ = normed(layers)
    stored, found = Stored.of(graph), found_in(graph)
    legality = Legality.of(graph, stored, EnumerationLimits())
    assert found and len(set(found)) == len(found)
    for members, written in found:
        outputs = mask_of(written)
        plain = members & ~legality.linear
        assert outputs & members == outputs and len(written) <= TOGETHER and not legality.admit(plain)
        assert stored.dag.missing(members) & legality.linear, "others grow"
        assert not any(stored.dag.ancestors[i] & outputs for i in bits(stored.inputs_of(members))), "it would wait"
        reached = outputs
        for m in reversed(list(bits(members))):
            if reached >> m & 1:
                reached |= stored.dag.producers[m] & members
        assert reached == members, "nothing is computed for nobody"
        assert (members & legality.linear).bit_count() <= 1
        kinds = {CATEGORY[graph.nodes[m].prim] for m in bits(plain)}
        assert kinds <= {Category.ELEMENTWISE, Category.REDUCE}


def test_where_what_is_kept_is_too_far_away_a_set_begins_at_sixteen_bits() -> None:
    """Behind a long chain, as that of a pool's gradient is; what it ends in is stored once."""

    def chained(length: int) -> tuple[list[Mask], NodeId, Stored]:
        b = GraphBuilder()
        x, w, v = (b.input(TensorType(BF16, shape)) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)))
        y = b.add(Prim.MATMUL, x, w)
        g = b.cast(b.add(Prim.MATMUL, b.cast(b.apply(Prim.EXP, b.cast(y, F32)), BF16), v), F32)
        for k in range(length):
            g = b.apply(Prim.ADD, g, b.scalar(1.0 + k, F32))
        narrow = b.cast(g, BF16)
        last = b.cast(b.apply(Prim.MUL, b.cast(narrow, F32), b.cast(y, F32)), BF16)
        graph = b.build([b.add(Prim.MATMUL, last, w)])
        stored = Stored.of(graph)
        found = recomputed(graph, stored, Legality.of(graph, stored, EnumerationLimits()))
        plain = [m for m, written in found if written == (last,)]
        return plain, narrow, stored

    short, narrow, _ = chained(2)
    assert short and all(m >> narrow & 1 for m in short)
    long, narrow, stored = chained(EnumerationLimits().max_members)
    assert long and all(stored.inputs_of(m) >> narrow & 1 for m in long)


def activated(*, constant: bool = False, others: bool = False) -> tuple[Graph, dict[str, NodeId]]:
    """Two products with an activation between them, and the gradient of that; `others` read what its product leaves."""
    b = GraphBuilder()
    x, gradient = (b.input(TensorType(BF16, (ROWS, WIDTH))) for _ in range(2))
    first, second = (b.input(TensorType(BF16, (WIDTH, WIDTH))) for _ in range(2))
    bias = b.cast(b.input(TensorType(F32, (WIDTH,))), BF16)
    y = b.add(Prim.MATMUL, x, first)
    wide = b.cast(b.apply(Prim.ADD, y, bias), F32)
    slope = b.apply(Prim.ADD, b.apply(Prim.ERF, wide), b.scalar(1.0, F32))
    z = b.add(Prim.MATMUL, b.cast(b.apply(Prim.MUL, wide, slope), BF16), second)
    ones = np.ones((WIDTH, WIDTH), np.float32)
    turned = b.constant(ones, BF16) if constant else b.add(Prim.TRANSPOSE, second, attrs=TURNED)
    g = b.add(Prim.MATMUL, b.apply(Prim.MUL, gradient, z), turned)
    inner = b.cast(b.apply(Prim.MUL, b.cast(g, F32), slope), BF16)
    more = [b.apply(Prim.EXP, g)] if others else []
    dx = b.add(Prim.MATMUL, inner, b.add(Prim.TRANSPOSE, first, attrs=TURNED))
    return b.build([z, dx, *more]), {"y": y, "g": g, "inner": inner}


def test_a_product_ends_in_the_gradient_of_an_activation() -> None:
    """Which reads what the forward product left, and neither the slope nor what it is the slope at."""
    graph, at = activated()
    stored, large = Stored.of(graph), ROWS * WIDTH
    sets = [m for m, written in found_in(graph) if written == (at["inner"],) and m >> at["g"] & 1]
    assert sets
    for members in sets:
        read = {i for i in bits(stored.inputs_of(members)) if graph.type_of(i).size == large}
        assert at["y"] in read and all(graph.type_of(i).dtype is BF16 for i in read)
    candidates = enumerate_candidates(graph, EnumerationLimits()).candidates
    assert {(m, (at["inner"],)) for m in sets} <= {(c.members, c.outputs) for c in candidates}


@pytest.mark.parametrize("changed", ["constant", "others"])
def test_no_product_of_constants_and_none_that_others_read_ends_in_recomputed_values(changed: str) -> None:
    graph, _ = activated(**{changed: True})
    stored = Stored.of(graph)
    legality = Legality.of(graph, stored, EnumerationLimits())
    assert not any(members & legality.linear for members, _ in found_in(graph))


def test_they_are_candidates_and_inference_has_none() -> None:
    graph, at = normed()
    limits = EnumerationLimits()
    candidates = {(c.members, c.outputs) for c in enumerate_candidates(graph, limits).candidates}
    assert set(found_in(graph)) <= candidates
    assert any(written == (at["first"], at["second"]) for _, written in candidates)
    assert not found_in(residual_net(2))


def test_a_convolution_whose_weight_changes_is_alone_where_no_template_takes_it() -> None:
    b = GraphBuilder()
    x, w = b.input(TensorType(BF16, (1, 8, 8, 8))), b.input(TensorType(BF16, (8, 8, 1, 1)))
    attrs = ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1)
    y = b.add(Prim.CONV, x, w, attrs=attrs)
    z = b.apply(Prim.MAX, y, b.scalar(0.0, BF16))
    graph = b.build([z])
    for allowed in (True, False):
        found = enumerate_candidates(graph, EnumerationLimits(changing_weights=allowed)).candidates
        assert any(c.members >> y & 1 and c.members >> z & 1 for c in found) is allowed


@pytest.mark.parametrize(("perm", "together"), [((0, 3, 1, 2), True), ((0, 2, 3, 1), False)])
def test_such_a_convolution_may_read_its_weight_with_channels_last(perm: tuple[int, ...], together: bool) -> None:
    b = GraphBuilder()
    shape = [8, 8, 3, 3]
    x, w = (
        b.input(TensorType(BF16, (1, 8, 8, 8))),
        b.input(TensorType(BF16, tuple(shape[perm.index(k)] for k in range(4)))),
    )
    turned = b.transpose(w, perm)
    y = b.add(Prim.CONV, x, turned, attrs=ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 1))
    graph = b.build([b.apply(Prim.MAX, y, b.scalar(0.0, BF16))])
    found = enumerate_candidates(graph, EnumerationLimits(changing_weights=False)).candidates
    both = 1 << y | 1 << turned
    assert any(c.members == both for c in found) is together
    assert not any(c.members & both and c.members & ~both for c in found)
