"""Graphs of which the framework runs a part: custom operators, complex and random numbers, and what is round them."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.torch_backend.seen import Seen
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from weft.frontends.imported import Imported
from weft.frontends.torch import calls_of_framework
from weft.options import Options
from weft.torch_backend.engine import Run, compiling_engine, reference_engine
from weft.torch_backend.split import MOST_PARTS, split

LIB = "weft_split_tests"


@torch.library.custom_op(f"{LIB}::shifted", mutates_args=())
def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    return torch.roll(x, by, -1)


@shifted.register_fake
def _(x: torch.Tensor, by: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{LIB}::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(np.floor(x.numpy())), x.clone() * 2


@halves.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


CALLED: list[str] = []


@torch.library.custom_op(f"{LIB}::told", mutates_args=())
def told(x: torch.Tensor, what: str) -> torch.Tensor:
    CALLED.append(what)
    return x.clone()


@told.register_fake
def _(x: torch.Tensor, what: str) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def given(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Custom(nn.Module):
    """Two products with operators of another library between and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        for k, p in enumerate(self.parameters()):
            p.data = 0.3 * given(*p.shape, seed=k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = shifted(torch.relu(self.first(x)), 3)
        x = self.second(torch.tanh(x))
        low, high = halves(x)
        return self.third(low) * torch.sigmoid(self.third(high))


def test_what_is_round_a_custom_operator_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    seen, model, x = Seen(), Custom().eval(), given(5, 8)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "weft"):
        torch.testing.assert_close(seen.compile(model)(x), model(x))
    assert len(seen.regions) == 3 and not seen.fallbacks()
    assert all(r.program is not None and not r.program.imported.opaque for r in seen.regions)
    (line,) = [r.getMessage() for r in caplog.records if "in parts" in r.getMessage()]
    assert "parts (3)" in line and "(2 calls)" in line and f"{LIB}.shifted" in line


def test_weights_are_constants_of_the_parts_and_a_change_is_seen() -> None:
    seen, model, x = Seen(), Custom().eval(), given(5, 8)
    with torch.no_grad():
        compiled = seen.compile(model)
        torch.testing.assert_close(compiled(x), model(x))
        inputs = [len(r.program.imported.graph.inputs) for r in seen.regions if r.program is not None]
        assert inputs == [1, 1, 2], "the activations alone"
        model.second.weight.mul_(-0.5)
        torch.testing.assert_close(compiled(x), model(x))


def test_training_goes_through_a_part_of_the_framework() -> None:
    torch.library.register_autograd(
        f"{LIB}::shifted",
        lambda ctx, grad: (torch.roll(grad, -ctx.by, -1), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
    )

    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(shifted(torch.relu(self.first(x)), 2))

    torch.manual_seed(1)
    seen, model, x = Seen(), Shifts(), given(6, 8)
    results = []
    for f in (model, seen.compile(model)):
        model.zero_grad()
        out = f(x)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == 5
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert not seen.fallbacks() and len(seen.regions) >= 2


def test_complex_numbers_inside_are_in_one_part() -> None:
    def spectrum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = torch.fft.rfft(torch.relu(x @ w))
        return torch.nn.functional.gelu(torch.fft.irfft(kept * kept.abs(), n=w.shape[1]) @ w.T)

    seen, x, w = Seen(), given(4, 6), 0.2 * given(6, 16, seed=1)
    torch.testing.assert_close(seen.compile(spectrum)(x, w), spectrum(x, w))
    assert len(seen.regions) == 1 and not seen.fallbacks()


def test_complex_numbers_stay_with_the_framework_beside_what_it_runs_anyway() -> None:
    def spectrum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        kept = torch.fft.rfft(torch.relu(x @ w))
        kept = kept * torch.exp(kept.real + 0 * torch.rand_like(kept.real))
        return torch.nn.functional.gelu(torch.fft.irfft(kept, n=w.shape[1]) @ w.T)

    seen, x, w = Seen(), given(4, 6), 0.2 * given(6, 16, seed=1)
    torch.testing.assert_close(seen.compile(spectrum)(x, w), spectrum(x, w))
    assert len(seen.regions) >= 2 and not seen.fallbacks()


def test_random_numbers_are_those_of_the_framework_in_its_order() -> None:
    def noisy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a = torch.relu(x @ w)
        first = a + torch.rand_like(a)
        b = torch.tanh(first @ w.T)
        return (b + torch.randn_like(b)) @ w * torch.rand_like(a)

    seen, x, w = Seen(), given(4, 6), given(6, 6, seed=1)
    torch.manual_seed(7)
    want, state = noisy(x, w), torch.get_rng_state()
    torch.manual_seed(7)
    torch.testing.assert_close(seen.compile(noisy)(x, w), want)
    assert torch.equal(torch.get_rng_state(), state)
    assert not seen.fallbacks() and len(seen.regions) == 3


def test_operators_of_others_are_called_in_the_order_of_the_model() -> None:
    def telling(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        late = told(torch.relu((told(x @ w, "one")) @ w), "two")
        return told(x @ w.T, "three") + late

    seen, x, w = Seen(), given(4, 6), given(6, 6, seed=1)
    CALLED.clear()
    want = telling(x, w)
    torch.testing.assert_close(seen.compile(telling)(x, w), want)
    assert CALLED == 2 * ["one", "two", "three"]


def test_what_a_graph_writes_is_written_last() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 6)
            self.register_buffer("seen", torch.zeros(6))
            self.seen: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.line(x + self.seen)
            self.seen.add_(shifted(torch.relu(before), 1).sum(0))
            return torch.tanh(self.line(before)) * self.seen.sum()

    torch.manual_seed(0)
    seen, model = Seen(), Counts().eval()
    twin = Counts().eval()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        compiled = seen.compile(model)
        for k in range(3):
            x = given(4, 6, seed=k)
            torch.testing.assert_close(compiled(x), twin(x))
            torch.testing.assert_close(model.seen, twin.seen)
    assert not seen.fallbacks() and len(seen.regions) >= 2


def test_a_graph_of_too_many_parts_or_of_nothing_worth_a_plan_is_left_whole() -> None:
    def many(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for k in range(MOST_PARTS + 2):
            x = shifted(torch.relu(x @ w), k)
        return x

    def little(x: torch.Tensor) -> torch.Tensor:
        return shifted(x + 1, 1) * 2

    x, w = given(4, 6), 0.3 * given(6, 6, seed=1)
    for f, inputs in ((many, (x, w)), (little, (x,))):
        seen = Seen()
        torch.testing.assert_close(seen.compile(f)(*inputs), f(*inputs))
        (region,) = seen.regions
        assert "shifted" in region.fallback


def test_other_shapes_are_split_too() -> None:
    seen, model = Seen(), Custom().eval()
    with torch.no_grad():
        compiled = seen.compile(model, dynamic=True)
        for rows in (3, 5, 3, 9):
            x = given(rows, 8, seed=rows)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(seen.regions) == 9 and not seen.fallbacks()


def test_the_budget_is_shared_among_the_parts() -> None:
    budgets: list[float] = []

    def engine(imported: Imported, options: Options, eager: Run) -> Run:
        budgets.append(options.budget_s)
        return reference_engine(imported, options, eager)

    seen, model, x = Seen(engine, budget_s=6.0), Custom().eval(), given(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(seen.compile(model)(x), model(x))
    assert len(budgets) == 3 and abs(sum(budgets) - 6.0) < 1e-6 and min(budgets) > 1


def test_by_the_compiler(tmp_path: Path) -> None:
    seen, model, x = Seen(compiling_engine, budget_s=0.0, cache_dir=tmp_path), Custom().eval(), given(64, 8)
    with torch.no_grad():
        torch.testing.assert_close(seen.compile(model)(x), model(x))
    assert not seen.fallbacks() and len(seen.regions) == 3


# ---- random graphs


def traced(seed: int) -> tuple[fx.GraphModule, list[torch.Tensor], list[str]]:
    """A random graph of calls that plans hold and calls of the framework's, some with an order of their own."""
    chance = random.Random(seed)
    inputs = [given(4, 4, seed=10 * seed + k) for k in range(2)]

    def build(*xs: torch.Tensor) -> list[torch.Tensor]:
        values = list(xs)
        for k in range(chance.randrange(3, 25)):
            a, b = chance.choice(values[-6:]), chance.choice(values[-6:])
            kind = chance.randrange(8)
            if kind == 0:
                values.append(shifted(a, k))
            elif kind == 1:
                values.append(told(a, str(k)))
            elif kind == 2:
                values += halves(a)
            elif kind <= 5:
                values.append(torch.relu(a @ b))
            else:
                values.append(a + b.transpose(0, 1))
        return values[-3:]

    gm = make_fx(build, tracing_mode="fake")(*inputs)
    order = [str(n.args[1]) for n in gm.graph.nodes if "told" in str(n.target)]
    return gm, inputs, order


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_keep_their_values_and_their_order(seed: int) -> None:
    gm, inputs, order = traced(seed)
    CALLED.clear()
    want = gm(*inputs)
    assert order == CALLED
    left = calls_of_framework(gm, inputs)
    assert {str(n.target).split(".")[0] for n in left} <= {LIB}
    parts = split(gm, left)
    if parts is None:
        return
    assert 1 <= len(parts.compiled) <= MOST_PARTS and abs(sum(p.share for p in parts.compiled) - 1) < 1e-9
    ran: list[str] = []

    def make(part: Any) -> Any:
        assert not any(LIB in str(n.target) for n in part.graph.graph.nodes)
        assert not calls_of_framework(part.graph, [None] * len(part.arguments)), "a plan holds all of it"

        def run(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
            ran.append(part.name)
            for k, position in enumerate(part.arguments):
                assert position < 0 or arguments[k] is inputs[position]
            found = part.graph(*arguments)
            return list(found) if isinstance(found, tuple | list) else [found]

        return run

    CALLED.clear()
    for a, b in zip(want, parts.with_compiled(make)(*inputs), strict=True):
        assert torch.equal(a, b)
    assert order == CALLED and sorted(ran) == sorted(p.name for p in parts.compiled)
