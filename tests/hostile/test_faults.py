"""Models at fault are refused as models, with the operator's name: never an error of the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.hostile import onnx_files as files
from tests.hostile.onnx_files import value
from tests.slow import few
from tests.typed import narrow

import weft
from weft.errors import LimitError, ModelError, RefusedError, UnsupportedError
from weft.frontends.onnx import Limits, import_onnx
from weft.frontends.onnx.read import read_model
from weft.generate.library import opaque_onnx
from weft.ir.reference import evaluate
from weft.pipeline import deadline

I64 = TensorProto.INT64


def array(name: str, values: Any, dtype: Any = np.int64) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype), name)


def one(
    op: str,
    inputs: Any,
    *,
    given: Any = None,
    constants: Any = (),
    out: Any = ("y", (None,), TensorProto.FLOAT),
    opset: int = 17,
    **attributes: Any,
) -> onnx.ModelProto:
    """One operator by the name 'bad'."""
    node = helper.make_node(op, inputs, ["y"], name="bad", **attributes)
    return files.model(
        [node], inputs=given if given is not None else [value("x")], outputs=[value(*out)], initialisers=constants,
        opset=opset,
    )  # fmt: skip


def convolution(op: str, group: int) -> Any:
    w = array("w", np.ones((2, 2, 1, 1)), np.float32)
    return one(op, ["x", "w"], given=[value("x", (1, 2, 4, 4))], constants=[w], out=("y", (None,) * 4), group=group)


def switch(size: Any) -> Any:
    then = helper.make_graph([helper.make_node("Relu", ["x"], ["b"])], "b", [], [value("b")])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["e"])], "e", [], [value("e")])
    given = [value("c", (size,), TensorProto.BOOL), value("x")]
    return one("If", ["c"], given=given, then_branch=then, else_branch=other)


def resized(*scales: Any) -> Any:
    given = [value("x", (1, 1, 4, 4))]
    return one(
        "Resize", ["x", "", "s"], given=given, constants=[array("s", scales, np.float32)], out=("y", (None,) * 4)
    )


def counted(start: Any, limit: Any, delta: Any, dtype: Any = np.int64) -> Any:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    constants = [array(n, v, dtype) for n, v in (("a", start), ("b", limit), ("c", delta))]
    return one("Range", ["a", "b", "c"], given=[], constants=constants, out=("y", (None,), kind))


def one_hot(depth: int) -> Any:
    constants = [array("d", depth), array("v", [0, 1], np.float32)]
    return one("OneHot", ["x", "d", "v"], given=[value("x", (4,), I64)], constants=constants, out=("y", (None, None)))


FAULTS = {
    "a range in steps of 0": (lambda: counted(0, 5, 0), "in steps of 0"),
    "a range to NaN": (lambda: counted(0, np.nan, 1, np.float32), "nan"),
    "no groups": (lambda: convolution("Conv", 0), "in 0 groups"),
    "negative groups": (lambda: convolution("Conv", -3), "in -3 groups"),
    "no groups, transposed": (lambda: convolution("ConvTranspose", 0), "group"),
    "three conditions": (lambda: switch(3), "3 elements"),
    "no condition": (lambda: switch(0), "0 elements"),
    "the largest of nothing": (
        lambda: one("ArgMax", ["x"], given=[value("x", (0, 3))], out=("y", (1, 3), I64)), "without elements",
    ),
    "resized by NaN": (lambda: resized(1, 1, np.nan, 2), "positive and finite"),
    "resized by infinity": (lambda: resized(1, 1, np.inf, 2), "positive and finite"),
    "resized by less than nothing": (lambda: resized(1, 1, -1, 2), "positive and finite"),
    "one hot of nothing": (lambda: one_hot(-5), "depth -5"),
    "a negative size": (
        lambda: one("ConstantOfShape", ["s"], given=[], constants=[array("s", [-2])], out=("y", (None,))), "-2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_operator_is_named(name: str) -> None:
    make, told = FAULTS[name]
    with pytest.raises(ModelError) as caught:
        read_model(files.raw(make()))
    text = str(caught.value)
    assert "'bad'" in text and told in text and not caught.value.code.startswith("W3"), text
    assert len(text.splitlines()) == 2


@pytest.mark.parametrize("kind", ["input", "Reshape", "Unsqueeze"])
def test_rank_is_bounded(kind: str) -> None:
    many = 5000
    if kind == "input":
        m = files.model([files.relu()], inputs=[value("x", (1,) * many)])
    elif kind == "Reshape":
        m = one("Reshape", ["x", "s"], constants=[array("s", [2] + [1] * (many - 1))])
    else:
        m = one("Unsqueeze", ["x", "s"], constants=[array("s", range(many))])
    with pytest.raises(LimitError, match="the most is 32"):
        read_model(files.raw(m))


def test_long_chains_are_refused_before_they_take_minutes() -> None:
    ops = [helper.make_node("Sin", [f"v{k}" if k else "x"], [f"v{k + 1}"]) for k in range(200)]
    m = files.raw(files.model(ops, outputs=[value("v200")]))
    assert import_onnx(m).operators == 200
    with pytest.raises(LimitError, match=r"node 10\d '' \(Sin\): more than 100 primitives.*\n.*--max-graph"):
        import_onnx(m, limits=Limits(primitives=100))

    class Long(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(30):
                x = torch.sin(x)
            return x

    with pytest.raises(LimitError, match=r"30 primitives, the limit is 20.*\n.*WEFT_MAX_PRIMITIVES"):
        weft.compile(Long(), (torch.ones(2),), options=weft.Options(budget_s=0, max_primitives=20))


def test_shapes_that_are_folded_do_not_count() -> None:
    nodes = [helper.make_node("Add", [f"s{k}" if k else "s", "s"], [f"s{k + 1}"]) for k in range(50)]
    nodes.append(helper.make_node("Expand", ["x", "s50"], ["y"]))
    m = files.model(nodes, outputs=[value("y", (None,))], initialisers=[array("s", [0])], inputs=[value("x", (1,))])
    assert import_onnx(files.raw(m), limits=Limits(primitives=5)).graph.outputs


def test_a_long_range_is_counted_not_stored() -> None:
    m = counted(3, 3 + 7 * 200_000, 7)
    graph = import_onnx(files.raw(m)).graph
    assert sum(x.nbytes for x in graph.constants.values()) < 100
    (y,) = evaluate(graph, [])
    np.testing.assert_array_equal(y, np.arange(3, 3 + 7 * 200_000, 7))
    (z,) = evaluate(import_onnx(files.raw(counted(0, 10_000, 0.1, np.float32))).graph, [])
    expected = (np.arange(len(z)) * np.float64(np.float32(0.1))).astype(np.float32)
    np.testing.assert_array_equal(z, expected)


def test_folding_makes_no_large_values() -> None:
    """The operands are small, and so is the result; what lies between is not."""
    node = helper.make_node("Einsum", ["w", "w", "w"], ["y"], equation="a,b,c->", name="bad")
    m = files.model([node], inputs=[], outputs=[value("y", ())], initialisers=[array("w", np.ones(2000), np.float32)])
    graph = import_onnx(files.raw(m)).graph
    assert max(x.size for x in graph.constants.values()) <= 2000


@pytest.mark.parametrize("dtype", few([np.int8, np.int32, np.int64, np.uint8], 1))
@pytest.mark.parametrize(("lambd", "bias"), [(0.5, 0.0), (1.5, 1.5), (2.0, 0.7), (1.5, -1.5)])
def test_shrink_of_integers(dtype: type[np.generic], lambd: float, bias: float) -> None:
    ort = pytest.importorskip("onnxruntime")
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = (
        np.array([0, 1, 2, 3, 4, 7, 100], dtype)
        if dtype is np.uint8
        else np.array([-7, -3, -2, -1, 0, 1, 2, 3, 9], dtype)
    )
    m = files.raw(
        one("Shrink", ["x"], given=[value("x", x.shape, kind)], out=("y", x.shape, kind), lambd=lambd, bias=bias)
    )
    (mine,) = evaluate(import_onnx(m).graph, [x])
    wanted = np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)).astype(dtype)
    (theirs,) = ort.InferenceSession(m, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_array_equal(wanted, theirs)
    np.testing.assert_array_equal(mine, wanted)


def test_what_the_runtime_refuses_is_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator whose inputs are wrong only when they are seen; with its place where the graph is known."""
    m = one(
        "TopK", ["x", "k"], given=[value("x", (5,))], constants=[array("k", [3])], out=("y", (3,)), opset=11, sorted=1
    )
    m.graph.node[0].output.append("i")

    class Refuses:
        def run(self, *_: Any) -> None:
            raise RuntimeError(
                "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code returned while running TopK node."
                " Name:'' Status Message: topk.cc:12 Compute k is \x1b[31mwrong"
            )

    monkeypatch.setattr(opaque_onnx, "_session", lambda payload: (Refuses(), ["weft.in.0"], []))
    monkeypatch.setattr(deadline, "NO_BUDGET_S", 60.0)  # on a busy machine, too, there is time to run it
    with pytest.raises(RefusedError, match="W115") as caught:
        weft.compile(files.raw(m), options=weft.Options(budget_s=0))
    text = str(caught.value)
    assert text.startswith("node 'bad' (TopK): ONNX Runtime refuses to run TopK: k is ?[31mwrong"), text


def test_an_operator_that_the_runtime_lacks_is_unsupported() -> None:
    error = RuntimeError("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Foo(1)")
    found = opaque_onnx._refused(error, "")
    assert isinstance(found, UnsupportedError) and "Could not find" in str(found)


def unsorted(inner: bool = False) -> onnx.ModelProto:
    nodes = [helper.make_node("Neg", ["b"], ["y"]), helper.make_node("Relu", ["x"], ["b"])]
    if not inner:
        return files.model(nodes)
    body = helper.make_graph(
        [helper.make_node("Neg", ["c"], ["r"]), helper.make_node("Relu", ["x"], ["c"])], "b", [], [value("r")]
    )
    always = helper.make_node("Constant", [], ["t"], value=array("", True, np.bool_))
    return files.model([helper.make_node("If", ["t"], ["y"], then_branch=body, else_branch=body), always])


@pytest.mark.parametrize("inner", [False, True])
def test_nodes_that_are_not_sorted_are_sorted(inner: bool) -> None:
    imported = import_onnx(files.raw(unsorted(inner)))
    assert "not sorted" in imported.notes[0]
    (y,) = evaluate(imported.graph, [np.array([-3, 5], np.float32)])
    assert y.tolist() == [0, -5]


def test_the_order_of_the_file_stays_where_it_is_one() -> None:
    assert not import_onnx(files.raw(files.model([files.relu()]))).notes


@pytest.mark.parametrize("declared", [(3,), (2, 1), ()])
def test_a_declared_shape_that_does_not_hold_is_a_warning(declared: tuple[int, ...]) -> None:
    m = files.raw(files.model([files.relu()], outputs=[value("y", declared)]))
    with pytest.warns(UserWarning, match=r"output 'y' has shape \[2\], not .* as the model declares"):
        compiled = weft.compile(m, options=weft.Options(budget_s=0))
    assert narrow(torch.Tensor, compiled(torch.tensor([-1.0, 2.0]))).tolist() == [0, 2]


def test_sizes_that_nobody_gave_are_told_in_one_line() -> None:
    m = files.model([files.relu()], inputs=[value("x", ("N", "M", None))], outputs=[value("y", ("N", "M", None))])
    (note,) = import_onnx(files.raw(m)).notes
    assert "'N'" in note and "'M'" in note and "unnamed" in note and "set to 1" in note
