"""Values that are dear to make, by key: each is made once, by the first who asks, and nobody else waits for it.

Who asks for a key that is being made waits for that one. Those that are there are given out meanwhile, without waiting.
Two are never made at the same time: making one measures, and the other would disturb its times.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar, final

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Pending(Generic[V]):
    """A value that a thread is making."""

    future: Future[V] = field(default_factory=Future)
    thread: int = field(default_factory=threading.get_ident)


def _always(_: object) -> bool:
    return True


@final
class SingleFlightCache(Generic[K, V]):
    """The `limit` (at least 1) values used last. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = max(limit, 1)
        self._found: OrderedDict[K, V] = OrderedDict()
        self._pending: dict[K, _Pending[V]] = {}
        self._lock = threading.Lock()
        """Of the two tables; nothing slow is done under it."""
        self._turn = threading.RLock()

    def __len__(self) -> int:
        with self._lock:  # between a value that came and the one that goes there is one too many
            return len(self._found)

    def known(self, key: K) -> V | None:
        """The value of a key, where there is one; it counts as used."""
        with self._lock:
            value = self._found.get(key)
            if value is not None:
                self._found.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Take a value for the one of its key; what was used longest ago may go for it."""
        with self._lock:
            self._found[key] = value
            self._found.move_to_end(key)
            while len(self._found) > self._limit:
                self._found.popitem(last=False)

    def get(self, key: K, make: Callable[[], V], holds: Callable[[V], bool] = _always) -> V:
        """The value of a key, made if there is none or the one there does not `hold` for this caller.

        What `make` raises goes to all who wait for it, and is not kept: who asks later makes it anew. An interruption
        of the thread that makes it is its own: another one of those who wait goes on.
        """
        me = threading.get_ident()
        while True:
            value = self.known(key)
            if value is not None and holds(value):
                return value
            with self._lock:
                if self._found.get(key) is not value:
                    continue  # it came in between
                pending = self._pending.get(key)
                mine = pending is None
                if pending is None:
                    pending = self._pending[key] = _Pending()
            if mine:
                return self._made(key, pending, make)
            if pending.thread == me:
                return make()  # asked for while it is being made, by who makes it
            try:
                value = pending.future.result()
            except CancelledError:
                continue
            if holds(value):
                return value  # even where others have taken its place meanwhile

    def _made(self, key: K, pending: _Pending[V], make: Callable[[], V]) -> V:
        try:
            with self._turn:
                value = make()
                self.put(key, value)
        except BaseException as error:
            self._forget(key)
            if isinstance(error, Exception):
                pending.future.set_exception(error)
            else:
                pending.future.cancel()
            raise
        self._forget(key)
        pending.future.set_result(value)
        return value

    def _forget(self, key: K) -> None:
        with self._lock:
            del self._pending[key]

    @contextmanager
    def renewal(self) -> Iterator[dict[K, V]]:
        """All values, to be changed in the dictionary given; put in their place together when the block ends well.

        Nothing is made meanwhile; values are given out as they were. A key that is taken out is made anew.
        """
        with self._turn:
            with self._lock:
                changed = dict(self._found)
            yield changed
            with self._lock:
                self._found = OrderedDict(changed)
