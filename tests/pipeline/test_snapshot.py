"""A model is compiled as it stands: what its owner does with it later changes no plan."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.slow import few
from torch import nn

import weft
from weft import api
from weft.frontends.torch.structure import OfTensors
from weft.options import Options


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The machine is looked at once."""
    return tmp_path_factory.mktemp("cache")


class Stubborn(nn.Sequential):
    """A module that cannot be copied."""

    error: Exception = RuntimeError("only one of me")

    def __deepcopy__(self, memo: object) -> Stubborn:
        raise self.error


def model_of(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 32)]
    return kind(*layers).eval()


def spoil(model: nn.Module) -> None:
    model.train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)


@pytest.mark.parametrize("budget_s", few([0.0, 60.0], 1))
@pytest.mark.parametrize("exported", few([False, True], 1))
def test_weights_and_modes_that_change_later(budget_s: float, exported: bool, cache: Path, tmp_path: Path) -> None:
    model, x = model_of(), torch.randn(32, 64)
    with torch.no_grad():
        want = model(x)
    given = torch.export.export(model, (x,)) if exported else model
    compiled = weft.compile(given, x, options=Options(budget_s=budget_s, cache_dir=cache))
    spoil(model)
    torch.testing.assert_close(compiled(x), want)
    torch.testing.assert_close(compiled.executable(x)[0], want)
    told = nullcontext() if exported else pytest.warns(UserWarning, match="weights of the module changed")
    with told:  # once per change: where another plan is made, or one is saved
        if not exported:
            with torch.no_grad():
                more = torch.randn(8, 64)
                torch.testing.assert_close(compiled(more), model_of()(more))
        compiled.save(tmp_path / "plan.weft")
    loaded = weft.load(tmp_path / "plan.weft", options=Options(cache_dir=cache))
    torch.testing.assert_close(loaded(x), want)


@pytest.mark.parametrize("error", [RuntimeError("only one of me"), copy.Error("none"), KeyError("none")])
def test_a_module_that_cannot_be_copied_has_a_plan_of_its_own_weights(
    error: Exception, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stubborn, "error", error)
    model, x = model_of(Stubborn), torch.randn(32, 64)
    with torch.no_grad():
        want = model(x)
    compiled = weft.compile(model, x, options=Options(budget_s=0.0, cache_dir=cache))
    spoil(model)
    torch.testing.assert_close(compiled.executable(x)[0], want)


@pytest.mark.parametrize("owned", [False, True])
def test_the_frameworks_model_settles_once(owned: bool) -> None:
    model = model_of()
    eager = api._Eager(OfTensors(model), "cpu", owned=owned)
    eager.settle()
    settled = eager._module
    assert settled is not model
    assert (next(settled.parameters()) is next(model.parameters())) is owned
    eager.settle()
    assert eager._module is settled


def test_other_shapes_are_compiled_beside_calls_of_the_frameworks_model(cache: Path) -> None:
    """While a module is exported, its parameters are no tensors that anybody could compute with."""
    model = model_of()
    inputs = {n: torch.randn(n, 64) for n in (2, 3, 4)}
    with torch.no_grad():
        want = {n: model(x) for n, x in inputs.items()}
    compiled = weft.compile(model, inputs[2], options=Options(budget_s=0.0, cache_dir=cache))
    failed: list[object] = []

    def call(n: int) -> None:
        try:
            for _ in range(20 if n == 2 else 1):
                torch.testing.assert_close(compiled(inputs[n]), want[n])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(n,)) for n in (3, 4, 2, 2, 3, 4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed, failed


class Given(nn.Module):
    """Gives back what it was given and what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.view(-1), self.weight.t(), x + self.weight


def test_results_may_be_written_whoever_has_won(cache: Path) -> None:
    model, x = Given().eval(), torch.randn(4, 4)
    want, kept = [t.detach().clone() for t in model(x)], x.clone()
    compiled = weft.compile(model, x, options=Options(budget_s=0.0, cache_dir=cache))
    own = api._Eager(OfTensors(api._copied(model)[0]), "cpu", owned=True)
    own.settle()
    for run in (compiled, compiled.executable, own):
        for _ in range(2):
            for got, right in zip(run(x), want, strict=True):
                torch.testing.assert_close(got, right)
                got.zero_()
    assert torch.equal(x, kept)


class Mixed(nn.Module):
    """Something that autocast computes in 16 bits, and something that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.line(x).reshape(-1, 4, 8)
        return nn.functional.scaled_dot_product_attention(y, y, y), torch.exp(x)


def test_a_callers_autocast_keeps_no_weights() -> None:
    """They would be freed with it, while a CUDA graph reads them."""
    line, x = nn.Linear(8, 8), torch.randn(2, 8)
    model = api._Autocast(line, "cpu", torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(x)
        line.weight.zero_()
        assert torch.equal(model(x), line.bias.bfloat16().expand(2, 8))


@pytest.mark.parametrize("automatic", [False, True])
def test_autocast_is_that_of_the_compilation(automatic: bool, cache: Path) -> None:
    torch.manual_seed(0)
    model, x = Mixed().eval(), torch.randn(16, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=automatic):
        with torch.no_grad():
            want = model(x)
        compiled = weft.compile(model, x, options=Options(budget_s=0.0, cache_dir=cache))
    assert want[0].dtype is (torch.bfloat16 if automatic else torch.float32)
    for around in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            for found in (compiled(x), compiled.executable(x)):
                for got, right in zip(found, want, strict=True):
                    assert got.dtype is right.dtype
                    limit = 0.02 if right.dtype is torch.bfloat16 else 1e-5
                    torch.testing.assert_close(got, right, atol=limit, rtol=limit)
            assert [t.dtype for t in compiled(torch.randn(4, 32))] == [t.dtype for t in want]
