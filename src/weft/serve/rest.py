"""The Open Inference Protocol over HTTP: JSON, and tensors as bytes behind it. Needs the extra `weft[serve]`."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from weft.errors import WeftError
from weft.serve import metrics, service, tensors
from weft.serve.access import FrontOptions, check_token
from weft.serve.errors import RequestError, ServeError, TooLargeError, UnavailableError, line_of, status_of
from weft.serve.query import Outputs
from weft.serve.server import Server

HEADER = "inference-header-content-length"
GONE = 499
"""What nobody reads: the client has closed."""
Handler = Callable[[Request], Awaitable[Response]]


def make(server: Server, options: FrontOptions) -> FastAPI:
    """The application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    rest = _Rest(server, options)
    models = "/v2/models/{name}"
    routes: list[tuple[str, str, Handler]] = [
        ("GET", "/v2", rest.metadata),
        ("GET", "/v2/health/live", rest.live),
        ("GET", "/v2/health/ready", rest.ready),
        ("GET", "/v2/models/stats", rest.statistics),
        ("POST", "/v2/repository/index", rest.index),
        ("POST", "/v2/repository/models/{name}/load", rest.load),
        ("POST", "/v2/repository/models/{name}/unload", rest.unload),
        ("GET", "/metrics", rest.metrics),
    ]
    for prefix in (models, models + "/versions/{version}"):
        routes += [
            ("GET", prefix, rest.model), ("GET", prefix + "/ready", rest.model_ready),
            ("GET", prefix + "/config", rest.config), ("GET", prefix + "/stats", rest.statistics),
            ("POST", prefix + "/infer", rest.infer),
        ]  # fmt: skip
    for method, path, handler in routes:
        public = path.startswith("/v2/health")
        app.add_api_route(path, _guarded(handler, options, public=public), methods=[method], response_model=None)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _our_error)
    return app


def _guarded(handler: Handler, options: FrontOptions, *, public: bool) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            if sum(len(k) + len(v) for k, v in request.headers.raw) > options.max_header_bytes:
                return JSONResponse({"error": f"headers of more than {options.max_header_bytes} bytes"}, 431)
            if not public:
                check_token(options, request.headers.get("authorization"))
            return await handler(request)
        except WeftError as error:
            return _error(error)
        except ClientDisconnect:
            return Response(status_code=GONE)

    return answer


def _error(error: WeftError) -> Response:
    headers = {}
    if isinstance(error, ServeError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    status = status_of(error).http
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status not in (429, 503):
        headers.pop("Retry-After", None)
    return JSONResponse({"error": line_of(error)}, status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # what it was registered for
    told = {404: f"there is no {request.url.path[:200]}", 405: f"{request.method} is no method of it"}
    return JSONResponse({"error": told.get(error.status_code, error.detail)}, error.status_code, error.headers)


async def _our_error(request: Request, error: Exception) -> Response:
    """What nobody expected; its traceback is in the log."""
    return JSONResponse({"error": f"an error of the server: {type(error).__name__}"}, 500)


class _Rest:
    """What each path answers."""

    def __init__(self, server: Server, options: FrontOptions) -> None:
        self._server, self._options = server, options

    async def metadata(self, request: Request) -> Response:
        return JSONResponse(service.server_metadata())

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        ready = self._server.ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def model(self, request: Request) -> Response:
        served = self._server.model(*_place(request))
        return JSONResponse(service.model_metadata(self._server, served))

    async def model_ready(self, request: Request) -> Response:
        served = self._server.model(*_place(request))
        if served.state != "READY":
            raise UnavailableError(problem=f"model {served.name!r} is {served.state.lower()}: {served.problem}")
        return JSONResponse({"name": served.name, "ready": True})

    async def config(self, request: Request) -> Response:
        return JSONResponse(service.model_config(self._server.model(*_place(request))))

    async def statistics(self, request: Request) -> Response:
        name, version = _place(request)
        found = [self._server.model(name, version)] if name else self._server.models()
        return JSONResponse({"model_stats": [service.statistics(s) for s in found]})

    async def metrics(self, request: Request) -> Response:
        return Response(metrics.text(self._server), media_type=metrics.CONTENT_TYPE)

    async def index(self, request: Request) -> Response:
        asked = await self._object(request, ("ready",))
        ready = asked.get("ready", False)
        if not isinstance(ready, bool):
            raise RequestError(problem="'ready' is neither true nor false")
        return JSONResponse(await asyncio.to_thread(partial(service.index, self._server, ready=ready)))

    async def load(self, request: Request) -> Response:
        return await self._control(request, self._server.load)

    async def unload(self, request: Request) -> Response:
        return await self._control(request, self._server.unload)

    async def _control(self, request: Request, action: Callable[[str], None]) -> Response:
        if not self._options.control:
            raise RequestError(problem="this server loads and unloads no models at a client's wish")
        asked = await self._object(request, ("parameters",))
        given = asked.get("parameters", {})
        if not isinstance(given, dict) or given.keys() - {"unload_dependents"}:
            problem = "a model is loaded from its own files: no configuration or content of a file is taken"
            raise RequestError(problem=problem)
        await asyncio.to_thread(action, _place(request)[0])
        return JSONResponse({})

    async def _object(self, request: Request, keys: tuple[str, ...]) -> dict[str, object]:
        """The body: nothing, or a JSON object with these keys alone."""
        import json

        body = await self._body(request)
        if not body.strip():
            return {}
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            raise RequestError(problem="the body is no JSON") from None
        if not isinstance(found, dict) or found.keys() - set(keys):
            raise RequestError(problem=f"the body is no JSON object with {', '.join(keys)} alone")
        return found

    async def _body(self, request: Request) -> bytes:
        most = self._options.max_body_bytes
        over = TooLargeError(problem=f"a body of more than {most} bytes")
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told[:20]) > most:
            raise over
        found = bytearray()
        try:
            async with asyncio.timeout(self._options.read_s):
                async for chunk in request.stream():
                    found += chunk
                    if len(found) > most:
                        raise over
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {self._options.read_s:g} s") from None
        return _plain(bytes(found), request.headers.get("content-encoding", ""), over, most)

    async def infer(self, request: Request) -> Response:
        served = self._server.model(*_place(request))
        body = await self._body(request)
        query = tensors.read(memoryview(body), _header_bytes(request, len(body)))
        arrays = tensors.arrays_of(query, served.signature)
        tensors.chosen(query, served.signature)
        future = self._server.submit(arrays, model=served.name, version=served.version, timeout_s=query.timeout_s)
        outputs = await _outputs(request, future)
        answer, head = tensors.write(query, served.name, served.version, served.signature, outputs)
        if head is None:
            return Response(answer, media_type="application/json")
        return Response(answer, media_type="application/octet-stream", headers={HEADER: str(head)})


def _place(request: Request) -> tuple[str, str]:
    name, version = request.path_params.get("name", ""), request.path_params.get("version", "")
    return str(name), str(version)


def _plain(body: bytes, encoding: str, over: TooLargeError, most: int) -> bytes:
    """What was compressed, and no more of it than may be."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise RequestError(problem=f"content encoding {encoding[:40]!r} is neither gzip nor deflate")
    reader = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        found = reader.decompress(body, most + 1)
    except zlib.error:
        raise RequestError(problem=f"the body is no {encoding}") from None
    if len(found) > most:
        raise over
    if not reader.eof or reader.unused_data:
        raise RequestError(problem=f"the body is not one whole {encoding}")
    return found


def _header_bytes(request: Request, size: int) -> int | None:
    """How much of the body is JSON; None: all of it."""
    told = request.headers.getlist(HEADER)
    if not told:
        return None
    if len(told) > 1:
        raise RequestError(problem="Inference-Header-Content-Length is there twice")
    if not (told[0].isascii() and told[0].isdecimal()) or len(told[0]) > 18:
        raise RequestError(problem=f"Inference-Header-Content-Length {told[0][:40]!r} is no number of bytes")
    if int(told[0]) > size:
        raise RequestError(problem=f"Inference-Header-Content-Length is {told[0]}, the body has {size} bytes")
    return int(told[0])


async def _outputs(request: Request, future: Future[Outputs]) -> Outputs:
    """What was computed; a client that closes takes its query back."""
    waiting: asyncio.Future[Outputs] = asyncio.wrap_future(future)
    gone: asyncio.Future[None] = asyncio.create_task(_gone(request))
    both: list[asyncio.Future[Any]] = [waiting, gone]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        if not waiting.done():
            waiting.cancel()  # and with it the query, if it still waits


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass  # an empty end of a body
