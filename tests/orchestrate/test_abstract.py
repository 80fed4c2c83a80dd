"""Growth per sink against Korch's counts and against brute force."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest

from weft.ir.graph import Mask, bits, mask_of
from weft.orchestrate.abstract import Dag, Reentry, census, grow, single_sink


def dag_of(*producers: tuple[int, ...]) -> Dag:
    return Dag.of([mask_of(p) for p in producers])


# Fig. 4 of the paper, with p1 at position 0
FIG4 = dag_of((), (0,), (0,), (0,), (1, 2), (4,), (5,), (3,), (6, 7), (8,), (9,), (9, 10))
LINEAR = mask_of((4, 8))
PAPER = {
    (1,), (1, 2), (1, 3), (1, 4), (1, 4, 8), (2,), (3,), (4,), (4, 8), (5,), (6,), (6, 7), (7,), (8,), (9,),
    (10,), (10, 11), (10, 11, 12), (11,), (11, 12), (12,),
}  # fmt: skip


def linear_alone(members: Mask) -> str:
    return "linear with others" if members & LINEAR and members & (members - 1) else ""


def anything(members: Mask) -> str:
    return ""


def names(sets: set[Mask]) -> set[tuple[int, ...]]:
    return {tuple(m + 1 for m in bits(s)) for s in sets}


def everything(dag: Dag, admit: Any = linear_alone, reentry: Reentry | None = None) -> set[Mask]:
    found = [s for v in range(len(dag)) for s in grow(dag, v, admit, reentry=reentry).sets]
    assert len(found) == len(set(found)), "a set was emitted twice"
    return set(found)


def test_s1_is_the_papers_list() -> None:
    assert names(everything(FIG4)) == PAPER


def test_s1_korchs_own_count() -> None:
    count = census(FIG4, linear_alone)
    assert (count.states, count.pairs, count.raw) == (26, 256, 57)
    assert names(set(count.unique)) == PAPER


def test_s1_reentrant_adds_one() -> None:
    reduction = mask_of((10,))
    restricted = Reentry.of(FIG4, LINEAR | reduction, forbidden=LINEAR)
    assert names(everything(FIG4, reentry=restricted)) - PAPER == {(10, 12)}
    assert names(everything(FIG4, reentry=Reentry.of(FIG4, (1 << 12) - 1))) - PAPER == {(10, 12)}


def test_s1_without_linear_alone() -> None:
    assert len(everything(FIG4, anything)) == 122
    assert len(everything(FIG4, anything, Reentry.of(FIG4, (1 << 12) - 1))) == 211


def chained(blocks: int) -> tuple[Dag, Mask]:
    """Fig. 4 repeated, each block's result feeding the next."""
    producers: list[Mask] = []
    linear = 0
    for b in range(blocks):
        base = 12 * b
        for v in range(12):
            mask = FIG4.producers[v] << base
            if v == 0 and b:
                mask |= 1 << (base - 1)
            producers.append(mask)
        linear |= LINEAR << base
    return Dag.of(producers), linear


def test_960_primitives_in_a_second() -> None:
    dag, linear = chained(80)

    def admit(members: Mask) -> str:
        return "linear with others" if members & linear and members & (members - 1) else ""

    started = time.perf_counter()
    sets = everything(dag, admit)
    assert time.perf_counter() - started < 1.0
    assert len(sets) == 2865


def decode_head(width: int, depth: int) -> Dag:
    producers: list[Mask] = []
    for _ in range(width):
        for d in range(depth):
            producers.append(1 << (len(producers) - 1) if d else 0)
    producers.append(mask_of(depth * (w + 1) - 1 for w in range(width)))
    return Dag.of(producers)


def test_segformer_head() -> None:
    dag = decode_head(4, 4)
    assert len(everything(dag, anything)) == 665
    count = census(dag, anything)
    assert (count.states, count.pairs, count.raw, len(count.unique)) == (626, 50625, 5625, 665)


@pytest.mark.parametrize(("w", "d"), [(1, 1), (2, 3), (3, 3), (5, 4)])
def test_wide_joins_by_formula(w: int, d: int) -> None:
    assert len(everything(decode_head(w, d), anything)) == w * d * (d + 1) // 2 + (d + 1) ** w


def test_cap_keeps_the_maximal_set() -> None:
    dag = decode_head(8, 4)  # 5^8 = 390 625 sets of the last sink
    grown = grow(dag, 32, anything, cap=64)
    assert len(grown.sets) == 64
    assert grown.capped
    assert (1 << 33) - 1 in grown.sets
    assert grown.sets[0] == 1 << 32


def test_cap_not_reached_is_complete() -> None:
    grown = grow(FIG4, 11, linear_alone, cap=1000)
    assert not grown.capped
    assert set(grown.sets) == set(grow(FIG4, 11, linear_alone).sets)


def random_dag(rng: random.Random, n: int) -> Dag:
    return Dag.of(
        [mask_of(rng.sample(range(v), min(v, rng.choice((0, 1, 1, 2, 2, 3))))) for v in range(n)]
    )  # fmt: skip


def test_500_random_graphs_against_brute_force() -> None:
    rng = random.Random(4)
    for _ in range(500):
        dag = random_dag(rng, rng.randint(1, 8))
        n = len(dag)
        linear = mask_of(v for v in range(n) if rng.random() < 0.2)
        limit = rng.randint(1, 8)

        def admit(members: Mask, linear: Any = linear, limit: Any = limit) -> str:
            if members & linear and members & (members - 1):
                return "linear with others"
            return "members" if members.bit_count() > limit else ""

        rooted = {s for s in range(1, 1 << n) if not admit(s) and single_sink(dag, s) >= 0}
        convex = {s for s in rooted if not dag.missing(s)}
        assert everything(dag, admit) == convex
        assert everything(dag, admit, Reentry.of(dag, (1 << n) - 1)) == rooted


def test_reentry_restrictions_only_remove() -> None:
    rng = random.Random(5)
    for _ in range(300):
        dag = random_dag(rng, rng.randint(3, 8))
        n = len(dag)
        barrier = mask_of(v for v in range(n) if rng.random() < 0.3)
        forbidden = barrier & rng.getrandbits(n)
        found = everything(dag, anything, Reentry.of(dag, barrier, forbidden))
        convex = everything(dag, anything)
        assert convex <= found
        for s in found - convex:
            missing = dag.missing(s)
            assert not missing & forbidden
            assert missing & barrier, "a path that returns holds a barrier"


def test_convexity_helpers() -> None:
    dag = dag_of((), (0,), (0, 1))
    assert dag.missing(0b101) == 0b010
    assert dag.missing(0b111) == 0
    assert dag.inputs_of(0b100) == 0b011
    assert dag.written(0b011) == 0b011
    assert dag.written(0b111, results=0b100) == 0b100


def test_a_consumer_before_its_producer_is_refused() -> None:
    with pytest.raises(ValueError, match="does not stand before"):
        Dag.of([0b10, 0])


def test_reasons_are_counted() -> None:
    rejected: Counter[str] = Counter()
    grow(FIG4, 5, linear_alone, rejected=rejected)
    assert rejected == {"linear with others": 1}
