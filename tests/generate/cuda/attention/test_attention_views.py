"""Strided views against NumPy's: every index map on random shapes, and what no strides can say."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.generate.cuda.attentions import F16, ROW

from weft.generate.contraction.values import Grouped, NotStridedError, Reader, View, plain, regrouped
from weft.ir import attrs as a
from weft.ir.graph import GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import TensorType
from weft.kernels.candidate import Problem


def dense(shape: tuple[int, ...]) -> View:
    return View(shape, ROW.strides(shape))


def positions(view: View) -> np.ndarray:
    index = np.indices(view.shape).reshape(len(view.shape), -1)
    return (view.offset + np.asarray(view.strides, np.int64) @ index).reshape(view.shape)


def test_a_view_of_nothing_has_any_shape_of_nothing() -> None:
    for shape, into in (((4, 0), (0, 9)), ((0,), (3, 0, 2)), ((5, 0, 2), (0,))):
        assert positions(dense(shape).reshape(into)).shape == into


def test_reshape_agrees_with_numpy_or_is_refused() -> None:
    rng = random.Random(0)
    said = refused = 0
    for _ in range(300):
        shape = tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 4)))
        perm = rng.sample(range(len(shape)), len(shape))
        view = dense(shape).transpose(perm)
        rest, target = int(np.prod(shape)), []
        while rest > 1:
            n = rng.choice([d for d in range(2, rest + 1) if rest % d == 0])
            target.append(n)
            rest //= n
        target.insert(rng.randint(0, len(target)), 1)
        want = positions(view).reshape(target)
        try:
            got = view.reshape(target)
        except NotStridedError:
            refused += 1
            own = np.arange(int(np.prod(shape))).reshape(shape).transpose(perm)
            assert not np.shares_memory(own.reshape(target), own), "NumPy needs no copy"
            continue
        said += 1
        np.testing.assert_array_equal(positions(got), want)
    assert said > 50
    assert refused > 20


def test_slices_and_broadcasts() -> None:
    view = dense((4, 6)).slice((1, 5), (3, 2), (1, -3))
    np.testing.assert_array_equal(positions(view), np.arange(24).reshape(4, 6)[1:4, 5:0:-3])
    wide = dense((3, 1)).broadcast((2, 3, 4))
    np.testing.assert_array_equal(positions(wide), np.broadcast_to(np.arange(3)[:, None], (2, 3, 4)))


def problem(*prims: Prim) -> tuple[Problem, int]:
    b = GraphBuilder()
    x = b.input(TensorType(F16, (2, 3)))
    y = b.add(Prim.CONCAT, x, b.apply(Prim.NEG, x), attrs=a.ConcatAttrs(0)) if Prim.CONCAT in prims else x
    if Prim.REDUCE_SUM in prims:
        y = b.reduce(Prim.REDUCE_SUM, y, (1,))
    return Problem(b.build([y]), "p", (ROW,), (ROW,)), y


@pytest.mark.parametrize(
    ("prim", "concat", "reason"),
    [
        (Prim.CONCAT, False, "concat in front"),
        (Prim.CONCAT, True, "computed values"),
        (Prim.REDUCE_SUM, False, "reduce_sum in front"),
    ],
)
def test_what_is_no_view_says_why(prim: Prim, concat: bool, reason: str) -> None:
    p, node = problem(prim)
    with pytest.raises(NotStridedError, match=reason):
        Reader(p, {}, concat=concat).read(node)


def places(view: View) -> np.ndarray:
    """The same of a view that may be grouped."""
    if not isinstance(view, Grouped):
        return positions(view)
    flat = [step for group in view.steps for step in group]
    fine = View(tuple(n for n, _ in flat), tuple(s for _, s in flat), view.offset)
    return positions(fine).reshape(view.shape)


def test_grouped_views_agree_with_numpy() -> None:
    rng = random.Random(1)
    grouped = 0
    for _ in range(200):
        shape = tuple(rng.choice((1, 2, 3, 4)) for _ in range(4))
        view: View = dense(shape)
        exact = np.arange(int(np.prod(shape))).reshape(shape)
        for _ in range(3):
            perm = rng.sample(range(exact.ndim), exact.ndim)
            view, exact = view.transpose(perm), exact.transpose(perm)
            at = rng.randrange(exact.ndim - 1)
            joined = (*exact.shape[:at], exact.shape[at] * exact.shape[at + 1], *exact.shape[at + 2 :])
            wide = (2, 3, *joined) if exact.ndim > 3 else (2, *joined)
            view, exact = regrouped(view, joined), exact.reshape(joined)
            if exact.ndim < 4:
                view, exact = view.broadcast(wide), np.broadcast_to(exact, wide)
            grouped += isinstance(view, Grouped)
        np.testing.assert_array_equal(places(view), exact)
    assert grouped > 50


def test_what_grouped_views_refuse() -> None:
    view = regrouped(dense((4, 6, 5)).transpose((1, 0, 2)), (24, 5))
    assert isinstance(view, Grouped)
    np.testing.assert_array_equal(positions(plain(view.reshape((6, 4, 5)))), positions(dense((4, 6, 5))).swapaxes(0, 1))
    assert view.slice((0, 0), (24, 5), (1, 1)) is view
    for refuse in (
        lambda: plain(view),
        lambda: view.slice((1, 0), (20, 5), (1, 1)),
        lambda: regrouped(dense((4, 6)).transpose((1, 0)), (9, 2)),
    ):
        with pytest.raises(NotStridedError, match="would copy"):
            refuse()
