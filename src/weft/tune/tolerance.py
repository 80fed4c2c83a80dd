"""The one table of tolerances, and the two gates that read it. Nothing here has a default argument.

Gate A judges one kernel against the float64 value of its problem, by the error that the problem's own precision
allows: `RMSE <= k * RMSE_ref + floor` and `max|err| <= 16 * MAX_ref + floor`, with the reference error of a plain
left-to-right evaluation in the problem's own types (`oracle.reference_error`). Gate B judges a whole model.

Source: reliability notes, section 5 (numbers and their derivation). Plain order follows 0.31 * sqrt(K) units
in the last place of the result's RMS for K = 16..16,384, which is why contractions need no simulation.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from weft.ir.prims import Prim
from weft.ir.types import Array, DType


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What may be wrong with values of one element type. Exact types have zeros everywhere."""

    unit: float
    """Unit roundoff u; 0 for integers and bool, which are compared exactly."""
    rmse_factor: float
    """k of gate A."""
    max_factor: float
    rtol: float
    """Gate B, relative to the reference."""
    atol: float
    """Gate B, absolute."""
    outside: float
    """Gate B: share of elements that may lie outside rtol and atol."""
    cosine: float
    """Gate B: least cosine similarity."""


_EXACT = Tolerance(unit=0.0, rmse_factor=0.0, max_factor=0.0, rtol=0.0, atol=0.0, outside=0.0, cosine=1.0)
TOLERANCES: Mapping[DType, Tolerance] = {
    # float64 is its own reference: both sides carry the error, so k is 3 rather than 2.
    DType.F64: Tolerance(2.0**-53, 3.0, 16.0, 1e-9, 1e-10, 1e-3, 0.99999),
    DType.F32: Tolerance(2.0**-24, 2.0, 16.0, 1e-4, 1e-5, 1e-3, 0.9999),
    DType.F16: Tolerance(2.0**-11, 3.0, 16.0, 2e-3, 1e-3, 1e-3, 0.999),
    DType.BF16: Tolerance(2.0**-8, 3.0, 16.0, 1.6e-2, 1e-3, 1e-3, 0.999),
    DType.F8E4M3: Tolerance(2.0**-4, 3.0, 16.0, 2.0**-3, 2.0**-9, 1e-3, 0.99),
    DType.F8E5M2: Tolerance(2.0**-3, 3.0, 16.0, 2.0**-2, 2.0**-15, 1e-3, 0.98),
    **dict.fromkeys((DType.I64, DType.I32, DType.I16, DType.I8, DType.U8, DType.BOOL), _EXACT),
}

ORDER_FACTOR = 0.31
"""RMSE of a left-to-right sum of K zero-mean terms, in units of u * RMS(result) * sqrt(K)."""
FLOAT8_SUM = 2.0**-11
"""RMSE of a product of 8-bit floats on tensor cores over the RMS of the result, and as much of the walk of its sums:
Hopper keeps some 14 bits while it adds up, and kernels move their sums to f32 every 128 terms."""
MAX_OVER_RMSE = 8.0
"""MAX_ref / RMSE_ref where the formula is used."""

ULPS: Mapping[Prim, float] = dict.fromkeys(
    (
        Prim.EXP, Prim.EXPM1, Prim.LOG, Prim.LOG1P, Prim.RSQRT, Prim.RECIPROCAL, Prim.ERF, Prim.TANH, Prim.SIN,
        Prim.COS, Prim.TAN, Prim.ASIN, Prim.ACOS, Prim.ATAN, Prim.SINH, Prim.COSH, Prim.ASINH, Prim.ACOSH,
        Prim.ATANH, Prim.POW, Prim.ATAN2, Prim.MOD,
    ),
    2.0,
)  # fmt: skip
"""Bound in units in the last place of each primitive that is not rounded exactly (see `ir.prims`)."""

COARSE = 4.0
"""Gate A is this much wider on the integer inputs where the result is not exact: with five distinct values the
rounding errors of a problem are few and repeat, so that their RMS is left to chance. The precision gate proper is
that of the normal inputs; here lost or doubled terms are looked for."""
FLIPS_COMPARE = 1e-5
"""Share of elements that may differ where a comparison of rounded values decides."""
FLIPS_STEP = 1e-4
"""The same where a step function (floor, cast to integer, argmax, ...) of rounded values decides."""
UNDECIDED, UNDECIDED_RUNS = 2.0, 2
UNDECIDED_FEW, UNDECIDED_FEW_RUNS = 8.0, 16
"""Gradients: an activation's derivative may jump where its argument's rounding decides, and one such decision changes a
row of the gradient of x, and of a layer's weights, far beyond any rounding. So the reference error of a gradient is the
largest of a few evaluations in which the arguments of comparisons are off by so many units of their RMS, evenly spread
(that of a sum of several layers is some half a unit to one). Where few values decide, L decisions of a kernel falling
the other way on average, 16 evaluations at 8 units hold some 128 L of them: a right kernel that has one where none of
these has any comes with L exp(-128 L), at most 0.3 %. Where many decide, errors are sums of many and 2 units do."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Gate A for one output."""

    rmse: float
    max: float
    flips: int
    """Elements that may be left out of both because a decision on rounded values may fall either way."""


def gate_a(dtype: DType, *, size: int, rmse_ref: float, max_ref: float, rms: float, ulps: float, flips: int) -> Limits:
    """Limits of one output.

    Args:
        dtype: element type of the output.
        size: number of elements; the RMS of n errors scatters by 1/sqrt(2n), so k grows to k * (1 + 2/sqrt(n)).
        rmse_ref: error of the reference evaluation in the problem's own types.
        max_ref: its largest error.
        rms: root mean square of the float64 result, over finite elements.
        ulps: the largest bound of `ULPS` among the primitives of the problem, else 0.
        flips: see `Limits`.
    """
    t = TOLERANCES[dtype]
    floor = t.unit * rms * (0.25 + ulps)
    k = t.rmse_factor * (1.0 + 2.0 / math.sqrt(max(size, 1)))
    return Limits(k * rmse_ref + floor, t.max_factor * max_ref + floor, flips)


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Gate B of one model output."""

    ok: bool
    outside: float
    """Share of elements outside rtol and atol (or of another NaN/Inf class)."""
    cosine: float
    worst: float
    """Largest absolute difference of finite elements."""


def gate_b(dtype: DType, *, got: Array, want: Array) -> ModelCheck:
    """Compare a model's output with the float32 (or exact) reference.

    Both arrays have the same shape; the tolerance is that of `dtype`, the element type in which the model computes.
    NaN and infinities must stand where they stand in the reference.
    """
    if got.shape != want.shape:
        return ModelCheck(False, 1.0, 0.0, math.inf)
    if want.size == 0:
        return ModelCheck(True, 0.0, 1.0, 0.0)
    t, sums = TOLERANCES[dtype], _Sums()
    mine, theirs = got.reshape(-1), want.reshape(-1)
    for start in range(0, want.size, _PIECE):
        g, w = (np.asarray(x[start : start + _PIECE], np.float64) for x in (mine, theirs))
        sums.add(g, w, t)
    outside = sums.outside / want.size
    # an output too small for a share may have nothing outside
    allowed = t.outside if want.size * t.outside >= 1 else 0.0
    cosine = sums.cosine
    ok = outside <= allowed and sums.same_class and cosine >= t.cosine * (1 - 1e-12)
    return ModelCheck(ok, outside, cosine, sums.worst)


_PIECE = 1 << 15
"""Elements that are compared at a time: their intermediates stay in a core's cache."""


@dataclass(slots=True)
class _Sums:
    """Of two arrays, piece by piece."""

    outside: int = 0
    worst: float = 0.0
    same_class: bool = True
    scale: float = 0.0
    """The largest finite magnitude so far, which the sums are in units of: squares of f64 overflow."""
    mine: float = 0.0
    theirs: float = 0.0
    both: float = 0.0

    def add(self, g: npt.NDArray[np.float64], w: npt.NDArray[np.float64], t: Tolerance) -> None:
        """A piece: what is given and what is wanted, shape (n,)."""
        finite = np.isfinite(w) & np.isfinite(g)
        if not finite.all():
            same = finite | (np.isnan(w) & np.isnan(g)) | (np.isinf(w) & (w == g))
            self.outside += int(np.count_nonzero(~same))
            self.same_class = self.same_class and bool(same.all())
            g, w = np.where(finite, g, 0.0), np.where(finite, w, 0.0)
        error, size = np.abs(g - w), np.abs(w)
        self.worst = max(self.worst, float(error.max()))
        largest = max(float(np.abs(g).max()), float(size.max()))
        self.outside += int(np.count_nonzero(error > t.atol + t.rtol * size))
        if largest > self.scale:
            shrunk = (self.scale / largest) ** 2
            self.mine, self.theirs, self.both = self.mine * shrunk, self.theirs * shrunk, self.both * shrunk
            self.scale = largest
        if self.scale > 0:
            g, w = g / self.scale, w / self.scale
            self.mine, self.theirs = self.mine + float(g @ g), self.theirs + float(w @ w)
            self.both += float(g @ w)

    @property
    def cosine(self) -> float:
        """Of both as vectors; where one of them is zero, 1 if both are, else 0."""
        norm = math.sqrt(self.mine) * math.sqrt(self.theirs)
        return self.both / norm if norm > 0 else float(self.mine == self.theirs)


def table_hash() -> str:
    """SHA-256 of everything above that decides: part of every verdict's key."""
    content = {
        "table": {d.value: asdict(t) for d, t in TOLERANCES.items()},
        "ulps": {p.value: v for p, v in ULPS.items()},
        "rest": ["1 + 2/sqrt(n)", ORDER_FACTOR, FLOAT8_SUM, MAX_OVER_RMSE, COARSE, FLIPS_COMPARE, FLIPS_STEP],
        "undecided": [UNDECIDED, UNDECIDED_RUNS, UNDECIDED_FEW, UNDECIDED_FEW_RUNS],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


OPAQUE_ULPS, OPAQUE_RUNS = 32.0, 3
"""A recurrent layer beside ONNX Runtime's, see `tune.opaque`: units of the RMS that its functions may always be off by
(ONNX Runtime's sigmoid and tanh are approximations, and so are cuDNN's: an LSTM of 12 steps in f32 was off by 17 on an
H200, a gate in another's place by some hundred thousand), and in how many runs on operands that are off the reference
error is looked for. No verdict that was found before these stood here depends on them, so the hash does not either."""
