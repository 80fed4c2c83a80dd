"""Products, convolutions, Einstein sums and attention against torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.fission.harness import FLOATS, build, close, declined, random, run, same

from weft.ir.declined import Declined
from weft.ir.prims import Prim

ONE = (1, 1)
ZERO = (0, 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("a", "c"),
    [
        ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((5, 2, 3), (3,)),
        ((5, 1, 2, 3), (6, 3, 4)), ((3,), (5, 3, 4)), ((2, 3), (5, 3, 4)), ((0, 3), (3, 2)),
    ],
)  # fmt: skip
def test_matmul(a: tuple[int, ...], c: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y = random(*a, dtype=dtype), random(*c, seed=1, dtype=dtype)
    close(run("matmul", x, y)[0], x.double() @ y.double(), ulps=4, scale=3)


def test_matmul_of_many_rows_is_one_product() -> None:
    built = build("matmul", [random(5, 2, 3), random(3, 4)])
    assert not isinstance(built, Declined)
    assert [n.type.shape for n in built[0].nodes if n.prim is Prim.MATMUL] == [(10, 4)]


def test_matmul_of_integers_wraps_and_mixed_types_decline() -> None:
    x, y = torch.randint(-99, 99, (3, 4)), torch.randint(-99, 99, (4, 2))
    same(run("matmul", x, y)[0], x @ y)
    assert "matmul" in declined("matmul", x, random(4, 2))
    assert "matmul" in declined("matmul", random(3, 4), torch.tensor(1.0))
    assert "inner dimensions" in declined("matmul", random(3, 4), random(3, 4))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_linear_and_its_kin(dtype: torch.dtype) -> None:
    x, w, c = random(2, 5, 8, dtype=dtype), random(6, 8, seed=1, dtype=dtype), random(6, seed=2, dtype=dtype)
    xd, wd, cd = x.double(), w.double(), c.double()
    close(run("linear", x, w, c)[0], F.linear(xd, wd, cd), ulps=4, scale=8)
    close(run("linear", x, w)[0], F.linear(xd, wd), ulps=4, scale=8)
    close(run("linear", x[0, 0], w, c)[0], F.linear(xd[0, 0], wd, cd), ulps=4, scale=8)
    close(run("linear", x, w[0])[0], F.linear(xd, wd[0]), ulps=4, scale=8)
    a, m = x[0], w.t().contiguous()
    close(
        run("addmm", c, a, m, alpha=0.3, beta=0.7)[0],
        torch.addmm(cd, a.double(), m.double(), alpha=0.3, beta=0.7),
        ulps=4,
        scale=8,
    )
    close(run("gemm", a, w, c, trans_b=True)[0], F.linear(a.double(), wd, cd), ulps=4, scale=8)
    close(run("gemm", a.t().contiguous(), m, trans_a=True, alpha=2.0)[0], 2 * a.double() @ m.double(), ulps=4, scale=8)
    y, z = random(3, 2, 4, dtype=dtype), random(3, 4, 5, seed=3, dtype=dtype)
    close(run("bmm", y, z)[0], y.double() @ z.double(), ulps=4, scale=8)
    t = random(3, 1, 5, seed=4, dtype=dtype)
    wanted = torch.baddbmm(t.double(), y.double(), z.double(), beta=0.5, alpha=2)
    close(run("baddbmm", t, y, z, beta=0.5, alpha=2.0)[0], wanted, ulps=4, scale=8)
    close(run("outer", c, c)[0], torch.outer(cd, cd), ulps=1)


def test_gemm_does_not_read_c_where_beta_is_zero() -> None:
    a, w, c = random(2, 3), random(3, 4), torch.full((4,), math.nan)
    close(run("gemm", a, w, c, beta=0.0)[0], a.double() @ w.double(), ulps=8, scale=3)
    x = torch.randint(-5, 5, (2, 2))
    same(run("gemm", x, x, x, beta=2.0)[0], x @ x + 2 * x)
    assert "alpha = 0.5" in declined("gemm", x, x, alpha=0.5)


CONVS = [
    # x, w, strides, lo, hi, dilations, groups
    ((2, 4, 9), (6, 4, 3), (2,), (1,), (1,), (1,), 1),
    ((2, 4, 7, 8), (6, 4, 3, 2), ONE, ZERO, ZERO, ONE, 1),
    ((2, 4, 7, 8), (6, 2, 3, 3), (2, 1), (1, 2), (1, 2), (1, 2), 2),
    ((2, 4, 7, 8), (4, 1, 3, 3), ONE, ONE, ONE, ONE, 4),
    ((2, 4, 7, 8), (8, 1, 3, 3), ONE, ONE, ONE, ONE, 4),
    ((1, 2, 4, 5, 4), (3, 2, 2, 3, 2), (1, 2, 1), (0, 1, 0), (0, 1, 0), (1, 1, 1), 1),
    ((4, 7, 8), (6, 4, 1, 1), ONE, ZERO, ZERO, ONE, 1),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", CONVS)
def test_conv(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    xs, ws, strides, lo, hi, dilations, groups = case
    x, w, c = random(*xs, dtype=dtype), random(*ws, seed=1, dtype=dtype), random(ws[0], seed=2, dtype=dtype)
    f = (F.conv1d, F.conv2d, F.conv3d)[len(strides) - 1]
    params = {"strides": strides, "pads_lo": lo, "pads_hi": hi, "dilations": dilations, "groups": groups}
    wanted = f(x.double(), w.double(), c.double(), strides, lo, dilations, groups)
    close(run("conv", x, w, c, **params)[0], wanted, ulps=4, scale=10)
    close(
        run("conv", x, w, **params)[0],
        f(x.double(), w.double(), None, strides, lo, dilations, groups),
        ulps=4,
        scale=10,
    )


def test_conv_with_unequal_pads() -> None:
    x, w = random(1, 2, 5, 5), random(3, 2, 3, 3, seed=1)
    found = run("conv", x, w, strides=ONE, pads_lo=(0, 1), pads_hi=(2, 0), dilations=ONE)[0]
    close(found, F.conv2d(F.pad(x.double(), (1, 0, 0, 2)), w.double()), ulps=16, scale=10)


TRANSPOSED = [
    # x, w, strides, lo, output padding, dilations, groups
    ((2, 4, 5), (4, 3, 3), (2,), (1,), (1,), (1,), 1),
    ((2, 4, 5, 6), (4, 3, 3, 2), (2, 3), (1, 0), (1, 2), ONE, 1),
    ((2, 4, 5, 6), (4, 3, 2, 2), (2, 2), ZERO, ZERO, ONE, 2),
    ((2, 4, 5, 6), (4, 1, 3, 3), (1, 2), ONE, (0, 1), (2, 1), 4),
    ((1, 2, 3, 2, 3), (2, 3, 2, 2, 2), (2, 1, 2), (0, 0, 1), (0, 0, 0), (1, 1, 1), 1),
    ((4, 5), (4, 3, 3), (2,), (1,), (1,), (1,), 1),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", TRANSPOSED)
def test_conv_transpose(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    xs, ws, strides, lo, extra, dilations, groups = case
    x, w = random(*xs, dtype=dtype), random(*ws, seed=1, dtype=dtype)
    c = random(ws[1] * groups, seed=2, dtype=dtype)
    f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(strides) - 1]
    wanted = f(x.double(), w.double(), c.double(), strides, lo, extra, groups, dilations)
    found = run(
        "conv_transpose", x, w, c,
        strides=strides, pads_lo=lo, pads_hi=lo, dilations=dilations, groups=groups, output_padding=extra,
    )[0]  # fmt: skip
    close(found, wanted, ulps=4, scale=10)


def test_conv_transpose_with_a_negative_high_pad_grows() -> None:
    x, w = random(1, 2, 4), random(2, 3, 3, seed=1)
    params = {"strides": (2,), "pads_lo": (0,), "dilations": (1,)}
    short = run("conv_transpose", x, w, pads_hi=(0,), **params)[0]
    long = run("conv_transpose", x, w, pads_hi=(-1,), **params)[0]
    same(long, F.pad(short, (0, 1)))


def test_convolutions_decline() -> None:
    params = {"strides": ONE, "pads_lo": ZERO, "pads_hi": ZERO, "dilations": ONE}
    assert "channels" in declined("conv", random(1, 3, 5, 5), random(4, 2, 3, 3), **params)
    assert "larger than" in declined("conv", random(1, 3, 2, 2), random(4, 3, 4, 4), **params)
    assert "negative pad" in declined("conv", random(1, 3, 5, 5), random(4, 3, 3, 3), **{**params, "pads_lo": (-1, 0)})
    assert "over 2 dimensions" in declined("conv", random(1, 3, 5), random(4, 3, 3), **params)
    assert "convolution of" in declined("conv", random(1, 3, 5, 5), torch.ones(4, 3, 3, 3, dtype=torch.int32), **params)


EINSUMS = [
    ("ij,jk->ik", (3, 4), (4, 5)), ("ij,jk", (3, 4), (4, 5)), ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)), ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)),
    ("...ij,jk", (2, 3, 4), (4, 5)), ("...ij,...jk->...ik", (1, 3, 4), (2, 4, 5)), ("i,j->ij", (3,), (4,)),
    ("i,i->", (3,), (3,)), ("i,i", (3,), (3,)), ("ij->ji", (3, 4)), ("ij->", (3, 4)), ("ij->j", (3, 4)),
    ("ii->i", (4, 4)), ("ii", (4, 4)), ("ijj->ij", (2, 3, 3)), ("ij,ij->ij", (3, 4), (3, 4)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)), ("abc,cd,be->aed", (2, 3, 4), (4, 5), (3, 6)), ("ba,cb", (3, 2), (4, 3)),
    ("bnd,d->bn", (2, 3, 4), (4,)), ("i...->...", (3, 2)), ("...->...", (2, 3)), ("ij,kj->ik", (3, 1), (2, 5)),
    ("bij,kj->bik", (1, 3, 4), (2, 4)),
]  # fmt: skip


@pytest.mark.parametrize("case", EINSUMS, ids=lambda c: c[0])
def test_einsum(case: tuple[Any, ...]) -> None:
    equation, *shapes = case
    xs = [random(*s, seed=i, dtype=torch.float64) for i, s in enumerate(shapes)]
    close(run("einsum", *xs, equation=equation)[0], torch.einsum(equation, *xs), ulps=16, scale=8)


def test_einsum_of_integers_and_half() -> None:
    x, y = torch.randint(-9, 9, (3, 4)), torch.randint(-9, 9, (4, 2))
    same(run("einsum", x, y, equation="ij,jk->ki")[0], torch.einsum("ij,jk->ki", x, y))
    x, y = random(3, 4, dtype=torch.float16), random(4, 2, seed=1, dtype=torch.float16)
    close(
        run("einsum", x, y, equation="ij,jk->ki")[0], torch.einsum("ij,jk->ki", x.double(), y.double()), ulps=2, scale=2
    )


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->iz", [(2, 3), (3, 4)]), ("ij->ii", [(2, 3)]), ("ij,jk->ik", [(2, 3), (4, 4)]), ("i1->i", [(2, 3)]),
        ("ijk->i", [(2, 3)]), ("ij,jk->ik", [(2, 3)]), ("ii->i", [(2, 3)]), ("...i...->i", [(2, 3)]),
    ],
)  # fmt: skip
def test_einsum_declines(equation: str, shapes: list[Any]) -> None:
    assert "einsum" in declined("einsum", *(random(*s) for s in shapes), equation=equation)


def attention(q: Any, k: Any, v: Any, mask: Any = None, **kw: Any) -> Any:
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, **kw)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = (random(2, 3, n, 16, seed=n, dtype=dtype) for n in (5, 7, 7))
    v = v[..., :6].contiguous()
    # two products of 16 and 7 terms and a softmax; 16-bit weights are rounded before the second product
    ulps = 32 if dtype in FLOATS[:2] else 4
    close(run("sdpa", q, k, v, causal=causal)[0], attention(q, k, v, is_causal=causal), ulps=ulps, scale=1)
    close(
        run("sdpa", q, k, v, causal=causal, scale=0.3)[0],
        attention(q, k, v, is_causal=causal, scale=0.3),
        ulps=ulps,
        scale=1,
    )


def test_sdpa_masks() -> None:
    q, k, v = (random(2, 3, n, 8, seed=n) for n in (5, 7, 7))
    keep = random(2, 1, 5, 7, seed=9) > 0
    keep[0, 0, 2] = False  # a row that sees nothing is 0, as torch has it
    found = run("sdpa", q, k, v, keep)[0]
    assert (found[0, :, 2] == 0).all()
    close(found, attention(q, k, v, keep), ulps=32, scale=1)
    bias = random(5, 7, seed=4)
    bias[1] = -math.inf
    bias[3, 2] = -math.inf
    found = run("sdpa", q, k, v, bias)[0]
    assert (found[:, :, 1] == 0).all()
    close(found, attention(q, k, v, bias.double()), ulps=32, scale=1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_grouped_heads(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = (
        random(2, 6, 5, 8, dtype=dtype),
        random(2, 2, 7, 8, seed=1, dtype=dtype),
        random(2, 2, 7, 4, seed=2, dtype=dtype),
    )
    keep = random(2, 6, 5, 7, seed=9) > -0.5 if masked else None
    wanted = attention(q, k, v, keep, enable_gqa=True)
    close(run("sdpa", q, k, v, keep, enable_gqa=True)[0], wanted, ulps=32 if dtype in FLOATS[:2] else 4, scale=1)


@pytest.mark.parametrize("width", [64, 96])
def test_sdpa_in_half_scales_before_the_product_overflows(width: int) -> None:
    q = torch.full((1, 1, 2, width), 40.0, dtype=torch.float16)
    k, v = q.clone(), random(1, 1, 2, width, dtype=torch.float16)
    assert width * 40.0 * 40.0 > 65504
    found = run("sdpa", q, k, v)[0]
    assert found.isfinite().all()
    close(found, attention(q, k, v), ulps=2, scale=1)


def test_sdpa_offset_and_softcap() -> None:
    q, k, v = (random(1, 2, n, 8, seed=n) for n in (3, 5, 5))
    s = q.double() @ k.double().mT / math.sqrt(8)
    s = 2 * torch.tanh(s / 2)
    hidden = torch.arange(5)[None, :] > torch.arange(3)[:, None] + 2
    wanted = s.masked_fill(hidden, -math.inf).softmax(-1) @ v.double()
    close(run("sdpa", q, k, v, causal=True, causal_offset=2, softcap=2.0)[0], wanted, ulps=32, scale=1)
    first = run("sdpa", q, k, v, causal=True, causal_offset=-1)[0][:, :, 0]
    assert (first == 0).all()


def test_sdpa_declines() -> None:
    x = random(1, 2, 3, 4)
    assert "i64" in declined("sdpa", x.long(), x.long(), x.long())
    assert "several element types" in declined("sdpa", x, x.double(), x)
    assert "sdpa of" in declined("sdpa", x, random(1, 2, 3, 5), x)
    assert "query heads" in declined("sdpa", random(1, 3, 3, 4), x, x, enable_gqa=True)
    assert "over nothing" in declined("sdpa", x, x[:, :, :0], x[:, :, :0])
