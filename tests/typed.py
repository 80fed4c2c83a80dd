"""What a test knows of a value and its type does not say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import pytest

T = TypeVar("T")


def narrow(kind: type[T], x: object) -> T:
    """The value, which is of that type."""
    assert isinstance(x, kind), f"{x!r} is no {kind.__name__}"
    return x


def some(x: T | None) -> T:
    """The value, which is there."""
    assert x is not None
    return x


def noting(note: Callable[..., object], then: Callable[..., T]) -> Callable[..., T]:
    """A stand-in that notes its arguments before it does what it stands for."""

    def called(*args: Any, **named: Any) -> T:
        note(*args, **named)
        return then(*args, **named)

    return called


def assert_allclose(got: object, want: object, *, rtol: float, atol: float = 0.0) -> None:
    """`np.testing.assert_allclose` of arrays whose element type is known at run time alone."""
    __tracebackhide__ = True
    np.testing.assert_allclose(cast("Any", got), cast("Any", want), rtol=rtol, atol=atol)


def numbers(x: object) -> np.ndarray[Any, np.dtype[np.float64]]:
    """An array whose element type is known at run time alone, for arithmetic in float64."""
    return np.asarray(x, dtype=np.float64)


def approx(expected: float, rel: float | None = None) -> Any:
    """`pytest.approx` inside of tuples and lists, where a float is expected."""
    return pytest.approx(expected, rel=rel)
