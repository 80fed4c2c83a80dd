"""Elementwise rules against torch, with broadcasting, special values and integer division."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from tests.fission.harness import FLOATS, TORCH, build, close, declined, random, run, same

from weft.fission.arithmetic import BINARY, UNARY
from weft.ir.declined import Declined
from weft.ir.prims import Prim

INF, NAN = math.inf, math.nan
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.5, INF, -INF, NAN, 1e-30, 3e38])

UNARY_TORCH = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p,
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "erf": torch.erf, "tanh": torch.tanh,
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "asin": torch.asin, "acos": torch.acos, "atan": torch.atan,
    "sinh": torch.sinh, "cosh": torch.cosh, "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh,
    "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "round": torch.round,
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", UNARY_TORCH)
def test_unary(op: str, dtype: torch.dtype) -> None:
    for x in (random(5, 6, dtype=dtype), random(5, 6, dtype=dtype).abs() + 1, random(5, 6, dtype=dtype).clamp(-1, 1)):
        close(run("unary", x, op=op)[0], UNARY_TORCH[op](x.double()), ulps=4 if dtype in FLOATS[:2] else 1)


@pytest.mark.parametrize("op", [op for op in UNARY_TORCH if op not in ("sin", "cos", "tan")])
def test_unary_special_values(op: str) -> None:
    found, wanted = run("unary", SPECIAL, op=op)[0], UNARY_TORCH[op](SPECIAL.double()).float()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-37, equal_nan=True)


def test_unary_of_integers_and_bool() -> None:
    x = torch.tensor([-3, 0, 5], dtype=torch.int32)
    for op, f in {"neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "not": torch.bitwise_not}.items():
        same(run("unary", x, op=op)[0], f(x))
    for op in ("floor", "ceil", "trunc", "round"):
        same(run("unary", x, op=op)[0], x)
    u = torch.tensor([0, 200], dtype=torch.uint8)
    same(run("unary", u, op="abs")[0], u)
    same(run("unary", u > 3, op="not")[0], u <= 3)
    same(run("logical_not", x)[0], torch.logical_not(x))
    assert "exp of i32" in declined("unary", x, op="exp")
    assert "neg of bool" in declined("unary", x > 0, op="neg")
    assert "not of f32" in declined("unary", x.float(), op="not")
    assert "no unary primitive" in declined("unary", x, op="__import__")


def test_every_primitive_is_reachable() -> None:
    assert set(UNARY) == {*UNARY_TORCH, "sign", "isnan", "isinf", "not"}
    assert len(UNARY) + len(BINARY) + 2 == sum(p.value not in _REST for p in Prim)  # with cast and select


_REST = {
    "input", "constant", "broadcast", "reshape", "transpose", "slice", "concat", "pad", "gather", "take_along", "iota",
    "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "argmax", "argmin", "window_sum", "window_max", "scan",
    "matmul", "conv", "opaque",
}  # fmt: skip


def test_tests_for_nan_and_infinity() -> None:
    same(run("isnan", SPECIAL)[0], SPECIAL.isnan())
    same(run("isinf", SPECIAL)[0], SPECIAL.isinf())
    same(run("is_inf", SPECIAL, negative=False)[0], SPECIAL == INF)
    same(run("is_inf", SPECIAL, positive=False)[0], SPECIAL == -INF)
    same(run("is_inf", SPECIAL, positive=False, negative=False)[0], torch.zeros(10, dtype=torch.bool))
    same(run("sign_or_zero", SPECIAL)[0], torch.sign(SPECIAL))
    assert "i64" in declined("is_inf", torch.tensor([1]))


BINARY_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "max": torch.maximum, "min": torch.minimum,
    "mod": torch.remainder, "fmod": torch.fmod, "atan2": torch.atan2, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt,
    "le": torch.le, "gt": torch.gt, "ge": torch.ge, "pow": torch.pow,
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", BINARY_TORCH)
def test_binary_broadcasts(op: str, dtype: torch.dtype) -> None:
    x, y = random(3, 1, 4, dtype=dtype), random(2, 1, seed=1, dtype=dtype)
    x, y = (x.abs(), y) if op == "pow" else (x, y)
    found, wanted = run("binary", x, y, op=op)[0], BINARY_TORCH[op](x.double(), y.double())
    if wanted.dtype is torch.bool:
        same(found, wanted)
    else:
        close(found, wanted, ulps=4 if dtype in FLOATS[:2] else 1, scale=1 if op in ("mod", "fmod") else 0)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "max", "min", "eq", "ne", "lt", "le", "gt", "ge", "pow"])
def test_binary_special_values(op: str) -> None:
    x, y = SPECIAL[:, None], SPECIAL[None, :]
    found, wanted = run("binary", x.contiguous(), y.contiguous(), op=op)[0], BINARY_TORCH[op](x, y)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_binary_of_integers(dtype: torch.dtype) -> None:
    x = torch.arange(-8, 9).to(dtype)[:, None].contiguous()
    y = torch.tensor([1, 2, 3, 7, -2, -5]).to(dtype)
    for op in ("add", "sub", "mul", "max", "min", "mod", "fmod", "eq", "lt", "ge"):
        same(run("binary", x, y, op=op)[0], BINARY_TORCH[op](x, y))
    same(run("binary", x, y, op="div")[0], torch.div(x, y, rounding_mode="trunc"))
    same(run("floor_divide", x, y)[0], torch.div(x, y, rounding_mode="floor"))
    same(run("true_divide", x, y)[0], torch.true_divide(x, y))
    same(run("remainder", x, y)[0], torch.remainder(x, y))
    for op, f in {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}.items():
        same(run("binary", x, y, op=op)[0], f(x, y))
    s = torch.tensor([0, 1, 3]).to(dtype)
    same(run("binary", x, s, op="shl")[0], x << s)
    same(run("binary", x, s, op="shr")[0], x >> s)


def test_binary_of_bool_and_mixed_types() -> None:
    x, y = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    for op, f in {"and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor}.items():
        same(run("binary", x, y, op=op)[0], f(x, y))
        same(run("logical", x.float() * 3, y.long(), op=op)[0], f(x, y))
    assert "add of bool" in declined("binary", x, y, op="add")
    assert "f32 and i64" in declined("binary", x.float(), y.long(), op="add")
    assert "and of f32" in declined("binary", x.float(), y.float(), op="and")
    assert "no binary primitive" in declined("binary", x, y, op="exec")
    assert "no logical operator" in declined("logical", x, y, op="add")
    assert "do not broadcast" in declined("binary", random(3), random(4), op="add")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floor_divide_is_exact(dtype: torch.dtype) -> None:
    x = torch.cat([random(40, dtype=dtype) * 10, torch.tensor([1.0, 6.0, -1.0, 0.0, 7.0]).to(dtype)])[
        :, None
    ].contiguous()
    y = torch.tensor([0.1, -0.1, 3.0, 0.7, -2.5]).to(dtype)
    # torch rounds the remainder to bf16 on the way, so the judge is rational arithmetic
    exact = [[math.floor(Fraction(float(a)) / Fraction(float(c))) for c in y] for a in x[:, 0]]
    same(run("floor_divide", x, y)[0], torch.tensor(exact, dtype=torch.float64).to(dtype))
    if dtype in FLOATS[:2]:
        same(run("floor_divide", x, y)[0], torch.div(x, y, rounding_mode="floor"))
    one, tenth = torch.tensor([1.0]).double(), torch.tensor([0.1]).double()
    assert run("floor_divide", one, tenth)[0].item() == 9.0  # where the rounded quotient is 10


def test_floor_divide_by_zero_and_infinity() -> None:
    x, y = torch.tensor([1.0, -1.0, 0.0, INF, NAN])[:, None].contiguous(), torch.tensor([0.0, -0.0, 2.0])
    same(run("floor_divide", x, y)[0], torch.div(x, y, rounding_mode="floor"))
    assert "bool" in declined("floor_divide", x > 0, x > 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("exponent", [0.0, 0.5, -0.5, 1.0, -1.0, 2.0, 3.0, -2.0, 4.0, 1.7])
def test_pow_by_a_constant(exponent: float, dtype: torch.dtype) -> None:
    x, e = random(20, dtype=dtype).abs() + 0.1, torch.tensor(exponent, dtype=dtype)
    close(run("pow", x, e, constants=(1,))[0], x.double() ** e.double(), ulps=4 if dtype in FLOATS[:2] else 1)
    built = build("pow", [x, e], (1,))
    assert not isinstance(built, Declined)
    cheap = exponent in (0.5, -0.5, 1.0, -1.0, 2.0, 3.0)
    assert any(n.prim is Prim.POW for n in built[0].nodes) is not cheap


def test_pow_of_mixed_types() -> None:
    x = torch.tensor([-2, 3, 4])
    same(run("pow", x, torch.tensor([3, 2, 0]))[0], torch.tensor([-8, 9, 1]))
    same(run("pow", x.float(), torch.tensor([3, 2, 0]))[0], torch.tensor([-8.0, 9.0, 1.0]))
    same(run("pow", x, torch.tensor([2.0, 0.5, 0.5]))[0], torch.tensor([4, 1, 2]))
    same(run("pow", x, torch.tensor(2), constants=(1,))[0], x * x)
    assert "bool" in declined("pow", x > 0, x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other_exponentials(dtype: torch.dtype) -> None:
    x = random(30, dtype=dtype) * 8
    close(run("exp2", x)[0], torch.exp2(x.double()), ulps=4 if dtype in FLOATS[:2] else 1)
    y = 2.0 ** torch.arange(-8, 9, dtype=torch.float64)
    same(run("log_base", y.to(dtype), base=2.0)[0], torch.arange(-8.0, 9.0).to(dtype))
    close(run("log_base", x.abs(), base=10.0)[0], x.double().abs().log10(), ulps=4 if dtype in FLOATS[:2] else 1)
    assert "base 1" in declined("log_base", x, base=1.0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_variadic(dtype: torch.dtype) -> None:
    xs = [random(3, 4, dtype=dtype), random(4, seed=1, dtype=dtype), random(3, 1, seed=2, dtype=dtype)]
    a, c, d = (x.double() for x in xs)
    close(run("sum_n", *xs)[0], a + c + d, ulps=4, scale=2)
    same(run("max_n", *xs)[0], torch.maximum(torch.maximum(xs[0], xs[1]), xs[2]))
    same(run("min_n", *xs)[0], torch.minimum(torch.minimum(xs[0], xs[1]), xs[2]))
    close(run("mean_n", *xs)[0], (a + c + d) / 3, ulps=4, scale=2)
    same(run("sum_n", xs[0])[0], xs[0])
    assert "nothing" in declined("sum_n")
    assert "add of" in declined("sum_n", xs[0], xs[0].long())


def test_where_and_masked_fill() -> None:
    c, x, y = random(3, 1) > 0, random(3, 4), random(4, seed=1)
    same(run("where", c, x, y)[0], torch.where(c, x, y))
    same(run("where", c.float(), x, y)[0], torch.where(c, x, y))
    assert "f32 and i64" in declined("where", c, x, y.long())
    same(run("masked_fill", x, c, value=-INF)[0], x.masked_fill(c, -INF))
    same(run("masked_fill", x, c, torch.tensor(3.0))[0], x.masked_fill(c, 3.0))
    i = torch.arange(12).reshape(3, 4)
    same(run("masked_fill", i, c, value=-7)[0], i.masked_fill(c, -7))
    same(run("masked_fill", i > 4, c, value=True)[0], (i > 4).masked_fill(c, True))
    assert "masked_fill of i64" in declined("masked_fill", i, c, value=0.5)
    assert "broadcast" in declined("masked_fill", x[0], c, value=0.0)


def test_cast() -> None:
    x = torch.tensor([-1.5, 0.0, 2.7, 100.0])
    for d, t in TORCH.items():
        if d.value == "u8":
            same(run("cast", x.abs(), dtype="u8")[0], x.abs().to(t))
        else:
            same(run("cast", x, dtype=d.value)[0], x.to(t))
    assert "complex" in declined("cast", x, dtype="complex")
