"""The Open Inference Protocol over gRPC. Needs the extra `weft[serve]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, final

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from weft.errors import OptionError, WeftError
from weft.serve import messages, service, tensors
from weft.serve.access import FrontOptions, check_token
from weft.serve.errors import RequestError, ServeError, TooLargeError, UnavailableError, line_of, status_of
from weft.serve.server import Server
from weft.serve.signature import PROTOCOL_TYPES
from weft.serve.tensors import Given, Infer, Wanted

OVERHEAD = 1 << 20
"""Bytes of a message beside its tensors."""
PUBLIC = ("ServerLive", "ServerReady")
CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
"""Where a message has numbers of a type; FP16 and BF16 are raw alone."""
Message = Any
"""Of the classes of `messages`, which are made at run time."""


@final
class Rpc:
    """The port of gRPC."""

    def __init__(self, server: Server, options: FrontOptions) -> None:
        self._server, self._options = server, options
        self._types = messages.classes()
        self._grpc: Any = None

    async def start(self) -> int:
        """Open it; which one it is.

        Raises:
            OptionError: it cannot be used, or the certificate cannot [W001].
        """
        o = self._options
        most = o.max_body_bytes + OVERHEAD
        self._grpc = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", most), ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", o.max_header_bytes), ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=o.max_connections,
        )  # fmt: skip
        handlers = {name: self._unary(name) for name in messages.METHODS}
        handlers[messages.STREAM[0]] = grpc.stream_stream_rpc_method_handler(self._stream)
        service_name = f"{messages.PACKAGE}.{messages.SERVICE}"
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, handlers),))
        host = f"[{o.host}]" if ":" in o.host else o.host
        address = f"{host}:{o.grpc_port}"
        try:
            if o.cert is not None and o.key is not None:
                pair = grpc.ssl_server_credentials([(o.key.read_bytes(), o.cert.read_bytes())])
                port = self._grpc.add_secure_port(address, pair)
            else:
                port = self._grpc.add_insecure_port(address)
        except (RuntimeError, OSError, ValueError) as error:
            raise OptionError(option="--grpc-port", problem=f"{address}: {str(error)[:200]}") from None
        await self._grpc.start()
        return int(port)

    async def stop(self, grace_s: float) -> None:
        """Close it; who is being answered has so long."""
        await self._grpc.stop(grace_s)

    def _unary(self, name: str) -> Any:
        action: Callable[[Message, Any], Awaitable[Message]] = getattr(self, f"_{_snake(name)}")

        async def answer(data: bytes, context: Any) -> bytes:
            try:
                if name not in PUBLIC:
                    self._check(context)
                return bytes((await action(self._read(name, data), context)).SerializeToString())
            except WeftError as error:
                retry: tuple[tuple[str, str], ...] = ()
                if isinstance(error, ServeError) and status_of(error).http in (429, 503):
                    retry = (("retry-after", f"{error.retry_after_s:.3f}"),)
                await context.abort(getattr(grpc.StatusCode, status_of(error).grpc), line_of(error), retry)
                raise

        return grpc.unary_unary_rpc_method_handler(answer)  # bytes: what is no message is the client's fault, and told

    def _read(self, name: str, data: bytes) -> Message:
        request, _ = messages.METHODS[name]
        try:
            return self._types[request].FromString(data)
        except DecodeError:
            raise RequestError(problem=f"the bytes are no {request}") from None

    def _check(self, context: Any) -> None:
        shown = dict(context.invocation_metadata() or ())
        check_token(self._options, shown.get("authorization"))

    async def _server_live(self, request: Message, context: Any) -> Message:
        return self._types["ServerLiveResponse"](live=True)

    async def _server_ready(self, request: Message, context: Any) -> Message:
        return self._types["ServerReadyResponse"](ready=self._server.ready)

    async def _model_ready(self, request: Message, context: Any) -> Message:
        try:
            ready = self._server.model(request.name, request.version).state == "READY"
        except UnavailableError:
            ready = False  # it is known, and not loaded
        return self._types["ModelReadyResponse"](ready=ready)

    async def _server_metadata(self, request: Message, context: Any) -> Message:
        return self._types["ServerMetadataResponse"](**service.server_metadata())

    async def _model_metadata(self, request: Message, context: Any) -> Message:
        served = self._server.model(request.name, request.version)
        return self._filled("ModelMetadataResponse", service.model_metadata(self._server, served))

    async def _model_config(self, request: Message, context: Any) -> Message:
        told = service.model_config(self._server.model(request.name, request.version))
        kept = {k: told[k] for k in ("name", "platform", "backend", "max_batch_size")}
        return self._filled("ModelConfigResponse", {"config": kept})

    async def _model_statistics(self, request: Message, context: Any) -> Message:
        named = self._server.model(request.name, request.version) if request.name else None
        found = [named] if named is not None else self._server.models()
        told: list[dict[str, object]] = [service.statistics(s) for s in found]
        for one in told:
            del one["memory_usage"]
        return self._filled("ModelStatisticsResponse", {"model_stats": told})

    async def _repository_index(self, request: Message, context: Any) -> Message:
        rows = await asyncio.to_thread(partial(service.index, self._server, ready=request.ready))
        return self._filled("RepositoryIndexResponse", {"models": rows})

    async def _repository_model_load(self, request: Message, context: Any) -> Message:
        await self._control(request, self._server.load)
        return self._types["RepositoryModelLoadResponse"]()

    async def _repository_model_unload(self, request: Message, context: Any) -> Message:
        await self._control(request, self._server.unload)
        return self._types["RepositoryModelUnloadResponse"]()

    async def _control(self, request: Message, action: Callable[[str], None]) -> None:
        if not self._options.control:
            raise RequestError(problem="this server loads and unloads no models at a client's wish")
        if set(request.parameters) - {"unload_dependents"}:
            problem = "a model is loaded from its own files: no configuration or content of a file is taken"
            raise RequestError(problem=problem)
        await asyncio.to_thread(action, request.model_name)

    def _filled(self, name: str, data: dict[str, object]) -> Message:
        return json_format.ParseDict(data, self._types[name]())

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Query after query over one call; an error answers its query and not the call."""
        response = self._types[messages.STREAM[2]]
        try:
            self._check(context)
        except WeftError as error:
            await context.abort(getattr(grpc.StatusCode, status_of(error).grpc), line_of(error))
        async for data in requests:
            try:
                answer = await self._model_infer(self._read("ModelInfer", data), context)
                yield response(infer_response=answer).SerializeToString()
            except WeftError as error:
                yield response(error_message=line_of(error)).SerializeToString()

    async def _model_infer(self, request: Message, context: Any) -> Message:
        served = self._server.model(request.model_name, request.model_version)
        raw_bytes = sum(map(len, request.raw_input_contents))
        if raw_bytes > self._options.max_body_bytes:
            raise TooLargeError(problem=f"tensors of more than {self._options.max_body_bytes} bytes")
        query = _query(request)
        arrays = tensors.arrays_of(query, served.signature)
        wanted = tensors.chosen(query, served.signature)
        timeout_s = query.timeout_s
        left_s = context.time_remaining()
        if left_s is not None and timeout_s is None:
            timeout_s = max(left_s, 1e-6)
        future = self._server.submit(arrays, model=served.name, version=served.version, timeout_s=timeout_s)
        outputs = await asyncio.wrap_future(future)  # a call that is cancelled takes its query back
        answer = self._types["ModelInferResponse"](model_name=served.name, model_version=served.version, id=request.id)
        for place, spec, _ in wanted:
            array = tensors.shaped(outputs[place], served.signature)
            answer.outputs.add(name=spec.name, datatype=spec.datatype, shape=array.shape)
            answer.raw_output_contents.append(tensors.bytes_of(array))
        return answer


def _query(request: Message) -> Infer:
    """What a message asks.

    Raises:
        RequestError: it contradicts itself [W019].
    """
    parameters = tensors.parameters_of("the query", _plain(request.parameters))
    for what, given in (("inputs", request.inputs), ("outputs", request.outputs)):
        if len(given) > tensors.MAX_TENSORS:
            raise RequestError(problem=f"{what!r} has {len(given)} entries, the most is {tensors.MAX_TENSORS}")
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise RequestError(problem=f"{len(raw)} raw tensors for {len(request.inputs)} inputs")
    inputs = []
    for i, given in enumerate(request.inputs):
        tensors.parameters_of(f"input {given.name[:80]!r}", _plain(given.parameters))
        shape = tensors.shape_of(given.name, list(given.shape))
        if given.datatype not in PROTOCOL_TYPES:
            problem = f"input {given.name[:80]!r}: {given.datatype[:40]!r} is no datatype of the protocol"
            raise RequestError(problem=problem)
        if raw:
            if given.HasField("contents"):
                raise RequestError(problem=f"input {given.name[:80]!r} has contents, and raw ones")
            inputs.append(Given(given.name, given.datatype, shape, raw=raw[i]))
        else:
            inputs.append(Given(given.name, given.datatype, shape, data=_contents(given)))
    outputs = []
    for wanted in request.outputs:
        tensors.parameters_of(f"output {wanted.name[:80]!r}", _plain(wanted.parameters))
        outputs.append(Wanted(wanted.name, binary=True))
    return Infer(
        request.id, tensors.unique_inputs(inputs), tensors.unique_outputs(outputs), binary=True,
        timeout_s=tensors.timeout_of(parameters),
    )  # fmt: skip


def _plain(parameters: Message) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        if kind is None:
            raise RequestError(problem=f"parameter {key[:80]!r} has no value")
        found[key] = getattr(value, kind)
    return found


def _contents(given: Message) -> list[object]:
    name = CONTENTS.get(given.datatype)
    if name is None:
        raise RequestError(problem=f"input {given.name[:80]!r} is {given.datatype}, which is sent as raw contents")
    others = [f.name for f, _ in given.contents.ListFields() if f.name != name]
    if others:
        raise RequestError(problem=f"input {given.name[:80]!r} is {given.datatype} and has {', '.join(others)}")
    return list(getattr(given.contents, name))


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
