"""8-bit floats from PyTorch: casts, products with scales, and what is left to ATen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.frontends.imported import Imported
from weft.frontends.torch import import_exported
from weft.frontends.torch.dtypes import to_numpy
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType
from weft.torch_backend.engine import opaque_call

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def both(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Imported, torch.Tensor, torch.Tensor]:
    """What is imported, its value by the reference, and torch's."""
    imported = import_exported(torch.export.export(Function(function), inputs))
    (found,) = evaluate(imported.graph, [to_numpy(x)[0] for x in inputs], opaque=opaque_call)
    return imported, torch.from_numpy(found), function(*inputs)


@pytest.mark.parametrize("dtype", [E4, E5])
def test_casts(dtype: torch.dtype) -> None:
    x = torch.randn(40, 8) * torch.logspace(-6, 4, 8)
    imported, found, wanted = both(lambda x: x.clamp(-400, 400).to(dtype).float(), x)
    assert not imported.opaque
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("types", [(E4, E4), (E4, E5), (E5, E4)])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
def test_products_with_a_scale_each(types: tuple[torch.dtype, torch.dtype], out: torch.dtype) -> None:
    a, b = torch.randn(32, 64).to(types[0]), torch.randn(48, 64).to(types[1])
    scales = torch.tensor(0.5), torch.tensor(0.02)

    def product(a: Any, b: Any, s: Any, t: Any) -> Any:
        return torch._scaled_mm(a, b.T, s, t, out_dtype=out, use_fast_accum=True)

    imported, found, wanted = both(product, a, b, *scales)
    assert not imported.opaque
    assert [n.prim for n in imported.graph.nodes].count(Prim.MATMUL) == 1
    assert next(n for n in imported.graph.nodes if n.prim is Prim.MATMUL).type.dtype is DType.F32
    # the result is rounded once, where torch on a CPU may round twice
    torch.testing.assert_close(found.to(out), wanted, rtol=2 * torch.finfo(out).eps, atol=1e-5)


def test_rows_columns_and_bias() -> None:
    a, b = torch.randn(32, 64).to(E4), torch.randn(48, 64).to(E4)
    inputs = (a, b, torch.rand(32, 1) + 0.5, torch.rand(1, 48) + 0.5, torch.randn(48, dtype=torch.bfloat16))

    def product(a: Any, b: Any, s: Any, t: Any, bias: Any) -> Any:
        return torch._scaled_mm(a, b.T, s, t, bias=bias, out_dtype=torch.bfloat16)

    imported, found, _ = both(product, *inputs)
    assert not imported.opaque
    a64, b64, s, t, bias = (x.double() for x in inputs)
    exact = (a64 * s) @ (b64 * t.T).T + bias
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


def test_a_scale_of_the_result_is_left_to_aten() -> None:
    a, b, s = torch.randn(32, 64).to(E4), torch.randn(48, 64).to(E4), torch.tensor(1.0)

    def product(a: Any, b: Any, s: Any) -> Any:
        return torch._scaled_mm(a, b.T, s, s, scale_result=s, out_dtype=E4).float()

    imported, found, wanted = both(product, a, b, s)
    assert [u.op for u in imported.opaque] == ["aten._scaled_mm.default"]
    assert "scale of the result" in imported.opaque[0].reason
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
