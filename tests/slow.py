"""What `make test` leaves to `make test-all`: tests marked `slow`, by durations that were measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], count: int, *, unpack: bool = False) -> list[Any]:
    """Parameters of which `count`, spread evenly, are for `make test` as well; the others are marked slow.

    `unpack`: each is a tuple, for several names of parameters.

    Raises:
        ValueError: there are no more than `count`, or none is wanted.
    """
    every = list(values)
    if not 0 < count < len(every):
        raise ValueError(f"{count} of {len(every)}")
    quick = {i * len(every) // count for i in range(count)}
    return [
        x if i in quick else pytest.param(*(x if unpack else (x,)), marks=pytest.mark.slow) for i, x in enumerate(every)
    ]
