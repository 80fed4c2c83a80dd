"""A model in a process of its own, which is started again when it dies: what `served.py` runs batches with by default.

One thread keeps the worker: it starts it, takes its answers, and starts the next one. What was under way when a worker
died is given back, the newest first, so that whoever puts it back into a queue keeps the order.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, final

import weft
from weft.colocate.bundle import is_bundle
from weft.errors import ArtifactError, WeftError
from weft.serve.backend import Job, JobState, Keeper
from weft.serve.channel import DONE, FAILED, RUN, Channel, Kind, Message
from weft.serve.errors import InferenceFailedError, RequestError, UnavailableError
from weft.serve.ring import Ring
from weft.serve.signature import Signature

SLOTS = 2
"""Batches under way: one runs, the next is packed meanwhile."""
START_S = 120.0
"""How long a worker may take to load."""
START_BESIDE_S = 900.0
"""And one that makes a job, and measures plan variants with fused kernels, beside it."""
TRIES = 3
"""Starts that fail one after the other before queries are refused; it is tried on."""
MOST_WAIT_S = 30.0
GRACE_S = 30.0
"""How long a worker with a job has to end it: results are written, and its progress is."""
SPARE_S = 1.0
"""How long a process that took over works alone before the next one to stand by is loaded: that takes a core."""


class Process(Protocol):
    """As far as a worker is concerned."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...

    def wait(self, seconds: float | None = None) -> None:
        """Until it has ended, or so long."""
        ...


Launch = Callable[[socket.socket], Process]
"""Start a process at the other end of a socket."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker is told, beside its files."""

    threads: int = 0
    cache: Path | None = None
    trust: tuple[str, ...] = ()


@final
class Worker:
    """One process that has loaded its plans."""

    def __init__(
        self, process: Process, channel: Channel, signature: Signature, digest: str, ring: Ring, grace_s: float
    ) -> None:
        """`grace_s`: how long it has to keep what it did beside the model, when it is told to end."""
        self.process, self.channel, self.signature, self.digest, self.ring = process, channel, signature, digest, ring
        self._grace_s = grace_s
        self.jobs: OrderedDict[int, Job] = OrderedDict()
        self.at_work_since = 0.0
        """When the oldest of the jobs became that."""

    def end(self) -> None:
        """Kill it, if it lives."""
        self.channel.hang_up()
        if self._grace_s:
            self.process.wait(self._grace_s)
        self.process.kill()
        self.process.wait()


@final
class ProcessBackend:
    """Thread-safe. `standby`: a second process has loaded the plans, too, and takes over at once."""

    def __init__(
        self, files: Sequence[Path], settings: Settings = Settings(), *, timeout_s: float = 60.0,
        standby: bool = False, launch: Launch | None = None,
    ) -> None:  # fmt: skip
        """The files are opened now: who replaces one later is served after a reload, not after a restart.

        A co-location bundle comes alone, and its job is beside the first worker alone: those behind one that died, and
        one that stands by, have the model alone, until it is loaded again.

        Raises:
            ArtifactError: a file cannot be opened, or is a bundle among others [W401].
        """
        self.restarts = 0
        self._settings, self._timeout_s, self._standby = settings, timeout_s, standby
        self._launch = launch or started
        self._names = [p.name for p in files]
        self.exclusive = any(is_bundle(p) for p in files)
        """See `Backend`: a bundle's job is in one process."""
        if self.exclusive and len(files) > 1:
            problem = "a co-location bundle holds the only plan of its model"
            raise ArtifactError(where=self._names[0], problem=problem, remedy="give the bundle alone")
        self._fds = opened(files)
        self._job: JobState | None = None
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._worker: Worker | None = None
        self._spare: Worker | None = None
        self._signature: Signature | None = None
        self._digest = ""
        self._taken = 0
        """Rooms that were acquired and not yet used."""
        self._closed = False
        self._problem = "it is being loaded"
        self._failures = 0
        """Starts, one after the other."""
        self._keeper: Keeper | None = None
        self._thread: threading.Thread | None = None
        self._sparing: threading.Thread | None = None

    @property
    def signature(self) -> Signature:
        """Of the model; there is one once it has started."""
        if self._signature is None:
            raise UnavailableError(problem="the model is not loaded")
        return self._signature

    @property
    def problem(self) -> str:
        """Why it cannot run anything now."""
        with self._lock:
            return self._problem

    @property
    def gone(self) -> bool:
        """Whether several starts have failed one after the other: nobody should wait."""
        with self._lock:
            return self._failures >= TRIES

    @property
    def stands_by(self) -> bool:
        """See `Backend`."""
        with self._lock:
            return self._spare is not None

    @property
    def job(self) -> JobState | None:
        """See `Backend`."""
        with self._lock:
            return self._job

    @property
    def pid(self) -> int:
        """Of the process that runs batches; 0: there is none."""
        with self._lock:
            return self._worker.process.pid if self._worker is not None else 0

    def start(self, keeper: Keeper) -> None:
        """Start a worker, and wait until it is ready.

        Raises:
            ArtifactError: it cannot load the plans [W401].
            UnavailableError: it did not start in time [W304].
        """
        self._keeper = keeper
        try:
            worker = self._new(alone=False)
        except BaseException:
            self.close()
            raise
        self._signature, self._digest = worker.signature, worker.digest
        self._set(worker)
        self._thread = threading.Thread(target=self._keep, args=(worker,), name="weft-serve-keep", daemon=True)
        self._thread.start()

    def _new(self, *, alone: bool = True) -> Worker:
        """A process that is ready; `alone`: without the job of a bundle."""
        here, there = socket.socketpair()
        with there:
            process = self._launch(there)
        channel = Channel(here)
        try:
            return self._greeted(process, channel, alone=alone)
        except BaseException:
            channel.hang_up()
            process.kill()
            process.wait()
            channel.close()
            raise

    def _greeted(self, process: Process, channel: Channel, *, alone: bool) -> Worker:
        beside = self.exclusive and not alone
        patience_s = START_BESIDE_S if beside else START_S
        channel.patience(patience_s)
        try:
            told = {
                "names": self._names, "threads": self._settings.threads, "cache": str(self._settings.cache or ""),
                "trust": list(self._settings.trust), "bundle": self.exclusive, "alone": alone,
            }  # fmt: skip
            channel.send_json(Kind.HELLO, told, self._fds)
            answer = channel.receive()
            if answer is not None and answer.kind is Kind.REFUSED:
                raise _refusal(answer.body.decode(errors="replace"))
            if answer is None or answer.kind is not Kind.SIGNATURE:
                raise UnavailableError(problem="the worker died while it loaded the plans")
            data = answer.json()
            signature, digest = Signature.from_json(data["signature"]), str(data["digest"])  # type: ignore[arg-type]
            if self._digest and digest != self._digest:
                problem = "the file was written over in place since it was loaded: load the model again"
                raise UnavailableError(problem=problem)
            ring, fd = Ring.made(signature, SLOTS)
            try:
                channel.send_json(Kind.MEMORY, {"slots": SLOTS}, [fd])
            finally:
                os.close(fd)
            ready = channel.receive()
            if ready is not None and ready.kind is Kind.REFUSED:
                raise _refusal(ready.body.decode(errors="replace"))
            if ready is None or ready.kind is not Kind.READY:
                raise UnavailableError(problem="the worker died before it was ready")
        except TimeoutError:
            raise UnavailableError(problem=f"the worker was not ready within {patience_s:g} s") from None
        except OSError as error:
            raise UnavailableError(problem=f"the worker died while it was started ({error.strerror})") from None
        channel.patience(None)
        return Worker(process, channel, signature, digest, ring, GRACE_S if beside else 0.0)

    def _set(self, worker: Worker) -> None:
        with self._lock:
            if self._closed:
                doomed = worker
            else:
                self._worker, self._problem, self._taken, doomed = worker, "", 0, None
                self._failures = 0
                self._room.notify_all()
        if doomed is not None:
            doomed.end()
            return
        assert self._keeper is not None  # `start` set it
        self._keeper.changed()
        if self._standby:
            self._sparing = threading.Thread(target=self._prepare, name="weft-serve-standby", daemon=True)
            self._sparing.start()

    def _prepare(self) -> None:
        """Have a second process ready."""
        with self._lock:
            self._room.wait_for(lambda: self._closed or self._worker is None, SPARE_S)
            closed = self._closed
        if closed:
            return
        try:
            spare = self._new()
        except WeftError:
            return  # the next one is started when it is needed
        with self._lock:
            closed = self._closed
            if not closed:
                self._spare = spare
        if closed:
            spare.end()
            spare.channel.close()

    def _keep(self, worker: Worker) -> None:
        """Take answers until the worker dies; then the same with the next one."""
        while True:
            while self._taken_in(worker):
                pass
            worker.end()
            lost = self._void(worker)
            worker.channel.close()
            assert self._keeper is not None  # `start` set it
            for i in reversed(range(len(lost))):
                self._keeper.lost(lost[i], began=i == 0)
            if self._closed:
                return
            self._keeper.changed()
            found = self._next()
            if found is None:
                return
            worker = found
            self.restarts += 1
            self._set(worker)

    def _next(self) -> Worker | None:
        """The process after one that died; None: closed meanwhile."""
        while True:
            if self._sparing is not None:
                self._sparing.join(START_S)  # it began before a new one would
            with self._lock:
                spare, self._spare = self._spare, None
            if spare is not None:
                return spare
            if self._failures:
                self._pause(min(MOST_WAIT_S, 0.1 * 4.0 ** (self._failures - 1)))
            if self._closed:
                return None
            try:
                return self._new()
            except WeftError as error:
                with self._lock:
                    self._failures += 1
                    self._problem = str(error.details.get("problem", error))
                assert self._keeper is not None  # `start` set it
                self._keeper.changed()

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._lock:
            while not self._closed and (left := end - time.monotonic()) > 0:
                self._room.wait(left)

    def _taken_in(self, worker: Worker) -> bool:
        """One answer of the worker; False: it is dead."""
        message = worker.channel.receive()
        if message is not None and message.kind is Kind.JOB:
            return self._told_of_job(message)
        if message is None or message.kind not in (Kind.DONE, Kind.FAILED):
            return False
        number = int.from_bytes(message.body[:8], "little")
        job = worker.jobs.get(number)
        if job is None or next(iter(worker.jobs)) != number:
            return False  # it answers what nobody asked
        assert self._keeper is not None  # `start` set it
        if message.kind is Kind.DONE:
            if not worker.ring.marked(number):
                return False
            _, seconds = DONE.unpack(message.body)
            self._keeper.finished(job, worker.ring.outputs(number, job.plan), seconds)
        else:
            _, ours = FAILED.unpack(message.body[: FAILED.size])
            text = message.body[FAILED.size :].decode(errors="replace")
            self._keeper.failed(job, RequestError(problem=text) if ours else InferenceFailedError(problem=text))
        with self._lock:
            del worker.jobs[number]
            worker.ring.release(number)
            worker.at_work_since = time.monotonic()
            self._room.notify_all()
        return True

    def _told_of_job(self, message: Message) -> bool:
        """How the job stands; False: the worker is sick."""
        try:
            found = JobState.from_json(message.json())
        except (ValueError, KeyError, TypeError, AttributeError):
            return False
        with self._lock:
            self._job = found
        return True

    def _void(self, worker: Worker) -> list[Job]:
        """What was under way in a worker that is dead, the oldest first."""
        with self._lock:
            if self._worker is worker:
                self._worker = None
                self._problem = "its worker died and is being started again"
            found = list(worker.jobs.values())
            worker.jobs.clear()
            if self._job is not None:
                self._job = replace(self._job, runs=False)
            self._room.notify_all()
        return found

    def acquire(self) -> bool:
        """See `Backend`."""
        with self._lock:
            while not self._closed:
                worker = self._worker
                if worker is not None and worker.ring.used + self._taken < worker.ring.slots:
                    self._taken += 1
                    return True
                self._room.wait()
        return False

    def release(self) -> None:
        """See `Backend`."""
        with self._lock:
            self._taken = max(0, self._taken - 1)
            self._room.notify_all()

    def run(self, job: Job) -> None:
        """See `Backend`. Called by one thread at a time."""
        with self._lock:
            worker = self._worker
            number = 0
            if worker is not None and worker.ring.used < worker.ring.slots:
                self._taken = max(0, self._taken - 1)
                number = worker.ring.claim()
        assert self._keeper is not None  # started
        if worker is None or not number:  # it died since there was room
            self._keeper.lost(job, began=False)
            return
        job.pack(worker.ring.inputs(number, job.plan))
        with self._lock:
            alive = self._worker is worker
            if alive:
                if not worker.jobs:
                    worker.at_work_since = time.monotonic()
                worker.jobs[number] = job
        if not alive:
            self._keeper.lost(job, began=False)
            return
        try:
            worker.channel.send(Kind.RUN, RUN.pack(number, job.plan, job.waited_s()))
        except OSError:
            worker.channel.hang_up()  # whoever keeps it gives the job back

    def watch(self, now: float) -> None:
        """Kill a worker that is at one batch for too long."""
        with self._lock:
            worker = self._worker
            hangs = worker is not None and bool(worker.jobs) and now - worker.at_work_since > self._timeout_s
        if worker is not None and hangs:
            worker.process.kill()

    def close(self) -> None:
        """See `Backend`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            worker, spare, self._spare = self._worker, self._spare, None
            self._problem = "it is closed"
            self._room.notify_all()
        for one in (worker, spare):
            if one is not None:
                one.end()
        for thread in (self._thread, self._sparing):
            if thread is not None and thread is not threading.current_thread():
                thread.join(START_S)
        if spare is not None:
            spare.channel.close()
        for fd in self._fds:
            os.close(fd)


def opened(files: Sequence[Path]) -> list[int]:
    """File descriptors of the files.

    Raises:
        ArtifactError: one cannot be opened [W401].
    """
    found: list[int] = []
    for path in files:
        if path.is_dir() and not is_bundle(path):
            for fd in found:
                os.close(fd)
            problem = "it is a folder, and no co-location bundle"
            raise ArtifactError(where=path.name, problem=problem, remedy="check the path; --repository takes folders")
        try:
            found.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            for fd in found:
                os.close(fd)
            problem = f"it cannot be opened: {error.strerror}"
            raise ArtifactError(where=path.name, problem=problem, remedy="check the path") from None
    return found


def _refusal(text: str) -> WeftError:
    lines = text.splitlines() or ["no reason given"]
    problem = lines[0].removesuffix(" [W401]")
    return ArtifactError(problem=problem, remedy=lines[1].strip() if len(lines) > 1 else "look at the server's log")


@final
class _Started:
    """A process of this program."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def wait(self, seconds: float | None = None) -> None:
        """Until it has ended, or so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def started(end: socket.socket, module: str = "weft.serve.worker", program: Sequence[str] = ()) -> Process:
    """Start a worker at this end of a socket; what it prints goes to standard error, as our output is read."""
    root = str(Path(weft.__file__ or ".").resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    command = [*(program or (sys.executable, "-m", module)), str(end.fileno())]
    environ = {k: v for k, v in os.environ.items() if k != "WEFT_SERVE_TOKEN"}
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin between batches take the core of the front end
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[end.fileno()], process_group=0,
        env={**environ, "PYTHONPATH": path},
    )  # fmt: skip
    return _Started(process)
