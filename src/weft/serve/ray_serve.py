"""The same server on Ray Serve: replicas on one machine or many, each with all the models. Needs `weft[ray]`.

    from ray import serve
    handle = serve.run(application({"mlp": ["mlp-1.weft", "mlp-8.weft"]}, num_replicas=2))
    (y,) = handle.submit.remote(x).result()

Ray starts replicas, on which machine it likes, replaces those that die and spreads queries over them. Within a replica
`Server.submit` answers: queries that Ray sends there while a batch runs share the next one. HTTP through Ray's proxy is
the Open Inference Protocol of `weft serve`; loading and unloading over it would reach one replica alone, and is off.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, MutableMapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, final

from weft.errors import OptionError
from weft.ir.types import Array
from weft.serve.errors import UnavailableError
from weft.serve.query import Outputs
from weft.serve.server import Server
from weft.serve.settings import ServeOptions

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Files = str | PathLike[str] | Sequence[str | PathLike[str]]
"""A saved plan, or plans of one model for several batch sizes; on every machine that gets a replica."""


def application(
    models: Files | Mapping[str, Files], options: ServeOptions | None = None, *, name: str = "weft", **settings: Any
) -> Any:
    """What `ray.serve.run` takes: a deployment of these models.

    `options`: as for `Server`; without any, plans run in the process of the replica (`isolated=False`), which Ray
    replaces when it dies. Paths, and `options.cache`, are of the machine of the replica, which on another one than
    where a plan was saved takes its digest from `options.trust`. `settings`: of the deployment (`num_replicas`,
    `ray_actor_options`, `autoscaling_config`...); `max_ongoing_requests` is `options.max_queries` unless given.

    The handle has `submit` (`Replica.submit`). Errors of Weft reach the caller as they are raised.

    Raises:
        OptionError: a model that is no file: what `weft.compile` gave lives in one process [W001].
        UnavailableError: Ray Serve is not installed [W304].
    """
    given = models.values() if isinstance(models, Mapping) else [models]
    for value in given:
        listed: Sequence[object] = value if isinstance(value, list | tuple) else [value]
        if not listed or not all(isinstance(x, str | PathLike) for x in listed):
            problem = (
                f"a replica loads saved plans; {type(value).__name__} is no path: save the model, and give the file"
            )
            raise OptionError(option="models", problem=problem)
    serve = _ray_serve()
    options = options or ServeOptions(isolated=False)
    settings = {"max_ongoing_requests": options.max_queries, **settings}
    return serve.deployment(name=name, **settings)(Replica).bind(models, options)


def _ray_serve() -> Any:
    try:
        return importlib.import_module("ray.serve")
    except ImportError:
        raise UnavailableError(problem="ray is not installed: pip install 'weft[ray]'") from None


@final
class Replica:
    """What one process of the deployment is; it knows nothing of Ray."""

    def __init__(self, models: Files | Mapping[str, Files], options: ServeOptions) -> None:
        """As `Server`."""
        from weft.serve import rest
        from weft.serve.access import FrontOptions

        self._server = Server(models, options)
        self._app = rest.make(self._server, FrontOptions(control=False))

    async def submit(
        self, inputs: Array | Sequence[Array] | Mapping[str, Array], model: str = "", version: str = "",
        timeout_s: float | None = None,
    ) -> Outputs:  # fmt: skip
        """One query, as `Server.submit`; a caller that gives up takes back what waits.

        Raises:
            RequestError: tensors that the model does not take, or no such model [W019].
            ServeError: the queue is full, the model is not there, or its time is over [W304].
        """
        return await asyncio.wrap_future(self._server.submit(inputs, model=model, version=version, timeout_s=timeout_s))

    async def __call__(self, request: Request) -> Response:
        """One request of HTTP, by the application of `weft serve`."""
        from starlette.responses import Response

        body = bytearray()
        answer = Response()

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                answer.status_code = message["status"]
                answer.raw_headers = list(message["headers"])
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))

        await self._app(request.scope, request.receive, send)
        answer.body = bytes(body)
        return answer

    def check_health(self) -> None:
        """Ray asks from time to time, and replaces a replica that raises.

        Raises:
            UnavailableError: a model does not answer, and cannot be started [W304].
        """
        gone = [s for s in self._server.models() if s.backend.gone]
        if gone or self._server.draining:
            reasons = "; ".join(f"{s.name}: {s.problem}" for s in gone)
            raise UnavailableError(problem=f"the replica does not answer: {reasons or 'it ends'}")

    def __del__(self) -> None:
        """Ray lets go of a replica once its queries are answered."""
        server = getattr(self, "_server", None)  # none: it could not be made
        if server is not None:
            server.close()
