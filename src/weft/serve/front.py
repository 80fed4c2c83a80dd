"""The front end: a server's ports, in one process. `python -m weft.serve.front` under a supervisor.

It reads its settings from standard input (a line of JSON), which stays open as long as the supervisor lives, and says
on standard output, a line of JSON each, where it listens, that it is ready, or why it is not. One that stands by loads
its models first, and opens its ports when a second line comes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import socket
import sys
import threading
from typing import Protocol

import uvicorn

from weft.errors import OptionError, WeftError
from weft.serve import rest
from weft.serve.access import FrontOptions, FrontSettings
from weft.serve.server import Server

KEEP_S = 75
"""How long a connection may rest between two queries: uvicorn's five seconds cut off callers that ask slowly."""
GRACE_S = 5.0
"""How long connections have to end once every query is answered."""


class Extra(Protocol):
    """A further protocol."""

    async def start(self) -> int:
        """Its port."""
        ...

    async def stop(self, grace_s: float) -> None:
        """End it."""
        ...


def listen(options: FrontOptions) -> socket.socket:
    """A socket that waits for HTTP.

    Raises:
        OptionError: nobody can listen there [W001].
    """
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        opened = socket.socket(found[0], found[1])
    except OSError as error:
        raise OptionError(option="--host", problem=f"{options.host}: {error.strerror}") from None
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(found[4])
        opened.listen(1024)
    except OSError as error:
        opened.close()
        raise OptionError(option="--port", problem=f"{options.host} port {options.port}: {error.strerror}") from None
    return opened


class Front:
    """The ports of one server, until it is told to stop."""

    def __init__(self, server: Server, options: FrontOptions, listening: socket.socket) -> None:
        self._server, self._options, self._listening = server, options, listening
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._opened = threading.Event()
        self._failure: BaseException | None = None
        self._http: uvicorn.Config | None = None
        self.port = int(listening.getsockname()[1])
        self.grpc_port = -1

    def prepare(self) -> None:
        """Load all that serves, so that `start` opens the ports at once.

        Raises:
            OptionError: a certificate cannot be used [W001].
        """
        o = self._options
        try:
            self._http = uvicorn.Config(
                rest.make(self._server, o), log_level="warning", access_log=False, lifespan="off", http="h11",
                ws="none", loop="asyncio", server_header=False, limit_concurrency=o.max_connections,
                h11_max_incomplete_event_size=o.max_header_bytes, timeout_graceful_shutdown=int(GRACE_S),
                timeout_keep_alive=KEEP_S, ssl_certfile=o.cert, ssl_keyfile=o.key,
            )  # fmt: skip
            self._http.load()
        except OSError as error:  # of the certificate
            raise OptionError(option="--tls-cert", problem=f"it cannot be used: {error}") from None
        if o.grpc_port >= 0:
            importlib.import_module("weft.serve.rpc")

    def start(self) -> None:
        """Open the ports; returns when they are.

        Raises:
            OptionError: a port or a certificate cannot be used [W001].
        """
        self._thread = threading.Thread(target=self._run, name="weft-serve-front", daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def stop(self) -> None:
        """Take no more queries, answer those that there are, and close the ports; returns when that is done."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._opened.set()

    async def _serve(self) -> None:
        if self._http is None:
            self.prepare()
        assert self._http is not None  # prepared
        extra = _extra(self._server, self._options)
        if extra is not None:
            self.grpc_port = await extra.start()
        http = uvicorn.Server(self._http)
        serving = asyncio.create_task(http.serve(sockets=[self._listening]))
        while not http.started and not serving.done():
            await asyncio.sleep(0.005)
        self._opened.set()
        while not self._stop.is_set() and not serving.done():
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._server.drain)
        http.should_exit = True
        if extra is not None:
            await extra.stop(GRACE_S)
        await serving


def _extra(server: Server, options: FrontOptions) -> Extra | None:
    if options.grpc_port < 0:
        return None
    from weft.serve import rpc

    return rpc.Rpc(server, options)


def main() -> None:
    """Serve until standard input ends, or a signal says so."""
    told, go = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        told.set()
        go.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    settings = FrontSettings.from_json(sys.stdin.readline())

    def parent() -> None:
        if settings.standby and sys.stdin.readline():
            go.set()
        sys.stdin.read()
        stop()

    threading.Thread(target=parent, daemon=True).start()
    with socket.socket(fileno=settings.fd) as listening:
        server = Server(settings.models, settings.options, directory=settings.directory, start=False)
        server.on_change = lambda: _say(changed=True, unloaded=sorted(server.unloaded))
        ports = Front(server, settings.front, listening)
        try:
            if settings.standby:
                server.load_all(settings.without)
                ports.prepare()
                _say(loaded=True)
                go.wait()
            if not told.is_set():
                ports.start()
                _say(listening=ports.port, grpc=ports.grpc_port)
            if not settings.standby:
                server.load_all(settings.without)
        except WeftError as error:
            _say(failed=str(error), exit=error.exit_code)
            told.set()
        else:
            _say(ready=True)
        while not told.wait(1.0):
            pass
        ports.stop()
        server.close()
    sys.stdout.flush()
    os._exit(0)  # nothing waits for threads of clients that hang


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201 - the supervisor reads it


if __name__ == "__main__":
    main()
