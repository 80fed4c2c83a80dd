"""Where the framework's own execution answers, a call gives what the module gives, and nothing that is somebody's."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.frontends.torch.structure import tensors_in
from weft.options import Options


@dataclass
class Found:
    first: torch.Tensor
    rest: dict[str, Any]


class Cache:
    """An object that nobody can look through."""

    def __init__(self, *kept: torch.Tensor) -> None:
        self.kept = kept


class Net(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.form = form

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        y = x * self.weight * scale
        return {
            "tensor": y,
            "weight": (y, self.weight),
            "view": [y, self.weight[1:]],
            "input": (y, x),
            "fields": Found(y, {"x": x, "n": 3}),
            "cache": (y, Cache(y + 1, y + 2)),
            "cached weight": (y, Cache(y + 1, self.weight)),
        }[self.form]


def tensors(value: Any) -> list[torch.Tensor]:
    """All of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Cache):
        return list(value.kept)
    if isinstance(value, Found):
        return [value.first, value.rest["x"]]
    return [t for x in value for t in tensors(x)]


@pytest.mark.filterwarnings("ignore:Weft")
@pytest.mark.parametrize("form", ["tensor", "weight", "view", "input", "fields", "cache", "cached weight"])
def test_results_are_the_modules_own_and_nobody_elses(form: str) -> None:
    model = Net(form)
    x = torch.randn(4)
    compiled = weft.compile(model, x, options=Options(budget_s=1e-3))
    assert compiled.record.chosen == "eager"
    for scale in (1.0, 1.0, 2.0):
        with torch.no_grad():
            want = model(x, scale=scale)
        got = compiled(x, scale=scale)
        assert type(got) is type(want)
        for one, other in zip(tensors(got), tensors(want), strict=True):
            assert torch.equal(one, other)
            one.detach().zero_()
        assert torch.equal(model.weight, torch.ones(4))
    assert torch.equal(tensors(compiled(torch.ones(4)))[0], torch.ones(4))


def test_what_can_be_looked_through() -> None:
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    found, whole = tensors_in({"a": [a, 3, None], "b": Found(b, {"c": (c, "text")})})
    assert {id(t) for t in found} == {id(a), id(b), id(c)} and whole
    found, whole = tensors_in((a, SimpleNamespace(b=b)))
    assert [id(t) for t in found] == [id(a)] and not whole
