"""The front end: a server's ports, in one process. `python -m weft.serve.front` under a supervisor.

It reads its settings from standard input (a line of JSON), which stays open as long as the supervisor lives, and says
on standard output, a line of JSON each, where it listens, that it is ready, or why it is not.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import uvicorn

from weft.errors import OptionError, WeftError
from weft.serve import rest
from weft.serve.access import FrontOptions
from weft.serve.server import Server
from weft.serve.settings import ServeOptions, Source

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
        self.port = int(listening.getsockname()[1])
        self.grpc_port = -1

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
        o = self._options
        try:
            config = uvicorn.Config(
                rest.make(self._server, o), log_level="warning", access_log=False, lifespan="off", http="h11",
                ws="none", loop="asyncio", server_header=False, limit_concurrency=o.max_connections,
                h11_max_incomplete_event_size=o.max_header_bytes, timeout_graceful_shutdown=int(GRACE_S),
                ssl_certfile=o.cert, ssl_keyfile=o.key,
            )  # fmt: skip
            config.load()
        except OSError as error:  # of the certificate
            raise OptionError(option="--tls-cert", problem=f"it cannot be used: {error}") from None
        extra = _extra(self._server, o)
        if extra is not None:
            self.grpc_port = await extra.start()
        http = uvicorn.Server(config)
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


def settings_to_json(
    models: list[Source], directory: Path | None, options: ServeOptions, front: FrontOptions, fd: int
) -> str:
    """What the process of a front end reads."""
    whole = {
        "models": [asdict(m) for m in models], "directory": directory, "options": asdict(options),
        "front": asdict(front), "fd": fd,
    }  # fmt: skip
    return json.dumps(whole, default=str)


def _settings(text: str) -> tuple[list[Source], Path | None, ServeOptions, FrontOptions, int]:
    data: dict[str, Any] = json.loads(text)

    def paths(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
        return {k: Path(v) if k in names and v is not None else v for k, v in given.items()}

    models = [Source(m["name"], m["version"], tuple(map(Path, m["files"]))) for m in data["models"]]
    options = paths(data["options"], "cache")
    directory = None if data["directory"] is None else Path(data["directory"])
    return (
        models, directory, ServeOptions(**{**options, "trust": tuple(options["trust"])}),
        FrontOptions(**paths(data["front"], "cert", "key")), int(data["fd"]),
    )  # fmt: skip


def main() -> None:
    """Serve until standard input ends, or a signal says so."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    models, directory, options, front, fd = _settings(sys.stdin.readline())

    def parent() -> None:
        sys.stdin.read()
        told.set()

    threading.Thread(target=parent, daemon=True).start()
    with socket.socket(fileno=fd) as listening:
        server = Server(models, options, directory=directory, start=False)
        ports = Front(server, front, listening)
        try:
            ports.start()
            _say(listening=ports.port, grpc=ports.grpc_port)
            server.load_all()
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
