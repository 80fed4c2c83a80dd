from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from weft.errors import UnsupportedError
from weft.frontends.onnx import import_onnx
from weft.frontends.onnx.errors import BindingError, MismatchError, NeedsValueError
from weft.generate.library.opaque_onnx import run_onnx
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.verify import verify_graph

F, INT = TensorProto.FLOAT, TensorProto.INT64


def info(name: str, shape: Sequence[Any] | None, kind: Any = F) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def make(nodes: Sequence[onnx.NodeProto], inputs: Any, outputs: Any, initialisers: Any = (), opset: int = 18) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initialisers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]).SerializeToString()


def values(*arrays: Any, names: str = "wvu") -> Any:
    return [numpy_helper.from_array(np.asarray(x), n) for x, n in zip(arrays, names, strict=False)]


def flat(x: Any) -> Any:
    """Flatten through Shape, Gather and Concat, as exporters write it."""
    return [
        helper.make_node("Shape", [x], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Concat", ["n", "minus"], ["t"], axis=0),
        helper.make_node("Reshape", [x, "t"], ["y"]),
    ]


FLAT = [numpy_helper.from_array(np.array([0]), "zero"), numpy_helper.from_array(np.array([-1]), "minus")]


def test_shape_arithmetic_disappears() -> None:
    raw = make(flat("x"), [info("x", ["N", 3, 4])], [info("y", ["N", 12])], FLAT)
    imported = import_onnx(raw, dims={"N": 5})
    assert [n.prim for n in imported.graph.nodes] == [Prim.INPUT, Prim.RESHAPE]
    assert imported.graph.type_of(imported.graph.outputs[0]).shape == (5, 12)
    assert imported.notes == ()
    assert imported.operators == 4
    verify_graph(imported.graph)


def test_symbolic_sizes() -> None:
    raw = make(flat("x"), [info("x", ["N", 3, 4])], [info("y", ["N", 12])], FLAT)
    assert "symbolic" in import_onnx(raw).notes[0]
    example = np.zeros((7, 3, 4), np.float32)
    assert import_onnx(raw, example_inputs=[example]).graph.type_of(0).shape == (7, 3, 4)
    with pytest.raises(BindingError, match="W114"):
        import_onnx(raw, example_inputs=[example, example])
    with pytest.raises(BindingError, match=r"no input has a symbolic dimension 'M' \[W114\]\n .*are: N"):
        import_onnx(raw, dims={"M": 5})
    with pytest.raises(BindingError, match="the model says 3"):
        import_onnx(raw, example_inputs=[np.zeros((7, 4, 4), np.float32)])


def test_run_time_shape_is_guarded() -> None:
    raw = make(
        [helper.make_node("Reshape", ["x", "s"], ["y"])], [info("x", [4]), info("s", [2], INT)], [info("y", None)]
    )
    with pytest.raises(NeedsValueError, match="pass example inputs"):
        import_onnx(raw)
    x, s = np.arange(4, dtype=np.float32), np.array([2, 2])
    imported = import_onnx(raw, example_inputs=[x, s])
    (guard,) = imported.guards
    assert guard.input_index == 1
    assert guard.holds(s)
    assert not guard.holds(np.array([4, 1]))
    assert not guard.holds(s.astype(np.int32))
    assert evaluate(imported.graph, [x, s])[0].tolist() == [[0, 1], [2, 3]]


def test_opaque_operator() -> None:
    raw = make(
        [helper.make_node("TopK", ["x", "w"], ["y", "i"])],
        [info("x", [2, 5])],
        [info("y", [2, 2]), info("i", [2, 2], INT)],
        values(np.array([2])),
    )
    imported = import_onnx(raw)
    (use,) = imported.opaque
    assert (use.op, use.count) == ("onnx::TopK", 1)
    x = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.float32)
    y, i = evaluate(imported.graph, [x], opaque=lambda attrs, xs: run_onnx(attrs.payload, xs))
    assert y.tolist() == [[5, 4], [9, 6]]
    assert i.tolist() == [[4, 2], [0, 2]]


def test_origins_name_rules_and_operators() -> None:
    raw = make(
        [helper.make_node("Softmax", ["x"], ["y"], name="attn", axis=-1)], [info("x", [2, 3])], [info("y", [2, 3])]
    )
    (origin,) = import_onnx(raw).graph.origins
    assert origin.rule == "softmax"
    assert origin.source == "node 'attn' (Softmax)"


def test_softmax_follows_the_opset() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    sums = {}
    for opset in (11, 13):
        raw = make(
            [helper.make_node("Softmax", ["x"], ["y"], axis=1)],
            [info("x", [2, 3, 4])],
            [info("y", [2, 3, 4])],
            opset=opset,
        )
        (y,) = evaluate(import_onnx(raw).graph, [x])
        sums[opset] = (y.sum((1, 2)), y.sum(1))
    np.testing.assert_allclose(sums[11][0], 1, rtol=1e-5)
    np.testing.assert_allclose(sums[13][1], 1, rtol=1e-5)


def test_scatter_counts_from_the_end() -> None:
    raw = make(
        [helper.make_node("ScatterND", ["x", "w", "v"], ["y"])], [info("x", [4])], [info("y", [4])],
        values(np.array([[-1]]), np.array([9], np.float32)),
    )  # fmt: skip
    assert evaluate(import_onnx(raw).graph, [np.zeros(4, np.float32)])[0].tolist() == [0, 0, 0, 9]


def test_cumsum_keeps_infinities_apart() -> None:
    raw = make([helper.make_node("CumSum", ["x", "w"], ["y"])], [info("x", [4])], [info("y", [4])], values(np.array(0)))
    x = np.array([1, 2, np.inf, 3], np.float32)
    assert evaluate(import_onnx(raw).graph, [x])[0].tolist() == [1, 3, np.inf, np.inf]


def test_known_condition_inlines() -> None:
    branches = {
        f"{name}_branch": helper.make_graph([helper.make_node(op, ["x"], [name])], name, [], [info(name, [2])])
        for name, op in (("then", "Neg"), ("else", "Abs"))
    }
    raw = make(
        [helper.make_node("If", ["w"], ["y"], **branches)], [info("x", [2])], [info("y", [2])], values(np.array(False))
    )
    assert [n.prim for n in import_onnx(raw).graph.nodes] == [Prim.INPUT, Prim.ABS]


def test_random_operators_are_refused() -> None:
    raw = make([helper.make_node("RandomNormalLike", ["x"], ["y"])], [info("x", [2])], [info("y", [2])])
    with pytest.raises(UnsupportedError, match="random"):
        import_onnx(raw)


def test_mismatch_names_the_node() -> None:
    raw = make([helper.make_node("MatMul", ["x", "x"], ["y"], name="qk")], [info("x", [2, 3])], [info("y", [2, 2])])
    with pytest.raises(MismatchError, match=r"node 0 'qk' \(MatMul\)"):
        import_onnx(raw)
