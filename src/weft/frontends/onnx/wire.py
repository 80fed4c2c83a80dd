"""How an import crosses from the parsing process: a JSON document and one block of raw tensors, both re-checked.

The receiver trusts nothing: every node's type is inferred again, every constant is hashed again, every range is
checked against the block. A forged message yields an error, never a broken graph.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast, get_args

import numpy as np

from weft.frontends.imported import Imported, OpaqueUse, ValueGuard
from weft.frontends.onnx.external import ExternalRange
from weft.frontends.onnx.partition import Partition
from weft.ir import attrs as a
from weft.ir.graph import Graph, Node, Origin, OriginParam, digest_of
from weft.ir.prims import Prim
from weft.ir.shapes import infer
from weft.ir.types import Array, DType, TensorType

Json = Any
ALIGNMENT = 64
_ATTRS = {c.__name__: c for c in get_args(a.Attrs)}


class WireError(ValueError):
    """A message that is not one of ours."""


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise WireError(what)


# Values: JSON has no tuples, element types or tensor types.


def _pack(value: object) -> Json:
    if isinstance(value, DType):
        return {"d": value.value}
    if isinstance(value, TensorType):
        return {"t": [value.dtype.value, list(value.shape)]}
    if isinstance(value, tuple):
        return [_pack(v) for v in value]
    if isinstance(value, float):
        return {"f": value.hex()}
    return value


def _unpack(value: Json) -> Any:
    if isinstance(value, list):
        return tuple(_unpack(v) for v in value)
    if isinstance(value, dict):
        _need(len(value) == 1, "value")
        ((kind, inner),) = value.items()
        if kind == "d":
            return DType(inner)
        if kind == "t":
            return _type(inner)
        if kind == "f":
            return float.fromhex(inner)
        raise WireError(f"value of kind {kind!r}")
    return value


def _type(value: Json) -> TensorType:
    name, shape = value
    _need(all(isinstance(n, int) and 0 <= n < 2**62 for n in shape), "shape")
    return TensorType(DType(name), tuple(shape))


def to_message(imported: Imported, external: Mapping[int, ExternalRange]) -> tuple[Json, list[tuple[int, Array]], int]:
    """The document, the arrays with their offsets in the block, and the block's size in bytes."""
    graph = imported.graph
    types = {cast("a.ConstantAttrs", n.attrs).digest: n.type.dtype for n in graph.nodes if n.prim is Prim.CONSTANT}
    constants: dict[str, Json] = {}
    block: list[tuple[int, Array]] = []
    end = 0
    for digest, data in graph.constants.items():
        entry: dict[str, Json] = {"type": [types[digest].value, list(data.shape)]}
        place = external.get(data.__array_interface__["data"][0]) if data.size else None
        if place is not None and place.length == data.nbytes:
            entry["external"] = [place.location, place.offset, place.length]
        elif data.nbytes:
            entry["offset"] = end
            block.append((end, data))
            end += -(-data.nbytes // ALIGNMENT) * ALIGNMENT
        constants[digest] = entry
    document = {
        "nodes": [
            [
                n.prim.value,
                list(n.inputs),
                [type(n.attrs).__name__, *(_pack(getattr(n.attrs, f.name)) for f in fields(n.attrs))],
                [n.type.dtype.value, list(n.type.shape)],
                n.origin,
            ]
            for n in graph.nodes
        ],
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "input_names": list(graph.input_names),
        "output_names": list(graph.output_names),
        "origins": [
            [o.rule, [[k, _pack(v)] for k, v in o.params], list(o.operands), list(o.results), o.source, o.location]
            for o in graph.origins
        ],
        "constants": constants,
        "operators": imported.operators,
        "opaque": [[u.op, u.reason, u.count] for u in imported.opaque],
        "guards": [
            [g.input_index, _pack(g.type), base64.b64encode(bytes.fromhex(g.data)).decode("ascii"), g.reason]
            for g in imported.guards
        ],
        "notes": list(imported.notes),
    }
    return document, block, end


def from_message(document: Json, block: memoryview, read_external: Callable[[ExternalRange, str], Array]) -> Imported:
    """The import, checked.

    Raises:
        WireError: not a message of ours.
        ModelError: external data that changed or cannot be opened.
    """
    try:
        return _from_message(document, block, read_external)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from error


def _from_message(document: Json, block: memoryview, read_external: Callable[[ExternalRange, str], Array]) -> Imported:
    constants = {
        digest: _constant(digest, entry, block, read_external) for digest, entry in document["constants"].items()
    }
    nodes: list[Node] = []
    origins = tuple(_origin(o, len(document["nodes"])) for o in document["origins"])
    for k, (prim, inputs, packed, type, origin) in enumerate(document["nodes"]):
        _need(all(isinstance(i, int) and 0 <= i < k for i in inputs), f"operands of node {k}")
        _need(isinstance(origin, int) and -1 <= origin < len(origins), f"origin of node {k}")
        kind = _ATTRS[packed[0]]
        attrs = cast("a.Attrs", kind(*map(_unpack, packed[1:])))
        said = _type(type)
        p = Prim(prim)
        if p is Prim.CONSTANT:
            value = constants[cast("a.ConstantAttrs", attrs).digest]
            _need(value.shape == said.shape and value.dtype == said.dtype.numpy, f"constant {k}")
        elif p is not Prim.INPUT:
            found = infer(p, tuple(nodes[i].type for i in inputs), attrs)
            _need(found == said, f"type of node {k}")
        nodes.append(Node(p, tuple(inputs), attrs, said, origin))
    given = [n for n in nodes if n.prim is Prim.INPUT]
    inputs, outputs = tuple(document["inputs"]), tuple(document["outputs"])
    _need(len(given) == len(inputs), "inputs")
    _need(all(isinstance(i, int) and 0 <= i < len(nodes) for i in (*inputs, *outputs)), "inputs or outputs")
    _need(all(nodes[i].attrs == a.InputAttrs(k) for k, i in enumerate(inputs)), "order of the inputs")
    graph = Graph(
        nodes=tuple(nodes),
        inputs=inputs,
        outputs=outputs,
        constants=constants,
        origins=origins,
        input_names=_texts(document["input_names"], len(inputs)),
        output_names=_texts(document["output_names"], len(outputs)),
    )
    guards = tuple(
        ValueGuard(int(i), _unpack(t), base64.b64decode(data).hex(), str(reason))
        for i, t, data, reason in document["guards"]
    )
    _need(all(0 <= g.input_index < len(inputs) for g in guards), "guards")
    return Imported(
        graph,
        int(document["operators"]),
        tuple(OpaqueUse(str(op), str(reason), int(n)) for op, reason, n in document["opaque"]),
        guards,
        _texts(document["notes"], None),
    )


def partition_to_message(partition: Partition, at: int) -> Json:
    """What is left to ONNX Runtime, which lies at this byte of the block."""
    return {
        "rest": [at, len(partition.rest)],
        "fed": list(partition.fed),
        "results": list(partition.results),
        "operators": sorted(partition.operators.items()),
    }


def partition_from_message(compiled: Imported, told: Json, block: memoryview) -> Partition:
    """A model in two partitions, checked.

    Raises:
        WireError: not a message of ours.
    """
    try:
        at, size = told["rest"]
        _need(isinstance(at, int) and isinstance(size, int) and 0 <= at <= at + size <= len(block), "rest")
        fed, results = (tuple(told[k]) for k in ("fed", "results"))
        _need(all(isinstance(k, int) for k in (*fed, *results)), "places")
        graph = compiled.graph
        _need(all(-len(graph.inputs) <= k < len(graph.outputs) for k in fed), "what is fed")
        left = [k for k in results if k >= 0]
        _need(sorted(left) == list(range(len(left))) and min(results, default=0) >= -len(graph.outputs), "results")
        operators = {str(name): int(count) for name, count in told["operators"]}
        return Partition(compiled, bytes(block[at : at + size]), fed, results, operators)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise WireError(f"{type(error).__name__}: {error}") from error


def _texts(value: Sequence[object], count: int | None) -> tuple[str, ...]:
    _need(all(isinstance(v, str) for v in value) and count in (None, len(value)), "names")
    return cast("tuple[str, ...]", tuple(value))


def _origin(value: Json, count: int) -> Origin:
    rule, params, operands, results, source, location = value
    _need(all(isinstance(i, int) and -1 <= i < count for i in (*operands, *results)), "origin")
    named = tuple((str(k), cast("OriginParam", _unpack(v))) for k, v in params)
    return Origin(str(rule), named, tuple(operands), tuple(results), str(source), str(location))


def _constant(
    digest: str, entry: Json, block: memoryview, read_external: Callable[[ExternalRange, str], Array]
) -> Array:
    type = _type(entry["type"])
    size = type.size * type.dtype.numpy.itemsize
    if "external" in entry:
        location, offset, length = entry["external"]
        _need(length == size, "external length")
        raw = read_external(ExternalRange(str(location), int(offset), int(length)), "external data")
        data: Array = raw.view(type.dtype.numpy)
    elif size == 0:
        data = np.zeros(0, type.dtype.numpy)
    else:
        start = entry["offset"]
        _need(isinstance(start, int) and 0 <= start <= len(block) - size, "offset")
        data = np.frombuffer(block, np.uint8, size, start).view(type.dtype.numpy)
        if type.dtype is DType.BOOL:
            _need(not (data.view(np.uint8) > 1).any(), "bool")
    data = data.reshape(type.shape)
    _need(digest_of(type.dtype, data) == digest, "digest")
    data.flags.writeable = False
    return data
