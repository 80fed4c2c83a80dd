"""Steps side by side: who waits for whom, memory that nobody shares too early, and results in any permitted order."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import torch
from tests.runtime.fake_cuda import FakeCuda, install
from tests.runtime.plans import library_plan

from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Linked
from weft.runtime.lanes import Order, Use, assign, dependencies, order_of
from weft.runtime.memory import Lifetime, plan_memory
from weft.runtime.values import survey

FACTS = {"gpu": "NVIDIA H200", "capability": "90"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def random_needs(rng: random.Random, steps: int) -> list[frozenset[int]]:
    return [frozenset(rng.sample(range(i), min(i, rng.choice((0, 1, 1, 2, 3))))) for i in range(steps)]


def reachable(order: Order) -> list[set[int]]:
    """Per step all that come before it, from lanes and waits alone."""
    before: list[set[int]] = []
    for i, lane in enumerate(order.lanes):
        direct = {j for j in range(i) if order.lanes[j] == lane} | set(order.waits[i])
        before.append(direct.union(*(before[j] for j in direct)) if direct else set())
    return before


@pytest.mark.parametrize("seed", range(100))
def test_lanes_keep_every_need_and_wait_for_nothing_twice(seed: int) -> None:
    rng = random.Random(seed)
    needs = random_needs(rng, rng.randint(1, 30))
    lanes = rng.randint(1, 5)
    order = Order.of(needs, assign(needs, [rng.uniform(1, 9) for _ in needs], lanes))
    before = reachable(order)
    for i, mine in enumerate(needs):
        assert mine <= before[i] and order.before[i] == sum(1 << j for j in before[i])
        for p in order.waits[i]:
            assert order.lanes[p] != order.lanes[i]
            others = set(order.waits[i]) - {p}
            known = {j for j in range(i) if order.lanes[j] == order.lanes[i]} | others
            assert p not in known.union(*(before[j] for j in known)), "it follows from the others"
    assert order.width <= lanes


@pytest.mark.parametrize("seed", range(100))
def test_memory_is_shared_only_along_the_order(seed: int) -> None:
    rng = random.Random(seed)
    needs = random_needs(rng, rng.randint(2, 20))
    order = Order.of(needs, assign(needs, [1.0] * len(needs), rng.randint(2, 4)))
    before = reachable(order)
    uses = []
    for i in range(len(needs)):
        readers = [j for j in range(i + 1, len(needs)) if i in needs[j]]
        uses.append(Use(i, (i, *readers), kept=rng.random() < 0.1))
    end = len(needs)
    lifetimes = [Lifetime(rng.randint(1, 5) * 256, u.first, end if u.kept else max(u.steps)) for u in uses]
    plan = plan_memory(lifetimes, alignment=256, conflicts=order.conflicts(uses))
    for i in range(len(uses)):
        for j in range(i):
            apart = plan.offsets[i] + lifetimes[i].size <= plan.offsets[j] or (
                plan.offsets[j] + lifetimes[j].size <= plan.offsets[i]
            )
            over = not uses[j].kept and set(uses[j].steps) <= before[uses[i].first]
            assert apart or over, f"buffers {j} and {i} may live at once and overlap"


def test_a_chain_stays_in_one_lane_and_branches_part() -> None:
    chain = [frozenset({i - 1}) if i else frozenset() for i in range(6)]
    assert assign(chain, [5.0] * 6, 4) == [0] * 6
    # a stem, three branches of two steps, and what joins them
    stem, a, b, c = 0, (1, 2), (3, 4), (5, 6)
    needs = [frozenset(), frozenset({stem}), frozenset({1}), frozenset({stem}), frozenset({3}), frozenset({stem})]
    needs += [frozenset({5}), frozenset({2, 4, 6})]
    lanes = assign(needs, [5.0] * 8, 4)
    assert [len({lanes[k] for k in branch}) for branch in (a, b, c)] == [1, 1, 1]
    assert len({lanes[1], lanes[3], lanes[5]}) == 3
    order = Order.of(needs, lanes)
    assert order.width == 3 and len(order.waits[7]) == 2
    assert order_of_one(needs).waits == ((),) * 8


def order_of_one(needs: list[frozenset[int]]) -> Order:
    return Order.of(needs, [0] * len(needs))


def wide() -> Graph:
    """Four branches of different length from one input, added up."""
    b = GraphBuilder()
    x, w = b.input(TensorType(DType.F32, (8, 8))), b.input(TensorType(DType.F32, (8, 8)))
    ends = []
    for length in (1, 2, 3, 4):
        y = b.add(Prim.MATMUL, x, w)
        for k in range(length):
            y = b.apply((Prim.TANH, Prim.SIN, Prim.COS)[(length + k) % 3], y)
            y = b.add(Prim.MATMUL, y, w)
        ends.append(y)
    total = ends[0]
    for y in ends[1:]:
        total = b.add(Prim.ADD, total, y)
    return b.build([total, ends[2]])


@pytest.mark.parametrize("branches", [1, 2, 3, 8])
def test_results_do_not_depend_on_the_order_that_is_left_open(cuda: FakeCuda, branches: int) -> None:
    graph = wide()
    plan = replace(library_plan(graph), branches=branches)
    exe = CudaExecutable(Linked(graph, plan, {}, None, None, 0, FACTS), device=torch.device("cpu"))
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    plain = CudaExecutable(Linked(graph, library_plan(graph), {}, None, None, 0, FACTS), device=torch.device("cpu"))
    want = plain(x, w)
    for _ in range(30):
        got = exe(x, w)
        assert all(torch.equal(g, v) for g, v in zip(got, want, strict=True))
    assert (exe.order.width > 1) == (branches > 1)
    assert len(cuda.graphs[0].launches) == len(plan.steps)


def test_lanes_of_a_plan_that_is_gone_are_taken_over_before_the_recording(cuda: FakeCuda) -> None:
    graph = wide()
    linked = Linked(graph, replace(library_plan(graph), branches=3), {}, None, None, 0, FACTS)
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    first = CudaExecutable(linked, device=torch.device("cpu"))
    want = first(x, w)
    del first
    gc.collect()  # its launches hold it
    again = CudaExecutable(linked, device=torch.device("cpu"))
    assert again.order.width > 1
    assert all(torch.equal(g, v) for g, v in zip(again(x, w), want, strict=True))


def test_a_value_written_twice_keeps_its_order() -> None:
    graph = wide()
    plan = library_plan(graph)
    again = replace(plan, steps=(*plan.steps, plan.steps[0]))
    values = survey(graph, again)
    key = plan.steps[0].outputs[0]
    assert values.users(key)[-1] == len(plan.steps)
    readers = set(values.readers[key])
    assert readers <= dependencies(again, values)[-1]
    assert order_of(again, values, 4).before[-1] >> 0 & 1
