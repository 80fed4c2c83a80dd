"""Long preparations beside each other, timings one after another: worker processes, turns at a device, a barrier.

A worker prepares (compiles, say), and whatever it times meanwhile it times in its `Turn`. When every worker has
prepared, failed or run out of time, those that have are asked for their measurement, one at a time, while the others
do nothing; those that have not are ended first. Every wait has a limit, every worker is a process group of its own,
and none outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, final

PREPARING, TIMING = -10, -20
"""Niceness of a worker's thread while it prepares (its helpers' is 0) and in its turn, where the system allows that."""
HELD_S = 60.0
"""A worker that keeps its turn for longer has hung, and ends itself."""
SAID_S = 20.0
"""Between two lines about its turns in a worker's log."""
GONE_S = 10.0
"""How long an ended process may take to disappear."""

Result = Mapping[str, Any]


@final
class Turn:
    """The exclusive use of a device among the processes that name the same file; may be entered again from inside."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._thread = threading.RLock()
        self._depth = self._before = 0
        self.since = 0.0
        """When it was taken, on the monotonic clock, in seconds; 0: it is not."""
        self.waited_s = self.held_s = 0.0
        self.taken = 0
        """How often."""

    def __str__(self) -> str:
        return f"{self.taken} turns, waited {self.waited_s:.1f} s for them, held {self.held_s:.1f} s"

    def __enter__(self) -> Turn:
        self._thread.acquire()
        if self._depth == 0:
            asked = time.monotonic()
            try:
                # closed in what this process executes: nobody else holds the lock with it
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX)
            except BaseException:
                self._thread.release()
                raise
            self.taken += 1
            self.since = time.monotonic()
            self.waited_s += self.since - asked
            self._before = niceness(TIMING)
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.held_s += time.monotonic() - self.since
            self.since = 0.0
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            niceness(self._before)
        self._thread.release()


def niceness(value: int) -> int:
    """Set that of this thread, and of what it starts from now on, where that is allowed; what it was."""
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, value)
    return before


def work(fd: int, parent: int, turn: Turn, prepare: Callable[[], Callable[[], Result]]) -> None:
    """A worker's life: prepare, say so, wait for the word, measure in its turn, hand the result over.

    `fd` is the worker's end of its line to the process `parent`. What `prepare` or its result raises is handed over in
    its place.
    """
    os.set_inheritable(fd, False)
    line = Connection(fd)
    threading.Thread(target=_watch, args=(turn, parent), daemon=True).start()
    try:
        measure = prepare()
        _say(line, {"ready": True})
        line.recv_bytes()
        with turn:
            result = measure()
        _say(line, {"result": result})
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        _say(line, {"failed": f"{type(error).__name__}: {lines[0][:300] if lines else ''}"})
    sys.stdout.flush()
    sys.stderr.flush()
    line.poll(GONE_S)  # the parent ends it, helpers included


def _say(line: Connection, what: Result) -> None:
    line.send_bytes(json.dumps(what).encode())


def _watch(turn: Turn, parent: int) -> None:
    """End this worker, and what it has started, when its parent is gone or it has hung in its turn."""
    said = time.monotonic()
    while os.getppid() == parent:
        if time.monotonic() - said > SAID_S:
            said = time.monotonic()
            print(turn, flush=True)
        since = turn.since
        if since and time.monotonic() - since > HELD_S:
            print(f"kept its turn for more than {HELD_S:.0f} s", file=sys.stderr, flush=True)
            break
        time.sleep(0.25)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker is to do."""

    name: str
    command: Sequence[str]
    """`--line FD --parent PID` is added to it."""
    log: Path
    environment: Mapping[str, str]


@final
class Worker:
    """A process that prepares, in a group of its own, and the line to it."""

    def __init__(self, task: Task) -> None:
        self.name, self.log = task.name, task.log
        self.began = time.monotonic()
        self.prepared_s = 0.0
        self.line, theirs = Pipe()
        with theirs, task.log.open("wb") as log:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [*task.command, "--line", str(fd), "--parent", str(os.getpid())], env=dict(task.environment),
                pass_fds=(fd,), start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._ended = False

    def hear(self, limit_s: float = 0.0) -> Result:
        """What it says next; a failure if it says nothing for so long, or is gone."""
        try:
            if not self.line.poll(limit_s):
                return {"failed": f"said nothing for {limit_s:.0f} s"}
            said = json.loads(self.line.recv_bytes())
            return said if isinstance(said, dict) else {"failed": "said what nobody asked for"}
        except (EOFError, OSError, ValueError):
            return {"failed": f"died ({self._status()})"}

    def ask(self, limit_s: float) -> Result:
        """Let it measure: {"result": ...} or {"failed": why}."""
        with contextlib.suppress(OSError):  # it is gone, as `hear` will find
            self.line.send_bytes(b"go")
        return self.hear(limit_s)

    def kill(self) -> None:
        """Tell it, and what it has started, to end."""
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> bool:
        """The same, and whether it is gone."""
        if self._ended:
            return True
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GONE_S)
            self._ended = True
            self.line.close()
        return self._ended

    def _status(self) -> str:
        try:
            return f"status {self._process.wait(GONE_S)}"
        except subprocess.TimeoutExpired:
            return "it closed its line"

    def tail(self, lines: int = 12) -> str:
        """The end of what it printed."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 40_000))
            text = log.read().decode(errors="replace")
        last = text.splitlines()
        turns = [x for x in last if " turns, waited " in x][-1:]
        return "\n".join(f"    | {x[:240]}" for x in (*turns, *last[-lines:]))


def run(
    tasks: Sequence[Task],
    *,
    jobs: int,
    prepare_s: float,
    measure_s: float,
    say: Callable[[str], None],
    lost: Callable[[str, str], None] = lambda name, why: None,
) -> Generator[tuple[str, float, Result]]:
    """Prepare all of them, `jobs` at a time in the order given, then measure one by one: (name, seconds, result).

    What has not prepared after `prepare_s` in all, has failed, or has not measured within `measure_s`, is named to
    `say` and ended, and yields nothing; `lost` is told the name and the reason of what failed by itself.
    """
    workers: list[Worker] = []
    try:
        ready = _prepared(tasks, workers, jobs, prepare_s, say, lost)
        for worker in ready:
            said = worker.ask(measure_s)
            if "result" in said:
                yield worker.name, worker.prepared_s, said["result"]
            else:
                say(f"{worker.name}: not measured: {said.get('failed', said)}\n{worker.tail()}")
                lost(worker.name, str(said.get("failed", said)))
            _ended(worker, say)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            _ended(worker, say)


def _prepared(
    tasks: Sequence[Task],
    workers: list[Worker],
    jobs: int,
    limit_s: float,
    say: Callable[[str], None],
    lost: Callable[[str, str], None],
) -> list[Worker]:
    """Those that have prepared when nothing else goes on any more; all that were started are added to `workers`."""
    began = time.monotonic()
    waiting, busy, ready = deque(tasks), dict[Connection, Worker](), list[Worker]()
    while (waiting or busy) and (left := began + limit_s - time.monotonic()) > 0:
        while waiting and len(busy) < jobs:
            workers.append(Worker(waiting.popleft()))
            busy[workers[-1].line] = workers[-1]
        for line in wait(list(busy), timeout=left):
            assert isinstance(line, Connection)
            worker = busy.pop(line)
            worker.prepared_s = time.monotonic() - worker.began
            said = worker.hear()
            if "ready" in said:
                ready.append(worker)
                say(f"{worker.name}: ready after {worker.prepared_s:.1f} s")
                continue
            say(f"{worker.name}: failed after {worker.prepared_s:.1f} s: {said.get('failed', said)}\n{worker.tail()}")
            lost(worker.name, str(said.get("failed", said)))
            _ended(worker, say)
    for worker in busy.values():
        worker.kill()
    for worker in busy.values():
        say(f"{worker.name}: not ready after {time.monotonic() - worker.began:.1f} s, given up\n{worker.tail(3)}")
        _ended(worker, say)
    for task in waiting:
        say(f"{task.name}: no time left, not begun")
    return ready


def _ended(worker: Worker, say: Callable[[str], None]) -> None:
    if not worker.end():
        say(f"{worker.name}: does not end: timings after this line may be disturbed")
