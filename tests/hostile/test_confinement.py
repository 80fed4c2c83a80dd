"""Data outside of the model, wherever the model names them: held to the rules, carried to the runtime, or refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from onnx import TensorProto, helper, numpy_helper
from tests.hostile import onnx_files as files
from tests.hostile.onnx_files import value
from tests.slow import few

from weft.errors import ArtifactError, LimitError, ModelError
from weft.frontends.onnx import import_onnx, opaque
from weft.generate.library import onnx_wire
from weft.generate.library.onnx_wire import carries_its_data
from weft.generate.library.opaque_onnx import run_onnx
from weft.ir.attrs import OpaqueAttrs
from weft.ir.reference import evaluate

SECRET = np.array([42, 43], np.float32)
X = np.array([1, 2], np.float32)


def outside(location: str, **fields: Any) -> Any:
    """Two floats at a location."""
    t = files.external([("location", location)])
    for name, v in fields.items():
        setattr(t, name, v)
    return t


def branch(nodes: Sequence[onnx.NodeProto], initialisers: Any = ()) -> onnx.GraphProto:
    return helper.make_graph(nodes, "then", [], [value("b")], list(initialisers))


def switched(then: Any, *, functions: Any = (), swap: bool = False) -> onnx.ModelProto:
    """A branch that is taken or not at run time: ONNX Runtime gets it whole."""
    other = helper.make_graph([helper.make_node("Relu", ["x"], ["e"])], "else", [], [value("e")])
    branches = {"then_branch": other, "else_branch": then} if swap else {"then_branch": then, "else_branch": other}
    node = helper.make_node("If", ["c"], ["y"], **branches)
    return files.model(
        [node],
        inputs=[value("c", (), TensorProto.BOOL), value("x")],
        functions=functions,
        imports=files.LOCAL if functions else None,
    )


ADD = helper.make_node("Add", ["x", "w"], ["b"])


def constant(t: onnx.TensorProto) -> Any:
    return helper.make_node("Constant", [], ["w"], value=t)


def sparse(values: Any) -> Any:
    indices = numpy_helper.from_array(np.array([0, 1], np.int64))
    return onnx.SparseTensorProto(values=values, indices=indices, dims=[2])


def in_sparse_initialiser(t: onnx.TensorProto) -> Any:
    body = branch([ADD])
    body.sparse_initializer.append(sparse(t))
    return switched(body)


def in_nested_branch(t: onnx.TensorProto) -> Any:
    inner = helper.make_graph([constant(t), ADD], "inner", [], [value("b")])
    other = helper.make_graph([helper.make_node("Relu", ["x"], ["e2"])], "else", [], [value("e2")])
    node = helper.make_node("If", ["c"], ["b2"], then_branch=inner, else_branch=other)
    body = helper.make_graph([node], "then", [], [value("b2")])
    return switched(body)


def in_function(t: onnx.TensorProto) -> Any:
    f = onnx.FunctionProto(name="f", domain="local", input=["a"], output=["r"])
    f.node.extend([constant(t), helper.make_node("Add", ["a", "w"], ["r"])])
    f.opset_import.extend(files.LOCAL)
    return switched(branch([helper.make_node("f", ["x"], ["b"], domain="local")]), functions=[f])


def in_default_of_function(t: onnx.TensorProto) -> Any:
    f = onnx.FunctionProto(name="f", domain="local", input=["a"], output=["r"])
    node = helper.make_node("Constant", [], ["w"])
    node.attribute.append(onnx.AttributeProto(name="value", ref_attr_name="v", type=onnx.AttributeProto.TENSOR))
    f.node.extend([node, helper.make_node("Add", ["a", "w"], ["r"])])
    f.attribute_proto.append(onnx.AttributeProto(name="v", type=onnx.AttributeProto.TENSOR, t=t))
    f.opset_import.extend(files.LOCAL)
    return switched(branch([helper.make_node("f", ["x"], ["b"], domain="local")]), functions=[f])


PLACES = {
    "initialiser of a branch": lambda t: switched(branch([ADD], [t])),
    "initialiser of the other branch": lambda t: switched(branch([ADD], [t]), swap=True),
    "Constant in a branch": lambda t: switched(branch([constant(t), ADD])),
    "sparse Constant in a branch": lambda t: switched(
        branch([helper.make_node("Constant", [], ["w"], sparse_value=sparse(t)), ADD])
    ),
    "sparse initialiser of a branch": in_sparse_initialiser,
    "branch in a branch": in_nested_branch,
    "function that a branch calls": in_function,
    "default of a function": in_default_of_function,
    "Constant that is taken apart": lambda t: files.model([constant(t), helper.make_node("Add", ["x", "w"], ["y"])]),
    "Constant that nobody reads": lambda t: files.model([constant(t), files.relu()]),
}
RUN_BY_RUNTIME = [name for name in PLACES if "branch" in name and "sparse" not in name]


def raw(model: Any) -> bytes:
    model.ir_version = 8
    return model.SerializeToString()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A working directory with a secret, and the model's folder in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.bin").write_bytes(SECRET.tobytes())
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("place", few(PLACES, 3))
def test_a_file_of_the_working_directory_is_not_read(here: Any, place: str) -> None:
    with pytest.raises(ModelError, match="W113") as caught:
        import_onnx(raw(PLACES[place](outside("secret.bin"))))
    assert "secret.bin" in str(caught.value)
    (here / "m.onnx").write_bytes(raw(PLACES[place](outside("secret.bin"))))
    with pytest.raises(ModelError, match="W113"):
        import_onnx(here / "m.onnx")


@pytest.mark.parametrize("place", ["Constant in a branch", "function that a branch calls"])
@pytest.mark.parametrize(
    ("location", "code"),
    [("../secret.bin", "W113"), ("/etc/hostname", "W113"), ("link.bin", "W113"), ("short.bin", "W112")],
)
def test_every_rule_of_external_data_holds_inside(here: Any, place: str, location: str, code: str) -> None:
    (here / "link.bin").symlink_to("../secret.bin")
    (here / "short.bin").write_bytes(b"\0" * 4)
    (here / "m.onnx").write_bytes(raw(PLACES[place](outside(location))))
    with pytest.raises(ModelError) as caught:
        import_onnx(here / "m.onnx")
    assert caught.value.code == code
    assert "node 0" in str(caught.value) or "function 'f'" in str(caught.value)


def run(imported: Any, *inputs: Any) -> Any:
    return evaluate(imported.graph, list(inputs), opaque=lambda attrs, xs: run_onnx(attrs.payload, xs))[0].tolist()


@pytest.mark.parametrize("place", RUN_BY_RUNTIME)
def test_data_beside_the_model_work(here: Any, place: str) -> None:
    """And the plan needs neither the file nor the folder afterwards."""
    (here / "sub").mkdir()
    data = here / "sub" / "w.bin"
    data.write_bytes(np.array([10, 20], np.float32).tobytes())
    (here / "m.onnx").write_bytes(raw(PLACES[place](outside("sub/w.bin"))))
    imported = import_onnx(here / "m.onnx")
    data.unlink()
    payloads = [n.attrs.payload for n in imported.graph.nodes if isinstance(n.attrs, OpaqueAttrs)]
    assert len(payloads) == 1
    assert carries_its_data(base64.b64decode(json.loads(payloads[0])["model"]))
    swapped = place == "initialiser of the other branch"
    assert run(imported, np.array(not swapped), X) == [11.0, 22.0]
    assert run(imported, np.array(swapped), X) == [1.0, 2.0]


def test_the_runtime_refuses_a_payload_that_names_a_file(here: Any) -> None:
    """Whoever made it: a stored plan, or a parsing process that was taken over."""
    model = raw(PLACES["Constant in a branch"](outside("secret.bin")))
    with pytest.raises(ArtifactError, match="names a file"):
        run_onnx(json.dumps({"model": base64.b64encode(model).decode()}), [np.array(True), X])


def test_weights_inside_of_an_operator_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opaque, "_CARRIED_BYTES", 7)
    from weft.frontends.onnx.read import read_model

    with pytest.raises(LimitError, match="initializers of the main graph"):
        read_model(raw(switched(branch([ADD], [files.tensor()]))))


def leads_to_tensors() -> Any:
    """Message -> fields that lead to a tensor, as onnx itself describes them."""
    every = onnx.ModelProto.DESCRIPTOR.file.message_types_by_name
    inner = {
        name: {f.number: f.message_type.name for f in m.fields if f.type == FieldDescriptor.TYPE_MESSAGE}
        for name, m in every.items()
    }
    leads = {"TensorProto"}
    while True:
        more = {name for name, fs in inner.items() if leads & set(fs.values())} - leads
        if not more:
            break
        leads |= more
    found = {name: {k: v for k, v in inner[name].items() if v in leads} for name in leads - {"TensorProto"}}
    return found, every["TensorProto"].fields_by_name


def test_the_wire_table_is_that_of_onnx() -> None:
    found, tensor = leads_to_tensors()
    assert found == {name: dict(fields) for name, fields in onnx_wire.FIELDS.items()}
    assert tensor["external_data"].number == onnx_wire.EXTERNAL_DATA
    assert tensor["data_location"].number == onnx_wire.DATA_LOCATION


@pytest.mark.parametrize("place", PLACES)
def test_the_wire_form_shows_every_place(place: str) -> None:
    assert not carries_its_data(raw(PLACES[place](outside("w.bin"))))
    assert not carries_its_data(raw(PLACES[place](outside("w.bin", data_location=TensorProto.DEFAULT))))
    here = files.tensor()
    here.data_location = TensorProto.DEFAULT
    assert carries_its_data(raw(PLACES[place](here)))


def test_bytes_that_are_no_model_carry_nothing() -> None:
    good = raw(switched(branch([ADD], [files.tensor()])))
    assert carries_its_data(good)
    assert not carries_its_data(good[:-1])
    assert not carries_its_data(good + b"\x0b")
    assert not carries_its_data(b"\xff" * 30)
