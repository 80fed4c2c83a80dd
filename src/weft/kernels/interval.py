"""How sure a median is."""

from __future__ import annotations

import math
from collections.abc import Sequence


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """An interval of the median without assuming a distribution, from order statistics.

    The narrowest symmetric pair of sorted samples whose coverage (by the binomial distribution) is at least
    `confidence`; for fewer samples than that needs (six, at 95 %), the whole range. NaN without samples.
    """
    found = sorted(samples)
    n = len(found)
    if n == 0:
        return math.nan, math.nan
    outside, skip = 0.0, 0
    for k in range(n // 2):
        outside += math.comb(n, k) / 2**n
        if 2 * outside > 1 - confidence:
            break
        skip = k + 1
    low = max(skip - 1, 0)
    return found[low], found[n - 1 - low]
