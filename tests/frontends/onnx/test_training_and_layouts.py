from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.slow import few
from tests.typed import assert_allclose

from weft.errors import UnsupportedError
from weft.frontends.onnx import import_onnx
from weft.frontends.onnx.errors import MismatchError
from weft.generate.library.opaque_onnx import run_onnx
from weft.ir.prims import Prim
from weft.ir.reference import evaluate

F, INT = TensorProto.FLOAT, TensorProto.INT64
PREVIEW = "ai.onnx.preview.training"


def make(node: Any, inputs: Any, outputs: Any) -> bytes:
    graph = helper.make_graph([node], "g", inputs, outputs)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(PREVIEW, 1)]
    return helper.make_model(graph, opset_imports=opsets).SerializeToString()


def info(name: str, shape: Sequence[Any] | None, kind: Any = F) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def momentum(names: str = "xgv", **attributes: Any) -> Any:
    given = {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.1, "mode": "standard", **attributes}
    node = helper.make_node("Momentum", ["r", "t", *names], ["x2", "v2"], domain=PREVIEW, **given)
    inputs = [info("r", []), info("t", [], INT), *(info(n, [3]) for n in names)]
    return make(node, inputs, [info("x2", [3]), info("v2", [3])])


@pytest.mark.parametrize(("t", "share"), [(0, 1.0), (4, 0.5)])
def test_the_first_step_takes_the_whole_gradient(t: int, share: float) -> None:
    imported = import_onnx(momentum())
    assert not imported.opaque
    x, g, v = (np.array(a, np.float32) for a in ([1, 2, 3], [0.5, -1, 0], [0.1, 0.2, 0.3]))
    x2, v2 = evaluate(imported.graph, [np.array(0.1, np.float32), np.array(t, np.int64), x, g, v])
    want = 0.9 * v + share * (g + 0.1 * x)
    assert_allclose(v2, want, rtol=1e-6)
    assert_allclose(x2, x - 0.1 * want, rtol=1e-6)


def test_a_mode_that_does_not_exist() -> None:
    with pytest.raises(MismatchError, match="mode 'sideways'"):
        import_onnx(momentum(mode="sideways"))


def test_tensors_that_do_not_come_in_groups() -> None:
    with pytest.raises(MismatchError, match="groups of 3"):
        import_onnx(momentum(names="xgvw"))


@pytest.mark.parametrize(("op", "gates"), few([("RNN", 1), ("GRU", 3), ("LSTM", 4)], 1, unpack=True))
def test_a_batch_in_front_is_the_same_recurrence(op: str, gates: int) -> None:
    rng = np.random.default_rng(0)
    b, t, i, h = 2, 5, 3, 4
    shapes = {"x": (t, b, i), "w": (1, gates * h, i), "r": (1, gates * h, h), "h0": (1, b, h)}
    values = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    turned = {**values, "x": values["x"].swapaxes(0, 1), "h0": values["h0"].swapaxes(0, 1)}

    def run(given: Any, layout: Any) -> Any:
        node = helper.make_node(op, ["x", "w", "r", "", "", "h0"], ["y", "yh"], hidden_size=h, layout=layout)
        inputs = [info(k, v.shape) for k, v in given.items()]
        imported = import_onnx(make(node, inputs, [info("y", None), info("yh", None)]))
        assert Prim.OPAQUE in {n.prim for n in imported.graph.nodes}
        return evaluate(imported.graph, list(given.values()), opaque=lambda a, xs: run_onnx(a.payload, xs))

    (y, last), (y1, last1) = run(values, 0), run(turned, 1)
    np.testing.assert_allclose(y1, y.transpose(2, 0, 1, 3), rtol=1e-6)
    np.testing.assert_allclose(last1, last.transpose(1, 0, 2), rtol=1e-6)


def test_an_optional_with_an_element_is_the_element() -> None:
    nodes = [
        helper.make_node("Optional", ["x"], ["o"]),
        helper.make_node("OptionalGetElement", ["o"], ["e"]),
        helper.make_node("OptionalHasElement", ["o"], ["has"]),
        helper.make_node("OptionalHasElement", [""], ["hasnot"]),
        helper.make_node("Neg", ["e"], ["y"]),
    ]
    outputs = [info("y", [2]), *(info(k, [], TensorProto.BOOL) for k in ("has", "hasnot"))]
    graph = helper.make_graph(nodes, "g", [info("x", [2])], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    imported = import_onnx(model.SerializeToString())
    y, has, hasnot = evaluate(imported.graph, [np.array([1, -2], np.float32)])
    assert y.tolist() == [-1, 2]
    assert (bool(has), bool(hasnot)) == (True, False)


def test_an_empty_optional_is_refused() -> None:
    kind = helper.make_tensor_type_proto(F, [2])
    nodes = [helper.make_node("Optional", [], ["o"], type=kind), helper.make_node("OptionalGetElement", ["o"], ["y"])]
    graph = helper.make_graph(nodes, "g", [], [info("y", [2])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    with pytest.raises(UnsupportedError, match="an optional without an element"):
        import_onnx(model.SerializeToString())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max"])
def test_scattered_rows(reduction: str, known: bool) -> None:
    rng = np.random.default_rng(0)
    x, updates = rng.normal(size=(4, 3, 50)).astype(np.float32), rng.normal(size=(3, 50)).astype(np.float32)
    at = np.array([[0, 2], [-1, 1], [3, 0]])
    node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction=reduction)
    values = [helper.make_tensor("i", INT, at.shape, at.reshape(-1))] if known else []
    inputs = [info("x", x.shape), *([] if known else [info("i", at.shape, INT)]), info("u", updates.shape)]
    graph = helper.make_graph([node], "g", inputs, [info("y", x.shape)], values)
    opsets = [helper.make_opsetid("", 18)]
    imported = import_onnx(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    assert not imported.opaque
    want = x.copy()
    ways: dict[str, Any] = {"none": lambda _, v: v, "add": np.add, "mul": np.multiply, "max": np.maximum}
    combine = ways[reduction]
    for place, value in zip(at, updates, strict=True):
        want[tuple(place)] = combine(want[tuple(place)], value)
    (found,) = evaluate(imported.graph, [x, updates] if known else [x, at, updates])
    assert_allclose(found, want, rtol=1e-6)
    if reduction in ("none", "add"):  # each place is compared with the rows' indices, not with those of all elements
        assert max(n.type.size for n in imported.graph.nodes) <= max(x.size, 12 * 3 * 50)
