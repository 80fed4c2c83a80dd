"""Requests that a server has to refuse: over a hundred kinds for HTTP, kinds for gRPC, and bytes changed at random.

All are variations of a good query to a model with one input, `input` of FP32 and 16 columns, and one output, `output`.
"""

from __future__ import annotations

import gzip
import http.client
import json
import random
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WIDTH = 16
HEADER = "Inference-Header-Content-Length"
OVER = 1 << 20
"""A body that is larger is refused by the server that these are for."""


@dataclass(frozen=True)
class Request:
    """What is sent, and which answers are right."""

    body: bytes = b""
    method: str = "POST"
    path: str = "/v2/models/mlp/infer"
    headers: Mapping[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = (400,)


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def send(port: int, request: Request, *, timeout_s: float = 30.0) -> Answer:
    """Over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(request.method, request.path, request.body, dict(request.headers))
        response = connection.getresponse()
        return Answer(response.status, response.read(), {k.lower(): v for k, v in response.getheaders()})
    finally:
        connection.close()


def good(rows: int = 1, **changes: Any) -> dict[str, Any]:
    """A query; `changes` replace fields of its input."""
    data = [0.25 * i for i in range(rows * WIDTH)]
    return {"inputs": [{"name": "input", "shape": [rows, WIDTH], "datatype": "FP32", "data": data, **changes}]}


def binary(
    rows: int = 1, *, head: bytes | None = None, told: str | None = None, tail: bytes | None = None, **changes: Any
) -> Request:
    """A query whose tensor is behind the JSON."""
    blob = np.arange(rows * WIDTH, dtype=np.float32).tobytes() if tail is None else tail
    given = good(rows)
    del given["inputs"][0]["data"]
    given["inputs"][0] |= {"parameters": {"binary_data_size": rows * WIDTH * 4}} | changes
    text = json.dumps(given).encode() if head is None else head
    return Request(text + blob, headers={HEADER: str(len(text)) if told is None else told})


def malformed() -> dict[str, Request]:
    """By what is wrong."""
    found = {name: Request(json.dumps(body).encode()) for name, body in _bodies().items()}
    found |= {name: Request(body) for name, body in _texts().items()}
    found |= _binaries()
    found |= _places()
    return found


def _bodies() -> dict[str, object]:
    first = good()["inputs"][0]
    numbers = first["data"]
    found: dict[str, object] = {
        "a list": [], "a number": 3, "a text": "query", "nothing": None, "true": True, "an empty object": {},
        "inputs missing": {"id": "1"}, "inputs no list": {"inputs": first}, "inputs null": {"inputs": None},
        "inputs empty": {"inputs": []}, "input no object": {"inputs": [3]}, "input a list": {"inputs": [[first]]},
        "input null": {"inputs": [None]}, "an input twice": {"inputs": [first, first]},
        "too many inputs": {"inputs": [first] * 300}, "a further input": {"inputs": [first, {**first, "name": "z"}]},
        "an unknown field": {**good(), "colour": "red"}, "an unknown field of an input": good(colour="red"),
        "id a number": {**good(), "id": 3}, "id too long": {**good(), "id": "x" * 2000},
        "parameters a list": {**good(), "parameters": []}, "parameters text": {**good(), "parameters": "a"},
        "outputs an object": {**good(), "outputs": {}}, "output no object": {**good(), "outputs": ["output"]},
        "output without name": {**good(), "outputs": [{}]}, "output unknown": {**good(), "outputs": [{"name": "y"}]},
        "output twice": {**good(), "outputs": [{"name": "output"}] * 2},
        "output with a field": {**good(), "outputs": [{"name": "output", "shape": [1]}]},
        "output's binary_data text": {**good(), "outputs": [{"name": "output", "parameters": {"binary_data": "yes"}}]},
        "output's classes": {**good(), "outputs": [{"name": "output", "parameters": {"classification": 3}}]},
        "output in shared memory": {
            **good(), "outputs": [{"name": "output", "parameters": {"shared_memory_region": "r"}}]
        },
        "binary_data_output a number": {**good(), "parameters": {"binary_data_output": 1}},
        "a sequence": {**good(), "parameters": {"sequence_id": 7}},
        "a sequence's start": {**good(), "parameters": {"sequence_start": True}},
        "a parameter that is a list": {**good(), "parameters": {"x": [1]}},
        "a parameter that is null": {**good(), "parameters": {"x": None}},
    }  # fmt: skip
    for name, timeout in {"zero": 0, "negative": -5, "text": "soon", "true": True, "a fraction": 1.5}.items():
        found[f"timeout {name}"] = {**good(), "parameters": {"timeout": timeout}}
    changes: dict[str, dict[str, Any]] = {
        "name a number": {"name": 3}, "name empty": {"name": ""}, "name null": {"name": None},
        "name unknown": {"name": "x"}, "name too long": {"name": "x" * 3000}, "name in capitals": {"name": "INPUT"},
        "datatype missing": {"datatype": None}, "datatype unknown": {"datatype": "FLOAT"},
        "datatype a number": {"datatype": 32}, "datatype of another": {"datatype": "FP64"},
        "datatype of integers": {"datatype": "INT32"}, "datatype BYTES": {"datatype": "BYTES"},
        "datatype FP16": {"datatype": "FP16"}, "datatype UINT64": {"datatype": "UINT64"},
        "datatype in small letters": {"datatype": "fp32"},
        "shape missing": {"shape": None}, "shape a number": {"shape": 16}, "shape text": {"shape": "[1, 16]"},
        "shape empty": {"shape": []}, "shape of one": {"shape": [16]}, "shape turned": {"shape": [16, 1]},
        "shape of three": {"shape": [1, 1, 16]}, "shape negative": {"shape": [-1, 16]},
        "shape of fractions": {"shape": [1.0, 16]}, "shape of texts": {"shape": ["1", "16"]},
        "shape of nulls": {"shape": [None, 16]}, "shape of truths": {"shape": [True, 16]},
        "shape no rows": {"shape": [0, 16], "data": []}, "shape too wide": {"shape": [1, 17], "data": [0.0] * 17},
        "shape too narrow": {"shape": [1, 15], "data": [0.0] * 15},
        "shape huge": {"shape": [1 << 40, 16]}, "shape beyond 64 bits": {"shape": [1 << 70, 16]},
        "shape of many axes": {"shape": [1] * 100}, "more rows than a batch": {"shape": [9, 16], "data": [0.0] * 144},
        "data missing": {"data": None}, "data a number": {"data": 1.5}, "data text": {"data": "abc"},
        "data an object": {"data": {"0": 1}}, "data too short": {"data": numbers[1:]},
        "data too long": {"data": [*numbers, 1.0]}, "data empty": {"data": []}, "data of texts": {"data": ["1"] * 16},
        "data of nulls": {"data": [None] * 16}, "data with one null": {"data": [*numbers[1:], None]},
        "data of truths": {"data": [True] * 16}, "data with one truth": {"data": [*numbers[1:], True]},
        "data of objects": {"data": [{}] * 16}, "data over the type": {"data": [1e39] * 16},
        "data of huge integers": {"data": [10**400] * 16}, "data ragged": {"data": [numbers[:8], numbers[:7]]},
        "data in a list too many": {"data": [[numbers]]}, "data nested otherwise": {"data": [[x] for x in numbers]},
        "data half nested": {"data": [numbers[:8], 1, 2, 3, 4, 5, 6, 7, 8]},
        "parameters of an input a list": {"parameters": [1]}, "in shared memory": {"parameters": {
            "shared_memory_region": "r", "shared_memory_byte_size": 64}},
        "binary size and data": {"parameters": {"binary_data_size": 64}},
    }  # fmt: skip
    return found | {name: good(1, **change) for name, change in changes.items()}


def _texts() -> dict[str, bytes]:
    text = json.dumps(good()).encode()
    return {
        "no body": b"", "blanks": b"   \n", "half a body": text[: len(text) // 2], "two bodies": text + text,
        "a comma too many": text.replace(b"]}", b",]}"), "single quotes": text.replace(b'"', b"'"),
        "not UTF-8": text.replace(b"input", b"\xff\xfe\xfd"), "zeros": bytes(64), "xml": b"<query/>",
        "nested deeply": b"[" * 100_000, "objects nested deeply": b'{"inputs":' * 50_000,
        "a form": b"name=input&shape=1", "binary without its header": binary().body, "a long number": b"9" * 5000,
        "a lone surrogate's half": b'{"inputs": "\\ud8', "numbers with letters": text.replace(b"0.25", b"0x25"),
        "a byte order mark": b"\xef\xbb\xbf" + text, "UTF-16": text.decode().encode("utf-16"),
        "a half after a whole": text + b"{",
    }  # fmt: skip


def _binaries() -> dict[str, Request]:
    text = json.dumps(good()).encode()
    whole = binary()
    return {
        "header length text": binary(told="many"), "header length negative": binary(told="-1"),
        "header length empty": Request(text, headers={HEADER: " "}), "header length a fraction": binary(told="1.5"),
        "header length hexadecimal": binary(told="0x10"), "header length with a sign": binary(told="+10"),
        "header length zero": binary(told="0"), "header length short": binary(told="10"),
        "header length beyond": binary(told="99999"), "header length huge": binary(told="9" * 30),
        "header length over the JSON": Request(whole.body, headers={HEADER: str(len(whole.body))}),
        "header length of digits elsewhere": binary(told="٣".encode().decode("latin-1")),
        "blob short": binary(tail=bytes(60)), "blob long": binary(tail=bytes(68)), "blob missing": binary(tail=b""),
        "blob behind data": Request(text + bytes(8), headers={HEADER: str(len(text))}),
        "size of no number": binary(parameters={"binary_data_size": "64"}),
        "size of a fraction": binary(parameters={"binary_data_size": 64.0}),
        "size negative": binary(parameters={"binary_data_size": -64}),
        "size true": binary(parameters={"binary_data_size": True}),
        "size short": binary(parameters={"binary_data_size": 60}, tail=bytes(60)),
        "size long": binary(parameters={"binary_data_size": 68}, tail=bytes(68)),
        "size beyond": binary(parameters={"binary_data_size": 1 << 40}),
        "size missing": binary(parameters={}), "rows beyond a batch": binary(9), "no rows": binary(0),
        "type of another size": binary(datatype="FP64"), "gzip that is none": Request(text, headers={
            "Content-Encoding": "gzip"}),
        "gzip cut off": Request(gzip.compress(text)[:-9], headers={"Content-Encoding": "gzip"}),
        "gzip twice": Request(gzip.compress(text) * 2, headers={"Content-Encoding": "gzip"}),
        "deflate that is none": Request(text, headers={"Content-Encoding": "deflate"}),
        "gzip of nonsense": Request(gzip.compress(b"abc"), headers={"Content-Encoding": "gzip"}),
        "an encoding of another kind": Request(text, headers={"Content-Encoding": "br"}),
        "a body over the limit": Request(bytes(OVER + 1), statuses=(413,)),
        "a body that grows over the limit": Request(
            zlib.compress(bytes(OVER + 1)), headers={"Content-Encoding": "deflate"}, statuses=(413,)
        ),
    }  # fmt: skip


def _places() -> dict[str, Request]:
    text = json.dumps(good()).encode()
    infer = "/v2/models/{}/infer"
    return {
        "a model that is not there": Request(text, path=infer.format("nobody"), statuses=(404,)),
        "a version that is not there": Request(text, path="/v2/models/mlp/versions/9/infer", statuses=(404,)),
        "a version that is no number": Request(text, path="/v2/models/mlp/versions/x/infer", statuses=(404,)),
        "a model without a name": Request(text, path="/v2/models//infer", statuses=(404,)),
        "a path as a model": Request(text, path=infer.format("..%2F..%2Fetc"), statuses=(404,)),
        "a model with zeros": Request(text, path=infer.format("mlp%00"), statuses=(404,)),
        "a very long model": Request(text, path=infer.format("m" * 5000), statuses=(404,)),
        "a path that is not there": Request(text, path="/v2/models/mlp/guess", statuses=(404, 405)),
        "another version of the protocol": Request(text, path="/v1/models/mlp:predict", statuses=(404,)),
        "the root": Request(method="GET", path="/", statuses=(404,)),
        "infer by GET": Request(method="GET", statuses=(405,)),
        "infer by DELETE": Request(method="DELETE", statuses=(405,)),
        "infer by PUT": Request(text, method="PUT", statuses=(405,)),
        "metadata by POST": Request(text, path="/v2/models/mlp", statuses=(405,)),
        "health by POST": Request(path="/v2/health/live", statuses=(405,)),
        "a method of nobody": Request(method="BREW", statuses=(405, 400)),
        "metadata of nobody": Request(method="GET", path="/v2/models/nobody", statuses=(404,)),
        "statistics of nobody": Request(method="GET", path="/v2/models/nobody/stats", statuses=(404,)),
        "load of nobody": Request(path="/v2/repository/models/nobody/load", statuses=(404,)),
        "unload of nobody": Request(path="/v2/repository/models/nobody/unload", statuses=(404,)),
        "load of a path": Request(path="/v2/repository/models/..%2Fx/load", statuses=(404,)),
        "load with a file": Request(
            b'{"parameters": {"file:1/model.weft": "AAAA"}}', path="/v2/repository/models/mlp/load"
        ),
        "load with a configuration": Request(
            b'{"parameters": {"config": "{}"}}', path="/v2/repository/models/mlp/load"
        ),
        "load with a list": Request(b"[]", path="/v2/repository/models/mlp/load"),
        "load with nonsense": Request(b"{", path="/v2/repository/models/mlp/load"),
        "index with a list": Request(b"[]", path="/v2/repository/index"),
        "index with nonsense": Request(b"nonsense", path="/v2/repository/index"),
        "index ready text": Request(b'{"ready": "yes"}', path="/v2/repository/index"),
        "index with a field": Request(b'{"colour": 1}', path="/v2/repository/index"),
        "a header over the limit": Request(text, headers={"X": "x" * 40_000}, statuses=(400, 431)),
    }  # fmt: skip


def changed(count: int, seed: int) -> Iterator[bytes]:
    """Good bodies of HTTP with some bytes changed, cut or doubled; that most are refused is all that is known."""
    chance = random.Random(seed)
    whole = [json.dumps(good(2)).encode(), binary(2).body, json.dumps({**good(), "id": "7"}).encode()]
    for _ in range(count):
        body = bytearray(chance.choice(whole))
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(body))
            what = chance.random()
            if what < 0.5:
                body[at] = chance.randrange(256)
            elif what < 0.7:
                del body[at : at + chance.randint(1, 20)]
            elif what < 0.9:
                body[at:at] = chance.randbytes(chance.randint(1, 8))
            else:
                body[at:at] = body[at : at + chance.randint(1, 40)]
            if not body:
                body += b"{"
        yield bytes(body)
