from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.typed import assert_allclose

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


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_gate_b_in_pieces_is_that_of_the_whole(data: st.DataObject) -> None:
    """Beside the formula on whole arrays; special values stand in both, or in one."""
    special = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e-30, -1e30])
    wanted = data.draw(st.lists(st.floats(-10, 10, width=32) | special, min_size=1, max_size=40))
    off = data.draw(st.lists(st.sampled_from([0.0, 0.0, 1e-6, 0.1]), min_size=len(wanted), max_size=len(wanted)))
    want = np.array(wanted)
    got = (want + np.array(off)).astype(np.float32)
    if data.draw(st.booleans()):
        got[data.draw(st.integers(0, len(wanted) - 1))] = data.draw(special)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tolerance, "_PIECE", data.draw(st.integers(1, 9)))
        found = gate_b(DType.F32, got=got, want=want)
    g, t = got.astype(np.float64), TOLERANCES[DType.F32]
    finite = np.isfinite(g) & np.isfinite(want)
    alike = finite | (np.isnan(g) & np.isnan(want)) | (np.isinf(want) & (g == want))
    g, w = np.where(finite, g, 0.0), np.where(finite, want, 0.0)
    error = np.abs(g - w)
    outside = (~alike | (error > t.atol + t.rtol * np.abs(w))).mean()
    scale = max(np.abs(g).max(), np.abs(w).max()) or 1.0
    norm = np.linalg.norm(g / scale) * np.linalg.norm(w / scale)
    cosine = (g / scale) @ (w / scale) / norm if norm > 0 else float(np.array_equal(g, w))
    allowed = t.outside if len(wanted) * t.outside >= 1 else 0.0
    assert found.outside == outside and found.worst == error.max()
    assert_allclose(found.cosine, cosine, rtol=1e-9, atol=1e-12)
    sure = abs(cosine - t.cosine) > 1e-9
    assert not sure or found.ok == bool(outside <= allowed and alike.all() and cosine >= t.cosine)


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
