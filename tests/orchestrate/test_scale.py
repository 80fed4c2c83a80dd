"""Sizes of real networks: solved to proven optimality in seconds."""

from __future__ import annotations

import random
import time

import pytest
from tests.orchestrate.graphs import residual_net, transformer

from weft.ir.graph import Graph, bits, mask_of
from weft.orchestrate.abstract import Dag, grow
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import format_choices
from weft.orchestrate.instance import Instance, Option, execute
from weft.orchestrate.program import solve
from weft.orchestrate.select import Priced, build_instance


def block_options(blocks: int, rng: random.Random) -> tuple[Instance, int]:
    """Chained blocks of Fig. 4, epilogues allowed: up to nine members, costs of launch, traffic and noise."""
    producers: list[int] = []
    for b in range(blocks):
        for p in ((), (0,), (0,), (0,), (1, 2), (4,), (5,), (3,), (6, 7), (8,), (9,), (9, 10)):
            mask = mask_of(12 * b + q for q in p)
            producers.append(mask | (1 << (12 * b - 1) if b and not p else 0))
    dag = Dag.of(producers)
    linear = mask_of(12 * b + q for b in range(blocks) for q in (4, 8))

    def admit(s: int) -> str:
        if (s & linear).bit_count() > 1 or s.bit_count() > 9:
            return "too much"
        inner = s & linear
        return "prologue" if inner and s & dag.ancestors[inner.bit_length() - 1] else ""

    options = []
    for v in range(len(dag)):
        for s in grow(dag, v, admit).sets:
            traffic = dag.inputs_of(s).bit_count() + 1
            cost = (2 + traffic + 0.3 * s.bit_count() + 8 * (s & linear).bit_count()) * rng.uniform(0.8, 1.25)
            options.append(Option(frozenset(bits(dag.inputs_of(s))), frozenset({v}), cost, frozenset(bits(s))))
    results = frozenset({len(dag) - 1})
    return Instance(tuple(options), frozenset(), results, frozenset(range(len(dag)))), len(dag)


@pytest.mark.slow
def test_500_primitives_to_proven_optimality() -> None:
    instance, n = block_options(112, random.Random(0))
    assert n > 1000
    assert len(instance.options) > 5000
    started = time.process_time()
    solution = solve(instance)
    assert time.process_time() - started < 10.0
    assert solution.report.status == "optimal"
    assert solution.report.gap == 0.0
    assert not execute(instance, solution.chosen)[1]


@pytest.mark.parametrize("graph", [transformer(4), residual_net(8)], ids=["attention", "conv"])
def test_networks_with_alternatives_and_formats(graph: Graph) -> None:
    rng = random.Random(1)
    found = find_alternatives(graph)
    noise: dict[tuple[object, ...], float] = {}
    priced = []
    for c in enumerate_candidates(found.graph, alternatives=found).candidates:
        names = tuple(found.graph.nodes[m].prim for m in bits(c.members))
        for f in format_choices(found.graph, c):
            factor = noise.setdefault((names, f), rng.uniform(0.7, 1.5))
            nbytes = sum(found.graph.type_of(v).nbytes for v in c.inputs + c.outputs)
            priced.append(Priced(c, f.inputs, f.outputs, (2.0 + nbytes / 1e4) * factor))
    instance = build_instance(found.graph, priced, alternatives=found)
    started = time.process_time()
    solution = solve(instance)
    assert time.process_time() - started < 10.0
    assert solution.report.status == "optimal"
    assert solution.report.gap < 1e-6
    assert not execute(instance, solution.chosen)[1]
