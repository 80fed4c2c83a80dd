"""Models with complex numbers, compiled whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.errors import InputError


class Fourier(nn.Module):
    """A spectral convolution (arXiv:2010.08895) between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 8), nn.Linear(8, 2)
        self.weight = nn.Parameter(torch.randn(8, 8, 4, dtype=torch.complex64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.into(x).transpose(1, 2)
        modes = torch.fft.rfft(y)[..., :4]
        mixed = torch.einsum("bik,iok->bok", modes, self.weight)
        return self.out((torch.fft.irfft(mixed, n=y.shape[-1]) + y).relu().transpose(1, 2))


def compiled(model: nn.Module, given: Any, folder: Path, budget_s: float = 0.0) -> weft.Compiled:
    options = weft.Options(budget_s=budget_s, cache_dir=folder, in_parts=False)
    return weft.compile(model.eval(), given, options=options)


@pytest.mark.parametrize("budget", [0.0, 12.0])
def test_a_fourier_layer(budget: float, tmp_path: Path) -> None:
    model, x = Fourier(), torch.randn(2, 16, 3)
    found = compiled(model, (x,), tmp_path, budget)
    assert sorted(op for op, _, _ in found.record.opaque) == ["aten._fft_c2r.default", "aten._fft_r2c.default"]
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_small_fnet(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.FNetConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, intermediate_size=32, max_position_embeddings=12
    )
    model, tokens = transformers.FNetModel(config).eval(), torch.randint(0, 20, (2, 12))
    found = compiled(model, (tokens,), tmp_path)
    with torch.no_grad():
        want = model(tokens).last_hidden_state
        torch.testing.assert_close(found(tokens).last_hidden_state, want, rtol=1e-4, atol=1e-5)


class Spectrum(nn.Module):
    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        found = torch.fft.rfft(x) * shift.conj()
        return {"spectrum": found, "power": found.abs() ** 2}


def test_complex_arguments_and_results_are_the_modules(tmp_path: Path) -> None:
    model, x, shift = Spectrum(), torch.randn(2, 8), torch.randn(5, dtype=torch.complex64)
    found = compiled(model, (x, shift), tmp_path)
    for given in (shift, torch.randn(5, dtype=torch.complex64).conj()):
        want = model(x, given)
        got = found(x, given)
        assert got.keys() == want.keys() and got["spectrum"].dtype is torch.complex64
        for name, value in want.items():
            torch.testing.assert_close(got[name], value)


def test_a_saved_plan_takes_and_gives_them_too(tmp_path: Path) -> None:
    model, x, shift = Spectrum(), torch.randn(2, 8), torch.randn(5, dtype=torch.complex64)
    digest = compiled(model, (x, shift), tmp_path).save(tmp_path / "m.weft")
    loaded = weft.load(tmp_path / "m.weft", trust=digest)
    torch.testing.assert_close(loaded(x, shift)["spectrum"], model(x, shift)["spectrum"])
    with pytest.raises(InputError, match="expected 5x2xf32"):
        loaded(x, x[0, :5])


def test_a_complex_tensor_in_a_real_ones_place_is_another_plan(tmp_path: Path) -> None:
    class Size(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.abs() * 2

    model, x = Size(), torch.randn(3, 4)
    found = compiled(model, (x,), tmp_path)
    given = torch.randn(3, 4, dtype=torch.complex64)
    torch.testing.assert_close(found(given), model(given))
    torch.testing.assert_close(found(x), model(x))
    found.save(tmp_path / "m.weft")
    with pytest.raises(InputError, match="complex64"):
        weft.load(tmp_path / "m.weft")(given)
