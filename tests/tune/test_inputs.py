"""What kernels are verified on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.tune import inputs
from weft.tune.inputs import PERIOD, Domain, InputSet, draw
from weft.tune.oracle import Evaluation, Mode, evaluate


def _layers(count: int, width: int = 64) -> Graph:
    """Products of f16 with a bias and a rectifier after each."""
    b = GraphBuilder()
    y = b.input(TensorType(DType.F16, (500, width)))
    for _ in range(count):
        y = b.add(Prim.MATMUL, y, b.input(TensorType(DType.F16, (width, width)), is_weight=True))
        y = b.apply(Prim.MAX, b.apply(Prim.ADD, y, b.input(TensorType(DType.F16, (width,)), is_weight=True)), 0.0)
    return b.build([y])


@pytest.mark.parametrize(("count", "width"), [(3, 256), (5, 64), (8, 128), (24, 32)])
def test_whole_numbers_stay_exact_through_a_chain_of_products(count: int, width: int) -> None:
    graph = _layers(count, width)
    drawn = draw(graph, InputSet.INTEGERS, Domain.ZERO_MEAN, seed=3)
    found = evaluate(graph, drawn, Mode.PRECISE, seed=0)
    assert isinstance(found, Evaluation) and found.exact == (True,)
    (y,) = found.outputs
    assert 2 <= float(y.max()) < 2048, "all of them are whole in f16, and not all are zero"
    for weight in drawn[1::2]:
        assert set(weight.unique().tolist()) == {-1.0, 0.0, 1.0}
        assert 1 <= float((weight != 0).double().sum(0).mean()) <= 3


def test_few_products_keep_all_their_terms() -> None:
    drawn = draw(_layers(2), InputSet.INTEGERS, Domain.ZERO_MEAN, seed=3)
    assert all(set(x.unique().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0} for x in drawn)


@pytest.mark.parametrize("kind", list(InputSet), ids=lambda k: k.value)
def test_large_inputs_repeat_few_draws_without_a_stride_in_common(
    kind: InputSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1024, 1024)))
    graph = b.build([b.apply(Prim.NEG, x)])
    drawn: list[int] = []

    def counting(of: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def draws(*args: object, **given: object) -> torch.Tensor:
            found = of(*args, **given)
            drawn.append(found.numel())
            return found

        return draws

    monkeypatch.setattr(torch, "randn", counting(torch.randn))
    monkeypatch.setattr(torch, "randint", counting(torch.randint))
    inputs._remembered.cache_clear()
    (large,) = draw(graph, kind, Domain.ZERO_MEAN, seed=3)
    assert max(drawn) == PERIOD and sum(drawn) < PERIOD + 100
    assert large.shape == (1024, 1024) and large.is_contiguous()
    for rows in (1, 2, 3, 16, 255, 256, 257, 512):  # whatever is off by whole rows reads other values
        assert not torch.equal(large[rows:], large[:-rows])
    assert not torch.equal(large[:, 1:], large[:, :-1])
    before = len(drawn)
    large.zero_()  # nobody else's
    (again,) = draw(graph, kind, Domain.ZERO_MEAN, seed=3)
    assert max(drawn[before:], default=0) < 100  # what is planted is drawn anew
    inputs._remembered.cache_clear()
    assert torch.equal(again.view(torch.int32), draw(graph, kind, Domain.ZERO_MEAN, seed=3)[0].view(torch.int32))
