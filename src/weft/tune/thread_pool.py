"""Threads that nobody has to wait for: a pool like the standard one, but a task that hangs keeps nothing from ending.

The standard pool joins its threads when it is left and again when the interpreter ends. A compiler that never returns
would hold both for good. But a thread that comes back from native code while the interpreter ends is ended there, and
C++ answers that by aborting the process: so threads that were left at work have a moment at exit (`leave`).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar, final

P = ParamSpec("P")
R = TypeVar("R")
_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]
EXIT_S = 10.0
"""How long the end of the process waits, at most, for threads that were left at work."""
_left: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class ThreadOf(Protocol):
    """What makes a daemon thread, not started, that runs something."""

    def __call__(self, run: Callable[[], None], name: str, /) -> threading.Thread:
        """It is called so."""
        ...


def daemon(run: Callable[[], None], name: str, /) -> threading.Thread:
    """See `ThreadOf`: a thread as it comes. What hangs in it keeps the process from nothing."""
    return threading.Thread(target=run, daemon=True, name=name)


def leave(thread: threading.Thread) -> None:
    """Nobody waits for this daemon thread any longer but the end of the process, for `EXIT_S`."""
    if thread.is_alive():
        _left.add(thread)


@atexit.register
def _wait_for_left() -> None:
    end = time.monotonic() + EXIT_S
    for thread in list(_left):
        thread.join(max(0.0, end - time.monotonic()))


@final
class DaemonThreadPool(Executor):
    """So many daemon threads, started as they are needed. Leaving the block waits for what runs, up to `patience_s`."""

    def __init__(self, threads: int, patience_s: Callable[[], float] = lambda: threading.TIMEOUT_MAX) -> None:
        """`patience_s` is asked when the pool is closed: seconds that tasks in flight are waited for."""
        self._most = max(1, threads)
        self._patience_s = patience_s
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._waiting = 0
        """Threads that have nothing to do."""
        self._closed = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """See `Executor`."""
        future: Future[R] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            self._tasks.put((future, fn, args, kwargs))
            if self._tasks.qsize() > self._waiting and len(self._threads) < self._most:
                thread = daemon(self._work, "weft-pool")
                self._threads.append(thread)
                thread.start()
        return future

    def _work(self) -> None:
        while True:
            with self._lock:
                self._waiting += 1
            task = self._tasks.get()
            with self._lock:
                self._waiting -= 1
            if task is None:
                return
            future, fn, args, kwargs = task
            if not future.set_running_or_notify_cancel():
                continue  # cancelled before it began
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del task, future, fn, args, kwargs  # an idle thread holds nothing

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; with `wait`, give what runs its patience. What has not begun is done first, or cancelled."""
        with self._lock:
            self._closed = True
        if cancel_futures:
            with contextlib.suppress(Empty):
                while (task := self._tasks.get_nowait()) is not None:
                    task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        end = time.monotonic() + min(self._patience_s(), 1e9) if wait else 0.0
        for thread in self._threads:
            thread.join(min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX))
            leave(thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for all that was asked for; after an error for what has begun."""
        self.shutdown(wait=True, cancel_futures=kind is not None)
