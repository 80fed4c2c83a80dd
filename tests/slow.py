"""What `make test` leaves to `make test-all`: tests marked `slow`, by durations that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")


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


def asked(request: pytest.FixtureRequest, values: Mapping[str, Value], *always: str) -> list[Value]:
    """Of values by name those that a selected test of this file has a parameter of that name for, and these `always`.

    For a fixture that is made once for a file and costs as much as it holds.
    """
    tests = [x for x in request.session.items if x.path == request.path]
    names = {
        p for x in tests if (call := getattr(x, "callspec", None)) for p in call.params.values() if isinstance(p, str)
    }
    return [value for name, value in values.items() if name in names or name in always]
