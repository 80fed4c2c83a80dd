"""Worker processes for suites that must survive what they test: a crash or a hang costs one task, not the run.

`run(function, tasks)` yields (task, outcome) as they come; an outcome is what `function(task)` returned in some worker,
or a `Lost` that says how the worker ended. A worker serves many tasks and is replaced after `LIFETIME` of them, when it
dies, and when a task is out of time.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any

LIFETIME = 500
"""Tasks per process: what tests leak stays bounded."""
START_S = 300.0
"""Added to a worker's first time-out: imports."""
_spawn = get_context("spawn")


@dataclass(frozen=True, slots=True)
class Lost:
    """A task without a result, and why."""

    reason: str


def _serve(pipe: connection.Connection, function: Callable[[Any], Any]) -> None:
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(task), ""))
        except Exception:
            pipe.send((None, traceback.format_exc(limit=-3)))


class _Worker:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_serve, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()
        self.served = 0
        self.spent = False
        """True when it should take no more tasks."""
        self.task: Any = None
        self.deadline = 0.0

    def give(self, task: Any, timeout_s: float) -> None:
        self.task = task
        self.deadline = time.monotonic() + timeout_s + (0.0 if self.served else START_S)
        self.pipe.send(task)

    def take(self) -> Any:
        """The result of the current task, or a `Lost`."""
        self.served += 1
        self.spent = self.served >= LIFETIME
        try:
            result, error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            self.spent = True
            return Lost(_ending(self.process.exitcode))
        return Lost(error) if error else result

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with status {code}"


def run(
    function: Callable[[Any], Any], tasks: Sequence[Any], *, jobs: int, timeout_s: float
) -> Iterator[tuple[Any, Any]]:
    """Outcomes in the order in which they come. `function` must be importable by name, tasks and results picklable."""
    waiting = deque(tasks)
    workers: list[_Worker] = []

    def put_to_work(worker: _Worker | None) -> None:
        if waiting:
            worker = worker or _Worker(function)
            workers.append(worker)
            worker.give(waiting.popleft(), timeout_s)
        elif worker:
            worker.end()

    try:
        for _ in range(jobs):
            put_to_work(None)
        while workers:
            soonest = min(w.deadline for w in workers)
            ready = connection.wait([w.pipe for w in workers], max(0.0, soonest - time.monotonic()))
            for worker in [w for w in workers if w.pipe in ready or time.monotonic() > w.deadline]:
                task, late = worker.task, worker.pipe not in ready
                found = Lost(f"out of time: over {timeout_s:g} s") if late else worker.take()
                workers.remove(worker)
                spent = late or worker.spent
                if spent:
                    worker.end()
                put_to_work(None if spent else worker)
                yield task, found
    finally:
        for worker in workers:
            worker.end()
