"""What keeps a front end alive: it has the port of HTTP, starts the process that serves on it, and starts it again.

Connections that come while there is none wait in the port's queue. Workers end with their front end, and the next one
loads its own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import final

import weft
from weft.serve.access import FrontOptions
from weft.serve.errors import UnavailableError
from weft.serve.settings import ServeOptions, Source

STEADY_S = 10.0
"""A front end that was ready for as long is started again at once."""
MOST_WAIT_S = 30.0
EXTRA_S = 15.0
"""How long a front end may take to end, beside what it has to drain."""
Say = Callable[[str], None]


@final
class Supervisor:
    """Runs until it is told to stop."""

    def __init__(
        self, models: Sequence[Source], directory: Path | None, options: ServeOptions, front: FrontOptions,
        listening: socket.socket, say: Say,
    ) -> None:  # fmt: skip
        self._models, self._directory, self._options = list(models), directory, options
        self._front, self._listening, self._say = front, listening, say
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self.restarts = 0

    def run(self) -> int:
        """Serve until a signal says to stop; the command's exit code."""
        before = {n: signal.signal(n, self._stop) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def _run(self) -> int:
        failures = 0
        while True:
            began = time.monotonic()
            ended = self._once(first=self.restarts == 0 and failures == 0)
            if ended is not None:
                return ended
            if self._stopping.is_set():
                return 0
            failures = 0 if time.monotonic() - began > STEADY_S else failures + 1
            wait_s = min(MOST_WAIT_S, 0.5 * 2.0 ** (failures - 1)) if failures > 1 else 0.0
            self._say(f"the front end died and is started again{f' in {wait_s:g} s' if wait_s else ''}")
            if self._stopping.wait(wait_s):
                return 0
            self.restarts += 1

    def _once(self, *, first: bool) -> int | None:
        """A front end from its start to its end; an exit code where there is nothing to start again."""
        from weft.serve.front import settings_to_json

        root = str(Path(weft.__file__ or ".").resolve().parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        fd = self._listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "weft.serve.front"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=[fd], process_group=0, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._process = process
        assert process.stdin is not None  # a pipe
        assert process.stdout is not None  # a pipe
        code: int | None = None
        with process.stdin, process.stdout:
            try:
                text = settings_to_json(self._models, self._directory, self._options, self._front, fd)
                process.stdin.write(text + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it died at once
            if self._stopping.is_set():  # told before there was a process to tell
                process.terminate()
            for line in process.stdout:
                code = self._heard(line, code, first=first)
            self._ended(process)
        if code is not None:
            return code
        return 0 if process.returncode == 0 and self._stopping.is_set() else None

    def _heard(self, line: str, code: int | None, *, first: bool) -> int | None:
        try:
            told = json.loads(line)
        except ValueError:
            return code  # what a library prints
        if "listening" in told:
            self._front = replace(self._front, grpc_port=told["grpc"])  # the same one again
            scheme = "https" if self._front.cert is not None else "http"
            host = f"[{self._front.host}]" if ":" in self._front.host else self._front.host
            grpc = f", gRPC {host}:{told['grpc']}" if told["grpc"] >= 0 else ""
            self._say(f"listening: {scheme}://{host}:{told['listening']}{grpc}")
        elif "ready" in told:
            self._say("ready")
        elif "failed" in told:
            self._say(str(told["failed"]))
            return int(told["exit"]) if first else code
        return code

    def _ended(self, process: subprocess.Popen[str]) -> None:
        try:
            process.wait(self._options.drain_s + EXTRA_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def need(modules: Sequence[str] = ("fastapi", "uvicorn", "grpc", "google.protobuf")) -> None:
    """UnavailableError where a package of the extra is not installed [W304]."""
    import importlib

    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            raise UnavailableError(problem=f"{name} is not installed: pip install 'weft[serve]'") from None
