from __future__ import annotations

import inspect
import math

import numpy as np
import pytest

from weft.ir.types import DType
from weft.tune import tolerance
from weft.tune.tolerance import TOLERANCES, gate_a, gate_b, table_hash


def test_the_table_is_total_and_exact_where_it_must_be() -> None:
    assert set(TOLERANCES) == set(DType)
    for dtype, t in TOLERANCES.items():
        assert (t.unit > 0) == dtype.is_float
        if not dtype.is_float:
            assert (t.rtol, t.atol, t.outside, t.rmse_factor) == (0, 0, 0, 0)
    assert TOLERANCES[DType.F32].rtol == 1e-4 and TOLERANCES[DType.F32].atol == 1e-5
    assert TOLERANCES[DType.F16].rtol == 2e-3 and TOLERANCES[DType.BF16].rtol == 1.6e-2


@pytest.mark.parametrize("gate", [gate_a, gate_b])
def test_no_argument_has_a_default(gate: object) -> None:
    for parameter in inspect.signature(gate).parameters.values():  # type: ignore[arg-type]
        assert parameter.default is inspect.Parameter.empty


def test_gate_a_follows_the_formula() -> None:
    u = 2.0**-24
    found = gate_a(DType.F32, size=10**12, rmse_ref=1e-6, max_ref=1e-5, rms=2.0, ulps=2.0, flips=3)
    assert math.isclose(found.rmse, 2e-6 + u * 2.0 * 2.25, rel_tol=1e-5)
    assert math.isclose(found.max, 16e-5 + u * 2.0 * 2.25, rel_tol=1e-5) and found.flips == 3
    assert gate_a(DType.I32, size=9, rmse_ref=1.0, max_ref=1.0, rms=9.0, ulps=2.0, flips=0).rmse == 0


def test_gate_a_lets_left_to_right_pass_and_no_rounded_inputs() -> None:
    """K = 8,192: plain order 28 u, rounding the inputs to 10 bits 4,800 u (of RMS 1)."""
    u = 2.0**-24
    limits = gate_a(
        DType.F32, size=48 * 48, rmse_ref=0.31 * math.sqrt(8192) * u, max_ref=8 * 28 * u, rms=1.0, ulps=0.0, flips=0
    )
    assert 28 * u < limits.rmse < 100 * u


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("got", "want", "ok"),
    [
        (f32(1, 2, 3), f32(1, 2, 3), True),
        (f32(1, 2, 3 + 2e-4), f32(1, 2, 3), True),
        (f32(1, 2, 3.01), f32(1, 2, 3), False),
        (f32(1, np.nan), f32(1, np.nan), True),
        (f32(1, np.nan), f32(1, 2), False),
        (f32(1, np.inf), f32(1, np.inf), True),
        (f32(1, np.inf), f32(1, -np.inf), False),
        (f32(1, 2), f32(1, 2, 3), False),
        (f32(), f32(), True),
        (f32(0, 0), f32(0, 0), True),
        (f32(3e38, 3e38), f32(3e38, 3e38), True),
    ],
)
def test_gate_b(got: np.ndarray, want: np.ndarray, ok: bool) -> None:
    assert gate_b(DType.F32, got=got, want=want).ok is ok


def test_gate_b_allows_a_thousandth_outside_but_no_wrong_direction() -> None:
    want = np.ones(10_000, dtype=np.float32)
    few, many = want.copy(), want.copy()
    few[:9] += 1e-3
    many[:11] += 1e-3
    assert gate_b(DType.F32, got=few, want=want).ok
    assert not gate_b(DType.F32, got=many, want=want).ok
    assert not gate_b(DType.F32, got=-want, want=want).ok
    assert not gate_b(DType.F32, got=np.where(np.arange(10_000) == 3, 1e9, want).astype(np.float32), want=want).ok


def test_gate_b_is_exact_for_integers() -> None:
    want = np.arange(5000)
    assert gate_b(DType.I64, got=want, want=want).ok
    got = want.copy()
    got[17] += 1
    assert not gate_b(DType.I64, got=got, want=want).ok


def test_the_hash_covers_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    before = table_hash()
    assert before == table_hash()
    monkeypatch.setattr(tolerance, "FLIPS_STEP", 0.5)
    assert table_hash() != before
