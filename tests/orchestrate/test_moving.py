"""Operators of many elementwise steps on slices: taken whole, with what is elementwise around them, or not at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft import fission
from weft.ir.attrs import ConvAttrs
from weft.ir.graph import Graph, GraphBuilder, NodeId, bits
from weft.ir.prims import CATEGORY, Category, Prim
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind
from weft.orchestrate.enumerate import enumerate_candidates, sensible_cuts
from weft.orchestrate.moving import moving
from weft.orchestrate.recomputed import LEAST
from weft.orchestrate.stored import Stored

F32, BF16 = DType.F32, DType.BF16
ONES = ConvAttrs((1, 1), (0, 0), (0, 0), (1, 1), 1)
SIZE = 16


def step(**how: Any) -> tuple[Graph, dict[str, NodeId]]:
    """Part of a training step: convolution, scale, ReLU, pool, convolution; and the gradients in front of the pool."""
    b = GraphBuilder()
    named: dict[str, NodeId] = {}
    where = {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1), **how}

    def product(x: NodeId) -> NodeId:
        return b.add(Prim.CONV, x, b.input(TensorType(BF16, (8, 8, 1, 1))), attrs=ONES)

    scale = b.input(TensorType(F32, (8, 1, 1)))
    x = product(b.input(TensorType(BF16, (4, 8, SIZE, SIZE))))
    scaled = b.apply(Prim.MUL, b.cast(x, F32), scale)
    relu = b.apply(Prim.MAX, b.cast(scaled, BF16), 0.0)
    y, taps = fission.apply(b, "max_pool_taps", [relu], where)  # type: ignore[misc]
    z = product(y)
    dy = b.apply(Prim.ADD, product(z), product(z))
    (dx,) = fission.apply(b, "max_pool_taps_gradient", [dy, taps], {"sizes": (SIZE, SIZE), **where})  # type: ignore[misc]
    masked = b.apply(Prim.SELECT, b.apply(Prim.GT, relu, 0.0), dx, 0.0)
    first = b.reduce(Prim.REDUCE_SUM, b.cast(masked, F32), (0, 2, 3))
    second = b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, b.cast(masked, F32), b.cast(x, F32)), (0, 2, 3))
    last = b.cast(b.apply(Prim.MUL, b.cast(masked, F32), first), BF16)
    named.update(x=x, relu=relu, y=y, taps=taps, dy=dy, dx=dx, masked=masked, first=first, second=second, last=last)
    return b.build([product(last), second]), named


def test_a_pool_and_its_gradient_are_taken_whole() -> None:
    graph, at = step()
    stored = Stored.of(graph)
    forward, backward = moving(graph, stored)
    assert forward.results == 1 << at["y"] | 1 << at["taps"] and backward.results == 1 << at["dx"]
    for operator in (forward, backward):
        assert operator.members.bit_count() > 24 and operator.inner == operator.members & ~operator.results
        assert not sensible_cuts(graph, stored, (forward, backward)) & operator.inner
        for candidate in enumerate_candidates(graph).candidates:
            if candidate.kind in (Kind.GROUP, Kind.ORIGIN) and candidate.members & operator.members:
                assert not set(bits(operator.inner)) & {*candidate.inputs, *candidate.outputs}


def test_what_is_elementwise_around_them_is_in_their_kernels() -> None:
    graph, at = step()
    found = enumerate_candidates(graph).candidates
    assert SIZE * SIZE * 8 * 4 >= LEAST

    def large(outputs: tuple[str, ...]) -> list[set[NodeId]]:
        """What candidates read that is no vector and no table."""
        written = tuple(sorted(at[x] for x in outputs))
        return [{i for i in c.inputs if graph.type_of(i).rank == 4} for c in found if c.outputs == written]

    assert {at["x"]} in large(("y", "taps")), "the ReLU's result is computed for each window that reads it"
    assert {at["relu"]} in large(("y", "taps"))
    products = {
        i for i, n in enumerate(graph.nodes) if CATEGORY[n.prim] is Category.LINEAR and at["dy"] > i > at["taps"]
    }
    gradients = products - {min(products)} | {at["taps"]}
    assert gradients in large(("dx",))
    assert gradients | {at["relu"]} in large(("masked",))
    for written in (("first",), ("second",), ("first", "second")):
        assert gradients | {at["x"]} in large(written)
    assert {at["first"], at["x"]} | gradients in large(("last",))


def test_no_set_waits_for_itself_or_chooses_maxima_twice() -> None:
    graph, at = step()
    stored = Stored.of(graph)
    for candidate in enumerate_candidates(graph).candidates:
        outputs = sum(1 << o for o in candidate.outputs)
        assert not any(stored.dag.ancestors[i] & outputs for i in candidate.inputs)
        if candidate.kind is Kind.GROUP and candidate.members >> at["dx"] & 1:
            assert not candidate.members >> at["taps"] & 1


@pytest.mark.parametrize("how", [{"kernel": (2, 2), "pads": (0, 0)}])
def test_a_gradient_of_few_steps_grows_as_others_do(how: dict[str, Any]) -> None:
    graph, at = step(**how)
    found = moving(graph, Stored.of(graph))
    assert not any(x.members >> at["dx"] & 1 for x in found)


def test_an_operator_with_sums_inside_is_none() -> None:
    b = GraphBuilder()
    x = b.input(TensorType(F32, (4, 64)))
    weights = [b.constant(np.ones(64, np.float32)) for _ in range(2)]
    y = fission.apply(b, "layer_norm", [x, *weights], {"axes": (-1,), "eps": 1e-5})
    assert isinstance(y, tuple)
    graph = b.build(y)
    assert not moving(graph, Stored.of(graph))
