"""Results of a function of one object that are kept as long as the object lives: graphs hold weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")
V = TypeVar("V")


def while_it_lives(compute: Callable[[K], V]) -> Callable[[K], V]:
    """The function, computed once for each object; what it returns must not hold the object."""
    known: WeakKeyDictionary[K, V] = WeakKeyDictionary()

    @wraps(compute)
    def get(of: K) -> V:
        try:
            return known[of]
        except KeyError:
            found = known[of] = compute(of)
            return found

    return get
