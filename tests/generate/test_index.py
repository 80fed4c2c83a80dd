"""Index arithmetic against integers: whatever is simplified, the value is the same."""

from __future__ import annotations

import itertools
import random

from weft.generate.loopnest.body import _in_blocks
from weft.generate.loopnest.index import Index, Part, Var, index_of, unflatten

VARIABLES = (Var("a", 3), Var("b", 4), Var("c", 5))
POINTS = [dict(zip(VARIABLES, at, strict=True)) for at in itertools.product(range(3), range(4), range(5))]


def value(index: Index, at: dict[Var, int]) -> int:
    """What the text would give."""
    total = index.const
    for term, c in index.terms:
        if isinstance(term, Var):
            total += c * at[term]
        else:
            assert isinstance(term, Part)
            inner = value(term.of, at)
            match term.kind:
                case "quotient":
                    assert inner >= 0, "C truncates"
                    total += c * (inner // term.k)
                case "remainder":
                    assert inner >= 0
                    total += c * (inner % term.k)
                case _:
                    total += c * min(max(inner, 0), term.k - 1)
    return total


def drawn(rng: random.Random) -> Index:
    """A sum of a few multiples, never negative."""
    total = Index(rng.choice((0, 1, 3, 8)))
    for v in rng.sample(VARIABLES, rng.randint(1, 3)):
        total = total + index_of(v) * rng.choice((1, 2, 4, 8, 12, 64))
    return total


def test_quotients_and_remainders() -> None:
    rng = random.Random(0)
    for _ in range(300):
        index, k, m = drawn(rng), rng.choice((2, 3, 8, 12, 64)), rng.choice((2, 4, 5))
        quotient, remainder = index // k, index % k
        twice, inner = (quotient + index) // m, (remainder * 3 + index) % m
        back = quotient * k + remainder
        for at in POINTS:
            number = value(index, at)
            assert value(quotient, at) == number // k and value(remainder, at) == number % k
            assert value(twice, at) == (number // k + number) // m
            assert value(inner, at) == (number % k * 3 + number) % m
            assert value(back, at) == number
            low, high = remainder.bounds
            assert low <= value(remainder, at) <= high


def test_neighbours_divide_the_same_number() -> None:
    """So that their addresses differ by constants, and are read together."""
    vectors = index_of(Var("v", 96)) * 8
    apart = [unflatten(vectors + k, (12, 64)) for k in range(8)]
    for k, at in enumerate(apart):
        assert at[0] == apart[0][0] and at[1] == apart[0][1] + k


def test_blocks_lie_inside_or_outside_whole() -> None:
    rng = random.Random(1)
    for _ in range(300):
        index, n = drawn(rng) + -rng.choice((0, 8, 16, 24)), rng.choice((1, 7, 8, 24, 64))
        block, size, rest = _in_blocks(index, n)
        assert n % size == 0 and 0 <= rest < size
        for at in POINTS:
            number, outer = value(index, at), value(block, at)
            assert number == outer * size + rest
            assert (0 <= number < n) is (0 <= outer < n // size)
    assert _in_blocks(Index(3), 0) == (Index(3), 1, 0)
