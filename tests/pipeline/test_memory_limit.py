"""A limit on the memory of a plan, from the option to the plan. Nothing generated is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.orchestrate.graphs import Net, residual_net
from tests.pipeline.test_search import FACTS, Machine, start

from weft.errors import OptionError
from weft.ir.graph import Graph
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.kernels.measurement import Measurement
from weft.kernels.plan import Plan
from weft.options import Options
from weft.orchestrate.alternatives import Alternatives, find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline import choose, finish
from weft.pipeline.problems import Problems, collect
from weft.pipeline.search.kernels import Order
from weft.pipeline.search.loop import Inline, Search, Window
from weft.pipeline.warm import plan_key
from weft.platform.cuda.platform import Cuda


@pytest.fixture(scope="module")
def posed() -> tuple[Alternatives, Problems]:
    """Four maps of one input that are added up: separate kernels keep several of them at once."""
    net = Net()
    x = net.input(16, 64)
    maps = [net.relu(net.b.apply(Prim.EXP, net.b.apply(Prim.MUL, x, float(i)))) for i in range(2, 6)]
    total = maps[0]
    for y in maps[1:]:
        total = net.b.apply(Prim.ADD, total, y)
    alternatives = find_alternatives(net.build(total, net.b.apply(Prim.NEG, maps[0])))
    candidates = enumerate_candidates(alternatives.graph, alternatives=alternatives).candidates
    return alternatives, collect(alternatives.graph, candidates, alternatives, FACTS)


class DearFusion(Machine):
    """Here what is fused takes longer than its parts."""

    def measured(self, order: Order, search: Search) -> Iterator[Measurement]:
        samples = (0.9 + 0.2 * len(order.task.problem.graph) ** 2,)
        yield from (replace(m, samples_us=samples) for m in super().measured(order, search))


def alive_bytes(graph: Graph, plan: Plan) -> int:
    """Most bytes of written values between their writing and their last reader, the end for results."""
    steps = range(len(plan.steps))
    written = {v: k for k, step in enumerate(plan.steps) for v in step.outputs}
    last = {v: max(k for k in steps if k == made or v in plan.steps[k].inputs) for v, made in written.items()}
    last |= {v: len(steps) for v in written if v[0] in graph.outputs}
    sizes = {v: graph.type_of(v[0]).nbytes for v in written}
    return max(sum(sizes[v] for v in written if written[v] <= now <= last[v]) for now in steps)


def found(posed: tuple[Alternatives, Problems], options: Options) -> list[Plan]:
    alternatives, problems = posed
    machine = DearFusion(problems)
    search = start(posed, Cuda.policy, Window(lambda: False, lambda: 0.0), Inline(), options)
    known = search.run(lambda: machine(search))
    assert known.complete
    ranked = choose.rank(problems, known, library_only=False)
    return choose.plans(alternatives.graph, choose.offers(ranked), alternatives, options)


def test_every_plan_keeps_to_the_limit_and_too_small_a_one_is_an_error(posed: tuple[Alternatives, Problems]) -> None:
    graph = posed[0].graph
    free = found(posed, Options(solver_gap=0.0))
    peaks = [alive_bytes(graph, p) for p in free]
    limit = peaks[0] - 1
    limited = found(posed, Options(solver_gap=0.0, memory_limit_bytes=limit))
    assert limited and all(alive_bytes(graph, p) <= limit for p in limited)
    assert limited[0].predicted_us > free[0].predicted_us
    with pytest.raises(OptionError, match=r"memory_limit_bytes.* 1 bytes at once.* takes \d+"):
        found(posed, Options(memory_limit_bytes=1))


def contender(name: str, *, eligible: bool, right: bool = True) -> finish.Contender:
    value = torch.ones(4) if right else torch.zeros(4)
    return finish.Contender(name, lambda: [value], 1, 1.0, name == "eager", None, eligible)


def test_what_is_not_eligible_is_timed_and_never_chosen() -> None:
    expected = finish.Expected([np.ones(4)], [np.ones(4, np.float32)])
    eager = contender("eager", eligible=False)

    def sample(run: object, repeats: int) -> float:
        return 1.0 if run is eager.run else 50.0 + repeats

    both = [contender("solution-1", eligible=True), eager]
    chosen, records = finish.decide(both, expected, DType.F32, seed=0, sample=sample)
    assert chosen.name == "solution-1" and records[1].median_us == 1.0
    chosen, _ = finish.decide([both[0], replace(eager, eligible=True)], expected, DType.F32, seed=0, sample=sample)
    assert chosen.name == "eager"
    wrong = [contender("solution-1", eligible=True, right=False), eager]
    with pytest.raises(OptionError, match="memory_limit_bytes"):
        finish.decide(wrong, expected, DType.F32, seed=0, sample=sample)


def test_a_plan_is_recalled_for_its_own_limit_only() -> None:
    graph = residual_net(1)
    keys = {plan_key(graph, Options(memory_limit_bytes=n), {}) for n in (0, 1, 2)}
    assert len(keys) == 3


def test_the_option_is_a_size() -> None:
    assert (
        Options.from_environment({"WEFT_MEMORY_LIMIT_BYTES": "3MiB", "WEFT_CONFIG": ""}).memory_limit_bytes == 3 << 20
    )
    for text in ("-1", "much"):
        with pytest.raises(OptionError, match=r"(?i)memory_limit_bytes"):
            Options.from_environment({"WEFT_MEMORY_LIMIT_BYTES": text, "WEFT_CONFIG": ""})
