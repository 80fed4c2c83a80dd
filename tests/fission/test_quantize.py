"""Quantisation and losses against their definitions in torch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.fission.harness import FLOATS, close, declined, random, run, same

RANGE = {torch.uint8: (0, 255), torch.int8: (-128, 127), torch.int16: (-32768, 32767)}


def quantized(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    lo, hi = RANGE[z.dtype]
    return (torch.round(x / s) + z.float()).clamp(lo, hi).to(z.dtype)


@pytest.mark.parametrize("dtype", RANGE, ids=str)
def test_quantize_and_dequantize(dtype: torch.dtype) -> None:
    x = random(3, 4, 5) * 100
    lo, hi = RANGE[dtype]
    cases: tuple[tuple[torch.Tensor, torch.Tensor, dict[str, Any], tuple[int, ...]], ...] = (
        (torch.tensor(0.7), torch.tensor((lo + hi) // 2 + 3).to(dtype), {}, ()),
        (torch.tensor([0.7]), torch.tensor([5]).to(dtype), {}, (1,)),
        (torch.tensor([0.3, 0.5, 0.7, 2.0]), torch.tensor([0, 1, 9, 3]).to(dtype), {"axis": 1}, (4, 1)),
        (torch.tensor([0.3, 0.5, 2.0]), torch.tensor([0, 1, 9]).to(dtype), {"axis": -3}, (3, 1, 1)),
    )
    for s, z, params, tall in cases:
        at = (s.reshape(tall), z.reshape(tall))
        q = run("quantize_linear", x, s, z, **params)[0]
        same(q, quantized(x, *at))
        back = run("dequantize_linear", q, s, z, **params)[0]
        same(back, (q.int() - at[1].int()).float() * at[0])


def test_quantize_ties_go_to_even_and_ends_saturate() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 1000.0, -1000.0, math.inf, -math.inf])
    found = run("quantize_linear", x, torch.tensor(1.0), torch.tensor(10, dtype=torch.uint8))[0]
    assert found.tolist() == [10, 12, 12, 10, 8, 255, 0, 255, 0]
    assert run("quantize_linear", x, torch.tensor(1.0), dtype="i8")[0].tolist() == [
        0,
        2,
        2,
        0,
        -2,
        127,
        -128,
        127,
        -128,
    ]


def test_blocked_scales() -> None:
    x = random(2, 5, 3) * 10
    s, z = random(2, 3, 3, seed=1).abs() + 0.1, torch.randint(0, 9, (2, 3, 3), dtype=torch.uint8)
    big = [p.repeat_interleave(2, 1)[:, :5] for p in (s, z)]
    q = run("quantize_linear", x, s, z, axis=1, block_size=2)[0]
    same(q, quantized(x, *big))
    same(run("dequantize_linear", q, s, z, axis=1, block_size=2)[0], (q.int() - big[1].int()).float() * big[0])
    assert "blocks of 2" in declined("quantize_linear", x, s[:, :2], z[:, :2], axis=1, block_size=2)


def test_dequantize_to_half_and_from_i32() -> None:
    q = torch.tensor([-100000, 7, 3], dtype=torch.int32)
    same(run("dequantize_linear", q, torch.tensor(0.25))[0], q * 0.25)
    h = run("dequantize_linear", q[1:], torch.tensor(0.1, dtype=torch.float16))[0]
    close(h, q[1:].double() * torch.tensor(0.1).half().double(), ulps=1)


def test_dynamic_quantize() -> None:
    for x in (random(4, 5) * 3, random(4, 5).abs() + 1, -random(4, 5).abs() - 1):
        y, s, z = run("dynamic_quantize_linear", x)
        top, low = max(float(x.max()), 0.0), min(float(x.min()), 0.0)
        scale = torch.tensor(top) - torch.tensor(low)
        same(s, scale / 255)
        same(z, torch.round(-torch.tensor(low) / s).clamp(0, 255).to(torch.uint8))
        same(y, quantized(x, s, z))


def test_integer_products() -> None:
    x, y = torch.randint(0, 255, (4, 3), dtype=torch.uint8), torch.randint(-128, 127, (3, 5), dtype=torch.int8)
    zx, zy = torch.tensor([3, 9, 1, 0], dtype=torch.uint8), torch.tensor(-7, dtype=torch.int8)
    same(run("matmul_integer", x, y, zx, zy)[0], (x.int() - zx.int()[:, None]) @ (y.int() - zy.int()))
    same(run("matmul_integer", x, y)[0], x.int() @ y.int())
    image, w = (
        torch.randint(0, 255, (1, 2, 5, 5), dtype=torch.uint8),
        torch.randint(-9, 9, (3, 2, 3, 3), dtype=torch.int8),
    )
    params = {"strides": (1, 1), "pads_lo": (1, 1), "pads_hi": (1, 1), "dilations": (1, 1)}
    zx, zw = torch.tensor(100, dtype=torch.uint8), torch.tensor([1, -2, 3], dtype=torch.int8)
    wanted = F.conv2d(image.double() - 100, w.double() - zw.double()[:, None, None, None], padding=1).int()
    same(run("conv_integer", image, w, zx, zw, **params)[0], wanted)
    sx, sw, sy = torch.tensor(0.02), torch.tensor([0.1, 0.2, 0.3]), torch.tensor(0.9)
    zy, bias = torch.tensor(20, dtype=torch.uint8), torch.tensor([5, -70, 11], dtype=torch.int32)
    factor = (sx * sw / sy)[:, None, None]
    total = (wanted + bias[:, None, None]).float() * factor
    found = run("qlinear_conv", image, sx, zx, w, sw, zw, sy, zy, bias, **params)[0]
    same(found, (torch.round(total) + 20).clamp(0, 255).to(torch.uint8))
    total = ((x.int() - 3) @ (y.int() + 7)).float() * (sx * 0.1 / sy)
    zy8, s1 = torch.tensor(-7, dtype=torch.int8), torch.tensor(0.1)
    found = run("qlinear_matmul", x, sx, torch.tensor(3, dtype=torch.uint8), y, s1, zy8, sy, zy)[0]
    same(found, (torch.round(total) + 20).clamp(0, 255).to(torch.uint8))


def test_quantisation_declines() -> None:
    x = random(2, 3)
    assert "i32" in declined("quantize_linear", x, torch.tensor(1.0), torch.tensor(1, dtype=torch.int32))
    assert "scale of shape" in declined("quantize_linear", x, torch.ones(2, 3))
    assert "f32" in declined("dequantize_linear", x, torch.tensor(1.0))
    assert "f64" in declined("dynamic_quantize_linear", x.double())
    u = torch.ones(2, 2, dtype=torch.uint8)
    s = torch.ones(2)
    assert "per row" in declined("qlinear_matmul", u, s, u[0], u, s[0], u[0, 0], s[0], u[0, 0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3), (2, 4, 3, 2), (4,)])
def test_losses(shape: tuple[Any, ...], dtype: torch.dtype) -> None:
    x = random(*shape, dtype=dtype)
    t = torch.randint(0, 4, shape[:1] + shape[2:] if len(shape) > 1 else (), generator=torch.Generator().manual_seed(1))
    w = random(4, seed=2).abs().to(dtype)
    ulps = 16 if dtype in FLOATS[:2] else 2
    for reduction, weight, ignore in itertools.product(("none", "sum", "mean"), (None, w), (None, 1)):
        if reduction == "mean" and ignore is not None and t.dim() == 0:
            continue  # 0/0
        kw: dict[str, Any] = {"reduction": reduction, "weight": None if weight is None else weight.double()}
        kw["ignore_index"] = -100 if ignore is None else ignore
        params: dict[str, Any] = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
        close(run("nll_loss", x, t, weight, **params)[0], F.nll_loss(x.double(), t, **kw), ulps=ulps, scale=4)
        loss, p = run("softmax_cross_entropy", x, t, weight, **params)
        close(p, x.double().log_softmax(min(1, len(shape) - 1)), ulps=ulps, scale=1)
        # 16-bit log-probabilities are rounded before the loss adds them up
        close(loss, F.cross_entropy(x.double(), t, **kw), ulps=ulps * 2, scale=16)


def test_nll_loss_total_weight_and_ignored_nan() -> None:
    x, t = random(4, 3), torch.tensor([0, 2, -100, 1])
    x[2] = math.nan
    loss, total = run("nll_loss_forward", x, t, torch.tensor([1.0, 2.0, 3.0]), reduction="mean", ignore_index=-100)
    same(total, torch.tensor(6.0))
    close(loss, F.nll_loss(x.double(), t, torch.tensor([1.0, 2.0, 3.0]).double()), ulps=8, scale=1)


def test_losses_decline() -> None:
    x = random(4, 3)
    assert "reduction 'most'" in declined("nll_loss", x, torch.zeros(4).long(), reduction="most")
    assert "targets" in declined("nll_loss", x, torch.zeros(3).long())
    assert "nll_loss" in declined("nll_loss", x, torch.zeros(4))
    assert "i64" in declined("nll_loss", x.long(), torch.zeros(4).long())
