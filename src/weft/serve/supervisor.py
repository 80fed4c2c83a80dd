"""What keeps a front end alive: it has the port of HTTP, starts the process that serves on it, and starts it again.

Connections that come while there is none wait in the port's queue. Workers end with their front end, and the next one
loads its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import final

import weft
from weft.serve.access import FrontOptions, FrontSettings
from weft.serve.errors import UnavailableError
from weft.serve.settings import ServeOptions, Source

STEADY_S = 10.0
"""A front end that was ready for as long is started again at once."""
MOST_WAIT_S = 30.0
EXTRA_S = 45.0
"""How long a front end may take to end, beside what it has to drain: jobs beside models end, too."""
SPARE_S = 1.0
"""How long a front end that is ready works alone before one that stands by is loaded: that takes a core."""
Say = Callable[[str], None]


@final
class _FrontEnd:
    """One process, and what it says."""

    def __init__(self, settings: FrontSettings, heard: queue.SimpleQueue[Heard], *, first: bool) -> None:
        """`heard` gets each line, then None when there are no more."""
        self.first = first
        self.began = time.monotonic()
        """When it began to serve, or to be started for that."""
        self.exit_code: int | None = None
        """What it said that the command should end with."""
        self._heard = heard
        root = str(Path(weft.__file__ or ".").resolve().parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft.serve.front"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=[settings.fd], process_group=0, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._write(settings.to_json())
        self._reader = threading.Thread(target=self._read, name="weft-serve-heard", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None  # a pipe
        with self._process.stdout:
            for line in self._process.stdout:
                try:
                    told = json.loads(line)
                except ValueError:
                    continue  # what a library prints
                if isinstance(told, dict):
                    self._heard.put((self, told))
        self._heard.put((self, None))

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None  # a pipe
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # it is dead, which its other end tells

    def serve(self) -> None:
        """One that stands by opens its ports now."""
        self.began = time.monotonic()
        self._write("serve")

    def terminate(self) -> None:
        """It answers what it has, and ends. Called in handlers of signals, too."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def wait(self, timeout_s: float) -> None:
        """Until it has ended; killed where that takes too long."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None  # a pipe
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._reader.join()


Heard = tuple["_FrontEnd | None", dict[str, object] | None]
"""Who said what; no front end: a signal came; nothing said: it has ended."""


@final
class Supervisor:
    """Runs until it is told to stop.

    With `ServeOptions.standby` there is a second front end, which has loaded the models (as they are since the last
    one was loaded or unloaded) and opens its ports when the first one dies.
    """

    def __init__(
        self, models: Sequence[Source], directory: Path | None, options: ServeOptions, front: FrontOptions,
        listening: socket.socket, say: Say,
    ) -> None:  # fmt: skip
        self._models, self._directory, self._options = tuple(models), directory, options
        self._front, self._listening, self._say = front, listening, say
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._active: _FrontEnd | None = None
        self._standby: _FrontEnd | None = None
        self._standby_at = math.inf
        """When one is to be started."""
        self._without: tuple[str, ...] = ()
        self._stopping = threading.Event()
        self._stop_by = math.inf
        self._failures = 0
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
        for one in (self._active, self._standby):
            if one is not None:
                one.terminate()
        self._heard.put((None, None))

    def _run(self) -> int:
        self._active = self._started(first=True)
        try:
            while True:
                code = self._once()
                if code is not None:
                    return code
        finally:
            for one in (self._active, self._standby):
                if one is not None:
                    one.kill()
                    one.wait(EXTRA_S)

    def _started(self, *, first: bool = False, standby: bool = False) -> _FrontEnd:
        settings = FrontSettings(
            self._models, self._directory, self._options, self._front, self._listening.fileno(), standby, self._without
        )
        found = _FrontEnd(settings, self._heard, first=first)
        if self._stopping.is_set():  # told before there was a process to tell
            found.terminate()
        return found

    def _once(self) -> int | None:
        """What happens next; an exit code: the end."""
        now = time.monotonic()
        if self._stopping.is_set():
            self._stop_by = min(self._stop_by, now + self._options.drain_s + EXTRA_S)
            if now >= self._stop_by:
                return 0  # who still runs is killed
        elif now >= self._standby_at:
            self._standby_at = math.inf
            self._standby = self._started(standby=True)
        at = self._stop_by if self._stopping.is_set() else self._standby_at
        try:
            one, told = self._heard.get(timeout=None if at == math.inf else max(0.0, at - now))
        except queue.Empty:
            return None  # it is time
        if one is None:
            return None  # a signal
        if told is None:
            return self._ended(one)
        if one is self._active:
            self._told(one, told)
        elif one is self._standby:
            self._told_by_standby(told)
        return None  # what one said that was replaced meanwhile is nobody's business

    def _told(self, one: _FrontEnd, told: Mapping[str, object]) -> None:
        if "listening" in told:
            self._front = replace(self._front, grpc_port=int(str(told["grpc"])))  # the same one again
            scheme = "https" if self._front.cert is not None else "http"
            host = f"[{self._front.host}]" if ":" in self._front.host else self._front.host
            grpc = f", gRPC {host}:{told['grpc']}" if self._front.grpc_port >= 0 else ""
            self._say(f"listening: {scheme}://{host}:{told['listening']}{grpc}")
        elif "ready" in told:
            self._say("ready")
            if self._options.standby and self._standby is None:
                self._standby_at = time.monotonic() + SPARE_S
        elif "failed" in told:
            self._say(str(told["failed"]))
            one.exit_code = int(str(told["exit"]))
        elif "changed" in told:
            unloaded = told["unloaded"]
            assert isinstance(unloaded, list)  # as `front.main` says it
            self._without = tuple(unloaded)
            self._replace_standby()

    def _told_by_standby(self, told: Mapping[str, object]) -> None:
        if "loaded" in told:
            self._say("a front end stands by")
        elif "failed" in told:
            self._say(f"no front end stands by: {told['failed']}")

    def _replace_standby(self) -> None:
        """It has models that are not served any more."""
        if self._standby is not None:
            self._standby.kill()
            self._standby.wait(EXTRA_S)
            self._standby = None
            self._standby_at = time.monotonic()

    def _ended(self, one: _FrontEnd) -> int | None:
        """A process has closed its output; an exit code where there is nothing to start again."""
        if one is self._standby:
            one.wait(EXTRA_S)
            self._standby = None
            self._standby_at = time.monotonic() + MOST_WAIT_S  # meanwhile a front end that dies is started anew
            return None
        if one is not self._active:
            return None
        one.wait(EXTRA_S)
        if one.first and one.exit_code is not None:
            return one.exit_code
        if self._stopping.is_set():
            return 0
        self._failures = 0 if time.monotonic() - one.began > STEADY_S else self._failures + 1
        self.restarts += 1
        if self._standby is not None:
            self._active, self._standby = self._standby, None
            self._say("the front end died, and the one that stood by serves")
            self._active.serve()
            return None
        wait_s = min(MOST_WAIT_S, 0.5 * 2.0 ** (self._failures - 1)) if self._failures > 1 else 0.0
        self._say(f"the front end died and is started again{f' in {wait_s:g} s' if wait_s else ''}")
        if self._stopping.wait(wait_s):
            return 0
        self._active = self._started()
        return None


def need(modules: Sequence[str] = ("fastapi", "uvicorn", "grpc", "google.protobuf")) -> None:
    """UnavailableError where a package of the extra, or one that it needs, is not installed [W304]."""
    import importlib

    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing = error.name or name
            told = name if f"{name}.".startswith(f"{missing}.") else f"{missing}, which {name} needs,"
            raise UnavailableError(problem=f"{told} is not installed: pip install 'weft[serve]'") from None
