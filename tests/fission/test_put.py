"""Writing by index against torch: known indices and others, twice into one place, by masks."""

from __future__ import annotations

import pytest
import torch
from tests.fission.harness import build, close, declined, random, run, same

from weft.ir.declined import Declined

KINDS = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
KNOWN = pytest.mark.parametrize("known", [True, False])


def put(x: torch.Tensor, at: torch.Tensor, values: torch.Tensor, axis: int, *, add: bool = False) -> torch.Tensor:
    turned, rows = x.movedim(axis, 0), values.movedim(axis, 0)
    return turned.index_put((at.long(),), rows, accumulate=add).movedim(0, axis)


@KNOWN
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_it_writes_where_torch_does(axis: int, kind: torch.dtype, known: bool) -> None:
    x = random(4, 5, 6).mul(8).to(kind)
    at = torch.tensor([3, 0, -1])
    shape = [*x.shape]
    shape[axis] = 3
    values = random(*shape, seed=1).mul(8).to(kind)
    found = run("put", x, at, values, constants=(1,) if known else (), axis=axis - 3)[0]
    same(found, put(x, at, values, axis))


@KNOWN
def test_the_last_value_of_a_place_stays(known: bool) -> None:
    x, at, values = torch.zeros(4), torch.tensor([2, 1, 2, 2], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = run("put", x, at, values, constants=(1,) if known else (), axis=0)[0]
    assert found.tolist() == [0.0, 2.0, 4.0, 0.0]


@KNOWN
@pytest.mark.parametrize("kind", KINDS[:4], ids=str)
def test_it_adds_all_values_of_a_place(kind: torch.dtype, known: bool) -> None:
    x, values = random(4, 5, 3).mul(4).to(kind), random(4, 6, 3, seed=1).mul(4).to(kind)
    at = torch.tensor([4, 1, 4, 0, 4, -1])
    found = run("put", x, at, values, constants=(1,) if known else (), axis=1, add=True)[0]
    wanted = put(x.double(), at, values.double(), 1, add=True)
    assert found.dtype is kind
    if kind.is_floating_point:
        close(found, wanted, ulps=4, scale=16)
    else:
        same(found, wanted.to(kind))


def test_infinities_reach_their_own_place_alone() -> None:
    x, at = torch.zeros(5), torch.tensor([3, 1])
    values = torch.tensor([float("inf"), float("nan")])
    for add in (False, True):
        for constants in ((), (1,)):
            found = run("put", x, at, values, constants=constants, axis=0, add=add)[0]
            same(found, torch.tensor([0.0, float("nan"), 0.0, float("inf"), 0.0]))


def test_nothing_to_write_and_an_index_outside() -> None:
    x = random(4, 3)
    same(run("put", x, torch.zeros(0, dtype=torch.int64), random(0, 3), axis=0)[0], x)
    values = random(2, 3)
    found = run("put", x, torch.tensor([9, 1]), values, axis=0)[0]  # known at run time only: it writes nothing
    same(found, put(x, torch.tensor([1]), values[1:], 0))
    assert "outside" in declined_known(x, torch.tensor([9, 1]), values)


def declined_known(x: torch.Tensor, at: torch.Tensor, values: torch.Tensor, *, add: bool = False) -> str:
    found = build("put", (x, at, values), (1,), axis=0, add=add)
    assert isinstance(found, Declined)
    return found.reason


def test_put_declines() -> None:
    x, at = random(8, 2), torch.tensor([0, 1])
    assert "put of" in declined("put", x, at, random(3, 2), axis=0)
    assert "put of" in declined("put", x, at, random(2, 2).half(), axis=0)
    assert "put of" in declined("put", x, at.float(), random(2, 2), axis=0)
    assert "axis 5" in declined("put", x, at, random(2, 2), axis=5)
    assert "adds bool" in declined("put", x > 0, at, random(2, 2) > 0, axis=0, add=True)
    many = torch.zeros(17, dtype=torch.int64)
    assert "adds 17" in declined("put", x, many, random(17, 2), axis=0, add=True)
    assert "one place" in declined_known(x, many, random(17, 2), add=True)
    assert "places" in declined("put", random(200), torch.zeros(100, dtype=torch.int64), random(100), axis=0)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_in_order_where_a_mask_is_set(kind: torch.dtype) -> None:
    x, values = random(3, 4, 5).mul(8).to(kind), random(6, 10, seed=1).mul(8).to(kind)
    mask = random(3, 4, 5, seed=2) > 0
    same(run("masked_put", x, mask, values)[0], x.masked_scatter(mask, values))
    for every in (torch.zeros_like(mask), torch.ones_like(mask)):
        same(run("masked_put", x, every, values)[0], x.masked_scatter(every, values))
    one = run("masked_put", x[:1, 0, 0], mask[:1, 0, 0], values)[0]
    same(one, x[:1, 0, 0].masked_scatter(mask[:1, 0, 0], values))


def test_masked_put_declines() -> None:
    x, mask = random(3, 4), random(3, 4) > 0
    assert "masked_put" in declined("masked_put", x, mask[:1], x)
    assert "masked_put" in declined("masked_put", x, mask.long(), x)
    assert "masked_put" in declined("masked_put", x, mask, x.half())
    assert "masked_put" in declined("masked_put", x, mask, x[:0])
