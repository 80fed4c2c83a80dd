"""The messages of the Open Inference Protocol's gRPC form, made when they are needed.

Names and numbers of fields are the protocol's (KServe v2, package `inference`; what Triton adds to it that this server
has). They live in a pool of their own: a client of the protocol in the same process has the same names in its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = "GRPCInferenceService"
METHODS: Mapping[str, tuple[str, str]] = {
    **{
        n: (f"{n}Request", f"{n}Response")
        for n in (
            "ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer",
            "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "ModelConfig",
        )
    },
}  # fmt: skip
"""Request and response of each method; `ModelStreamInfer` stands beside them, as it is a stream."""
STREAM = ("ModelStreamInfer", "ModelInferRequest", "ModelStreamInferResponse")
SCHEMA = """
ServerLiveRequest
ServerLiveResponse
  bool live = 1
ServerReadyRequest
ServerReadyResponse
  bool ready = 1
ModelReadyRequest
  string name = 1
  string version = 2
ModelReadyResponse
  bool ready = 1
ServerMetadataRequest
ServerMetadataResponse
  string name = 1
  string version = 2
  repeated string extensions = 3
ModelMetadataRequest
  string name = 1
  string version = 2
ModelMetadataResponse
  string name = 1
  repeated string versions = 2
  string platform = 3
  repeated ModelMetadataResponse.TensorMetadata inputs = 4
  repeated ModelMetadataResponse.TensorMetadata outputs = 5
ModelMetadataResponse.TensorMetadata
  string name = 1
  string datatype = 2
  repeated int64 shape = 3
InferParameter
  oneof bool bool_param = 1
  oneof int64 int64_param = 2
  oneof string string_param = 3
  oneof double double_param = 4
  oneof uint64 uint64_param = 5
InferTensorContents
  repeated bool bool_contents = 1
  repeated int32 int_contents = 2
  repeated int64 int64_contents = 3
  repeated uint32 uint_contents = 4
  repeated uint64 uint64_contents = 5
  repeated float fp32_contents = 6
  repeated double fp64_contents = 7
  repeated bytes bytes_contents = 8
ModelInferRequest
  string model_name = 1
  string model_version = 2
  string id = 3
  map InferParameter parameters = 4
  repeated ModelInferRequest.InferInputTensor inputs = 5
  repeated ModelInferRequest.InferRequestedOutputTensor outputs = 6
  repeated bytes raw_input_contents = 7
ModelInferRequest.InferInputTensor
  string name = 1
  string datatype = 2
  repeated int64 shape = 3
  map InferParameter parameters = 4
  InferTensorContents contents = 5
ModelInferRequest.InferRequestedOutputTensor
  string name = 1
  map InferParameter parameters = 2
ModelInferResponse
  string model_name = 1
  string model_version = 2
  string id = 3
  map InferParameter parameters = 4
  repeated ModelInferResponse.InferOutputTensor outputs = 5
  repeated bytes raw_output_contents = 6
ModelInferResponse.InferOutputTensor
  string name = 1
  string datatype = 2
  repeated int64 shape = 3
  map InferParameter parameters = 4
  InferTensorContents contents = 5
ModelStreamInferResponse
  string error_message = 1
  ModelInferResponse infer_response = 2
ModelConfigRequest
  string name = 1
  string version = 2
ModelConfigResponse
  ModelConfig config = 1
ModelConfig
  string name = 1
  string platform = 2
  int32 max_batch_size = 4
  string backend = 17
ModelStatisticsRequest
  string name = 1
  string version = 2
ModelStatisticsResponse
  repeated ModelStatistics model_stats = 1
ModelStatistics
  string name = 1
  string version = 2
  uint64 last_inference = 3
  uint64 inference_count = 4
  uint64 execution_count = 5
  InferStatistics inference_stats = 6
  repeated InferBatchStatistics batch_stats = 7
StatisticDuration
  uint64 count = 1
  uint64 ns = 2
InferStatistics
  StatisticDuration success = 1
  StatisticDuration fail = 2
  StatisticDuration queue = 3
  StatisticDuration compute_input = 4
  StatisticDuration compute_infer = 5
  StatisticDuration compute_output = 6
  StatisticDuration cache_hit = 7
  StatisticDuration cache_miss = 8
InferBatchStatistics
  uint64 batch_size = 1
  StatisticDuration compute_input = 2
  StatisticDuration compute_infer = 3
  StatisticDuration compute_output = 4
ModelRepositoryParameter
  oneof bool bool_param = 1
  oneof int64 int64_param = 2
  oneof string string_param = 3
  oneof bytes bytes_param = 4
RepositoryIndexRequest
  string repository_name = 1
  bool ready = 2
RepositoryIndexResponse
  repeated RepositoryIndexResponse.ModelIndex models = 1
RepositoryIndexResponse.ModelIndex
  string name = 1
  string version = 2
  string state = 3
  string reason = 4
RepositoryModelLoadRequest
  string repository_name = 1
  string model_name = 2
  map ModelRepositoryParameter parameters = 3
RepositoryModelLoadResponse
RepositoryModelUnloadRequest
  string repository_name = 1
  string model_name = 2
  map ModelRepositoryParameter parameters = 3
RepositoryModelUnloadResponse
"""
"""A message a line, its fields below it: `repeated`, `map` (from text to what is named) or `oneof` (of all such)."""
_FIELD = re.compile(r"  (?:(repeated|map|oneof) )?([\w.]+) (\w+) = (\d+)")
_F = descriptor_pb2.FieldDescriptorProto


def fields() -> Iterator[tuple[str, list[tuple[str, str, str, int]]]]:
    """Each message of the schema with its fields: how often, type, name, number."""
    for block in re.split(r"\n(?=\w)", SCHEMA.strip()):
        name, *lines = block.splitlines()
        found = [_FIELD.fullmatch(x) for x in lines]
        yield name, [(m[1] or "", m[2], m[3], int(m[4])) for m in found if m is not None]


@cache
def classes() -> Mapping[str, Any]:
    """The message classes by name, inner ones as `Outer.Inner`."""
    file = descriptor_pb2.FileDescriptorProto(name="open_inference.proto", package=PACKAGE, syntax="proto3")
    made: dict[str, Any] = {}
    for name, own in fields():
        outer, _, inner = name.partition(".")
        message = made[outer].nested_type.add(name=inner) if inner else file.message_type.add(name=name)
        made[name] = message
        for how, kind, field, number in own:
            _add(message, name, how, kind, field, number)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in made}


def _add(message: Any, owner: str, how: str, kind: str, name: str, number: int) -> None:
    field = message.field.add(name=name, number=number)
    field.label = _F.LABEL_REPEATED if how in ("repeated", "map") else _F.LABEL_OPTIONAL
    if how == "map":
        entry = message.nested_type.add(name="".join(x.capitalize() for x in name.split("_")) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_F.LABEL_OPTIONAL, type=_F.TYPE_STRING)
        value = entry.field.add(name="value", number=2, label=_F.LABEL_OPTIONAL, type=_F.TYPE_MESSAGE)
        value.type_name = f".{PACKAGE}.{kind}"
        field.type, field.type_name = _F.TYPE_MESSAGE, f".{PACKAGE}.{owner}.{entry.name}"
        return
    if how == "oneof":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if kind[0].isupper():
        field.type, field.type_name = _F.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(_F, f"TYPE_{kind.upper()}")
