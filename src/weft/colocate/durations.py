"""How long things take: fits of kernels alone and fused, and an online model of queries by a plan variant.

Fits minimise relative errors. `Online` is refitted while queries run: an exponential window over the last ones, for
each bucket of inputs and of the SM clock; a drift test says when it must not be believed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from weft.kernels.scheduling import PairModel, SoloModel

CLOCK_BUCKET_MHZ = 75
"""Width of a bucket of the SM clock."""
WINDOW = 200
"""Queries that an exponential window is of."""
REFIT = 20
"""Queries after a drift, until the model is believed again."""
WRONG = 0.10
"""Relative error that counts as wrong; three of five are a drift."""
_OF_LAST, _MOST_WRONG = 5, 3
_ALLOWED, _ALARM = 0.02, 0.5
"""Page and Hinkley's test: mean error that is let pass, and sum beyond it that is an alarm."""
_GRID = 400
Floats = npt.NDArray[np.float64]


def fit_solo(points: Sequence[tuple[float, float]], resident: int) -> SoloModel:
    """From (blocks, us): linear in blocks, or in whole waves of `resident` blocks, whichever is off by less.

    Raises:
        ValueError: fewer than three points of two sizes, or a point that cannot be.
    """
    n, us = _columns(points, least=3)
    if resident < 1:
        raise ValueError(f"{resident} resident blocks")
    best: SoloModel | None = None
    for whole in (False, True):
        waves = np.ceil(n / resident) if whole else n / resident
        if len(set(waves.tolist())) < 2:
            continue
        base, wave = _least_squares(np.stack([np.ones_like(waves), waves], axis=1), us)
        error = np.abs((base + wave * waves) / us - 1)
        found = SoloModel(base, max(wave, 0.0), resident, whole, float(np.quantile(error, 0.95)))
        if best is None or error.mean() < mean_error(best, points):
            best = found
    if best is None:
        raise ValueError("all points are of one size")
    return best


def mean_error(model: SoloModel | PairModel, points: Sequence[tuple[float, float]]) -> float:
    """Mean of the relative errors."""
    return float(np.mean([abs(model.us(x) / us - 1) for x, us in points]))


def fit_pair(points: Sequence[tuple[float, float]]) -> PairModel:
    """From (fraction, us): two lines that meet, by trying where. One line, where two fit no better.

    Raises:
        ValueError: fewer than four points, or a point that cannot be.
    """
    f, us = _columns(points, least=4)
    inner = np.unique(f)
    if len(inner) < 3:
        raise ValueError("fewer than three fractions")
    best: tuple[float, PairModel] | None = None
    one = np.array([f.max()])
    for ratio in np.concatenate([one, np.linspace(inner[1], inner[-2], _GRID)]):
        before, behind = np.minimum(f, ratio), np.maximum(f - ratio, 0.0)
        if behind.any():
            base, under, over = _least_squares(np.stack([np.ones_like(f), before, behind], axis=1), us)
        else:
            base, under = _least_squares(np.stack([np.ones_like(f), before], axis=1), us)
            over = under
        error = (base + under * before + over * behind) / us - 1
        loss = float((error**2).sum())
        if base >= 0 and (best is None or loss < best[0] * (1 - 1e-9)):
            best = loss, PairModel(base, under, over, float(ratio), float(np.quantile(np.abs(error), 0.95)))
    if best is None:
        raise ValueError("no two lines with a positive time at nothing to draw")
    return best[1]


def two_lines(lc_us: float, slowdown: float, fraction: float, idle: float) -> PairModel:
    """What Tacker's predictor makes of one measured point: a line to it, and one of slope 1 behind it.

    Raises:
        ValueError: no such point.
    """
    if not (lc_us > 0 and fraction > 0 and math.isfinite(slowdown) and math.isfinite(idle)):
        raise ValueError(f"a point of {lc_us} us with slowdown {slowdown} at fraction {fraction}")
    return PairModel(lc_us * (1 + idle), lc_us * (slowdown - idle) / fraction, lc_us, fraction, 0.0)


def compute_share(points: Sequence[tuple[float, float]]) -> float:
    """From (MHz, us): the part of the time that goes with the reciprocal of the clock, 0 to 1, at the highest clock.

    Raises:
        ValueError: fewer than two clocks.
    """
    mhz, us = _columns(points, least=2)
    if len(set(mhz.tolist())) < 2 or mhz.min() <= 0:
        raise ValueError("fewer than two clocks")
    fixed, with_clock = _least_squares(np.stack([np.ones_like(mhz), mhz.max() / mhz], axis=1), us)
    return min(1.0, max(0.0, with_clock / (fixed + with_clock)))


def at_clock(us: float, from_mhz: float, to_mhz: float, share: float) -> float:
    """A time at another clock, of which a share goes with its reciprocal."""
    return us * (share * from_mhz / to_mhz + 1 - share)


def clock_bucket(mhz: float) -> int:
    """Buckets are `CLOCK_BUCKET_MHZ` wide."""
    return round(mhz / CLOCK_BUCKET_MHZ)


_WEIGHTS = (1 - 1 / WINDOW) ** np.arange(WINDOW - 1, -1, -1)
"""Of residuals in the window, the oldest first."""


@final
class Online:
    """Times of the queries that ran by one plan variant."""

    def __init__(self, prior_us: float, margin_us: float, *, clock_mhz: float, share: float = 1.0) -> None:
        """What was measured before: median and q99 over it, at a clock.

        Raises:
            ValueError: no such time, margin, clock or share.
        """
        if not (0 < prior_us < math.inf and 0 <= margin_us < math.inf and clock_mhz > 0 and 0 <= share <= 1):
            raise ValueError(f"{prior_us} us with a margin of {margin_us} at {clock_mhz} MHz, share {share}")
        self._prior, self._prior_margin = prior_us, margin_us / prior_us
        self._clock, self._share = clock_mhz, share
        self._known: dict[tuple[int, int], tuple[float, int, float]] = {}
        """By inputs and clock bucket: mean time, how many it is of, and the clock itself, the last one seen."""
        self._errors: deque[float] = deque(maxlen=WINDOW)
        self._last: deque[bool] = deque(maxlen=_OF_LAST)
        self._above = self._below = 0.0
        self._wanted = 0
        self._is_forgotten = False
        """What was measured before no longer holds."""

    @property
    def is_ready(self) -> bool:
        """Whether it may be believed: no drift since it was last refitted."""
        return self._wanted == 0

    def predict_us(self, *, clock_mhz: float, inputs: int = 1) -> float:
        """Of a query with so many inputs; at a clock that was never seen, from the nearest one by the compute share."""
        bucket = clock_bucket(clock_mhz)
        known = self._known.get((inputs, bucket))
        if known is not None:
            return known[0]
        near = min((b for i, b in self._known if i == inputs), key=lambda b: abs(b - bucket), default=None)
        if near is None:
            return at_clock(self._prior, self._clock, clock_mhz, self._share)
        us, _, mhz = self._known[inputs, near]
        return at_clock(us, mhz, clock_mhz, self._share)

    @property
    def margin(self) -> float:
        """q99 of the relative residuals in the window, the newest weighing most; that from before, until it is full."""
        n = len(self._errors)
        if n < WINDOW // 2:
            return max(self._prior_margin, *self._errors) if n else self._prior_margin
        order = np.argsort(np.fromiter(self._errors, np.float64, n))
        weights = _WEIGHTS[WINDOW - n :][order].cumsum()
        rank = weights.searchsorted(0.99 * weights[-1])
        return max(0.0, float(self._errors[int(order[min(int(rank), n - 1)])]))

    def observe(self, us: float, *, clock_mhz: float, inputs: int = 1) -> None:
        """Take note of a query that has ended.

        Raises:
            ValueError: no such time.
        """
        if not (0 < us < math.inf and clock_mhz > 0):
            raise ValueError(f"{us} us at {clock_mhz} MHz")
        predicted = self.predict_us(clock_mhz=clock_mhz, inputs=inputs)
        error = us / predicted - 1
        if self._wanted:
            self._wanted -= 1
        else:
            self._errors.append(error)
            self._last.append(abs(error) > WRONG)
            cut = max(-WRONG, min(error, WRONG))  # so that one that is far off is no alarm by itself
            self._above = max(0.0, self._above + cut - _ALLOWED)
            self._below = max(0.0, self._below - cut - _ALLOWED)
            if sum(self._last) >= _MOST_WRONG or max(self._above, self._below) > _ALARM:
                self._forget()
                return
        key = (inputs, clock_bucket(clock_mhz))
        mean, n, _ = self._known.get(key, (predicted, 0 if self._is_forgotten else REFIT, clock_mhz))
        n += 1
        self._known[key] = mean + (us - mean) * max(1 / n, 2 / (WINDOW + 1)), n, clock_mhz

    def _forget(self) -> None:
        self._known.clear()
        self._errors.clear()
        self._last.clear()
        self._above = self._below = 0.0
        self._wanted = REFIT
        self._is_forgotten = True


def _columns(points: Sequence[tuple[float, float]], *, least: int) -> tuple[Floats, Floats]:
    if len(points) < least:
        raise ValueError(f"{len(points)} points, at least {least} are needed")
    both = np.array(points, dtype=np.float64)
    if not np.isfinite(both).all() or both[:, 0].min() < 0 or both[:, 1].min() <= 0:
        raise ValueError("a point that cannot be")
    return both[:, 0], both[:, 1]


def _least_squares(terms: Floats, us: Floats) -> list[float]:
    """Coefficients of the least sum of squared relative errors."""
    found, *_ = np.linalg.lstsq(terms / us[:, None], np.ones_like(us), rcond=None)
    return [float(x) for x in found]
