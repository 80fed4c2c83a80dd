"""A model is compiled as it stands: what its owner does with it later changes no plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from weft import api
from weft.options import Options


class Stubborn(nn.Sequential):
    """A module that cannot be copied."""

    def __deepcopy__(self, memo: object) -> Stubborn:
        raise RuntimeError("only one of me")


def model_of(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 32)]
    return kind(*layers).eval()


def spoil(model: nn.Module) -> None:
    model.train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


@pytest.mark.parametrize("budget_s", [0.0, 8.0])
@pytest.mark.parametrize("exported", [False, True])
def test_weights_and_modes_that_change_later(budget_s: float, exported: bool, tmp_path: Path) -> None:
    model, x = model_of(), torch.randn(32, 64)
    with torch.no_grad():
        want = model(x)
    given = torch.export.export(model, (x,)) if exported else model
    compiled = weft.compile(given, x, options=Options(budget_s=budget_s, cache_dir=tmp_path))
    spoil(model)
    torch.testing.assert_close(compiled(x), want)
    torch.testing.assert_close(compiled.executable(x)[0], want)
    if not exported:
        with torch.no_grad():
            more = torch.randn(8, 64)
            torch.testing.assert_close(compiled(more), model_of()(more))
    compiled.save(tmp_path / "plan.weft")
    loaded = weft.load(tmp_path / "plan.weft", options=Options(cache_dir=tmp_path))
    torch.testing.assert_close(loaded(x), want)


def test_a_module_that_cannot_be_copied_has_a_plan_of_its_own_weights(tmp_path: Path) -> None:
    model, x = model_of(Stubborn), torch.randn(32, 64)
    with torch.no_grad():
        want = model(x)
    compiled = weft.compile(model, x, options=Options(budget_s=0.0, cache_dir=tmp_path))
    spoil(model)
    torch.testing.assert_close(compiled.executable(x)[0], want)


def test_the_frameworks_model_settles_once() -> None:
    model = model_of()
    mine = api._Eager(model, owned=True)
    mine.settle()
    assert mine._module is model
    shared = api._Eager(model, owned=False)
    shared.settle()
    settled = shared._module
    assert settled is not model
    shared.settle()
    assert shared._module is settled
