"""A limit of time on reading a source: whoever goes through text of others in loops asks here whether to go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

SECONDS = 20.0
"""For reading and cutting one source, the compiler's time not included; the suites' largest takes under one."""
_end: ContextVar[float] = ContextVar("_end", default=float("inf"))


class ImpatientError(Exception):
    """Reading a source takes too long."""


@contextmanager
def limited() -> Iterator[None]:
    """Within it `tick` raises once the time is over."""
    token = _end.set(min(_end.get(), time.monotonic() + SECONDS))
    try:
        yield
    finally:
        _end.reset(token)


def over() -> bool:
    """Whether the time is over."""
    return time.monotonic() > _end.get()


def tick() -> None:
    """Go on.

    Raises:
        ImpatientError: the time is over.
    """
    if over():
        raise ImpatientError
