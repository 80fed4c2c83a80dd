"""Activations that are any expression: what is one, its value, its derivative against differences and against torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.generate.cuda.gradients import Runner, error_of, exact, made, network, normal, text_of
from tests.generate.cuda.tensor_emulator import Emulated
from tests.slow import few
from torch import nn

from weft.generate.cuda.training import Activation, Formula
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.nn.formulas import by_torch, traced


class Own(nn.Module):
    """A function of one value."""

    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "snake": lambda x: x + torch.sin(3.0 * x) ** 2 / 3.0,
    "bump": lambda x: torch.exp(-x * x),
    "wave": lambda x: x * torch.sin(5 * x) + 0.5 * torch.cos(x),
    "cases": lambda x: torch.where(x > 0, x * torch.exp(-x), x.clamp(min=-0.5)),
    "powers": lambda x: (x.abs() + 1) ** 1.5 - 2.0 ** (0.3 * x) + x**3 / 8,
    "quotients": lambda x: x / (1 + x.abs()) + torch.sqrt(1 + x * x) - torch.rsqrt(2 + x * x) + 1 / (3 + x * x),
    "inverses": lambda x: torch.atan(x) + torch.asinh(x) + torch.atan2(x, 1 + x * x) + torch.log1p(x * x),
    "hyperbolic": lambda x: torch.sinh(0.3 * x) - torch.cosh(0.2 * x) + torch.erf(x) * torch.tanh(x),
    "bounded": lambda x: torch.minimum(torch.maximum(x, torch.sin(x) - 1), torch.cos(x) + 2),
    "narrow": lambda x: torch.asin(x.tanh() / 20) + torch.acos(0.5 * torch.sin(x)) + torch.atanh(0.1 * torch.sin(x)),
    "others": lambda x: torch.expm1(0.2 * x) - torch.log(2 + x * x) + torch.acosh(2 + x * x) + torch.tan(0.05 * x),
    "steps": lambda x: x - torch.floor(x) * 0.25 + torch.remainder(x, 3.0) + torch.fmod(x, 2.0),
}
MODULES: list[nn.Module] = [nn.Mish(), nn.Hardswish(), nn.Softsign(), nn.CELU(), nn.SELU(), nn.LogSigmoid(), nn.ReLU6()]


def formula_of(module: nn.Module) -> Formula:
    found = traced(module)
    assert isinstance(found, Activation), found.reason
    assert found.formula is not None
    return found.formula


@pytest.mark.parametrize(
    "module", [*(Own(f) for f in FUNCTIONS.values()), *MODULES], ids=[*FUNCTIONS, *map(repr, MODULES)]
)
def test_value_and_derivative(module: nn.Module) -> None:
    f = formula_of(module)
    slope = f.derivative()
    assert isinstance(slope, Formula), slope
    x = np.random.default_rng(0).uniform(-4, 4, 997)
    z = torch.tensor(x, requires_grad=True)
    y = module(z)
    (wanted,) = torch.autograd.grad(y.sum(), z)
    np.testing.assert_allclose(f.at(x), y.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope.at(x), wanted.numpy(), rtol=3e-5, atol=3e-5)
    assert f.smooth() is None
    again = by_torch(f, z)
    torch.testing.assert_close(again, y)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), z)[0], wanted)


def test_second_derivatives_by_torch() -> None:
    f = formula_of(Own(FUNCTIONS["wave"]))
    x = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: by_torch(f, x), (x,))


def test_equal_expressions_are_equal() -> None:
    one, two = (formula_of(Own(FUNCTIONS["snake"])) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != formula_of(Own(lambda x: x + torch.sin(2.0 * x) ** 2 / 2.0))


@pytest.mark.parametrize(
    ("module", "part"),
    [
        (nn.PReLU(), "no expression without parameters"),
        (nn.BatchNorm1d(4, affine=False), "no expression without parameters"),
        (nn.Softmax(-1), "reduce_max, which is not elementwise"),
        (nn.Flatten(), "is no elementwise expression"),
        (nn.Dropout(0.5), "random numbers"),
        (Own(lambda x: x * x.shape[-1]), "depends on the shape"),
        (Own(lambda x: x if x.sum() > 0 else -x), "cannot be traced"),
        (Own(lambda x: x.cumsum(-1)), "is no elementwise expression"),
        (Own(lambda x: (x.double() + 1).float()), "f64"),
        (Own(lambda x: x > 0), "another shape or type"),
    ],
    ids=str,
)
def test_what_is_no_expression_says_why(module: nn.Module, part: str) -> None:
    found = traced(module)
    assert isinstance(found, Declined) and part in found.reason, found


@pytest.mark.parametrize("f", [lambda x: 1 / x, torch.log, lambda x: x.abs().sqrt(), lambda x: torch.exp(x * x)])
def test_where_it_is_infinite_gradients_are_left_to_torch(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    refused = formula_of(Own(f)).smooth()
    assert refused is not None and "not finite" in refused.reason


ACTS = {
    name: Activation("formula", (), formula_of(Own(FUNCTIONS[name]))) for name in ("snake", "bump", "cases", "wave")
}
NETS = {
    "each its own": (network((5, 24, 40, 16, 3), (*(ACTS[x] for x in ("snake", "bump", "cases")), Activation())), 37),
    "layers alike": (network((8, *(32,) * 4, 1), ACTS["wave"], DType.F16, given=DType.F32, last=ACTS["bump"]), 40),
}


@pytest.mark.parametrize("name", few(NETS, 1))
def test_gradients_near_float64(name: str) -> None:
    net, rows = NETS[name]
    g = made(net)
    x, dy, parameters = normal(net, rows)
    dx, others = Runner(Emulated([text_of(g)]), net, g).run(x, dy, parameters)
    wanted = exact(net, x, dy, parameters)
    eager = exact(net, x, dy, parameters, torch.bfloat16 if net.dtype is DType.BF16 else torch.float16)
    error, own = (
        math.fsum(error_of(a, b) for a, b in zip(found, wanted, strict=True)) / len(wanted)
        for found in ([dx, *others], eager)
    )
    assert error <= 1.2 * own + 2e-3, (error, own)
