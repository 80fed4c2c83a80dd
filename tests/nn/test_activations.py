"""The table of tuned activations: each entry whole, and one more entry is all that a new activation takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.generate.cuda.gradients import Runner, error_of, exact, made, network, normal, text_of
from tests.generate.cuda.tensor_emulator import Emulated
from torch import nn

from weft.cli.mlp import _activations
from weft.generate.cuda.training import KINDS, Activation, Kept, Kind, called
from weft.ir.declined import Declined
from weft.ir.prims import Prim
from weft.ir.types import DType
from weft.nn.layers import activation_of, layers_of, module_of

SOFTSIGN = Kind(
    "softsign",
    "Softsign",
    "softsign",
    Kept.RESULT,
    graph=lambda b, x: b.apply(Prim.DIV, x, b.apply(Prim.ADD, b.apply(Prim.ABS, x), 1.0)),
    slope=lambda n, g: n.mul(g, n.mul(n.less(n.op(Prim.ABS, n.x)), n.less(n.op(Prim.ABS, n.x)))),
    of="return z / (1.0f + fabsf(z));",
    back="const float s = 1.0f - fabsf(z); return g * (s * s);",
)
"""x / (1 + |x|); the derivative over the result y is (1 - |y|)^2."""


@pytest.fixture
def softsign(monkeypatch: pytest.MonkeyPatch) -> Kind:
    monkeypatch.setitem(KINDS, SOFTSIGN.name, SOFTSIGN)
    return SOFTSIGN


@pytest.mark.parametrize("name", KINDS)
def test_modules_and_activations_are_two_names_of_one_thing(name: str) -> None:
    kind = KINDS[name]
    act = Activation(name, tuple(2 * x + 0.5 for x in kind.numbers.values()))
    assert activation_of(module_of(act)) == act
    assert name == "identity" or name in _activations()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.call])
def test_calls_are_activations(name: str) -> None:
    kind = KINDS[name]
    defaults = tuple(kind.numbers.values())
    options = kind.options if name == "gelu_tanh" else {}
    assert called(kind.call, (), options) == Activation(name, defaults)
    assert called(kind.call + "_", (), {"inplace": True, **options}) == Activation(name, defaults)
    takes = list(kind.numbers if kind.call_takes is None else kind.call_takes)
    others = tuple(x + 0.25 for x in defaults[: len(takes)])
    wanted = Activation(name, (*others, *defaults[len(takes) :]))
    assert called(kind.call, others, options) == wanted
    assert called(kind.call, (), {**dict(zip(takes, others, strict=True)), **options}) == wanted


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("relu", (0.5,), {}),
        ("sin", (2.0,), {}),
        ("elu", (1.0, 2.0), {}),
        ("elu", (), {"scale": 2.0}),
        ("leaky_relu", (torch.zeros(1),), {}),
        ("gelu", (), {"approximate": "other"}),
        ("add", (), {}),
        ("", (), {}),
    ],
)
def test_other_calls_are_none(name: str, arguments: tuple[object, ...], named: dict[str, object]) -> None:
    assert called(name, arguments, named) is None


def test_numbers_must_be_those_of_the_kind() -> None:
    with pytest.raises(ValueError, match="leaky_relu takes"):
        Activation("leaky_relu")
    with pytest.raises(ValueError, match="no activation 'swoosh'"):
        Activation("swoosh")
    assert isinstance(activation_of(nn.Softplus(beta=0.0)), Declined)
    assert isinstance(activation_of(nn.ELU(float("inf"))), Declined)


def test_a_derived_class_is_not_the_activation() -> None:
    class Own(nn.ReLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * 3.0

    found = activation_of(Own())
    assert isinstance(found, Activation) and found.kind == "formula"


def test_one_entry_makes_a_tuned_activation(softsign: Kind) -> None:
    assert activation_of(nn.Softsign()) == Activation("softsign")
    found = layers_of([nn.Linear(5, 24), nn.Softsign(), nn.Linear(24, 3)])
    assert not isinstance(found, Declined) and found.acts == (Activation("softsign"), Activation())
    assert "softsign" in _activations()
    assert called("softsign", (), {}) == Activation("softsign")


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_its_kernels_are_right(softsign: Kind, dtype: DType) -> None:
    net = network((5, 24, 40, 3), Activation(softsign.name), dtype)
    gradient = made(net)
    emulated = Emulated([text_of(gradient)])
    x, dy, parameters = normal(net, 37)
    dx, others = Runner(emulated, net, gradient).run(x, dy, parameters)
    wanted = exact(net, x, dy, parameters)
    eager = exact(net, x, dy, parameters, torch.bfloat16 if dtype is DType.BF16 else torch.float16)
    unit = 2.0**-8 if dtype is DType.BF16 else 2.0**-11
    error, own = (np.mean([error_of(a, b) for a, b in zip(ys, wanted, strict=True)]) for ys in ([dx, *others], eager))
    assert error <= 1.2 * own + 0.5 * unit, (error, own)
