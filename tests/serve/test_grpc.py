"""The protocol over gRPC, by a server in this process."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.serve.conftest import Saved

pytest.importorskip("fastapi", reason="the extra weft[serve] is not installed")
pytest.importorskip("grpc", reason="the extra weft[serve] is not installed")

import grpc

from weft.serve import Server, messages
from weft.serve.access import FrontOptions
from weft.serve.front import Front, listen

TYPES = messages.classes()
PATH = f"/{messages.PACKAGE}.{messages.SERVICE}/"
Given = np.random.default_rng(3).standard_normal((3, 16)).astype(np.float32)
Change = Callable[[Any], object]


@pytest.fixture(scope="module")
def channel(saved: Saved) -> Iterator[Any]:
    options = FrontOptions(port=0, grpc_port=0, max_body_bytes=1 << 20)
    models = {"mlp": [saved.one, saved.eight], "two": saved.two}
    with Server(models, saved.options(isolated=False)) as server, listen(options) as listening:
        front = Front(server, options, listening)
        front.start()
        with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}") as opened:
            yield opened
        front.stop()


def call(channel: Any, name: str, data: bytes = b"", metadata: Any = None, timeout: float = 30) -> Any:
    _, response = messages.METHODS[name]
    method = channel.unary_unary(PATH + name, response_deserializer=TYPES[response].FromString)
    return method(data, metadata=metadata, timeout=timeout)


def query(model: str = "mlp", **fields: Any) -> Any:
    request = TYPES["ModelInferRequest"](model_name=model, **fields)
    request.inputs.add(name="input", datatype="FP32", shape=[3, 16])
    request.raw_input_contents.append(Given.tobytes())
    return request


def contents(change: Change = lambda q: None) -> Any:
    request = query()
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend(Given.reshape(-1).tolist())
    change(request)
    return request


def test_queries(channel: Any, saved: Saved) -> None:
    want = saved.answer("mlp", Given)[0]
    for request in (query(id="a"), contents(lambda q: setattr(q, "id", "a"))):
        answer = call(channel, "ModelInfer", request.SerializeToString())
        assert (answer.id, answer.model_name, answer.model_version) == ("a", "mlp", "1")
        assert (answer.outputs[0].name, answer.outputs[0].datatype, list(answer.outputs[0].shape)) == (
            "output", "FP32", [3, 4]
        )  # fmt: skip
        found = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(3, 4)
        assert np.allclose(found, want, atol=1e-5)


def test_what_is_told_of_server_and_models(channel: Any) -> None:
    assert call(channel, "ServerLive").live and call(channel, "ServerReady").ready
    assert call(channel, "ServerMetadata").name == "weft"
    about = call(channel, "ModelMetadata", TYPES["ModelMetadataRequest"](name="mlp").SerializeToString())
    assert list(about.inputs[0].shape) == [-1, 16] and list(about.versions) == ["1"]
    ready = TYPES["ModelReadyRequest"](name="mlp", version="1").SerializeToString()
    assert call(channel, "ModelReady", ready).ready
    config = call(channel, "ModelConfig", TYPES["ModelConfigRequest"](name="mlp").SerializeToString())
    assert config.config.max_batch_size == 8
    call(channel, "ModelInfer", query().SerializeToString())
    told = call(channel, "ModelStatistics", TYPES["ModelStatisticsRequest"](name="mlp").SerializeToString())
    assert told.model_stats[0].inference_count >= 3 and told.model_stats[0].inference_stats.success.ns > 0
    assert len(call(channel, "ModelStatistics").model_stats) == 2
    index = call(channel, "RepositoryIndex", TYPES["RepositoryIndexRequest"](ready=True).SerializeToString())
    assert [(m.name, m.state) for m in index.models] == [("mlp", "READY"), ("two", "READY")]


def test_models_come_and_go(channel: Any) -> None:
    load, unload = (TYPES[f"RepositoryModel{x}Request"] for x in ("Load", "Unload"))
    named = unload(model_name="two").SerializeToString()
    call(channel, "RepositoryModelUnload", named)
    ready = TYPES["ModelReadyRequest"](name="two").SerializeToString()
    assert not call(channel, "ModelReady", ready).ready
    with pytest.raises(grpc.RpcError) as told:
        call(channel, "ModelMetadata", TYPES["ModelMetadataRequest"](name="two").SerializeToString())
    assert told.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "retry-after" in dict(told.value.trailing_metadata())
    call(channel, "RepositoryModelLoad", load(model_name="two").SerializeToString())
    assert call(channel, "ModelReady", ready).ready
    request = load(model_name="two")
    request.parameters["config"].string_param = "{}"
    with pytest.raises(grpc.RpcError, match="loaded from its own files"):
        call(channel, "RepositoryModelLoad", request.SerializeToString())


def test_a_stream_goes_on_after_an_error(channel: Any) -> None:
    answers = channel.stream_stream(
        PATH + messages.STREAM[0], response_deserializer=TYPES[messages.STREAM[2]].FromString
    )(
        iter(
            [
                query(id="1").SerializeToString(),
                b"\xff",
                query("nobody").SerializeToString(),
                query(id="4").SerializeToString(),
            ]
        )
    )
    found = list(answers)
    assert [x.infer_response.id for x in found] == ["1", "", "", "4"]
    assert [bool(x.error_message) for x in found] == [False, True, True, False]


def parameter(where: Callable[[Any], Any], name: str, **value: Any) -> Change:
    def change(q: Any) -> None:
        if value:
            where(q).parameters[name].MergeFrom(TYPES["InferParameter"](**value))
        else:
            where(q).parameters[name].SetInParent()

    return change


def first(q: Any) -> Any:
    return q.inputs[0]


def output(q: Any) -> Any:
    return q.outputs.add(name="output")


def raw(data: bytes) -> Change:
    return lambda q: q.raw_input_contents.__setitem__(0, data)


def shape(*sizes: int) -> Change:
    return lambda q: (q.inputs[0].ClearField("shape"), q.inputs[0].shape.extend(sizes))


RAW: dict[str, Change] = {
    "no inputs": lambda q: q.ClearField("inputs"), "an input twice": lambda q: q.inputs.append(q.inputs[0]),
    "a raw tensor too few": lambda q: q.ClearField("raw_input_contents"),
    "a raw tensor too many": lambda q: q.raw_input_contents.append(b""), "raw short": raw(bytes(188)),
    "raw long": raw(bytes(196)), "raw empty": raw(b""), "name unknown": lambda q: setattr(q.inputs[0], "name", "x"),
    "name empty": lambda q: setattr(q.inputs[0], "name", ""),
    "datatype unknown": lambda q: setattr(q.inputs[0], "datatype", "FLOAT"),
    "datatype empty": lambda q: setattr(q.inputs[0], "datatype", ""),
    "datatype of another": lambda q: setattr(q.inputs[0], "datatype", "FP64"),
    "datatype BYTES": lambda q: setattr(q.inputs[0], "datatype", "BYTES"),
    "shape empty": shape(), "shape turned": shape(16, 3), "shape negative": shape(-1, 16), "no rows": shape(0, 16),
    "rows beyond a batch": shape(9, 16), "shape huge": shape(1 << 60, 16), "shape of many axes": shape(*[1] * 60),
    "output unknown": lambda q: q.outputs.add(name="y"),
    "output twice": lambda q: (output(q), output(q)), "output without name": lambda q: q.outputs.add(),
    "output's classes": parameter(output, "classification", int64_param=3),
    "in shared memory": parameter(first, "shared_memory_region", string_param="r"),
    "a sequence": parameter(lambda q: q, "sequence_id", int64_param=4),
    "a parameter of nothing": parameter(lambda q: q, "x"),
    "timeout negative": parameter(lambda q: q, "timeout", int64_param=-4),
    "timeout true": parameter(lambda q: q, "timeout", bool_param=True),
    "timeout text": parameter(lambda q: q, "timeout", string_param="soon"),
    "too many inputs": lambda q: q.inputs.extend([q.inputs[0]] * 300),
    "contents beside raw": lambda q: q.inputs[0].contents.fp32_contents.append(1.0),
}  # fmt: skip
CONTENTS: dict[str, Change] = {
    "contents of another type": lambda q: q.inputs[0].contents.int_contents.append(1),
    "contents short": lambda q: q.inputs[0].contents.fp32_contents.pop(),
    "contents long": lambda q: q.inputs[0].contents.fp32_contents.append(0.0),
    "contents missing": lambda q: q.inputs[0].ClearField("contents"),
    "contents of FP16": lambda q: setattr(q.inputs[0], "datatype", "FP16"),
}


@pytest.mark.parametrize("name", [*RAW, *CONTENTS])
def test_what_is_malformed_is_told(name: str, channel: Any) -> None:
    request = query() if name in RAW else contents()
    (RAW | CONTENTS)[name](request)
    with pytest.raises(grpc.RpcError) as told:
        call(channel, "ModelInfer", request.SerializeToString())
    assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "[W019]" in told.value.details()


def test_other_errors_have_their_codes(channel: Any) -> None:
    for data, metadata, timeout, code in (
        (query("nobody").SerializeToString(), None, 30, "NOT_FOUND"),
        (query(model_version="7").SerializeToString(), None, 30, "NOT_FOUND"),
        (bytes(3 << 20), None, 30, "RESOURCE_EXHAUSTED"), (b"\xff\xff\xff", None, 30, "INVALID_ARGUMENT"),
    ):  # fmt: skip
        with pytest.raises(grpc.RpcError) as told:
            call(channel, "ModelInfer", data, metadata, timeout)
        assert told.value.code() is getattr(grpc.StatusCode, code)
    with pytest.raises(grpc.RpcError) as told:
        channel.unary_unary(PATH + "Guess")(b"")
    assert told.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_bytes_changed_at_random_are_never_the_servers_fault(channel: Any) -> None:
    chance = random.Random(8)
    fine = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    for _ in range(200):
        body = bytearray(query(id="x").SerializeToString())
        for _ in range(chance.randint(1, 4)):
            body[chance.randrange(60)] = chance.randrange(256)
        try:
            call(channel, "ModelInfer", bytes(body))
            found = None
        except grpc.RpcError as error:
            found = error.code()
        assert found is None or found in fine
    assert call(channel, "ModelInfer", query().SerializeToString()).outputs


def test_a_token_and_deadlines(saved: Saved) -> None:
    options = FrontOptions(port=0, grpc_port=0, token="secret")
    with (
        Server({"mlp": saved.eight}, saved.options(isolated=False, max_delay_s=0.5)) as server,
        listen(options) as listening,
    ):
        front = Front(server, options, listening)
        front.start()
        data = query().SerializeToString()
        shown = (("authorization", "Bearer secret"),)
        with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
            assert call(channel, "ServerReady").ready
            with pytest.raises(grpc.RpcError) as told:
                call(channel, "ModelInfer", data)
            assert told.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.RpcError) as told:
                call(channel, "ModelInfer", data, shown, timeout=0.1)
            assert told.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            future = channel.unary_unary(PATH + "ModelInfer").future(data, metadata=shown)
            future.cancel()
            assert call(channel, "ModelInfer", data, shown).outputs
        front.stop()


def test_messages_have_the_protocols_numbers() -> None:
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2", reason="tritonclient is not installed")
    configs = importlib.import_module("tritonclient.grpc.model_config_pb2")
    for name, own in messages.fields():
        message: Any = configs if name == "ModelConfig" else theirs
        for part in name.split("."):
            message = getattr(message, part)
        numbers = {f.name: f.number for f in message.DESCRIPTOR.fields}
        kinds = {f.name: f.type for f in message.DESCRIPTOR.fields}
        mine = {f.name: f.type for f in TYPES[name].DESCRIPTOR.fields}
        assert {field: number for _, _, field, number in own}.items() <= numbers.items(), name
        assert mine.items() <= kinds.items(), name
