from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from tests import goldens

from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, NodeId
from weft.ir.passes import clean_up
from weft.ir.passes.roll_recurrences import LEAST_STEPS, RollRecurrencesPass
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType

STEPS = 7


class Loop:
    """h = a_t h + b_t over slices of two tensors (batch, steps, width), as a framework unrolls it."""

    def __init__(self, steps: int = STEPS, dtype: DType = DType.F32, *, zero: bool = True) -> None:
        self.b = GraphBuilder()
        self.steps, self.dtype = steps, dtype
        self.factor, self.term = (self.b.input(TensorType(dtype, (2, steps + 1, 5))) for _ in range(2))
        self.start = (
            self.b.broadcast(self.b.scalar(0.0, dtype), (2, 5)) if zero else self.b.input(TensorType(dtype, (2, 5)))
        )

    def at(self, x: NodeId, t: int) -> NodeId:
        return self.b.reshape(self.b.slice(x, (0, t, 0), (2, 1, 5), (1, 1, 1)), (2, 5))

    def states(self, order: Callable[[int], int] = lambda t: t, *, swap: bool = False) -> list[NodeId]:
        b, h, found = self.b, self.start, []
        for t in range(self.steps):
            product = b.add(
                Prim.MUL, *((h, self.at(self.factor, order(t))) if swap else (self.at(self.factor, order(t)), h))
            )
            pair = (self.at(self.term, order(t)), product) if swap else (product, self.at(self.term, order(t)))
            h = b.add(Prim.ADD, *pair)
            found.append(h)
        return found

    def stack(self, values: list[NodeId], axis: int = 1) -> NodeId:
        shape = self.b.type_of(values[0]).shape
        pieces = [self.b.reshape(v, (*shape[:axis], 1, *shape[axis:])) for v in values]
        return self.b.add(Prim.CONCAT, *pieces, attrs=a.ConcatAttrs(axis))


def prims(graph: Graph) -> Counter[str]:
    return Counter(n.prim.value for n in graph.nodes)


def same(graph: Graph, rolled: Graph, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    xs = [rng.standard_normal(graph.type_of(i).shape).astype(graph.type_of(i).dtype.numpy) for i in graph.inputs]
    tolerance = 2e-3 if any(graph.type_of(i).dtype is DType.F16 for i in graph.inputs) else 1e-6
    for mine, theirs in zip(evaluate(rolled, xs), evaluate(graph, xs), strict=True):
        np.testing.assert_allclose(mine.astype(np.float64), theirs.astype(np.float64), rtol=tolerance, atol=tolerance)


def rolled(graph: Graph) -> Graph:
    """The cleaned graph, which holds one scan and no chain."""
    found = clean_up(graph, verify=True)
    assert ("roll-recurrences" in dict(found.log)) and prims(found.graph)["scan"] == 1
    assert prims(found.graph)["concat"] <= 1 and prims(found.graph)["mul"] <= 3
    same(graph, found.graph)
    return found.graph


def left_alone(graph: Graph) -> None:
    after, changes = RollRecurrencesPass().run(graph)
    assert changes == 0 and after is graph


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("swap", [False, True])
def test_a_stack_of_the_states(axis: int, swap: bool) -> None:
    loop = Loop()
    rolled(loop.b.build([loop.stack(loop.states(swap=swap), axis)]))


def test_from_the_end() -> None:
    loop = Loop()
    states = loop.states(lambda t: STEPS - t)
    rolled(loop.b.build([loop.stack(states)]))


def test_every_second_position() -> None:
    loop = Loop(6)
    loop.factor, loop.term = (loop.b.input(TensorType(DType.F32, (2, 12, 5))) for _ in range(2))
    rolled(loop.b.build([loop.stack(loop.states(lambda t: 2 * t + 1))]))


def test_a_state_before_the_first() -> None:
    loop = Loop(zero=False)
    rolled(loop.b.build([loop.stack(loop.states())]))


def test_halves() -> None:
    loop = Loop(dtype=DType.F16)
    rolled(loop.b.build([loop.stack(loop.states())]))


def test_a_factor_that_is_always_the_same() -> None:
    loop = Loop()
    b, h, states = loop.b, loop.start, []
    decay = b.input(TensorType(DType.F32, (5,)))
    for t in range(STEPS):
        h = b.add(Prim.ADD, b.apply(Prim.MUL, decay, h), loop.at(loop.term, t))
        states.append(h)
    rolled(b.build([loop.stack(states)]))


def test_the_last_state_is_a_result_too() -> None:
    loop = Loop()
    states = loop.states()
    rolled(loop.b.build([loop.stack(states), states[-1]]))


def test_what_each_step_computes_of_its_state() -> None:
    """As in a selective scan: a product with a row that belongs to the step, and more."""
    loop = Loop()
    b = loop.b
    c = b.input(TensorType(DType.F32, (2, STEPS, 5)))
    bias = b.input(TensorType(DType.F32, (2, 1)))
    outs = []
    for t, h in enumerate(loop.states()):
        column = b.reshape(b.slice(c, (0, t, 0), (2, 1, 5), (1, 1, 1)), (2, 5, 1))
        y = b.add(Prim.MATMUL, b.reshape(h, (2, 1, 5)), column)
        outs.append(b.add(Prim.TANH, b.apply(Prim.ADD, b.reshape(y, (2, 1)), bias)))
    graph = rolled(b.build([b.add(Prim.CONCAT, *outs, attrs=a.ConcatAttrs(1))]))
    assert prims(graph)["matmul"] == 0 and prims(graph)["reduce_sum"] == 1  # so that it may end the scan's kernel


def test_a_product_with_a_matrix_stays_one() -> None:
    loop = Loop()
    b = loop.b
    w = b.input(TensorType(DType.F32, (5, 3)))
    graph = rolled(b.build([loop.stack([b.add(Prim.MATMUL, h, w) for h in loop.states()])]))
    assert prims(graph)["matmul"] == 1


def test_two_loops_one_behind_the_other() -> None:
    loop = Loop()
    b = loop.b
    first = loop.stack(loop.states())
    loop.term = b.add(Prim.TANH, first)
    graph = b.build([loop.stack(loop.states())])
    found = clean_up(graph, verify=True).graph
    assert prims(found)["scan"] == 2 and prims(found)["concat"] == 0
    same(graph, found)


def test_few_steps_stay() -> None:
    loop = Loop(LEAST_STEPS - 1)
    left_alone(loop.b.build([loop.stack(loop.states())]))


def test_a_broken_chain_stays() -> None:
    loop = Loop()
    b, h, states = loop.b, loop.start, []
    for t in range(STEPS):
        h = b.add(Prim.ADD, b.add(Prim.MUL, loop.at(loop.factor, t), h), loop.at(loop.term, t))
        if t == 3:
            h = b.add(Prim.TANH, h)
        states.append(h)
    left_alone(b.build([loop.stack(states)]))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 6, 5), (0, 1, 2, 3, 3, 4, 5)])
def test_positions_that_are_not_consecutive_stay(order: tuple[int, ...]) -> None:
    loop = Loop()
    left_alone(loop.b.build([loop.stack(loop.states(lambda t: order[t]))]))


def test_unequal_steps_stay() -> None:
    loop = Loop()
    b, h, states = loop.b, loop.start, []
    for t in range(STEPS):
        term = loop.at(loop.term, t)
        h = b.add(Prim.ADD, b.add(Prim.MUL, loop.at(loop.factor, t), h), b.add(Prim.NEG, term) if t == 4 else term)
        states.append(h)
    left_alone(b.build([loop.stack(states)]))


def test_a_recurrence_that_is_not_linear_stays() -> None:
    loop = Loop()
    b, h, states = loop.b, loop.start, []
    for t in range(STEPS):
        h = b.add(Prim.ADD, b.add(Prim.MUL, b.add(Prim.TANH, h), h), loop.at(loop.term, t))
        states.append(h)
    left_alone(b.build([loop.stack(states)]))


def test_a_gate_that_reads_the_state_stays() -> None:
    loop = Loop()
    b, h, states = loop.b, loop.start, []
    for t in range(STEPS):
        gate = b.add(Prim.TANH, b.add(Prim.ADD, h, loop.at(loop.factor, t)))
        h = b.add(Prim.ADD, b.add(Prim.MUL, gate, h), loop.at(loop.term, t))
        states.append(h)
    left_alone(b.build([loop.stack(states)]))


def test_a_state_of_the_middle_that_somebody_reads_stays() -> None:
    loop = Loop()
    states = loop.states()
    left_alone(loop.b.build([loop.stack(states), loop.b.add(Prim.TANH, states[3])]))


def test_a_stack_in_another_order_stays() -> None:
    loop = Loop()
    left_alone(loop.b.build([loop.stack(loop.states()[::-1])]))


def test_a_polynomial_by_horner_stays() -> None:
    loop = Loop()
    b, h, states = loop.b, loop.start, []
    x = b.input(TensorType(DType.F32, (2, 5)))
    for k in range(STEPS):
        h = b.apply(Prim.ADD, b.add(Prim.MUL, h, x), float(k + 1))
        states.append(h)
    left_alone(b.build([loop.stack(states)]))


def test_strict_rolls_nothing_up() -> None:
    loop = Loop()
    assert "roll-recurrences" not in dict(clean_up(loop.b.build([loop.stack(loop.states())]), strict=True).log)


@pytest.mark.parametrize("seed", range(30))
def test_random_loops(seed: int) -> None:
    """Random steps of equal form between slices and the stack."""
    rng = np.random.default_rng(seed)
    loop = Loop(int(rng.integers(LEAST_STEPS, 10)), zero=bool(rng.integers(2)))
    b = loop.b
    if rng.integers(2):
        loop.factor = b.add(Prim.TANH, loop.factor)
    forms = rng.integers(0, 5, int(rng.integers(1, 4)))
    outs = []
    for t, state in enumerate(loop.states(swap=bool(rng.integers(2)))):
        y = state
        for form in forms:
            if form == 0:
                y = b.apply(Prim.MUL, y, loop.at(loop.term, t))
            elif form == 1:
                y = b.transpose(b.transpose(b.add(Prim.TANH, y), (1, 0)), (1, 0))
            elif form == 2:
                y = b.apply(Prim.SUB, y, b.reduce(Prim.REDUCE_MAX, y, (1,)))
            elif form == 3:
                y = b.reshape(b.apply(Prim.ADD, b.reshape(y, (10,)), 0.5), (2, 5))
            else:
                y = b.slice(b.add(Prim.CONCAT, y, y, attrs=a.ConcatAttrs(1)), (0, 2), (2, 5), (1, 1))
        outs.append(y)
    graph = b.build([loop.stack(outs, int(rng.integers(0, 3)))])
    found = clean_up(graph, verify=True)
    assert prims(found.graph)["scan"] == 1
    same(graph, found.graph, seed)


def test_text() -> None:
    loop = Loop()
    b = loop.b
    outs = [
        b.add(Prim.MATMUL, b.reshape(h, (2, 1, 5)), b.reshape(loop.at(loop.factor, t), (2, 5, 1)))
        for t, h in enumerate(loop.states())
    ]
    goldens.check("ir/roll_recurrences.txt", str(clean_up(b.build([loop.stack(outs)])).graph))
