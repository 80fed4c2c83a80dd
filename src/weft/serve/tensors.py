"""Queries as the protocol writes them: JSON, and bytes behind it for tensors that are sent as they lie in memory.

Strict: what the protocol does not have is refused by name, and nothing is converted that would change a number.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from weft.ir.types import Array
from weft.serve.errors import RequestError
from weft.serve.query import Outputs
from weft.serve.signature import PROTOCOL_TYPES, Signature, TensorSpec

MAX_TENSORS = 256
MAX_RANK = 32
MAX_NAME = 1024
BINARY_SIZE, BINARY, BINARY_ALL = "binary_data_size", "binary_data", "binary_data_output"
REFUSED = {
    "classification": "it gives tensors, not classes",
    "shared_memory_region": "it maps no memory of its clients",
    "shared_memory_offset": "it maps no memory of its clients",
    "shared_memory_byte_size": "it maps no memory of its clients",
    "sequence_id": "its models keep no state between queries",
    "sequence_start": "its models keep no state between queries",
    "sequence_end": "its models keep no state between queries",
}
"""Parameters that would change an answer, and why this server does not have them. Further ones are ignored."""

Parameters = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Given:
    """An input as it was sent: `data` of JSON, or bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: object = None
    raw: memoryview | bytes | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output that was asked for."""

    name: str
    binary: bool


@dataclass(frozen=True, slots=True)
class Infer:
    """A query."""

    id: str = ""
    inputs: tuple[Given, ...] = ()
    outputs: tuple[Wanted, ...] = ()
    """None: all."""
    binary: bool = False
    """How outputs are sent that do not say."""
    timeout_s: float | None = None
    extra: Parameters = field(default_factory=dict)


# -- what was sent


def read(body: memoryview, header_bytes: int | None) -> Infer:
    """A query of HTTP: its body, and how much of it is JSON where the rest is not.

    Raises:
        RequestError: it is none [W019].
    """
    head = body if header_bytes is None else body[:header_bytes]
    tail = body[len(head) :]
    try:
        found = json.loads(bytes(head).decode("utf-8"))  # given bytes, it would guess further encodings
    except UnicodeDecodeError:
        raise RequestError(problem="the body is no text in UTF-8") from None
    except RecursionError:
        raise RequestError(problem="the JSON of the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(problem=f"the body is no JSON: {str(error)[:200]}") from None
    top = _object("the body", found, ("id", "parameters", "inputs", "outputs", "model_name", "model_version"))
    parameters = parameters_of("the query", top.get("parameters"))
    name = top.get("id", "")
    if not isinstance(name, str) or len(name) > MAX_NAME:
        raise RequestError(problem=f"'id' is no text of at most {MAX_NAME} characters")
    inputs = []
    at = 0
    for i, item in enumerate(_list("inputs", top.get("inputs"), required=True)):
        given, size = _input(i, item, tail[at:])
        inputs.append(given)
        at += size
    if at != len(tail):
        raise RequestError(problem=f"{len(tail)} bytes follow the JSON, the inputs' {BINARY_SIZE!r} say {at}")
    binary = _flag(parameters, BINARY_ALL, default=False)
    outputs = tuple(_output(i, x, binary=binary) for i, x in enumerate(_list("outputs", top.get("outputs"))))
    return Infer(name, unique_inputs(inputs), unique_outputs(outputs), binary, timeout_of(parameters))


def _object(what: str, value: object, keys: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise RequestError(problem=f"{what} is no JSON object")
    unknown = next((k for k in value if k not in keys), None)
    if unknown is not None:
        raise RequestError(problem=f"{what} has a field {unknown[:80]!r}; the protocol has {', '.join(keys)}")
    return value


def _list(what: str, value: object, *, required: bool = False) -> list[object]:
    if value is None and not required:
        return []
    if not isinstance(value, list):
        raise RequestError(problem=f"{what!r} is no list" if value is not None else f"there is no {what!r}")
    if len(value) > MAX_TENSORS:
        raise RequestError(problem=f"{what!r} has {len(value)} entries, the most is {MAX_TENSORS}")
    return value


def _input(i: int, item: object, tail: memoryview) -> tuple[Given, int]:
    where = f"input {i}"
    found = _object(where, item, ("name", "shape", "datatype", "parameters", "data"))
    name = _name(where, found.get("name"))
    datatype = found.get("datatype")
    if not isinstance(datatype, str) or datatype not in PROTOCOL_TYPES:
        raise RequestError(problem=f"input {name[:80]!r}: {str(datatype)[:40]!r} is no datatype of the protocol")
    shape = shape_of(name, found.get("shape"))
    parameters = parameters_of(f"input {name[:80]!r}", found.get("parameters"))
    size = parameters.get(BINARY_SIZE)
    if size is None:
        if "data" not in found:
            raise RequestError(problem=f"input {name[:80]!r} has neither 'data' nor {BINARY_SIZE!r}")
        return Given(name, datatype, shape, data=found["data"]), 0
    if "data" in found:
        raise RequestError(problem=f"input {name[:80]!r} has both 'data' and {BINARY_SIZE!r}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise RequestError(problem=f"input {name[:80]!r}: {BINARY_SIZE!r} is no number of bytes")
    if size > len(tail):
        raise RequestError(problem=f"input {name[:80]!r} has {size} bytes, {len(tail)} are left behind the JSON")
    return Given(name, datatype, shape, raw=tail[:size]), size


def _output(i: int, item: object, *, binary: bool) -> Wanted:
    where = f"output {i}"
    found = _object(where, item, ("name", "parameters"))
    parameters = parameters_of(where, found.get("parameters"))
    return Wanted(_name(where, found.get("name")), _flag(parameters, BINARY, default=binary))


def _name(where: str, value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > MAX_NAME:
        raise RequestError(problem=f"{where} has no name of 1 to {MAX_NAME} characters")
    return value


def shape_of(name: str, value: object) -> tuple[int, ...]:
    """RequestError where it is none [W019]."""
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise RequestError(problem=f"input {name[:80]!r}: 'shape' is no list of at most {MAX_RANK} sizes")
    if any(not isinstance(x, int) or isinstance(x, bool) or not 0 <= x < 1 << 62 for x in value):
        raise RequestError(problem=f"input {name[:80]!r}: 'shape' has something else than sizes")
    return tuple(value)


def parameters_of(where: str, value: object) -> Parameters:
    """RequestError where they are none, or one is refused [W019]."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(problem=f"the parameters of {where} are no JSON object")
    for key, x in value.items():
        if key in REFUSED:
            raise RequestError(problem=f"{where} asks for {key!r}, which this server does not have: {REFUSED[key]}")
        if not isinstance(x, str | int | float | bool):
            raise RequestError(problem=f"{where}: parameter {key[:80]!r} is neither text, number nor truth value")
    return value


def _flag(parameters: Parameters, name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(problem=f"parameter {name!r} is neither true nor false")
    return value


def timeout_of(parameters: Parameters) -> float | None:
    """Seconds, of the microseconds that a query may say it waits; RequestError where they are none [W019]."""
    value = parameters.get("timeout")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).isdecimal() or int(value) <= 0:
        raise RequestError(problem="parameter 'timeout' is no number of microseconds")
    return min(int(str(value)[:18]) / 1e6, 1e6)


def unique_inputs(given: Sequence[Given]) -> tuple[Given, ...]:
    """RequestError where one is there twice [W019]."""
    _unique("input", [g.name for g in given])
    return tuple(given)


def unique_outputs(wanted: Sequence[Wanted]) -> tuple[Wanted, ...]:
    """RequestError where one is there twice [W019]."""
    _unique("output", [w.name for w in wanted])
    return tuple(wanted)


def _unique(what: str, names: Sequence[str]) -> None:
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise RequestError(problem=f"{what} {twice[:80]!r} is there twice")


# -- as arrays


def arrays_of(query: Infer, signature: Signature) -> dict[str, Array]:
    """The inputs of a query for this model.

    Raises:
        RequestError: they do not fit it, or their data do not fit them [W019].
    """
    signature.rows_of({g.name: (g.datatype, g.shape) for g in query.inputs})
    specs = {s.name: s for s in signature.inputs}
    return {g.name: _array(g, specs[g.name]) for g in query.inputs}


def _array(given: Given, spec: TensorSpec) -> Array:
    count = math.prod(given.shape)
    if given.raw is not None:
        if len(given.raw) != count * spec.dtype.itemsize:
            problem = f"{list(given.shape)} of {spec.datatype} are {count * spec.dtype.itemsize} bytes"
            raise RequestError(problem=f"input {spec.name!r} has {len(given.raw)} bytes, {problem}")
        found = np.frombuffer(given.raw, dtype=spec.dtype.newbyteorder("<")).reshape(given.shape)
        if spec.datatype == "BOOL" and (np.frombuffer(given.raw, np.uint8) > 1).any():
            raise RequestError(problem=f"input {spec.name!r} has a byte that is neither 0 nor 1")
        return found
    if spec.datatype == "BF16":
        raise RequestError(problem=f"input {spec.name!r} is BF16, which JSON does not have: send it as binary data")
    flat = _flat(spec.name, given.data, given.shape)
    if len(flat) != count:
        raise RequestError(problem=f"input {spec.name!r} has {len(flat)} numbers, its shape says {count}")
    return _converted(spec, flat).reshape(given.shape)


def _flat(name: str, data: object, shape: Sequence[int]) -> list[object]:
    """Numbers in order: a list of them, or lists in lists as the shape says."""
    if not isinstance(data, list):
        raise RequestError(problem=f"input {name!r}: 'data' is no list")
    level: list[object] = data
    sizes = [len(data)]
    while level and isinstance(level[0], list):
        lengths = {len(x) if isinstance(x, list) else -1 for x in level}
        if len(lengths) > 1:
            raise RequestError(problem=f"input {name!r}: its lists are not of one length")
        sizes.append(lengths.pop())
        if len(sizes) > len(shape):
            break
        level = list(itertools.chain.from_iterable(cast("list[list[object]]", level)))
    if len(sizes) > 1 and tuple(sizes) != tuple(shape):
        raise RequestError(problem=f"input {name!r}: its lists are {sizes[:16]}, its shape says {list(shape)}")
    return level


_PYTHON: Mapping[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""What JSON may have for a kind of elements."""


def _converted(spec: TensorSpec, flat: list[object]) -> Array:
    kinds = set(map(type, flat))
    dtype = spec.dtype
    allowed = _PYTHON[dtype.kind]
    if not kinds <= allowed:
        names = sorted(k.__name__ for k in kinds - allowed)
        raise RequestError(problem=f"input {spec.name!r} is {spec.datatype} and has data of type {', '.join(names)}")
    try:
        with np.errstate(over="raise"):
            wide = np.array(flat, dtype=np.float64 if dtype.kind == "f" else dtype)
            return wide.astype(dtype)
    except (OverflowError, FloatingPointError):
        raise RequestError(problem=f"input {spec.name!r} has a number that is too large for {spec.datatype}") from None


# -- what is sent back


def chosen(query: Infer, signature: Signature) -> list[tuple[int, TensorSpec, bool]]:
    """The outputs that a query wants: position, what it is, and whether it is sent as bytes.

    Raises:
        RequestError: there is no such output, or JSON does not have its type [W019].
    """
    places = {s.name: i for i, s in enumerate(signature.outputs)}
    wanted = query.outputs or tuple(Wanted(n, query.binary) for n in places)
    for w in wanted:
        if w.name not in places:
            raise RequestError(problem=f"the model has no output {w.name[:80]!r}")
        if not w.binary and signature.outputs[places[w.name]].datatype == "BF16":
            raise RequestError(problem=f"output {w.name!r} is BF16, which JSON does not have: ask for binary data")
    return [(places[w.name], signature.outputs[places[w.name]], w.binary) for w in wanted]


def shaped(output: Array, signature: Signature) -> Array:
    """An output without the axis in front that it has where queries are not packed."""
    return output if signature.packs else output[0]


def write(
    query: Infer, name: str, version: str, signature: Signature, outputs: Outputs
) -> tuple[bytes, int | None]:  # fmt: skip
    """The body of an answer, and how much of it is JSON where not all is.

    Numbers that JSON lacks are written `NaN`, `Infinity` and `-Infinity`, as Python and Triton write them.
    """
    told, blobs = [], []
    for place, spec, binary in chosen(query, signature):
        array = shaped(outputs[place], signature)
        about: dict[str, object] = {"name": spec.name, "datatype": spec.datatype, "shape": list(array.shape)}
        if binary:
            blob = bytes_of(array)
            blobs.append(blob)
            about["parameters"] = {BINARY_SIZE: len(blob)}
        else:
            about["data"] = array.reshape(-1).tolist()
        told.append(about)
    answer: dict[str, object] = {"model_name": name, "model_version": version, "outputs": told}
    if query.id:
        answer["id"] = query.id
    head = json.dumps(answer, separators=(",", ":")).encode()
    return (head + b"".join(blobs), len(head)) if blobs else (head, None)


def bytes_of(array: Array) -> bytes:
    """As the protocol sends them: little-endian, row by row."""
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
