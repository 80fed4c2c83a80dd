"""Methods that one thread at a time runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast


class Locked(Protocol):
    """Has a lock that the thread which holds it may take again."""

    lock: RLock


S = TypeVar("S", bound=Locked)
P = ParamSpec("P")
R = TypeVar("R")


def synchronized(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """The method, run while the object's lock is held."""

    @wraps(method)
    def alone(self: S, *arguments: P.args, **options: P.kwargs) -> R:
        with self.lock:
            return method(self, *arguments, **options)

    return cast("Callable[Concatenate[S, P], R]", alone)
