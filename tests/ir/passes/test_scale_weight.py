"""Weights times scales: rounded once, and declined where they would not be finite or lose bits."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.passes.fold_scales import scaled, scaling_of
from weft.ir.types import DType

CONV = a.ConvAttrs((1, 1), (1, 1), (1, 1), (1, 1), 1, False, (0, 0))


def weights(dtype: DType) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((300, 400, 3, 3)).astype(dtype.numpy)  # several strips


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32, DType.F64])
def test_every_weight_is_rounded_once(dtype: DType) -> None:
    w, scale = weights(dtype), np.linspace(-2, 3, 300)
    scaling = scaling_of(w, scale, dtype, CONV)
    assert not isinstance(scaling, Declined)
    (got,) = scaled([scaling])
    np.testing.assert_array_equal(got, (w.astype(np.float64) * scale[:, None, None, None]).astype(dtype.numpy))


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, -6e4])
def test_what_is_not_finite_is_declined(dtype: DType, bad: float) -> None:
    w = weights(dtype)
    w[7, 11, 1, 2] = bad
    scale = np.full(300, 2.0 if np.isfinite(bad) and dtype is DType.F16 else 1.0)
    finite = np.isfinite(bad) and dtype is DType.F32
    assert isinstance(scaling_of(w, scale, dtype, CONV), Declined) is not finite


def test_small_weights_lose_bits() -> None:
    w = np.full((4, 2, 1, 1), -1e-4, np.float16)
    assert isinstance(scaling_of(w, np.full(4, 0.1), DType.F16, CONV), Declined)
    assert not isinstance(scaling_of(w, np.zeros(4), DType.F16, CONV), Declined)
