"""Every activation against torch in f64, in each floating type, on the inputs that break careless forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.fission.harness import FLOATS, close, declined, random, run, same

CASES: dict[str, tuple[str, dict[str, Any], Callable[[torch.Tensor], torch.Tensor], float]] = {
    # rule, parameters, definition, absolute scale: the size of the terms that cancel in the definition
    "relu": ("relu", {}, torch.relu, 0),
    "leaky_relu": ("leaky_relu", {"alpha": 0.1}, lambda x: F.leaky_relu(x, 0.1), 0),
    "leaky_relu_steep": ("leaky_relu", {"alpha": 2.5}, lambda x: F.leaky_relu(x, 2.5), 0),
    "threshold": ("threshold", {"threshold": 0.3, "value": 7.0}, lambda x: F.threshold(x, 0.3, 7.0), 0),
    "thresholded_relu": ("thresholded_relu", {"alpha": 0.7}, lambda x: torch.where(x > 0.7, x, 0.0), 0),
    "clip": ("clip", {"lo": -0.25, "hi": 0.75}, lambda x: torch.clamp(x, -0.25, 0.75), 0),
    "clip_low": ("clip", {"lo": -0.25}, lambda x: torch.clamp(x, min=-0.25), 0),
    "clip_crossed": ("clip", {"lo": 1.0, "hi": -1.0}, lambda x: torch.clamp(x, 1.0, -1.0), 0),
    "relu6": ("relu6", {}, F.relu6, 0),
    "hard_tanh": ("hard_tanh", {}, F.hardtanh, 0),
    "sigmoid": ("sigmoid", {}, torch.sigmoid, 0),
    "silu": ("silu", {}, F.silu, 0),
    "swish": ("silu", {"alpha": 0.5}, lambda x: x * torch.sigmoid(0.5 * x), 0),
    "log_sigmoid": ("log_sigmoid", {}, F.logsigmoid, 0),
    "gelu": ("gelu", {}, F.gelu, 1),
    "gelu_tanh": (
        "gelu",
        {"approximate": "tanh"},
        lambda x: x / (1 + torch.exp(-1.5957691216057308 * (x + 0.044715 * x**3))),
        1e-3,
    ),
    "softplus": ("softplus", {}, lambda x: torch.logaddexp(x, torch.zeros_like(x)), 0),
    "softplus_torch": ("softplus", {"beta": 2.0, "threshold": 3.0}, lambda x: F.softplus(x, 2.0, 3.0), 0),
    "mish": ("mish", {}, F.mish, 0),
    "elu": ("elu", {"alpha": 1.5}, lambda x: F.elu(x, 1.5), 0),
    "elu_scaled": (
        "elu",
        {"alpha": 1.5, "scale": 2.0, "input_scale": 0.5},
        lambda x: torch._C._nn.elu(x, 1.5, 2.0, 0.5),
        0,
    ),
    "selu": ("selu", {}, F.selu, 0),
    "celu": ("celu", {"alpha": 0.7}, lambda x: F.celu(x, 0.7), 0),
    "hard_sigmoid": ("hard_sigmoid", {}, F.hardsigmoid, 1),
    "hard_sigmoid_onnx": ("hard_sigmoid", {"alpha": 0.2}, lambda x: torch.clamp(0.2 * x + 0.5, 0, 1), 1),
    "hard_swish": ("hard_swish", {}, F.hardswish, 4),
    "softsign": ("softsign", {}, F.softsign, 0),
    "shrink": (
        "shrink",
        {"lambd": 0.4, "bias": 0.1},
        lambda x: torch.where(x < -0.4, x + 0.1, torch.where(x > 0.4, x - 0.1, 0.0)),
        1,
    ),
    "soft_shrink": ("soft_shrink", {"lambd": 0.4}, lambda x: F.softshrink(x, 0.4), 1),
    "hard_shrink": ("hard_shrink", {"lambd": 0.4}, lambda x: F.hardshrink(x, 0.4), 0),
    "tanh_shrink": ("tanh_shrink", {}, F.tanhshrink, 1),
    "tanh": ("tanh", {}, torch.tanh, 0),
    "erf": ("erf", {}, torch.erf, 0),
}

DATA = {
    "normal": lambda: random(7, 11) * 3,
    "tiny": lambda: random(7, 11) * 1e-4,
    "wide": lambda: random(7, 11) * 40,
    "negative": lambda: -random(7, 11).abs() * 6,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_activation_equals_torch(case: str, dtype: torch.dtype) -> None:
    # 8 ulp: at most four rounded steps of 2 ulp each; 16-bit types are computed in f32 and rounded once (or twice)
    rule, params, definition, scale = CASES[case]
    for data in DATA.values():
        x = data().to(dtype)
        found = run(rule, x, **params)[0]
        assert found.dtype is dtype
        wanted = definition(x.double())
        # 8 ulp relative; values that cancel in the definition have that many ulp of the cancelled terms
        close(found, wanted, ulps=8 if dtype in FLOATS[:2] else 1, scale=max(scale, 1e-3 if rule == "silu" else 0))


SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 100.0, -100.0, 1e4, -1e4])


@pytest.mark.parametrize("case", [c for c in CASES if c not in ("shrink", "gelu_tanh", "swish")])
def test_special_values_are_those_of_torch(case: str) -> None:
    # f32, 16 ulp: torch itself rounds a few times
    rule, params, definition, _ = CASES[case]
    # in f64: torch's own f32 gelu gives NaN at ∞ on machines with wide vectors
    found, wanted = run(rule, SPECIAL, **params)[0], definition(SPECIAL.double()).float()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())
    torch.testing.assert_close(found, wanted, rtol=16 * 2**-23, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ["sigmoid", "silu", "gelu", "softplus", "mish", "elu", "selu", "log_sigmoid"])
def test_sixteen_bits_stay_finite_over_the_whole_range(case: str, dtype: torch.dtype) -> None:
    x = torch.tensor([-60000.0, -1000.0, -90.0, -12.0, 12.0, 90.0, 1000.0]).to(dtype)
    found = run(CASES[case][0], x)[0]
    assert found.isfinite().all()
    close(found, CASES[case][2](x.double()) if case != "elu" else F.elu(x.double()), ulps=1, scale=1e-2)


def test_gelu_tanh_keeps_relative_accuracy_in_the_left_tail() -> None:
    x = torch.linspace(-6, -1e-3, 500)
    u = math.sqrt(2 / math.pi) * (x.double() + 0.044715 * x.double() ** 3)
    wanted = x.double() / (1 + torch.exp(-2 * u))
    error = ((run("gelu", x, approximate="tanh")[0].double() - wanted) / wanted).abs().max()
    assert error < 5e-6  # exp of −2u ≈ 27 turns one ulp of u into 27 ulp of y; the tanh form is wrong by 13


def test_prelu_per_channel_and_broadcast() -> None:
    x, a = random(2, 3, 4), random(3, seed=1)
    same(run("prelu", x, a, axis=1)[0], F.prelu(x, a))
    same(run("prelu", x, a.reshape(3, 1))[0], F.prelu(x, a))
    same(run("prelu", x, a[:1], axis=1)[0], F.prelu(x, a[:1]))
    same(run("prelu", x[0, 0], a[:1], axis=1)[0], F.prelu(x[0, 0], a[:1]))


def test_glu() -> None:
    for dtype in FLOATS:
        x = random(3, 8, 2, dtype=dtype)
        close(run("glu", x, axis=1)[0], F.glu(x.double(), 1), ulps=4, scale=1e-3)
    assert "glu" in declined("glu", random(3, 7), axis=1)


def test_clip_with_bounds_that_are_values() -> None:
    x = random(5, 6)
    lo, hi = torch.tensor(-0.5), torch.tensor(0.5)
    same(run("clip", x, lo, hi)[0], x.clamp(-0.5, 0.5))
    same(run("clip", x, None, hi)[0], x.clamp(max=0.5))
    same(run("clip", x)[0], x)


def test_clip_of_integers_saturates_its_bounds() -> None:
    x = torch.arange(0, 256, 5).to(torch.uint8)
    same(run("clip", x, lo=-10.0, hi=300.0)[0], x)
    same(run("clip", x, lo=10.0, hi=100.0)[0], x.clamp(10, 100))
    assert "2.5" in declined("clip", x, lo=2.5)
    big = torch.tensor([2**53 + 1, -(2**60)])
    same(run("clip", big, lo=0)[0], big.clamp(0))


def test_relu_of_integers_and_bool() -> None:
    x = torch.tensor([-3, 0, 4])
    same(run("relu", x)[0], torch.relu(x))
    assert "bool" in declined("relu", torch.tensor([True]))


@pytest.mark.parametrize("case", [c for c in CASES if CASES[c][0] not in ("relu", "clip", "relu6", "hard_tanh")])
def test_integers_are_declined(case: str) -> None:
    rule, params, _, _ = CASES[case]
    assert "i64" in declined(rule, torch.tensor([1, 2]), **params)


def test_parameters_without_a_meaning_are_declined() -> None:
    x = random(3)
    assert "beta" in declined("softplus", x, beta=0.0)
    assert "alpha" in declined("celu", x, alpha=0.0)
    assert "approximate" in declined("gelu", x, approximate="fast")
    assert "lambda" in declined("soft_shrink", x, lambd=-1.0)
