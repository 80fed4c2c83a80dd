"""The parent's side of the process that measures pairs: it is started when it is needed, and may die or hang."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast, final

from weft.errors import KernelDeclinedError, NoWorkerError
from weft.kernels.codec import Json

COMMAND = (sys.executable, "-m", "weft.colocate.pair_worker")
START_S = 120.0
"""For reading the files, filling the buffers and the kernels by themselves."""
PATIENCE_S = 60.0
"""For an answer to one trial."""


class LostError(Exception):
    """The process died, or said nothing for too long; another one can be started."""


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    lines: queue.Queue[bytes | None]
    said: BinaryIO
    """What it wrote to its standard error."""
    reader: threading.Thread


@final
class PairProcess:
    """Asks, and gets what was answered."""

    def __init__(
        self,
        first: Mapping[str, Json],
        *,
        command: Sequence[str] = COMMAND,
        start_s: float = START_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`first`: what each new process is told."""
        self._first, self._command, self._start_s, self._patience_s = dict(first), list(command), start_s, patience_s
        self._running: _Running | None = None
        self.started = 0
        """Processes so far."""

    def ask(self, request: Mapping[str, Json]) -> Mapping[str, Any]:
        """What became of a request.

        Raises:
            LostError: the process died or hung over it.
            KernelDeclinedError: the two kernels by themselves are no proof [W205].
            NoWorkerError: no process can be started, or the GPU does not work [W301].
        """
        if self._running is None:
            self._start()
        found = self._exchange(request, self._patience_s)
        if found.get("event") == "lost":
            self.close()
            raise LostError(str(found.get("reason", "")))
        return found

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._running is None:
            return
        running, self._running = self._running, None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()
        running.reader.join()
        for pipe in (running.process.stdin, running.process.stdout, running.said):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _start(self) -> None:
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        said = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - closed with the process
        try:
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            said.close()
            raise NoWorkerError(problem=f"the process that measures cannot be started: {error}") from None
        lines: queue.Queue[bytes | None] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        self._running = _Running(process, lines, said, threading.Thread(target=read, daemon=True))
        self._running.reader.start()
        self.started += 1
        try:
            found = self._exchange(self._first, self._start_s)
        except LostError as error:
            raise NoWorkerError(problem=f"the process that measures did not begin: {error}") from None
        if found.get("event") == "ready":
            return
        self.close()
        reason = str(found.get("reason", "an answer that is none"))
        if found.get("event") == "declined":
            raise KernelDeclinedError(reason=reason)
        raise NoWorkerError(problem=reason)

    def _exchange(self, request: Mapping[str, Json], limit_s: float) -> Mapping[str, Any]:
        running = self._running
        assert running is not None
        assert running.process.stdin is not None
        try:
            running.process.stdin.write(json.dumps(request).encode() + b"\n")
            running.process.stdin.flush()
        except OSError:
            pass  # it has ended: what it left is read below
        try:
            line = running.lines.get(timeout=limit_s)
        except queue.Empty:
            self.close()
            raise LostError(f"no word for {limit_s:.0f} s") from None
        if line is None:
            status = running.process.wait()
            running.said.seek(0)
            told = [x for x in running.said.read()[-4000:].decode("utf-8", "replace").splitlines() if x.strip()]
            self.close()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise LostError(f"its process ended with {how}" + (f": {told[-1].strip()[:300]}" if told else ""))
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self.close()
            raise LostError("an answer that is no message")
        return found
