"""The text form of graphs: one line per node, printed and parsed without loss.

    graph 1
    inputs %0 "x"
    %0 = input() index=0 : 4x128xf32
    %1 = constant() values=(2.0) : f32
    %2 = broadcast(%1) shape=(4, 128) : 4x128xf32
    %3 = mul(%0, %2) : 4x128xf32 @0
    outputs %3 "y"
    @0 {"rule": "scale", "params": {"by": 2.0}, "operands": [0], "results": [3], "source": "", "location": ""}

Constants of at most `INLINE_LIMIT` elements stand in the text by value, larger ones by digest: their data travel
beside the text. The parser is for our own files, which somebody may have edited: it refuses whatever it does not
know and never evaluates anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import NoReturn, cast

import numpy as np

from weft.errors import InvalidGraphError, ModelError
from weft.ir import attrs as a
from weft.ir.graph import Graph, Node, NodeId, Origin, OriginParam, digest_of, digests_of
from weft.ir.prims import Prim
from weft.ir.shapes import ShapeError, infer
from weft.ir.types import Array, DType, TensorType, round_emulated
from weft.ir.verify import verify_graph

FORMAT = 1
"""Version of the text form; a reader refuses any other."""
INLINE_LIMIT = 16
"""Constants of at most so many elements are printed by value."""

_STRING = r'"(?:[^"\\]|\\.)*+"'
_VALUE = rf'(?:{_STRING}|\([^()"]*+\)|[^\s()":]++)'
_NODE = re.compile(
    rf"%(?P<id>\d{{1,9}}) = (?P<prim>[a-z][a-z_0-9]*)\((?P<inputs>[^()]*+)\)"
    rf"(?P<attrs>(?: [a-z_]+={_VALUE})*+) : (?P<type>[0-9a-z]+)(?: @(?P<origin>\d{{1,9}}))?"
)
_ATTR = re.compile(rf" ([a-z_]+)=({_VALUE})")
_SIGNATURE = re.compile(rf"(?:%\d{{1,9}}(?: {_STRING})?(?:, |$))*+")
_SIGNATURE_ITEM = re.compile(rf"%(\d{{1,9}})(?: ({_STRING}))?")
_ORIGIN = re.compile(r"@(\d{1,9}) (\{.*\})")
_INTEGER = re.compile(r"-?\d{1,19}")
_FLOAT = re.compile(r"-?(?:inf|nan|\d{1,400}(?:\.\d{1,400})?(?:e[+-]?\d{1,4})?)")


class _MalformedError(ValueError):
    """What is wrong with one piece of text; the caller adds the line."""


# Printing and reading single values.


def _print_tuple(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _read_tuple(text: str) -> list[str]:
    if not (text.startswith("(") and text.endswith(")")):
        raise _MalformedError(f"{text} is no tuple")
    inner = text[1:-1].removesuffix(",").strip()
    return [item.strip() for item in inner.split(",")] if inner else []


def _read_int(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise _MalformedError(f"{text!r} is no integer")
    return int(text)


def _read_float(text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise _MalformedError(f"{text!r} is no number")
    return float(text)


def _read_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise _MalformedError(f"{text!r} is neither true nor false")
    return text == "true"


def _read_string(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _MalformedError("malformed string") from None
    if not isinstance(value, str):
        raise _MalformedError(f"{text[:40]} is no string")
    return value


def _read_dtype(text: str) -> DType:
    try:
        return DType(text)
    except ValueError:
        raise _MalformedError(f"unknown element type {text!r}") from None


def _read_type(text: str) -> TensorType:
    *shape, dtype = text.split("x")
    type = TensorType(_read_dtype(dtype), tuple(map(_read_int, shape)))
    if min(type.shape, default=0) < 0 or type.size >= 2**62:
        raise _MalformedError(f"bad shape {text}")
    return type


def _read_word(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise _MalformedError(f"{text!r} is none of {', '.join(words)}")
        return text

    return read


_Print = Callable[[object], str]
_Read = Callable[[str], object]
_CODECS: Mapping[str, tuple[_Print, _Read]] = {
    "int": (str, _read_int),
    "bool": (lambda v: "true" if v else "false", _read_bool),
    "float": (lambda v: repr(float(cast("float", v))), _read_float),
    "str": (json.dumps, _read_string),
    "DType": (lambda v: cast("DType", v).value, _read_dtype),
    "ScanKind": (str, _read_word("sum", "prod", "linear")),
    "PadMode": (str, _read_word("constant", "reflect", "edge")),
    "Literal['aten', 'onnx']": (str, _read_word("aten", "onnx")),
    "tuple[int, ...]": (
        lambda v: _print_tuple([str(i) for i in cast("tuple[int, ...]", v)]),
        lambda text: tuple(map(_read_int, _read_tuple(text))),
    ),
    "tuple[TensorType, ...]": (
        lambda v: _print_tuple([str(t) for t in cast("tuple[TensorType, ...]", v)]),
        lambda text: tuple(map(_read_type, _read_tuple(text))),
    ),
}
"""How a field of an attribute record is written, by its annotation."""


def _print_attrs(attrs: a.Attrs, *, everything: bool) -> str:
    parts = []
    for field in fields(attrs):
        if not field.compare and not everything:
            continue  # a field for people, no part of the node's identity
        show, _ = _CODECS[str(field.type)]
        text = show(getattr(attrs, field.name))
        # compared as text, since -0.0 == 0.0
        if field.default is MISSING or text != show(field.default):
            parts.append(f" {field.name}={text}")
    return "".join(parts)


def _read_attrs(prim: Prim, given: dict[str, str]) -> a.Attrs:
    kind = a.ATTRS[prim]
    known = {field.name: field for field in fields(kind)}
    for name in given:
        if name not in known:
            raise _MalformedError(f"{prim.value} has no attribute {name!r}")
    for name, field in known.items():
        if field.default is MISSING and name not in given:
            raise _MalformedError(f"{prim.value} lacks attribute {name!r}")
    values = {name: _CODECS[str(known[name].type)][1](text) for name, text in given.items()}
    return cast("a.Attrs", kind(**values))


# Constants by value.


def _print_element(value: np.generic, dtype: DType) -> str:
    if dtype is DType.BOOL:
        return "true" if value else "false"
    if dtype.is_integer:
        return str(int(cast("int", value)))
    # the shortest text that names the value in its own type reads best; reading it goes through a double,
    # which can round twice, so fall back on the exact double
    short, exact = str(value), repr(float(cast("float", value)))
    with np.errstate(over="ignore"):
        same = np.array(float(short)).astype(dtype.numpy) == value
    return short if same or np.isnan(cast("float", value)) else exact


def _read_values(texts: list[str], type: TensorType) -> Array:
    if len(texts) != type.size:
        raise _MalformedError(f"{len(texts)} values for {type}")
    dtype = type.dtype
    if dtype is DType.BOOL:
        return np.array([_read_bool(t) for t in texts], np.bool_).reshape(type.shape)
    if dtype.is_integer:
        try:
            return np.array([_read_int(t) for t in texts], dtype.numpy).reshape(type.shape)
        except OverflowError:
            raise _MalformedError(f"a value does not fit {dtype.value}") from None
    with np.errstate(over="ignore"):
        data = np.array([_read_float(t) for t in texts], np.float64).astype(dtype.numpy).reshape(type.shape)
    return round_emulated(data, dtype)


def _inline_values(digest: str, type: TensorType, data: Array | None) -> str | None:
    """Text of a small constant; None where the digest must stand for it."""
    if data is None or data.shape != type.shape or data.dtype != type.dtype.numpy or data.size > INLINE_LIMIT:
        return None
    texts = [_print_element(value, type.dtype) for value in data.reshape(-1)]
    # a NaN may carry bits that the text does not show
    return _print_tuple(texts) if digest_of(type.dtype, _read_values(texts, type)) == digest else None


# Whole graphs.


def _print_signature(word: str, nodes: tuple[NodeId, ...], names: tuple[str, ...]) -> str:
    items = [f"%{n}" + (f" {json.dumps(names[i])}" if i < len(names) else "") for i, n in enumerate(nodes)]
    return f"{word} {', '.join(items)}".rstrip()


def _print_origin(index: int, o: Origin) -> str:
    record = {
        "rule": o.rule,
        "params": dict(o.params),
        "operands": o.operands,
        "results": o.results,
        "source": o.source,
        "location": o.location,
    }
    return f"@{index} {json.dumps(record)}"


def print_graph(graph: Graph, *, origins: bool = False) -> str:
    """Text of a graph; the same text means the same program.

    With `origins` the text also says which source operators the nodes come from and why opaque ones are opaque,
    so that parsing gives back the whole graph.
    """
    lines = [f"graph {FORMAT}", _print_signature("inputs", graph.inputs, graph.input_names)]
    for i, node in enumerate(graph.nodes):
        attrs = _print_attrs(node.attrs, everything=origins)
        if isinstance(node.attrs, a.ConstantAttrs):
            digest = node.attrs.digest
            values = _inline_values(digest, node.type, graph.constants.get(digest))
            attrs = f" digest={json.dumps(digest)}" if values is None else f" values={values}"
        mark = f" @{node.origin}" if origins and node.origin >= 0 else ""
        operands = ", ".join(f"%{j}" for j in node.inputs)
        lines.append(f"%{i} = {node.prim.value}({operands}){attrs} : {node.type}{mark}")
    lines.append(_print_signature("outputs", graph.outputs, graph.output_names))
    if origins:
        lines += [_print_origin(i, origin) for i, origin in enumerate(graph.origins)]
    return "\n".join(lines)


def _read_signature(word: str, text: str) -> tuple[tuple[NodeId, ...], tuple[str, ...]]:
    rest = text.removeprefix(word).removeprefix(" ")
    if not text.startswith(word) or not _SIGNATURE.fullmatch(rest) or rest.endswith(", "):
        raise _MalformedError(f'expected `{word} %0 "name", …`')
    items = _SIGNATURE_ITEM.findall(rest)
    names = [_read_string(name) for _, name in items if name]
    if any(name for _, name in items[len(names) :]):
        raise _MalformedError("a name after an unnamed value")
    return tuple(int(i) for i, _ in items), tuple(names)


def _read_operands(text: str, here: NodeId) -> tuple[NodeId, ...]:
    if not text:
        return ()
    found = []
    for item in text.split(", "):
        if not re.fullmatch(r"%\d{1,9}", item):
            raise _MalformedError(f"{item[:40]!r} is no operand")
        if int(item[1:]) >= here:
            raise _MalformedError(f"%{here} reads {item}, which does not stand before it")
        found.append(int(item[1:]))
    return tuple(found)


def _read_constant(given: dict[str, str], type: TensorType, data: Mapping[str, Array]) -> tuple[str, Array]:
    if given.keys() == {"values"}:
        values = _read_values(_read_tuple(given["values"]), type)
        values.flags.writeable = False
        return digest_of(type.dtype, values), values
    if given.keys() != {"digest"}:
        raise _MalformedError("constant takes either values or a digest")
    digest = _read_string(given["digest"])
    if digest not in data:
        raise _MalformedError(f"the data of constant {digest[:16]!r}… are missing")
    found = data[digest]
    if found.shape != type.shape or found.dtype != type.dtype.numpy:
        raise _foreign(digest)  # their bytes are looked at later: see `_check_data`
    view = found.view()
    view.flags.writeable = False
    return digest, view


def _foreign(digest: str) -> _MalformedError:
    return _MalformedError(f"the data of constant {digest[:16]!r}… are not those of its digest")


def _check_data(reader: _Reader, first: int, nodes: list[Node], found: Mapping[str, Array]) -> None:
    """All constants against their digests, side by side; `first` is the line of the first node."""
    stand = [(i, n.attrs.digest, n.type.dtype) for i, n in enumerate(nodes) if isinstance(n.attrs, a.ConstantAttrs)]
    digests = digests_of([(dtype, found[digest]) for _, digest, dtype in stand])
    for (i, digest, _), real in zip(stand, digests, strict=True):
        if real != digest:
            reader.at = first + i
            raise _foreign(digest)


def _read_origin(text: str, index: int, num_nodes: int) -> Origin:
    match = _ORIGIN.fullmatch(text)
    if not match or int(match[1]) != index:
        raise _MalformedError(f"expected origin @{index}")
    try:
        record = json.loads(match[2])
    except (ValueError, RecursionError):
        raise _MalformedError("an origin that is no JSON") from None
    if set(record) != {field.name for field in fields(Origin)}:
        raise _MalformedError("an origin with missing or unknown fields")

    def nodes(name: str, least: int = -1) -> tuple[NodeId, ...]:
        ids = record[name]
        if not isinstance(ids, list) or not all(type(i) is int and least <= i < num_nodes for i in ids):
            raise _MalformedError(f"{name} are no nodes of the graph")
        return tuple(ids)

    def text_of(name: str) -> str:
        if not isinstance(record[name], str):
            raise _MalformedError(f"{name} is no string")
        return cast("str", record[name])

    params: list[tuple[str, OriginParam]] = []
    if not isinstance(record["params"], dict):
        raise _MalformedError("params are no object")
    for name, value in record["params"].items():
        if isinstance(value, list) and all(type(i) is int for i in value):
            params.append((name, tuple(value)))
        elif isinstance(value, int | float | bool | str):
            params.append((name, value))
        else:
            raise _MalformedError(f"parameter {name!r} is neither a number, a string nor a list of integers")
    return Origin(
        text_of("rule"),
        tuple(params),
        nodes("operands", -2),  # one that is no longer there
        nodes("results"),
        text_of("source"),
        text_of("location"),
    )


class _Reader:
    """Lines in order; every complaint names the line."""

    def __init__(self, text: str) -> None:
        self.lines = text.rstrip("\n").split("\n")
        self.at = 0

    def peek(self) -> str:
        return self.lines[self.at] if self.at < len(self.lines) else ""

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(
            where=f"line {self.at + 1}",
            problem=problem,
            remedy="write graphs with weft.ir.text.print_graph and keep their constants beside them",
        )


def parse_graph(text: str, constants: Mapping[str, Array] | None = None) -> Graph:
    """Read what `print_graph` wrote; `constants` holds the data of the constants that stand by digest.

    Cost: hashes every constant that stands by digest once.

    Raises:
        ModelError: malformed or inconsistent text, missing or foreign constant data; names the line [W100].
    """
    reader = _Reader(text)
    try:
        return _parse(reader, constants or {})
    except (_MalformedError, ShapeError) as error:
        reader.fail(str(error))


def _parse(reader: _Reader, data: Mapping[str, Array]) -> Graph:
    if reader.peek() != f"graph {FORMAT}":
        raise _MalformedError(f"expected `graph {FORMAT}`, found {reader.peek()[:40]!r}")
    reader.at += 1
    inputs, input_names = _read_signature("inputs", reader.peek())
    nodes: list[Node] = []
    found: dict[str, Array] = {}
    seen: dict[Node, NodeId] = {}
    reader.at += 1
    first = reader.at
    while reader.peek().startswith("%"):
        node = _parse_node(reader.peek(), nodes, data, found)
        if node.prim is not Prim.INPUT and node in seen:
            raise _MalformedError(f"%{len(nodes)} is %{seen[node]} once more")
        seen[node] = len(nodes)
        nodes.append(node)
        reader.at += 1
    outputs, output_names = _read_signature("outputs", reader.peek())
    signature = reader.at
    origins: list[Origin] = []
    reader.at += 1
    while reader.at < len(reader.lines):
        origins.append(_read_origin(reader.peek(), len(origins), len(nodes)))
        reader.at += 1
    _check_data(reader, first, nodes, found)
    reader.at = signature
    graph = Graph(tuple(nodes), inputs, outputs, found, tuple(origins), input_names, output_names)
    try:
        verify_graph(graph)
    except InvalidGraphError as error:
        raise _MalformedError(str(error.details["problem"])) from None
    return graph


def _parse_node(line: str, nodes: list[Node], data: Mapping[str, Array], found: dict[str, Array]) -> Node:
    here = len(nodes)
    match = _NODE.fullmatch(line)
    if not match:
        raise _MalformedError(f"malformed node {line[:60]!r}")
    if int(match["id"]) != here:
        raise _MalformedError(f"expected %{here}, found %{match['id']}")
    try:
        prim = Prim(match["prim"])
    except ValueError:
        raise _MalformedError(f"unknown primitive {match['prim']!r}") from None
    pairs = _ATTR.findall(match["attrs"])
    given = dict(pairs)
    if len(given) != len(pairs):
        raise _MalformedError("an attribute is given twice")
    operands = _read_operands(match["inputs"], here)
    type = _read_type(match["type"])
    origin = int(match["origin"]) if match["origin"] else -1
    if prim is Prim.CONSTANT:
        digest, array = _read_constant(given, type, data)
        found[digest] = array
        attrs: a.Attrs = a.ConstantAttrs(digest)
    else:
        attrs = _read_attrs(prim, given)
    if prim in (Prim.INPUT, Prim.CONSTANT):
        if operands:
            raise _MalformedError(f"{prim.value} takes no operands")
    else:
        inferred = infer(prim, tuple(nodes[i].type for i in operands), attrs)
        if inferred != type:
            raise _MalformedError(f"{prim.value} gives {inferred}, not {type}")
    return Node(prim, operands, attrs, type, origin)
