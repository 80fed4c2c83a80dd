"""Hostile ONNX models, made here byte by byte: nothing of them is stored in the repository."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT


def value(name: str, shape: Sequence[Any] = (2,), kind: Any = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def model(
    nodes: Sequence[onnx.NodeProto],
    *,
    inputs: Any = None,
    outputs: Any = None,
    initialisers: Any = (),
    opset: int = 17,
    functions: Any = (),
    imports: Any = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        inputs if inputs is not None else [value("x")],
        outputs if outputs is not None else [value("y")],
        list(initialisers),
    )
    imports = imports if imports is not None else [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions))


def raw(m: Any) -> Any:
    """As it lies in a file; a version of the format that older runtimes know."""
    if isinstance(m, bytes):
        return m
    m.ir_version = min(m.ir_version, 10)
    return m.SerializeToString()


def relu(**fields: Any) -> Any:
    node = helper.make_node("Relu", ["x"], ["y"])
    for key, v in fields.items():
        setattr(node, key, v)
    return node


def add_weight(weight: onnx.TensorProto, **kw: Any) -> onnx.ModelProto:
    return model([helper.make_node("Add", ["x", weight.name], ["y"])], initialisers=[weight], **kw)


def tensor(name: str = "w", dims: Any = (2,), data: Any = b"\0" * 8, kind: Any = FLOAT) -> Any:
    t = TensorProto(name=name, data_type=kind, dims=list(dims))
    if data is not None:
        t.raw_data = data
    return t


def external(entries: Any, dims: Any = (2,), name: str = "w") -> Any:
    t = TensorProto(name=name, data_type=FLOAT, dims=list(dims), data_location=TensorProto.EXTERNAL)
    for key, v in entries:
        t.external_data.add(key=key, value=v)
    return t


def at(location: str, **more: Any) -> Any:
    return add_weight(external([("location", location), *more.items()]))


def nested_if(depth: int) -> onnx.ModelProto:
    """If inside If, `depth` subgraphs deep."""
    condition = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True)))
    body = helper.make_graph([helper.make_node("Relu", ["x"], ["b0"])], "b", [], [value("b0")])
    for k in range(1, depth + 1):
        node = helper.make_node("If", ["c"], [f"b{k}"], then_branch=body, else_branch=_leaf(k))
        body = helper.make_graph([node], "b", [], [value(f"b{k}")])
    nodes = [condition, *body.node, helper.make_node("Relu", [f"b{depth}"], ["y"])]
    return model(nodes)


def _leaf(k: Any) -> onnx.GraphProto:
    return helper.make_graph([helper.make_node("Relu", ["x"], [f"e{k}"])], "e", [], [value(f"e{k}")])


def function(name: str, calls: Any, *, domain: str = "local") -> Any:
    """A function that applies the operators `calls`, one after the other."""
    nodes, last = [], "a"
    for k, (op, in_domain) in enumerate(calls):
        nodes.append(NodeProto(op_type=op, domain=in_domain, input=[last], output=[f"v{k}"]))
        last = f"v{k}"
    f = FunctionProto(name=name, domain=domain, input=["a"], output=[last], node=nodes)
    f.opset_import.extend([helper.make_opsetid("", 17), helper.make_opsetid("local", 1)])
    return f


LOCAL = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]


def chain(length: int) -> onnx.ModelProto:
    """f0 calls f1 calls f2 ..."""
    fs = [function(f"f{k}", [(f"f{k + 1}", "local")]) for k in range(length)]
    fs.append(function(f"f{length}", [("Relu", "")]))
    call = NodeProto(op_type="f0", domain="local", input=["x"], output=["y"])
    return model([call], functions=fs, imports=LOCAL)


def doubling(levels: int) -> onnx.ModelProto:
    """Each function calls the next one twice: 2^levels operators from a few hundred bytes."""
    fs = [function(f"f{k}", [(f"f{k + 1}", "local")] * 2) for k in range(levels)]
    fs.append(function(f"f{levels}", [("Relu", ""), ("Neg", "")]))
    call = NodeProto(op_type="f0", domain="local", input=["x"], output=["y"])
    return model([call], functions=fs, imports=LOCAL)


def recursive(*names: Any) -> onnx.ModelProto:
    fs = [function(n, [(names[(k + 1) % len(names)], "local")]) for k, n in enumerate(names)]
    call = NodeProto(op_type=names[0], domain="local", input=["x"], output=["y"])
    return model([call], functions=fs, imports=LOCAL)


def endless_loop() -> onnx.ModelProto:
    """A Loop whose condition is always true, without a trip count."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Relu", ["v"], ["v2"])],
        "b",
        [value("i", (), TensorProto.INT64), value("c", (), TensorProto.BOOL), value("v")],
        [value("c2", (), TensorProto.BOOL), value("v2")],
    )
    always = helper.make_node("Constant", [], ["t"], value=numpy_helper.from_array(np.array(True)))
    return model([always, helper.make_node("Loop", ["", "t", "x"], ["y"], body=body)])


def huge_constant_of_shape() -> onnx.ModelProto:
    shape = numpy_helper.from_array(np.array([2**40, 2**10], np.int64), "s")
    nodes = [helper.make_node("ConstantOfShape", ["s"], ["z"]), helper.make_node("ReduceSum", ["z"], ["y"])]
    return model(nodes, initialisers=[shape], outputs=[value("y", (1, 1))])


def huge_range() -> onnx.ModelProto:
    nodes = [helper.make_node("Range", ["a", "b", "c"], ["z"]), helper.make_node("ReduceSum", ["z"], ["y"])]
    limits = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in (("a", 0), ("b", 2**62), ("c", 1))]
    return model(nodes, initialisers=limits, outputs=[value("y", (1,), TensorProto.INT64)])


def huge_tile() -> onnx.ModelProto:
    reps = numpy_helper.from_array(np.array([2**61], np.int64), "r")
    return model([helper.make_node("Tile", ["x", "r"], ["y"])], initialisers=[reps], outputs=[value("y", (None,))])


def wrong_attribute() -> onnx.ModelProto:
    node = relu(op_type="Softmax")
    node.attribute.append(AttributeProto(name="axis", type=AttributeProto.FLOAT, f=1.0))
    return model([node])


def lying_attribute() -> onnx.ModelProto:
    node = relu(op_type="Softmax")
    node.attribute.append(AttributeProto(name="axis", type=AttributeProto.INT, ints=[1, 2]))
    return model([node])


def double_attribute() -> onnx.ModelProto:
    node = relu(op_type="Softmax")
    for k in (0, 1):
        node.attribute.append(AttributeProto(name="axis", type=AttributeProto.INT, i=k))
    return model([node])


def undefined_attribute_type() -> onnx.ModelProto:
    node = relu(op_type="Softmax")
    node.attribute.append(AttributeProto(name="axis", type=AttributeProto.UNDEFINED, i=0))
    return model([node])


def deep_type(depth: int) -> Any:
    """Protobuf nesting past any reader's recursion limit."""
    body = b""
    for _ in range(depth):
        # TypeProto.sequence_type (4) { elem_type (1) }
        inner = b"\x0a" + _varint(len(body)) + body
        body = b"\x22" + _varint(len(inner)) + inner
    info = b"\x0a\x01x" + b"\x12" + _varint(len(body)) + body
    graph = b"\x5a" + _varint(len(info)) + info
    return b"\x3a" + _varint(len(graph)) + graph


def _varint(n: Any) -> Any:
    out = b""
    while True:
        n, low = n >> 7, n & 0x7F
        out += bytes([low | (0x80 if n else 0)])
        if not n:
            return out


def no_imports() -> Any:
    m = model([relu()])
    del m.opset_import[:]
    return m


def two_versions() -> onnx.ModelProto:
    return model([relu()], imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx", 13)])


def duplicate_initialisers() -> onnx.ModelProto:
    return model([helper.make_node("Add", ["x", "w"], ["y"])], initialisers=[tensor(), tensor(data=b"\1" * 8)])


def both_fields() -> Any:
    t = tensor()
    t.float_data.extend([1.0, 2.0])
    return add_weight(t)


def wrong_field() -> Any:
    t = tensor(data=None)
    t.int64_data.extend([1, 2])
    return add_weight(t)


def segment() -> Any:
    t = tensor()
    t.segment.begin = 0
    return add_weight(t)


def sparse(index: Any, dims: Any = (2,)) -> Any:
    m = model([helper.make_node("Add", ["x", "w"], ["y"])])
    s = m.graph.sparse_initializer.add()
    s.values.CopyFrom(numpy_helper.from_array(np.array([1.0], np.float32), "w"))
    s.indices.CopyFrom(numpy_helper.from_array(np.array([index], np.int64)))
    s.dims.extend(dims)
    return m


def optional_input() -> onnx.ModelProto:
    tensor_type = helper.make_tensor_type_proto(FLOAT, [2])
    info = helper.make_value_info("x", helper.make_optional_type_proto(tensor_type))
    return model([helper.make_node("OptionalGetElement", ["x"], ["y"])], inputs=[info], opset=18)


def string_weight() -> onnx.ModelProto:
    t = TensorProto(name="w", data_type=TensorProto.STRING, dims=[2], string_data=[b"a", b"<script>"])
    return model([helper.make_node("Identity", ["w"], ["y"])], initialisers=[t])


def shape_from_input() -> onnx.ModelProto:
    return model(
        [helper.make_node("Reshape", ["x", "s"], ["y"])],
        inputs=[value("x", (4,)), value("s", (2,), TensorProto.INT64)],
        outputs=[value("y", (2, 2))],
    )


EMPTY = b""
MODELS: dict[str, tuple[str, Callable[[], ModelProto | bytes]]] = {
    # what is no model at all
    "empty": ("W101", lambda: EMPTY),
    "garbage": ("W101", lambda: b"\xff" * 200),
    "text": ("W101", lambda: b"GIF89a not a model" * 20),
    "truncated": ("W101", lambda: add_weight(tensor(dims=(64,), data=b"\0" * 256)).SerializeToString()[:-200]),
    "no graph": ("W101", lambda: ModelProto(ir_version=8, opset_import=[helper.make_opsetid("", 17)])),
    "nested messages": ("W101", lambda: deep_type(500)),
    "length past the end": ("W101", lambda: b"\x3a" + struct.pack("B", 0x7F) + b"\x0a"),
    # operator sets
    "no operator set": ("W102", no_imports),
    "two versions": ("W102", two_versions),
    "opset of the future": ("W102", lambda: model([relu()], opset=9999)),
    "negative opset": ("W102", lambda: model([relu()], opset=-1)),
    "opset 1": ("W102", lambda: model([relu()], opset=1)),
    "domain not imported": ("W102", lambda: model([relu(domain="ai.onnx.ml", op_type="Scaler")])),
    # operators
    "unknown domain": ("W103", lambda: model([relu(domain="com.evil")])),
    "unknown operator": ("W103", lambda: model([relu(op_type="RunShell")])),
    "newer operator": ("W103", lambda: model([relu(op_type="Gelu")], opset=17)),
    # tensors
    "two data fields": ("W104", both_fields),
    "data in the wrong field": ("W104", wrong_field),
    "truncated data": ("W104", lambda: add_weight(tensor(data=b"\0" * 7))),
    "too much data": ("W104", lambda: add_weight(tensor(data=b"\0" * 9))),
    "no data": ("W104", lambda: add_weight(tensor(data=None))),
    "negative dimension": ("W104", lambda: add_weight(tensor(dims=(-2,)))),
    "overflowing dimensions": ("W104", lambda: add_weight(tensor(dims=(2**62, 4)))),
    "dimensions that wrap to 0": ("W104", lambda: add_weight(tensor(dims=(2**32, 2**32), data=b""))),
    "rank 100": ("W104", lambda: add_weight(tensor(dims=(1,) * 100, data=b"\0" * 4))),
    "segment": ("W104", segment),
    "sparse index outside": ("W104", lambda: sparse(2)),
    "sparse index negative": ("W104", lambda: sparse(-1)),
    "sparse of 2^62": ("W104", lambda: sparse(0, (2**62,))),
    "string tensor": ("W203", string_weight),
    "unknown element type": ("W203", lambda: add_weight(tensor(kind=999))),
    "complex tensor": ("W203", lambda: add_weight(tensor(kind=TensorProto.COMPLEX64, data=b"\0" * 16))),
    "external in bytes": ("W113", lambda: at("w.bin")),
    "entries without external": ("W104", lambda: _entries_on_raw()),  # noqa: PLW0108
    # structure
    "undefined input": ("W106", lambda: model([helper.make_node("Relu", ["nowhere"], ["y"])])),
    "undefined output": ("W106", lambda: model([helper.make_node("Relu", ["x"], ["z"])])),
    "no outputs": ("W106", lambda: model([relu()], outputs=[])),
    "cycle": (
        "W106",
        lambda: model([helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"]), relu()]),
    ),
    "self reference": ("W106", lambda: model([helper.make_node("Add", ["x", "y"], ["y"])])),
    "defined twice": ("W106", lambda: model([relu(), relu()])),
    "input defined again": ("W106", lambda: model([helper.make_node("Relu", ["x"], ["x"])], outputs=[value("x")])),
    "duplicate initialisers": ("W106", duplicate_initialisers),
    "duplicate inputs": ("W106", lambda: model([relu()], inputs=[value("x"), value("x")])),
    "too many operands": ("W106", lambda: model([helper.make_node("Relu", ["x", "x", "x"], ["y"])])),
    "too few operands": ("W106", lambda: model([helper.make_node("Add", ["x"], ["y"])])),
    # attributes
    "wrong attribute type": ("W107", wrong_attribute),
    "lying attribute": ("W107", lying_attribute),
    "attribute twice": ("W107", double_attribute),
    "untyped attribute": ("W107", undefined_attribute_type),
    "unknown attribute": ("W107", lambda: model([helper.make_node("Relu", ["x"], ["y"], axis=1)])),
    "missing attribute": ("W107", lambda: model([helper.make_node("Concat", ["x"], ["y"])])),
    "bytes that are no text": (
        "W107",
        lambda: model([helper.make_node("Conv", ["x", "x"], ["y"], auto_pad=b"\xff\xfe")]),
    ),
    # types and sizes
    "shapes do not fit": (
        "W108",
        lambda: model(
            [helper.make_node("MatMul", ["x", "w"], ["y"])], initialisers=[tensor(dims=(3, 1), data=b"\0" * 12)]
        ),
    ),
    "types do not fit": ("W108", lambda: add_weight(numpy_helper.from_array(np.zeros(2, np.int64), "w"))),
    "axis out of range": ("W108", lambda: model([helper.make_node("Softmax", ["x"], ["y"], axis=7)])),
    "zero stride": (
        "W108",
        lambda: model(
            [helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[1], strides=[0])], inputs=[value("x", (1, 1, 4))]
        ),
    ),
    "input of 2^63": ("W114", lambda: model([relu()], inputs=[value("x", (2**62, 2))])),
    "negative input size": ("W114", lambda: model([relu()], inputs=[value("x", (-1,))])),
    "huge constant": ("", huge_constant_of_shape),
    "huge range": ("", huge_range),
    "huge tile": ("", huge_tile),
    "optional input": ("W203", optional_input),
    "shape at run time": ("W202", shape_from_input),
    # depth and size
    "17 nested Ifs": ("W105", lambda: nested_if(17)),
    "3,000 nested calls": ("W109", lambda: chain(3000)),
    "function calls itself": ("W109", lambda: recursive("f")),
    "functions call in a ring": ("W109", lambda: recursive("f", "g", "h")),
    "2^40 operators": ("W105", lambda: doubling(40)),
    "endless loop": ("", endless_loop),
}
"""Name -> (expected code, or empty where several answers are right; the model)."""


def _entries_on_raw() -> Any:
    t = tensor()
    t.external_data.add(key="location", value="/etc/passwd")
    return add_weight(t)


def data(path: Path, size: int = 8) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    return path


def _link(root: Path, name: str, target: Path) -> None:
    (root / name).symlink_to(target)


def _outside(root: Path) -> Path:
    """A file beside the model's directory whose name begins like it."""
    return data(root.parent / f"{root.name}_evil" / "secret.bin")


def _hard_link(root: Path) -> None:
    os.link(data(root / "first.bin"), root / "second.bin")


def _linked_directory(root: Path) -> None:
    _link(root, "sub", _outside(root).parent)


EXTERNAL: dict[str, tuple[str, Callable[[Path], object], Callable[[Path], ModelProto]]] = {
    "parent directory": ("W113", _outside, lambda r: at(f"../{r.name}_evil/secret.bin")),
    "parent in the middle": ("W113", _outside, lambda r: at(f"sub/../../{r.name}_evil/secret.bin")),
    "absolute": ("W113", _outside, lambda r: at(str(_outside(r)))),
    "prefix twin": ("W113", _outside, lambda r: at(f"../{r.name}_evil/secret.bin")),
    "symbolic link": ("W113", lambda r: _link(r, "w.bin", _outside(r)), lambda r: at("w.bin")),
    "link that stays inside": ("W113", lambda r: _link(r, "w.bin", data(r / "real.bin")), lambda r: at("w.bin")),
    "linked directory": ("W113", _linked_directory, lambda r: at("sub/secret.bin")),
    "dangling link": ("W113", lambda r: _link(r, "w.bin", Path("/nowhere")), lambda r: at("w.bin")),
    "hard link": ("W113", _hard_link, lambda r: at("second.bin")),
    "FIFO": ("W113", lambda r: os.mkfifo(r / "w.bin"), lambda r: at("w.bin")),
    "directory": ("W113", lambda r: (r / "w.bin").mkdir(), lambda r: at("w.bin")),
    "device": ("W113", lambda r: None, lambda r: at("/dev/zero")),
    "device through a link": ("W113", lambda r: _link(r, "w.bin", Path("/dev/zero")), lambda r: at("w.bin")),
    "procfs": ("W113", lambda r: None, lambda r: at("/proc/self/environ")),
    "procfs through a link": ("W113", lambda r: _link(r, "w.bin", Path("/proc/self/environ")), lambda r: at("w.bin")),
    "missing": ("W113", lambda r: None, lambda r: at("w.bin")),
    "empty location": ("W113", lambda r: None, lambda r: at("")),
    "the directory itself": ("W113", lambda r: None, lambda r: at(".")),
    "NUL": ("W113", lambda r: None, lambda r: at("w\0.bin")),
    "backslash": ("W113", lambda r: None, lambda r: at("..\\w.bin")),
    "drive": ("W113", lambda r: None, lambda r: at("C:w.bin")),
    "double slash": ("W113", lambda r: data(r / "a" / "w.bin"), lambda r: at("a//w.bin")),
    "very long": ("W113", lambda r: None, lambda r: at("w" * 100_000)),
    "control characters": ("W113", lambda r: None, lambda r: at("\x1b[31mw\n.bin")),
    "no location": ("W111", lambda r: None, lambda r: add_weight(external([("offset", "0")]))),
    "unknown key": ("W111", lambda r: data(r / "w.bin"), lambda r: at("w.bin", __class__="x")),
    "dunder key": ("W111", lambda r: data(r / "w.bin"), lambda r: at("w.bin", __dict__="x")),
    "key twice": (
        "W111",
        lambda r: data(r / "w.bin"),
        lambda r: add_weight(external([("location", "w.bin"), ("location", "../w.bin")])),
    ),
    "offset past the end": ("W112", lambda r: data(r / "w.bin"), lambda r: at("w.bin", offset="4")),
    "offset of 2^63": ("W112", lambda r: data(r / "w.bin"), lambda r: at("w.bin", offset=str(2**63 - 1))),
    "offset of 100 digits": ("W112", lambda r: data(r / "w.bin"), lambda r: at("w.bin", offset="9" * 100)),
    "negative offset": ("W112", lambda r: data(r / "w.bin"), lambda r: at("w.bin", offset="-8")),
    "hexadecimal offset": ("W112", lambda r: data(r / "w.bin"), lambda r: at("w.bin", offset="0x0")),
    "offset in other digits": ("W112", lambda r: data(r / "w.bin"), lambda r: at("w.bin", offset="\u0660")),
    "offset with a blank": ("W112", lambda r: data(r / "w.bin"), lambda r: at("w.bin", offset=" 0")),
    "fractional length": ("W112", lambda r: data(r / "w.bin"), lambda r: at("w.bin", length="8.0")),
    "length too short": ("W112", lambda r: data(r / "w.bin"), lambda r: at("w.bin", length="4")),
    "length too long": ("W112", lambda r: data(r / "w.bin"), lambda r: at("w.bin", length="16")),
    "file too short": ("W112", lambda r: data(r / "w.bin", 7), lambda r: at("w.bin")),
    "empty file": ("W112", lambda r: data(r / "w.bin", 0), lambda r: at("w.bin")),
}
"""Name -> (expected code, what lies in the directory, the model)."""

NAMES = {
    "markup": "<script>alert(1)</script>",
    "escape sequence": "\x1b[2J\x1b[31mred",
    "quotes": "\"'`",
    "new line": "a\nb\r\nc",
    "comment end": "*/ int main() { } /*",
    "trailing backslash": "path\\",
    "format": "%s%n{0}{__class__}",
    "right to left": "\u202egnp.exe",
    "shell": "$(touch pwned); `touch pwned`",
    "path": "../../etc/passwd",
    "spreadsheet": "=HYPERLINK(1)",
    "lone surrogate escape": "\ufffe\uffff",
    "very long": "n" * 100_000,
}
"""Names that end up in graphs and messages."""


def named(name: str) -> ModelProto:
    """A model whose every name is hostile."""
    node = helper.make_node("Relu", [name], [f"{name}.y"], name=name)
    m = model([node], inputs=[value(name)], outputs=[value(f"{name}.y")])
    m.graph.name = name
    return m


def misnamed(name: str) -> ModelProto:
    """A model that is refused with the hostile name in the message."""
    node = helper.make_node("Relu", [f"{name}.missing"], ["y"], name=name)
    return model([node])
