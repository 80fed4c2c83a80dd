"""One version of one model that is served: its queue, the thread that makes batches, and who is told what.

A query is in one place at a time: in the queue, or in a job of the backend. What takes it out of one place (a batch, a
deadline, its caller, the end) decides its answer or puts it into the next. `Query.answer` holds that there is one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal, final

from weft.errors import UserError, WeftError
from weft.ir.types import Array
from weft.serve.backend import Backend, Job
from weft.serve.batcher import Batcher, QueueLimits
from weft.serve.errors import DeadlineError, InferenceFailedError, OverloadedError, RequestError, UnavailableError
from weft.serve.query import Outputs, Query
from weft.serve.signature import Signature
from weft.serve.statistics import Statistics

State = Literal["LOADING", "READY", "UNAVAILABLE", "DRAINING", "UNLOADED"]
_ACCEPTING = ("READY", "UNAVAILABLE")
HEADROOM = 0.8
"""A query is admitted where it would have its answer within this share of its time: the rest is for the way there and
back, and for a machine that is slower for a moment."""


@final
class Served:
    """Thread-safe. `start` it, `submit` queries, then `drain` and `close`."""

    def __init__(
        self, name: str, version: str, backend: Backend, *, max_delay_s: float = 0.0, max_queries: int = 1024,
        max_batch: int = 0, admit: bool = True, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`max_batch`: rows, fewer than the largest plan's; 0: as many. `admit`: refuse what would be late anyhow."""
        self.name, self.version = name, version
        self.statistics = Statistics()
        self._backend, self._clock, self._admit = backend, clock, admit
        self._settings = (max_delay_s, max_queries, max_batch)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._batcher = Batcher(QueueLimits(1))
        self._running: dict[int, Query] = {}
        self._ended = 0.0
        """When the last batch did."""
        self._state: State = "LOADING"
        self._dispatcher = threading.Thread(target=self._dispatch, name=f"weft-serve-{name}", daemon=True)

    @property
    def signature(self) -> Signature:
        """Of the model; it has one once it has started."""
        return self._backend.signature

    @property
    def state(self) -> State:
        """READY: it answers. UNAVAILABLE: its worker is being started again; queries wait."""
        with self._lock:
            if self._state == "READY" and self._backend.problem:
                return "UNAVAILABLE"
            return self._state

    @property
    def problem(self) -> str:
        """Why it is not ready."""
        return self._backend.problem

    @property
    def restarts(self) -> int:
        """Of its worker."""
        return self._backend.restarts

    @property
    def backend(self) -> Backend:
        """What runs it."""
        return self._backend

    @property
    def waiting(self) -> int:
        """Queries in the queue."""
        with self._lock:
            return len(self._batcher)

    @property
    def running(self) -> int:
        """Queries in batches."""
        with self._lock:
            return len(self._running)

    def start(self) -> None:
        """Returns when it is ready.

        Raises:
            WeftError: it cannot be.
        """
        self._backend.start(self)
        delay_s, queries, batch = self._settings
        most = self.signature.max_rows
        limits = QueueLimits(min(batch or most, most), delay_s if self.signature.packs else 0.0, queries)
        with self._lock:
            self._batcher = Batcher(limits)
            self._state = "READY"
        self._dispatcher.start()

    def submit(self, arrays: Mapping[str, Array], *, timeout_s: float = math.inf) -> Future[Outputs]:
        """One query. The future may be cancelled while it waits.

        Raises:
            RequestError: tensors that the model does not take [W019].
            OverloadedError: the queue is full, or it would be answered too late [W304].
            UnavailableError: the model is on its way out [W304].
        """
        placed, rows = self.signature.accept(arrays)
        if rows > self._batcher.limits.max_rows:
            raise RequestError(problem=f"{rows} rows, the server takes {self._batcher.limits.max_rows} at once")
        now = self._clock()
        query = Query(placed, rows, arrived=now, deadline=now + timeout_s)
        with self._lock:
            if self._state not in _ACCEPTING:
                raise UnavailableError(problem=f"model {self.name!r} is {self._state.lower()}")
            if self._backend.gone:
                raise UnavailableError(problem=self._gone(), retry_after_s=10.0)
            wait_s = self._wait_s()
            try:
                if self._admit and wait_s > HEADROOM * timeout_s:
                    problem = (
                        f"{len(self._batcher)} queries wait, which takes {wait_s:.3g} s, its time is {timeout_s:.3g} s"
                    )
                    raise OverloadedError(problem=problem, retry_after_s=max(wait_s - HEADROOM * timeout_s, 0.001))
                self._batcher.offer(query, retry_after_s=max(wait_s, 0.001))
            except OverloadedError:
                self.statistics.counted("rejected")
                raise
            self._changed.notify_all()
        query.future.add_done_callback(partial(self._settled, query))
        return query.future

    def _wait_s(self) -> float:
        """How long a query that comes now will take, by what batches took: those before it, and its own."""
        rows = self._batcher.rows + sum(q.rows for q in self._running.values())
        return self.statistics.takes_s(rows // self._batcher.limits.max_rows + 1) if rows else 0.0

    def _settled(self, query: Query, future: Future[Outputs]) -> None:
        if future.cancelled():
            with self._lock:
                self._batcher.remove(query)
                self._changed.notify_all()
            self.statistics.counted("cancelled")
            return
        error = future.exception()
        seconds = self._clock() - query.arrived
        if error is None:
            self.statistics.counted("success", seconds)
        else:
            self.statistics.counted("expired" if isinstance(error, DeadlineError) else "failed", seconds)

    def _dispatch(self) -> None:
        """Batch after batch, each made as late as there is room for it."""
        while self._backend.acquire():
            batch = self._next()
            if batch is None:
                self._backend.release()
                return
            self._backend.run(Job(batch, self.signature))

    def _next(self) -> list[Query] | None:
        """The next batch, with whom nobody has cancelled; None at the end."""
        with self._lock:
            while self._state != "UNLOADED":
                now = self._clock()
                taken = [q for q in self._batcher.take(now) if q.begin(now)]
                if taken:
                    self._running |= {q.number: q for q in taken}
                    return taken
                due = self._batcher.due_at()
                self._changed.wait(None if due is None else max(0.0, due - now))
        return None

    def finished(self, job: Job, outputs: Sequence[Array], compute_s: float) -> None:
        """See `Keeper`."""
        began = time.perf_counter()
        found = job.split(outputs)
        split_s = time.perf_counter() - began
        queued = [q.began - q.arrived for q in job.queries]
        self.statistics.batch(queued, job.rows, job.pack_s, compute_s, split_s)
        now = time.monotonic()
        self.statistics.paced(now - max(job.started, self._ended))
        self._ended = now
        self._left(job)
        for query, own in zip(job.queries, found, strict=True):
            query.answer(own)

    def failed(self, job: Job, error: WeftError) -> None:
        """See `Keeper`: several queries are run again each by itself, as one of them may be why."""
        if len(job.queries) > 1:
            for query in job.queries:
                query.alone = True
            self._left(job, again=job.queries)
            return
        self._left(job)
        (query,) = job.queries
        if isinstance(error, UserError):  # an index outside of its bounds, which the plan checks
            query.refuse(error)
        else:
            query.refuse(error if isinstance(error, InferenceFailedError) else InferenceFailedError(problem=str(error)))

    def lost(self, job: Job, *, began: bool) -> None:
        """See `Keeper`: what ran is replayed once, alone; what waited behind it is no worse for it."""
        errors = [(q, q.lost() if began else None) for q in job.queries]
        self._left(job, again=[q for q, error in errors if error is None and not q.future.done()])
        for query, error in errors:
            if error is not None:
                query.refuse(error)

    def changed(self) -> None:
        """See `Keeper`."""
        with self._lock:
            left = self._batcher.clear() if self._backend.gone else []
            self._changed.notify_all()
        _refuse_all(left, UnavailableError(problem=self._gone(), retry_after_s=10.0))

    def _gone(self) -> str:
        return f"model {self.name!r} cannot be started: {self._backend.problem}"

    def _left(self, job: Job, again: Sequence[Query] = ()) -> None:
        """The queries of a job run no longer; some wait again. In one step: nobody finds them in neither place."""
        with self._lock:
            for query in job.queries:
                self._running.pop(query.number, None)
            ended = self._state == "UNLOADED"
            if not ended:
                self._batcher.again(again)
            self._changed.notify_all()
        if ended:
            _refuse_all(again, UnavailableError(problem=f"model {self.name!r} was unloaded"))
        elif replayed := sum(q.losses > 0 for q in again):
            self.statistics.replayed(replayed)

    def watch(self) -> None:
        """Called some times a second: answers what is late, waiting or running."""
        now = self._clock()
        with self._lock:
            late = self._batcher.expired(now)
            late += [q for q in self._running.values() if q.deadline <= now]
            if late:
                self._changed.notify_all()
        for query in late:
            query.refuse(DeadlineError(problem=f"no answer within {query.deadline - query.arrived:.3g} s"))
        self._backend.watch(now)

    def drain(self, timeout_s: float) -> bool:
        """Take no more queries, and wait for those that there are; whether all had their answer in time."""
        end = time.monotonic() + timeout_s
        with self._lock:
            if self._state != "UNLOADED":
                self._state = "DRAINING"
            while len(self._batcher) or self._running:
                if (left := end - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(left, 0.1))
        return True

    def close(self) -> None:
        """End; queries that are there still get an error. Idempotent."""
        with self._lock:
            if self._state == "UNLOADED":
                return
            self._state = "UNLOADED"
            left = [*self._batcher.clear(), *self._running.values()]
            self._changed.notify_all()
        _refuse_all(left, UnavailableError(problem=f"model {self.name!r} was unloaded"))
        self._backend.close()
        if self._dispatcher.ident is not None and self._dispatcher is not threading.current_thread():
            self._dispatcher.join(60.0)


def _refuse_all(queries: Sequence[Query], error: Exception) -> None:
    for query in queries:
        query.refuse(error)
