"""Copies of modules: as `copy.deepcopy` makes them, with attributes set one by one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from weft.frontends.torch.copies import deep_copy


class Net(nn.Module):
    layers: nn.ModuleList
    tied: nn.Linear
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.layers[0].weight  # type: ignore[assignment]
        self.again = self.layers[1]
        self.sizes = [1, 2]
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.tied, self.again):
            x = layer(x)
        return x * self.scale * float(self.sizes[1])


class Named(Net):
    """An attribute of an instance's dictionary that a property hides."""

    @property
    def sizes(self) -> list[int]:
        return self.__dict__["sizes"]

    @sizes.setter
    def sizes(self, value: list[int]) -> None:
        self.__dict__["sizes"] = value


@pytest.mark.parametrize("kind", [Net, Named])
def test_a_copy_is_like_the_module_and_apart_from_it(kind: type[Net]) -> None:
    module, x = kind().eval(), torch.randn(3, 4)
    made: Any = deep_copy(module, {})
    assert type(made) is kind and list(vars(made)) == list(vars(module)) and not made.training
    assert made.tied.weight is made.layers[0].weight is not module.tied.weight and made.again is made.layers[1]
    before = module(x)
    assert torch.equal(made(x), before)
    module.sizes[1] = 7
    with torch.no_grad():
        module.tied.weight.zero_()
    assert torch.equal(made(x), before) and made.sizes == [1, 2]


def test_what_the_memo_has_is_shared() -> None:
    module = Net()
    made: Any = deep_copy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
    assert all(a is b for a, b in zip(made.parameters(), module.parameters(), strict=True))
    assert made.scale is module.scale and made.layers[0] is not module.layers[0]


def test_a_module_with_a_copy_of_its_own_is_asked_for_it() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: dict[int, Any]) -> Own:
            made = copy.copy(self)
            made.copied = True  # type: ignore[assignment]
            return made

    made: Any = deep_copy(nn.Sequential(Own(2, 2), nn.ReLU()), {})
    assert made[0].copied
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    x = torch.randn(1, 2)
    assert torch.equal(deep_copy(traced, {})(x), traced(x))
