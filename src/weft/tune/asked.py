"""Trials that are asked for, made in a thread of their own because making one may wait for who writes its kernels."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Full, Queue
from typing import Generic, Self, TypeVar, final

from weft.tune.thread_pool import ThreadOf, daemon, leave

T = TypeVar("T")
LOOK_S = 0.1
"""How long room in the queue is waited for before it is looked whether anybody takes anything any more."""


@final
class Asked(Generic[T]):
    """The queue between who asks for trials and who measures them; leaving the block ends its thread.

    Threads. What iterates over `trials`, and all that this calls, is the thread that is made here. `take` and `close`
    are called by the one that measures.
    """

    def __init__(
        self,
        trials: Iterable[T | None],
        most: int,
        thread: ThreadOf = daemon,
        patience_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Begin to take trials, so many ahead of who measures.

        Args:
            trials: None among them: there is none for the moment, and who asks is to look whether it may end.
            most: how many wait in the queue.
            thread: makes the thread.
            patience_s: seconds that are left, asked when the block is left.
        """
        self._queue: Queue[T | BaseException | None] = Queue(most)
        self._ended = self._stopped = False
        self._patience_s = patience_s
        self._thread = thread(lambda: self._run(trials), "weft-asked")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(self._patience_s())

    def _run(self, trials: Iterable[T | None]) -> None:
        end: BaseException | None = None
        try:
            for trial in trials:
                if trial is not None:
                    self._put(trial)
                if self._stopped:
                    break
        except BaseException as error:
            end = error  # the taker raises it
        self._put(end)

    def _put(self, item: T | BaseException | None) -> None:
        while not self._stopped:
            with contextlib.suppress(Full):
                self._queue.put(item, timeout=LOOK_S)
                return

    def take(self, *, wait: bool, most: int, left_s: Callable[[], float] = lambda: math.inf) -> Iterator[T]:
        """What is there, up to `most`; with `wait` at least one, if any is left and there before the time is up.

        Raises what making one raised.
        """
        while most > 0 and not self._ended:
            try:
                item = self._queue.get(block=wait, timeout=min(left_s(), threading.TIMEOUT_MAX))
            except Empty:
                return
            if isinstance(item, BaseException):
                self._ended = True
                raise item
            if item is None:
                self._ended = True
                return
            yield item
            wait, most = False, most - 1

    @property
    def is_at_work(self) -> bool:
        """Whether the thread is there still."""
        return self._thread.is_alive()

    def close(self, patience_s: float) -> None:
        """End the thread, once the trial that it is taking is there, or a None; wait for that no longer."""
        self._stopped = True
        self._thread.join(min(patience_s, threading.TIMEOUT_MAX))
        leave(self._thread)
