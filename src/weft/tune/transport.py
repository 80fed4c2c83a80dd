"""The parent's end of a worker: start it, talk to it with a time limit, kill its whole group.

`Transport` is what the tuner needs to know about a worker; `ProcessTransport` is the real one, and the tests drive the
tuner through a fake with a scripted clock and faults. What a worker prints is drained by a thread and capped at
64 KiB; one that prints more than 64 MiB is killed as crashed. A worker that dies, hangs or talks nonsense raises
`WorkerFault`; it is never talked to again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Protocol, final

import weft
from weft.tune.messages import BOARD, BOARD_BYTES, GarbageError, Message, body_size, decode, encode

REAP_S = 0.5
"""How long a worker that was killed is waited for; a driver may hold it longer, and then a thread does."""
SUCCEED_S = 2.0
"""How long one that follows it does."""
LOG_BYTES = 64 * 1024
FLOOD_BYTES = 64 * 1024 * 1024


class Fault(Enum):
    """How a worker was lost."""

    CRASH = "crash"
    HANG = "hang"
    OOM = "oom"
    GARBAGE = "garbage"
    FLOOD = "flood"
    RESTART = "restart"
    """It asked to be replaced, after it gave a kernel its verdict."""


class WorkerFault(Exception):  # noqa: N818 - it is the worker's fault, not an error of the caller
    """The worker is lost. `detail` says what is known: signal, last output."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(f"{fault.value}: {detail}")
        self.fault = fault
        self.detail = detail


class Transport(Protocol):
    """One worker process, or something that behaves like one."""

    def start(self) -> None:
        """Start a fresh worker. WorkerFault if it cannot be started."""
        ...

    def send(self, message: Message, timeout_s: float) -> None:
        """Send a request. WorkerFault if the worker is gone, or does not read it in time."""
        ...

    def receive(self, timeout_s: float) -> Message:
        """The next event. WorkerFault if the worker died, sent nonsense or stayed silent for `timeout_s`."""
        ...

    def running(self) -> int:
        """Number of the kernel that the worker was about to run; -1 for none."""
        ...

    def kill(self) -> None:
        """End the worker and its group for sure, from any thread, without waiting; does nothing if there is none."""
        ...


@final
class ProcessTransport:
    """A worker in a process group of its own."""

    def __init__(self, threads: int, *, environ: Mapping[str, str], module: str) -> None:
        """Nothing is started yet. `module` is `weft.tune.worker`, or a test's stand-in."""
        self._module = module
        inherited = {k: v for k, v in environ.items() if not k.startswith("WEFT_")}
        package_root = str(Path(weft.__file__ or ".").resolve().parent.parent)
        path = os.pathsep.join([package_root, *filter(None, [environ.get("PYTHONPATH", "")])])
        self._environ = {**inherited, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "PYTHONFAULTHANDLER": "0"}
        self._process: subprocess.Popen[bytes] | None = None
        self._send = self._receive = -1
        self._board: mmap.mmap | None = None
        self._log = bytearray()
        self._log_size = 0
        self._drain: threading.Thread | None = None
        self._pipes = threading.Lock()
        """Held by who uses the pipes, so that nobody closes them meanwhile: their numbers may be others' at once."""
        self._dying: threading.Thread | None = None
        self._disowned: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """See `Transport`."""
        self.kill()
        if self._dying is not None:
            self._dying.join(SUCCEED_S)  # it may hold memory that this one needs
        request_read, self._send = os.pipe()
        self._receive, answer_write = os.pipe()
        with tempfile.TemporaryFile(prefix="weft-board-") as shared:
            shared.truncate(BOARD_BYTES)
            self._board = mmap.mmap(shared.fileno(), BOARD_BYTES)
            BOARD.pack_into(self._board, 0, -1)
            fds = (request_read, answer_write, shared.fileno())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", self._module, *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=fds,
                    process_group=0,
                    env=self._environ,
                )
            except OSError as error:
                self._close()
                raise WorkerFault(Fault.CRASH, f"cannot start: {error}") from None
            finally:
                os.close(request_read)
                os.close(answer_write)
        os.set_blocking(self._send, False)
        self._log, self._log_size = bytearray(), 0
        self._drain = threading.Thread(target=self._read_log, args=(self._process,), daemon=True)
        self._drain.start()

    def _read_log(self, process: subprocess.Popen[bytes]) -> None:
        stream = process.stdout
        if stream is None:
            return
        with stream, contextlib.suppress(OSError, ValueError):
            while chunk := os.read(stream.fileno(), 1 << 16):
                self._log_size += len(chunk)
                # the end of a log says why a process died, so the cap drops the middle
                self._log += chunk
                if len(self._log) > LOG_BYTES:
                    del self._log[LOG_BYTES // 4 : len(self._log) - 3 * LOG_BYTES // 4]

    @property
    def log(self) -> str:
        """What the worker printed, at most 64 KiB of it."""
        return bytes(self._log).decode(errors="replace")

    def send(self, message: Message, timeout_s: float) -> None:
        """See `Transport`."""
        with self._pipes:
            self._write(message, timeout_s)

    def _write(self, message: Message, timeout_s: float) -> None:
        if self._process is None:
            raise self._lost()
        data = memoryview(encode(message))
        deadline = time.monotonic() + timeout_s
        while data:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerFault(Fault.HANG, f"did not read its request in {timeout_s:.0f} s")
            _, ready, _ = select.select([], [self._send], [], min(left, 0.5))
            if ready:
                try:
                    data = data[os.write(self._send, data) :]
                except BrokenPipeError:
                    raise self._lost() from None

    def receive(self, timeout_s: float) -> Message:
        """See `Transport`."""
        deadline = time.monotonic() + timeout_s
        with self._pipes:
            if self._process is None:
                raise self._lost()
            try:
                return decode(self._read(body_size(self._read(4, deadline)), deadline))
            except GarbageError as error:
                raise WorkerFault(Fault.GARBAGE, str(error)) from None

    def _read(self, count: int, deadline: float) -> bytes:
        out = bytearray()
        while len(out) < count:
            if self._log_size > FLOOD_BYTES:
                raise WorkerFault(Fault.FLOOD, f"printed {self._log_size} bytes")
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerFault(Fault.HANG, "no answer in time")
            ready, _, _ = select.select([self._receive], [], [], min(left, 0.5))
            if ready:
                chunk = os.read(self._receive, min(count - len(out), 1 << 20))
                if not chunk:
                    raise self._lost()
                out += chunk
        return bytes(out)

    def _lost(self) -> WorkerFault:
        """Why the pipe is closed."""
        process = self._process
        if process is None:
            return WorkerFault(Fault.CRASH, "no worker")
        status = _exit_status(process.pid, 2.0)
        if self._drain is not None:
            self._drain.join(timeout=1)
        tail = " ".join(self.log[-1500:].split())
        if status == -signal.SIGKILL:
            return WorkerFault(Fault.OOM, "killed by the system, most likely out of memory")
        if "MemoryError" in tail or "can't allocate memory" in tail or "bad_alloc" in tail:
            return WorkerFault(Fault.OOM, tail)
        if status is not None and status < 0:
            return WorkerFault(Fault.CRASH, f"{signal.Signals(-status).name} {tail}".strip())
        return WorkerFault(Fault.CRASH, f"exit status {status} {tail}".strip())

    def running(self) -> int:
        """See `Transport`."""
        return int(BOARD.unpack_from(self._board, 0)[0]) if self._board is not None else -1

    def kill(self) -> None:
        """See `Transport`."""
        process, self._process = self._process, None
        if process is not None:
            # the leader is not reaped yet, so its group number cannot have been given to others
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            end = time.monotonic() + REAP_S
            try:
                process.wait(REAP_S)
            except subprocess.TimeoutExpired:
                self._dying = threading.Thread(target=process.wait, daemon=True, name="weft-reaper")
                self._dying.start()
            if self._drain is not None:
                self._drain.join(max(0.0, end - time.monotonic()))
        if self._pipes.acquire(timeout=REAP_S):  # who reads meanwhile has come to the end of the pipe
            try:
                self._close()
            finally:
                self._pipes.release()

    @property
    def about(self) -> str:
        """All that what is started depends on."""
        return repr([self._module, sorted(self._environ.items()), _folder()])

    def disown(self) -> None:
        """In a process that was forked: the worker is the other's; only the copies of its pipes are closed."""
        self._process, self._drain, self._pipes, self._disowned = None, None, threading.Lock(), self._process
        self._close()

    def _close(self) -> None:
        for fd in (self._send, self._receive):
            if fd >= 0:
                os.close(fd)
        self._send = self._receive = -1
        if self._board is not None:
            self._board.close()
            self._board = None


def _folder() -> str:
    """Where this process is: programs that it starts look for modules there."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _exit_status(pid: int, timeout_s: float) -> int | None:
    """Exit status, negative for a signal, without reaping: until then the group number cannot be given to others."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is not None:
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        time.sleep(0.01)
    return None
