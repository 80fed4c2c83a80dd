"""Problems as JSON values and back: what the tuner sends to a worker. Tensors never cross, constants do.

The receiver builds the graph anew with `GraphBuilder`, so a message that is not a well-typed graph is an error
and never a half-right problem.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, cast

import numpy as np

from weft.errors import ArtifactError, InvalidGraphError
from weft.ir import attrs as a
from weft.ir.graph import Graph, GraphBuilder, OriginParam
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.codec import Json
from weft.kernels.formats import Format


def _type_to_json(t: TensorType) -> Json:
    return [t.dtype.value, list(t.shape)]


def _type_from_json(data: Json) -> TensorType:
    dtype, shape = cast("tuple[str, list[int]]", data)
    return TensorType(DType(dtype), tuple(int(n) for n in shape))


def _field_to_json(value: object) -> Json:
    if isinstance(value, DType):
        return {"dtype": value.value}
    if isinstance(value, float):
        return {"float": value.hex()}  # infinities and NaN have no JSON form
    if isinstance(value, TensorType):
        return {"type": _type_to_json(value)}
    if isinstance(value, tuple):
        return [_field_to_json(v) for v in value]
    return cast("Json", value)


def _field_from_json(data: Json) -> object:
    if isinstance(data, Mapping):
        if "dtype" in data:
            return DType(str(data["dtype"]))
        return float.fromhex(str(data["float"])) if "float" in data else _type_from_json(data["type"])
    if isinstance(data, list):
        return tuple(_field_from_json(v) for v in data)
    return data


def graph_to_json(graph: Graph) -> Json:
    """Nodes, inputs, outputs and the constants that are used; names and origins stay behind."""
    nodes: list[Json] = []
    used: dict[str, Json] = {}
    for node in graph.nodes:
        attrs = {f.name: _field_to_json(getattr(node.attrs, f.name)) for f in fields(node.attrs)}
        nodes.append([node.prim.value, list(node.inputs), attrs, _type_to_json(node.type)])
        if isinstance(node.attrs, a.ConstantAttrs):
            data = np.ascontiguousarray(graph.constants[node.attrs.digest])
            used[node.attrs.digest] = base64.b64encode(data.tobytes()).decode()
    return {"nodes": nodes, "inputs": list(graph.inputs), "outputs": list(graph.outputs), "constants": used}


def graph_from_json(data: Json) -> Graph:
    """Inverse of `graph_to_json` up to names and origins.

    Raises:
        ArtifactError: not such a value, or a graph that is not well-typed [W401].
    """
    try:
        return _build(cast("Mapping[str, Json]", data))
    except (KeyError, TypeError, ValueError, IndexError, InvalidGraphError) as error:
        raise ArtifactError(problem=f"malformed graph: {error}", remedy="send a graph of this version") from None


def _build(data: Mapping[str, Json]) -> Graph:
    nodes = cast("Sequence[tuple[str, list[int], dict[str, Json], Json]]", data["nodes"])
    constants = cast("Mapping[str, str]", data["constants"])
    b = GraphBuilder()
    ids: dict[int, int] = {}
    signature = cast("Sequence[int]", data["inputs"])

    def add_input(i: int) -> None:
        attrs = cast("a.InputAttrs", _attrs(Prim.INPUT, nodes[i][2]))
        ids[i] = b.input(_type_from_json(nodes[i][3]), is_weight=attrs.is_weight)

    if list(signature) != sorted(signature):  # else they are added where they stand, so that no node changes its number
        for i in signature:
            add_input(i)
    for i, (name, inputs, raw, type) in enumerate(nodes):
        prim = Prim(name)
        if prim is Prim.INPUT:
            if i not in signature:
                raise ValueError(f"input %{i} is not in the signature")
            if i not in ids:
                add_input(i)
            continue
        attrs_ = _attrs(prim, raw)
        if isinstance(attrs_, a.ConstantAttrs):
            t = _type_from_json(type)
            flat = np.frombuffer(base64.b64decode(constants[attrs_.digest]), dtype=t.dtype.numpy)
            ids[i] = b.constant(flat.reshape(t.shape), t.dtype)
        else:
            ids[i] = b.add(prim, *(ids[j] for j in inputs), attrs=attrs_)
        if b.type_of(ids[i]) != _type_from_json(type):
            raise ValueError(f"%{i} has type {b.type_of(ids[i])}")
    return b.build([ids[i] for i in cast("Sequence[int]", data["outputs"])])


def _attrs(prim: Prim, raw: Mapping[str, Json]) -> a.Attrs:
    return cast("a.Attrs", a.ATTRS[prim](**{k: _field_from_json(v) for k, v in raw.items()}))


def arrays_to_json(arrays: Mapping[int, Array]) -> Json:
    """Values of some of a problem's inputs, by position."""
    return {str(k): base64.b64encode(np.ascontiguousarray(x).tobytes()).decode() for k, x in arrays.items()}


def arrays_from_json(problem: Problem, data: Json) -> dict[int, Array]:
    """Inverse of `arrays_to_json`, for inputs of that problem.

    Raises:
        KeyError, TypeError or ValueError: not such a value.
    """
    found: dict[int, Array] = {}
    for name, text in cast("Mapping[str, str]", data).items():
        t = problem.graph.type_of(problem.graph.inputs[int(name)])
        found[int(name)] = np.frombuffer(base64.b64decode(text), dtype=t.dtype.numpy).reshape(t.shape)
    return found


def problem_to_json(problem: Problem) -> Json:
    """Graph, key, formats and, where there is one, the operator whose primitives it is."""
    origin: Json = {
        "rule": problem.origin_rule,
        "params": _field_to_json(problem.origin_params),
        "operands": list(problem.origin_operands),
        "operand_nodes": list(problem.origin_operand_nodes),
    }
    return {
        "graph": graph_to_json(problem.graph),
        "key": problem.key,
        "input_formats": [f.value for f in problem.input_formats],
        "output_formats": [f.value for f in problem.output_formats],
        "alignment": problem.alignment,
        "finite": problem.finite,
        **({"origin": origin} if problem.origin_rule else {}),
    }


_NO_ORIGIN: Mapping[str, Any] = {"rule": "", "params": [], "operands": [], "operand_nodes": []}
"""Of problems that are no operator's."""


def _param_from_json(data: Json) -> OriginParam:
    found = _field_from_json(data)
    if not isinstance(found, int | float | str | tuple):
        raise TypeError(f"a parameter that is {found!r}")
    return found


def problem_from_json(data: Json) -> Problem:
    """Inverse of `problem_to_json`; without an origin where none is told.

    Raises:
        ArtifactError: not such a value [W401].
    """
    try:
        record = cast("Mapping[str, Json]", data)
        ins = tuple(Format(str(f)) for f in cast("Sequence[str]", record["input_formats"]))
        outs = tuple(Format(str(f)) for f in cast("Sequence[str]", record["output_formats"]))
        graph = graph_from_json(record["graph"])
        if len(ins) != len(graph.inputs) or len(outs) != len(graph.outputs):
            raise ValueError("one format per input and output")
        alignment = int(cast("int", record["alignment"]))
        origin = cast("Mapping[str, Any]", record.get("origin", _NO_ORIGIN))
        return Problem(
            graph,
            str(record["key"]),
            ins,
            outs,
            str(origin["rule"]),
            tuple((str(name), _param_from_json(x)) for name, x in origin["params"]),
            tuple(map(int, origin["operands"])),
            tuple(map(int, origin["operand_nodes"])),
            alignment=alignment,
            finite=bool(record["finite"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(problem=f"malformed problem: {error}", remedy="send one of this version") from None
