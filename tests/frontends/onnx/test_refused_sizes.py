"""What Weft has no form for is refused when a model is read: sizes that values decide, strings, complex numbers."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper

from weft.errors import UnsupportedError
from weft.frontends.onnx import import_onnx

Value = tuple[str, int, list[int | None]]


def model(
    nodes: list[onnx.NodeProto], inputs: list[Value], outputs: list[Value], weights: list[onnx.TensorProto]
) -> bytes:
    given, made = ([helper.make_tensor_value_info(*v) for v in values] for values in (inputs, outputs))
    graph = helper.make_graph(nodes, "g", given, made, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


X: Value = ("x", T.FLOAT, [3, 4])
CASES: dict[str, tuple[list[onnx.NodeProto], list[Value], list[Value], str]] = {
    "NonZero": ([helper.make_node("NonZero", ["x"], ["y"], "here")], [X], [("y", T.INT64, [2, None])], "W201"),
    "Unique": ([helper.make_node("Unique", ["x"], ["y"], "here")], [X], [("y", T.FLOAT, [None])], "W201"),
    "NonMaxSuppression": (
        [helper.make_node("NonMaxSuppression", ["b", "s"], ["y"], "here")],
        [("b", T.FLOAT, [1, 5, 4]), ("s", T.FLOAT, [1, 1, 5])], [("y", T.INT64, [None, 3])], "W201",
    ),
    "Compress": (
        [helper.make_node("Compress", ["x", "c"], ["y"], "here", axis=0)],
        [X, ("c", T.BOOL, [3])], [("y", T.FLOAT, [None, 4])], "W202",
    ),
    "Range": (
        [helper.make_node("Range", ["a", "b", "c"], ["y"], "here")],
        [("a", T.FLOAT, []), ("b", T.FLOAT, []), ("c", T.FLOAT, [])], [("y", T.FLOAT, [None])], "W202",
    ),
    "Cast": (
        [helper.make_node("Cast", ["x"], ["s"], "here", to=T.STRING), helper.make_node("Cast", ["s"], ["y"], to=1)],
        [X], [("y", T.FLOAT, [3, 4])], "W203",
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", CASES)
def test_what_values_decide_or_weft_has_no_type_for_is_refused_at_its_node(op: str) -> None:
    nodes, inputs, outputs, code = CASES[op]
    # what stands behind it, and would fail later, hides nothing
    behind = helper.make_node("Identity", [nodes[-1].output[0]], ["z"], "behind")
    with pytest.raises(UnsupportedError) as error:
        import_onnx(model([*nodes, behind], inputs, [("z", *outputs[0][1:])], []))
    assert error.value.code == code and error.value.where == f"node 0 'here' ({op})"
    assert op in str(error.value) and "\n  " in str(error.value)


@pytest.mark.parametrize("kind", [T.STRING, T.COMPLEX64, T.COMPLEX128])
def test_inputs_and_weights_of_other_types_are_refused_by_name(kind: int) -> None:
    name = T.DataType.Name(kind)
    copy = helper.make_node("Identity", ["x"], ["y"])
    with pytest.raises(UnsupportedError, match=f"input 'x': .*{name}") as error:
        import_onnx(model([copy], [("x", kind, [3])], [("y", kind, [3])], []))
    assert error.value.code == "W203" and "cast it" in str(error.value)
    data: Any = [b"a", b"b"] if kind == T.STRING else [1 + 0j, 2 + 0j]
    add = helper.make_node("Add", ["x", "k"], ["y"])
    weights = [helper.make_tensor("k", kind, [2], data)]
    with pytest.raises(UnsupportedError, match=f"initializer 'k': .*{name}") as error:
        import_onnx(model([add], [("x", T.FLOAT, [2])], [("y", T.FLOAT, [2])], weights))
    assert error.value.code == "W203"
