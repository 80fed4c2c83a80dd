"""Complex numbers are two reals in a graph; what no handler takes is the framework's, with reals in and out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.frontends.torch.support import check

from weft.errors import UnsupportedError
from weft.frontends.torch import import_exported_program
from weft.frontends.torch.complexes import COMPLEX
from weft.frontends.torch.table import KEPT, OPAQUE, REFUSED

X, Y = (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(k)) for k in (0, 1))


def c(x: Any) -> Any:
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def r(x: Any) -> Any:
    return torch.view_as_real(x)


NATIVE: dict[str, Callable[[Any, Any], Any]] = {
    "parts": lambda x, y: (c(x).real, c(y).imag),
    "product": lambda x, y: r(c(x) * c(y)),
    "product with a real": lambda x, y: (r(c(x) * y[..., :2]), r(y[..., :2] * c(x)), r(c(x) * 2.5)),
    "product with a constant": lambda x, y: r(c(x) * (2 - 1j)),
    "sum": lambda x, y: (r(c(x) + c(y)), r(c(x) - y[..., :2]), r(torch.add(c(x), c(y), alpha=3)), r(c(x) + 1j)),
    "broadcast": lambda x, y: r(c(x)[:, :1] + y[:1, :, :1] * c(y)[0]),
    "conjugate": lambda x, y: (r(c(x).conj() * c(y)), r((-c(x)).resolve_conj())),
    "quotient by a real": lambda x, y: (r(c(x) / (y[..., :2] + 9)), r(c(x) / 3)),
    "size and angle": lambda x, y: (c(x).abs(), c(x).angle(), r(torch.polar(x.abs(), y))),
    "exponential": lambda x, y: r(c(x).exp()),
    "made of parts": lambda x, y: r(torch.complex(x, y[0])),
    "conversions": lambda x, y: (r(x.to(torch.complex64) * c(y)[:1, :1, :1]), c(x).to(torch.complex128).real),
    "views": lambda x, y: r(c(x).transpose(0, 1)[1:, :, None].expand(2, 2, 5, 2).reshape(4, 10).flip(0)),
    "joined": lambda x, y: r(torch.cat([c(x), c(y)], 1).roll(1, 1).sum(1)),
    "stacked": lambda x, y: r(torch.stack([c(x), c(y)]).mean(0).unsqueeze(1).squeeze(1)),
    "chosen": lambda x, y: r(torch.where(x[..., :2] > 0, c(x), c(y))),
    "split": lambda x, y: (r(c(x).split(2, 1)[1]), r(c(y).unbind(0)[1])),
    "by index": lambda x, y: r(c(x)[:, torch.tensor([2, 0])].index_select(2, torch.tensor([1]))),
    "padded": lambda x, y: r(torch.nn.functional.pad(c(x), (0, 1))),
    "einsum": lambda x, y: r(torch.einsum("bik,bjk->bij", c(x), c(y))),
    "matrices": lambda x, y: r(c(x) @ c(y).transpose(1, 2)),
    "matrices with a real one": lambda x, y: (r(c(x) @ y[..., :2].mT.to(torch.complex64)), r(c(x)[0] @ c(y)[0].t())),
}  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
def test_reals_stand_for_it(name: str) -> None:
    check(NATIVE[name], X, Y)


@pytest.mark.parametrize("name", ["product", "size and angle", "matrices"])
def test_in_double_precision(name: str) -> None:
    check(NATIVE[name], X.double(), Y.double(), dtype=torch.float64)


def test_the_size_of_the_largest_and_the_smallest() -> None:
    big = torch.tensor([[3e38, 4e37], [0.0, 0.0], [3e-38, 4e-38], [float("inf"), 1.0], [float("inf"), float("inf")]])
    check(lambda x: torch.view_as_complex(x).abs(), big)


LEFT: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "real transform": (lambda x: torch.fft.rfft(x).abs(), ("aten._fft_r2c.default",)),
    "there and back": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 2, n=3, dim=1),
        ("aten._fft_c2r.default", "aten._fft_r2c.default"),
    ),
    "of images": (lambda x: torch.fft.fft2(x).real, ("aten._fft_c2c.default",)),
    "eigenvalues": (lambda x: torch.linalg.eigvals(x[:, :, :3]).abs().sum(-1), ("aten.linalg_eig.default",)),
    "quotient": (lambda x: r(c(x) / c(x + 3)), ("aten.div.Tensor",)),
    "square root": (lambda x: r(c(x).sqrt()), ("aten.sqrt.default",)),
    "padded with ones": (lambda x: r(torch.nn.functional.pad(c(x), (0, 1), value=1.0)), ("aten.pad.default",)),
    "mixed": (lambda x: r(torch.cat([c(x), x], 2)), ("aten.cat.default",)),
}


@pytest.mark.parametrize("name", LEFT)
def test_the_framework_runs_the_others(name: str) -> None:
    function, ops = LEFT[name]
    imported = check(function, X, opaque_ops=ops)
    assert all(use.reason for use in imported.opaque)


class Turned(torch.nn.Module):
    """Rotary positions as complex numbers, held as a buffer (arXiv:2104.09864)."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(3.0), 1 / 100 ** (torch.arange(2.0) / 2))
        self.turns: torch.Tensor
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return r(c(x) * self.turns).flatten(-2)


def test_a_complex_buffer() -> None:
    imported = check(Turned(), X)
    assert not imported.opaque


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_half_precision_and_complex_results_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"element type torch\.complex32"):
        check(lambda x: torch.view_as_complex(x.half().reshape(2, 3, 2, 2)).real, X)

    class Gives(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x)

    with pytest.raises(UnsupportedError, match="a result is a complex tensor"):
        import_exported_program(torch.export.export(Gives(), (X,)))


def test_every_name_is_an_overload_and_none_is_refused() -> None:
    for name in COMPLEX:
        _, op, overload = name.split(".")
        assert str(getattr(getattr(torch.ops.aten, op), overload)) == name
    assert COMPLEX.keys().isdisjoint(REFUSED.keys() | OPAQUE.keys() | KEPT.keys())
