"""In-place calls of exported programs: read as functional ones where nothing aliases, left to torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frontends.torch.support import Wrapped, check
from torch import nn

from weft.frontends.torch.inplace import functional_forms, functional_overload, is_fresh

X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))


def forms(function: Callable[..., Any]) -> Any:
    return functional_forms(torch.export.export(Wrapped(function), (X,)).graph)


CLEAR = {
    "relu_": lambda x: (x + 1).relu_(),
    "written twice": lambda x: (x + 1).relu_().mul_(2).sub_(0.5),
    "read before": lambda x: [y := x * 2, y.sum(), y.add_(1)][1:],
    "read after by the old name": lambda x: [y := x * 2, y.add_(1), y * 3][1:],
    "two names": lambda x: [y := x * 2, y.relu_(), y.add_(5)],
    "viewed after": lambda x: (x * 2).add_(1).view(-1).exp(),
    "one written by another": lambda x: [y := x * 2, z := x * 3, y.add_(z), z.mul_(y)],
    "threshold": lambda x: F.hardtanh_(x * 3),
}
UNCLEAR = {
    "an argument is written": lambda x: x.clone().detach().view(-1).add_(1),
    "a view is written": lambda x: [y := x * 2, y[0].add_(1), y][1:],
    "viewed before": lambda x: [y := x * 2, v := y.view(-1), y.add_(1), v * 1],
    "may be itself": lambda x: [y := x * 2, z := y.reshape(2, 4, 6), y.relu_(), z * 1],
    "a part is written": lambda x: [y := (x * 2).split(2, 1)[0], y.add_(1)],
}


@pytest.mark.parametrize("name", CLEAR)
def test_clear_calls_are_read_as_functional(name: str) -> None:
    assert forms(CLEAR[name])
    check(CLEAR[name], X)


@pytest.mark.parametrize("name", UNCLEAR)
def test_unclear_ones_are_left_to_torch(name: str) -> None:
    assert forms(UNCLEAR[name]) is None
    check(UNCLEAR[name], X)


def test_a_network_with_in_place_activations() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 1),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Hardswish(inplace=True),
        nn.Dropout(0.5, inplace=True),
    )
    imported = check(net, torch.randn(1, 3, 6, 6))
    assert {"relu", "leaky_relu", "hard_swish", "batch_norm", "conv"} <= {o.rule for o in imported.graph.origins}


def test_batch_norm_in_training_mode_is_not_taken_for_inference() -> None:
    from weft.errors import UnsupportedError
    from weft.frontends.torch import import_exported

    program = torch.export.export(nn.BatchNorm1d(3).train(), (torch.randn(4, 3),))
    with pytest.raises(UnsupportedError, match="BUFFER_MUTATION"):
        import_exported(program)


def test_which_operators_are_fresh() -> None:
    aten = torch.ops.aten
    assert all(map(is_fresh, (aten.add.Tensor, aten.conv2d.default, aten.clone.default, aten.topk.default)))
    assert not any(
        map(is_fresh, (aten.view.default, aten.reshape.default, aten.relu_.default, aten._unsafe_view.default))
    )
    assert not is_fresh(print)


def test_functional_overloads() -> None:
    aten = torch.ops.aten
    assert functional_overload(aten.relu_.default) is aten.relu.default
    assert functional_overload(aten.add_.Tensor) is aten.add.Tensor
    assert functional_overload(aten.add.out) is None
