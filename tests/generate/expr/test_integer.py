"""Integer expressions of C: the text is short, and its value that of the arithmetic it stands for."""

from __future__ import annotations

import itertools
import random

import pytest

from weft.generate.expr.integer import Int, summed


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Int("tm") / 4 * 64, "tm / 4 * 64"),
        (Int("tm") / 1 * 64, "tm * 64"),
        (Int("tm") / 4 * 1, "tm / 4"),
        (Int("tm") % 1 * 64 + "x", "x"),
        (Int("tm") * 0, "0"),
        (1 * Int("x"), "x"),
        (0 + Int("x") + 0, "x"),
        (Int("x") + -3, "x - 3"),
        (Int("x") - -3, "x + 3"),
        (Int("x") - 0, "x"),
        (Int("x + y") * 2, "(x + y) * 2"),
        ((Int("x") + "y") * 2, "(x + y) * 2"),
        (Int("x") / (Int("y") * 2), "x / (y * 2)"),
        (Int("x") - (Int("y") - 1), "x - (y - 1)"),
        (Int("x") + Int("y") * 2, "x + y * 2"),
        (Int("f(x + 1)[2]") * 2, "f(x + 1)[2] * 2"),
        (Int("(x + y)") / 3, "(x + y) / 3"),
        (Int("(x) + (y)") / 3, "((x) + (y)) / 3"),
        (Int("x") / "1u" + "0u", "x"),
        (Int("a ? b : c") + 0, "a ? b : c"),
        (Int("a ? b : c") + 1, "(a ? b : c) + 1"),
        (summed("sb", 0, "FULL", 16), "sb + FULL + 16"),
        (summed(), "0"),
    ],
)
def test_the_text(found: Int, text: str) -> None:
    assert str(found) == f"{found}" == text


def test_the_value_is_that_of_the_arithmetic() -> None:
    rng = random.Random(0)
    names = {"a": 7, "b": 12, "c": 5}

    def made(depth: int) -> tuple[Int, int]:
        if depth == 0:
            name = rng.choice([*names])
            return Int(name), names[name]
        (x, n), (y, m) = made(depth - 1), made(rng.randrange(depth))
        k = rng.choice((1, 1, 2, 3))
        kind = rng.randrange(6)
        number = rng.choice((0, 1, 4, -2))
        return (
            (x + y, n + m),
            (x * number, n * number),
            (x / k, int(n / k)),
            (x % k, n - int(n / k) * k),
            (x - y, n - m),
            (x + number, n + number),
        )[kind]

    seen = 0
    for depth, _ in itertools.product(range(1, 6), range(200)):
        text, value = made(depth)
        # C's division rounds towards zero: only what is not negative is compared with Python's
        if all(ch not in str(text) for ch in "-"):
            assert eval(str(text).replace("/", "//"), {}, dict(names)) == value, str(text)  # noqa: S307
            seen += 1
    assert seen > 200
