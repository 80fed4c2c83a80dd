"""Single operators: promotion, scalars, shapes and indices exactly as eager has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frontends.torch.support import check

from weft.errors import UnsupportedError
from weft.frontends.torch import import_exported_program, importer

X = torch.tensor([[-2.5, -1.0, 0.0], [0.5, 1.5, 3.0]])
N = torch.tensor([[-7, -3, 0], [2, 5, 9]])
B = torch.tensor([[True, False, True], [False, False, True]])


def _blocks(x: Any) -> Any:
    with torch.no_grad():
        y = x * 2
    with torch.autocast("cpu", torch.bfloat16):
        return (y @ x.t()).float() + 1


CASES = {
    "int + float number": (lambda i: i + 1.5, N),
    "int + float": (lambda i, x: i + x, N, X),
    "int32 + int64": (lambda i: i.int() + i, N),
    "uint8 wraps": (lambda i: i.to(torch.uint8) * 200, N.abs()),
    "bool + bool": (lambda b: b + b, B),
    "bool * float": (lambda b, x: b * x, B, X),
    "alpha": (lambda x: torch.add(x, x, alpha=2) - torch.sub(x, 3, alpha=0.5), X),
    "rsub": (lambda x: 1 - x, X),
    "int / int": (lambda i: i / 3, N),
    "floor division of ints": (lambda i: i // 4, N),
    "floor division by a negative": (lambda i: torch.div(i, -4, rounding_mode="floor"), N),
    "truncating division": (lambda i: torch.div(i, -4, rounding_mode="trunc"), N),
    "floor division of floats": (lambda x: torch.div(x, 0.3, rounding_mode="floor"), X),
    "floor division at the ends of the range": (
        lambda i: (torch.div(i, 3, rounding_mode="floor"), torch.div(i, -3, rounding_mode="floor")),
        torch.tensor([127, -127, -128, 7, -7], dtype=torch.int8),
    ),
    "floor division by infinities and the smallest": (
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        torch.tensor([[1.0], [-1.0], [0.0]]),
        torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40]),
    ),
    "floor division by zero": (lambda x: torch.div(x, 0.0, rounding_mode="floor"), X),
    "remainder": (lambda i: (i % 4, i % -4, torch.fmod(i, -4)), N),
    "remainder of floats": (lambda x: (x % 0.7, torch.fmod(x, -0.7)), X),
    "powers": (lambda x: (x**2, x**3, x**-1, x**0, x**4, 2**x), X),
    "power of ints": (lambda i: (i**2, i**3, i**5), N),
    "root": (lambda x: (x.abs() ** 0.5, (x.abs() + 1) ** -0.5), X),
    "compare int with float number": (lambda i: (i > 2.5, i == 2, i <= -3.0), N),
    "compare int with float": (lambda i, x: i < x, N, X),
    "compare bool": (lambda b: b == True, B),  # noqa: E712
    "logic": (lambda x, b: (torch.logical_and(x, b), torch.logical_not(x), torch.logical_xor(x, b)), X, B),
    "bits": (lambda i: (i & 6, i | 1, i ^ 3, ~i), N),
    "bits of bools": (lambda b: (b & b, ~b), B),
    "product of bytes": (lambda i: torch._int_mm(i.to(torch.int8).repeat(16, 8), i.t().to(torch.int8).repeat(8, 8)), N),
    "clamp": (lambda x: (x.clamp(-1, 1), x.clamp(min=0.5), x.clamp(max=-0.5), x.clamp(1, -1)), X),
    "clamp int": (lambda i: (i.clamp(-2, 3), i.clamp(max=2.5)), N),
    "clamp by tensors": (lambda x: torch.clamp(x, x - 1, x * 0.5), X),
    "where": (lambda b, x, i: (torch.where(b, x, i), torch.where(b, x, 0.0)), B, X, N),
    "rounding": (lambda x: (x.floor(), x.ceil(), x.round(), x.trunc(), x.frac()), X),
    "rounding of ints": (lambda i: (i.floor(), i.round()), N),
    "classify": (lambda x: ((x / 0).isinf(), (x * float("nan")).isnan()), X),
    "classify ints": (lambda i: (i.isnan(), i.isinf()), N),
    "sign": (lambda x, b: (x.sign(), b.sign(), x.abs()), X, B),
    "casts": (lambda x: (x.int(), x.bool(), x.to(torch.uint8) * 0, x.double(), x.half()), X),
    "functions": (lambda x: (x.exp(), x.sin(), x.erf(), x.tanh(), x.expm1(), x.abs().log1p(), x.sinh()), X),
    "functions of ints": (lambda i: (i.exp(), i.sin(), i.abs().sqrt(), (i.abs() + 1).log2()), N),
    "logarithms": (lambda x: ((x.abs() + 1).log(), (x.abs() + 1).log2(), (x.abs() + 1).log10()), X),
    "sum": (lambda x: (x.sum(), x.sum(0), x.sum((0, 1), keepdim=True), x.sum([])), X),
    "running sum": (lambda x: (x.cumsum(0), x.cumsum(-1), x.sum().cumsum(0), x[:1].cumsum(0), x[:0].cumsum(1)), X),
    "running sum of ints and bools": (
        lambda i, b: (i.cumsum(1), b.cumsum(0), i.int().cumsum(0), i.cumsum(0, dtype=torch.float32)), N, B,
    ),
    "running product": (lambda x, i: (x.cumprod(1), i.cumprod(0), x.cumprod(0, dtype=torch.float64)), X, N),
    "sum of ints and bools": (lambda i, b: (i.sum(0), b.sum(), i.int().sum(1), b.sum(1, dtype=torch.float32)), N, B),
    "mean": (lambda x, i: (x.mean(), x.mean(-1, keepdim=True), i.mean(0, dtype=torch.float64)), X, N),
    "products": (lambda x, i: (x.prod(), x.prod(0), i.prod(1)), X, N),
    "extremes": (lambda x, i: (x.amax(), x.amin(0), i.amax(1, True), x.max(), i.min()), X, N),
    "extremes with positions": (lambda x, i: (*x.max(1), *i.min(0, keepdim=True)), X, N),
    "positions": (lambda x, i: (x.argmax(), x.argmin(0), i.argmax(1, keepdim=True)), X, N),
    "any and all": (lambda x, b, i: (b.any(), b.all(0), x.any(1), i.all(), b.any((0, 1))), X, B, N),
    "variance": (lambda x: (x.var(), x.var(1), x.std(0, correction=0), x.var((0, 1), keepdim=True)), X),
    "variance and mean": (lambda x: torch.var_mean(x, 1, correction=0), X),
    "norms": (lambda x: (x.norm(), x.norm(1, 0), torch.linalg.vector_norm(x, float("inf"), 1)), X),
    "logsumexp": (lambda x: (x.logsumexp(0), x.logsumexp((0, 1), keepdim=True)), X),
    "views": (lambda x: (x.view(3, 2), x.t(), x.reshape(-1), x[None, :, None], x.flatten().squeeze()), X),
    "slices": (lambda x: (x[:, 1:], x[-1], x[:, ::2], x[0:9], x[:, -2:-1], x[1:0]), X),
    "split": (lambda x: (x.split(2, 1), x.chunk(3, 1), x.unbind(0)), X),
    "join": (lambda x, i: (torch.cat([x, x], 1), torch.stack([x, x], -1), torch.cat([x, i])), X, N),
    "join with the empty vector": (lambda x: torch.cat([torch.empty(0), x]), X),
    "repeat": (lambda x: (x.repeat(2, 1), x.repeat(2, 1, 3), x.expand(4, 2, 3), x.repeat_interleave(2, 0)), X),
    "flip and roll": (lambda x: (x.flip(0, 1), x.roll(1, 1), x.roll((1, -1), (0, 1)), x.roll(2)), X),
    "diagonal": (lambda x: (x.diagonal(), x.diagonal(1), x.diagonal(-1), x.diagonal(5)), X),
    "triangles": (lambda x: (x.tril(), x.triu(1), x.tril(-1)), X),
    "pad": (lambda x: (F.pad(x, (1, 2)), F.pad(x, (1, 0, 2, 1), value=2.5), F.pad(x, (-1, 1))), X),
    "pad ints": (lambda i: F.pad(i, (1, 1), value=-4), N),
    "pad edges": (lambda x: (F.pad(x[None], (1, 2), mode="replicate"), F.pad(x[None], (2, 1), mode="reflect")), X),
    "fill": (lambda x: (torch.full_like(x, 3), torch.zeros(2, 3) + x, x.new_ones(3), torch.full((2,), 7)), X),
    "arange": (lambda x: (torch.arange(5), torch.arange(1, 9, 3), torch.arange(0, 1, 0.25), x + torch.arange(3)), X),
    "eye": (lambda x: (torch.eye(3), torch.eye(2, 3) * x), X),
    "masked fill": (lambda x, b: (x.masked_fill(b, -1e9), x.masked_fill(~b, torch.tensor(2.0))), X, B),
    "scatter a slice": (lambda x: (x.slice_scatter(x[:, :1] * 2, 1, 1, 2), x.select_scatter(x[0] * 3, 0, 1)), X),
    "index by one": (lambda x: (x[:, torch.tensor([2, 0, -1])], x[torch.tensor([[1, 0], [0, 1]])]), X),
    "index by two": (lambda x: x[torch.tensor([[0], [1]]), torch.tensor([0, 2, -1])], X),
    "index apart": (lambda x: x.view(2, 3, 1).expand(2, 3, 4)[torch.tensor([0, 1]), :, torch.tensor([3, -1])], X),
    "select by index": (lambda x: (x.index_select(1, torch.tensor([2, 2])), x.index_select(0, torch.tensor(1))), X),
    "gather": (lambda x: (x.gather(1, torch.tensor([[2], [0]])), x.gather(0, torch.tensor([[1, 0]]))), X),
    "matmul": (lambda x: (x @ x.t(), x @ x[0], x[0] @ x.t(), x[0] @ x[0], torch.mv(x, x[0])), X),
    "batched": (lambda x: (torch.bmm(x[None], x.t()[None]), torch.einsum("ij,kj->ik", x, x)), X),
    "addmm": (lambda x: torch.addmm(x[:, :2], x, x.t(), beta=0.5, alpha=2), X),
    "baddbmm": (lambda x: torch.baddbmm(x[None, :, :2], x[None], x.t()[None], beta=0.5, alpha=2), X),
    "int matmul": (lambda i: i @ i.t(), N),
    "softmax": (lambda x: (x.softmax(0), x.log_softmax(1), x.half().softmax(1, dtype=torch.float32)), X),
    "softmax of a scalar": (lambda x: x.sum().softmax(0), X),
    "pooling": (
        lambda x: (F.max_pool2d(x[None], 2, ceil_mode=True), F.avg_pool2d(x[None], 2, 1, 1, count_include_pad=False)),
        X,
    ),
    "places of maxima": (
        lambda x: (
            F.max_pool2d(x[None], 2, 1, 1, return_indices=True), F.max_pool1d(x, 2, 2, return_indices=True),
            F.max_pool3d(x[None, None], (1, 2, 2), 1, return_indices=True),
        ),
        X,
    ),
    "average pooling over the edge": (lambda x: F.avg_pool2d(x[None], 2, 2, 1, ceil_mode=True), X),
    "average pooling by a number": (lambda x: F.avg_pool2d(x[None], 2, 1, divisor_override=3), X),
    "pooling in one dimension": (lambda x: (F.max_pool1d(x, 2), F.avg_pool1d(x, 2), F.adaptive_avg_pool1d(x, 2)), X),
    "conv1d": (lambda x: F.conv1d(x[None], torch.ones(3, 2, 2), padding=1), X),
    "unbatched convolution": (lambda x: F.conv2d(x[None], torch.ones(3, 1, 2, 2), torch.ones(3)), X),
    "scalars": (lambda x: (x.sum() * 2, x.sum() + x, torch.tensor(3.0) * x), X),
    "empty": (lambda x: (x[:0], x[:0].sum(), torch.cat([x[:0], x]), x[:, :0] @ x[:0].t()[:0]), X),
    "windows": (lambda x: (x.unfold(1, 2, 1), x.unfold(0, 2, 2), x.narrow(1, 1, 2)), X),
    "circular pad": (lambda x: F.pad(x[None], (1, 2), mode="circular"), X),
    "prefer numbers": (lambda x: (torch.fmax(x / 0, x), torch.fmin(x, x / 0), torch.exp2(x), x.square()), X),
    "adaptive maximum": (lambda x: F.adaptive_max_pool2d(x[None], 2), X),
    "bicubic": (
        lambda x: (
            F.interpolate(x[None, None], scale_factor=1.7, mode="bicubic"),
            F.interpolate(x[None, None], size=(3, 9), mode="bicubic", align_corners=True),
        ),
        X,
    ),
    "antialiased": (
        lambda x: (
            F.interpolate(x[None, None], size=(1, 2), mode="bilinear", antialias=True),
            F.interpolate(x[None, None], size=(1, 2), mode="bicubic", antialias=True),
        ),
        X,
    ),
    "integer arguments of sums": (lambda x: torch.addmv(x[:, 0], x, x[0], beta=0.5, alpha=2), X),
    "without gradients and cast": (_blocks, X),
    "same thing twice": (lambda x: (x + 1, x + 1), X),
    "the largest": (lambda x: (x.topk(1, 0), x[0].topk(1), x.sum().topk(1)), X),
    "the smallest": (lambda n: n.topk(1, 1, largest=False), N),
    "the largest with NaN": (lambda x: (x / x.relu()).topk(1), X),
    "an argument": (lambda x: (x, x.clone()), X),
    "samples of a grid": (
        lambda x, g: F.grid_sample(x[None, None], g, padding_mode="border", align_corners=True),
        X, torch.tensor([[[[-1.5, 0.3], [0.2, -0.7], [0.9, 0.1]]]]),
    ),
    "nearest samples of a grid": (
        lambda x, g: F.grid_sample(x[None, None, None], g, "nearest", "reflection", False),
        X, torch.tensor([[[[[-1.5, 0.3, 0.4], [0.2, -0.7, -2.0]]]]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operator(name: str) -> None:
    function, *inputs = CASES[name]
    check(function, *inputs)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.logcumsumexp(0), "aten.logcumsumexp.default"),
        (lambda x: torch.linalg.inv(x @ x.t()), "aten.linalg_inv.default"),
        (lambda x: torch.inverse(x @ x.t()), "aten.inverse.default"),
        (lambda x: torch.linalg.solve(x @ x.t(), x), "aten.linalg_solve.default"),
        (lambda x: torch.linalg.lu_factor(x @ x.t())[0], "aten.linalg_lu_factor.default"),
        (lambda x: x.topk(2, 1), "aten.topk.default"),
        (lambda x: x.topk(1, 1, largest=False), "aten.topk.default"),
        (lambda x: x.sort(1), "aten.sort.default"),
        (lambda x: torch.cdist(x, x), "aten._cdist_forward.default"),
        (
            lambda x: F.grid_sample(x[None, None], torch.zeros(1, 2, 2, 2), "bicubic", align_corners=False),
            "aten.grid_sampler.default",
        ),
        (lambda x: F.max_pool2d(x[None], 6, 6, 3, return_indices=True), "aten.max_pool2d_with_indices.default"),
    ],
)
def test_an_operator_without_a_rule_is_run_by_aten(function: Callable[..., Any], op: str) -> None:
    imported = check(function, X, opaque_ops=(op,))
    (use,) = imported.opaque
    assert use.reason
    assert use.count == 1


def test_results_of_one_opaque_call_share_it() -> None:
    imported = check(lambda x: x.topk(2, 1), X, opaque_ops=("aten.topk.default",))
    calls = [n.attrs for n in imported.graph.nodes if n.prim.value == "opaque"]
    assert [c.result for c in calls] == [0, 1]
    assert calls[0].payload == calls[1].payload
    assert calls[0].types == calls[1].types


def test_a_number_that_f16_cannot_hold_is_not_rounded() -> None:
    check(lambda x: (x.half() * 1e-8 * 1e8, x.bfloat16() + 0.001), X, dtype=torch.float16)


@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_a_recurrent_layer_stays_whole() -> None:
    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.LSTM(4, 5, batch_first=True, dropout=0.3, num_layers=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0][:, -1].relu()

    imported = check(Last(), torch.randn(2, 3, 4), opaque_ops=("aten.lstm.input",))
    assert "loop over time" in imported.opaque[0].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_sign_of_nan_is_zero_as_in_torch(dtype: torch.dtype) -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 2.0, -3.0], dtype=dtype)
    assert torch.sign(x)[0] == 0
    check(lambda x: x.sign(), x, dtype=dtype)


def test_shifts() -> None:
    x = torch.tensor([-(1 << 40) - 3, -1, 0, 5, 1 << 40])
    check(lambda v: (v >> 3, v << 7), x, dtype=torch.int64)
    check(lambda v: v >> 31, x.to(torch.int32), dtype=torch.int32)
    check(lambda v: v >> 40, x.to(torch.int32), dtype=torch.int32, opaque_ops=["aten.__rshift__.Scalar"])


AT = torch.tensor([1, 0])
PUTS: dict[str, tuple[Any, ...]] = {
    "a number by a mask": (lambda x: _set(x, x > 0, 7.0), X),
    "rows by a mask": (lambda x, v: _set(x, x[:, 0] > 0, v), X, torch.tensor([1.0, 2.0, 3.0])),
    "a mask behind a dimension": (lambda x, m: _set(x, (slice(None), m), 5.0), X, B[0]),
    "added by a mask": (lambda x: x.index_put((x > 0,), torch.tensor(2.0), accumulate=True), X),
    "known columns": (lambda x, v: _set(x, (slice(None), [2, 0]), v), X, X[:, :2]),
    "known elements": (lambda x, v: _set(x, ([0, 1], [-1, 0]), v), X, X[0, :2]),
    "columns": (lambda x, i, v: _set(x, (slice(None), i), v), X, AT, X[:, :2]),
    "elements apart": (lambda x, i, v: _set(x[None], (i * 0, slice(None), i), v), X, AT, X[:, :2].clone()),
    "one row for all": (lambda x, i: _set(x, i, x[0] * 2), X, AT),
    "negative": (lambda x, i: _set(x, i - 2, 1.0), X, AT),
    "int32": (lambda x, i: _set(x, i.int(), 1.0), X, AT),
    "added twice": (lambda x, v: x.index_put((AT * 0,), v, accumulate=True), X, X * 3),
    "added": (lambda x, i, v: x.index_put((i * 0,), v, accumulate=True), X, AT, X * 3),
    "index_add": (lambda x, i, v: x.index_add(1, i, v, alpha=2), X, AT, X[:, :2]),
    "index_copy": (lambda x, i, v: x.index_copy(0, i, v), X, AT, X * 2),
    "index_fill": (lambda x, i: x.index_fill(1, i, 3.0), X, AT),
    "masked_scatter": (lambda x, b: x.masked_scatter(b, x * 10), X, B),
    "masked_scatter of rows": (lambda x, b: x.masked_scatter(b[:, :1], x * 10), X, B),
    "integers": (lambda n, i: _set(n, (slice(None), i), n[:, 1:]), N, AT),
}


def _set(x: Any, at: Any, value: Any) -> Any:
    y = x.clone()
    y[at] = value
    return y


@pytest.mark.parametrize("name", PUTS)
def test_writing_by_index(name: str) -> None:
    function, *inputs = PUTS[name]
    check(function, *inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_by_index(dtype: torch.dtype) -> None:
    check(lambda x, i: _set(x, (slice(None), i), x[:, 1:] * 2), X.to(dtype), AT, dtype=dtype)


def test_many_values_by_index_are_left_to_aten() -> None:
    def add(x: Any, i: Any, v: Any) -> Any:
        return x.index_put((i,), v, accumulate=True)

    at, x = torch.arange(80) % 7, torch.ones(100, 3)
    imported = check(add, x, at, torch.ones(80, 3), opaque_ops=("aten.index_put.default",))
    assert "adds 80 values" in imported.opaque[0].reason
    check(add, X, torch.zeros(40, dtype=torch.int64), torch.ones(40, 3))  # among few places


def test_what_looks_at_its_result_is_no_step_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inverse(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x)

    program = torch.export.export(Inverse(), (torch.eye(3),))
    assert import_exported_program(program).imported.opaque
    monkeypatch.setattr(importer._Importer, "_check_device", lambda *_: None)  # there is none here
    with pytest.raises(UnsupportedError, match="on the host"):
        import_exported_program(program, device="cuda")
