"""The baseline of a model that came without one: torch's own operators, one call each, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.slow import few

from weft.errors import UnsupportedError
from weft.frontends.onnx import import_onnx
from weft.generate.library.eager import ROWS, eager_model
from weft.generate.library.execute import resolve

X = np.random.default_rng(0).normal(size=(1, 4, 8, 8)).astype(np.float32)


def make(nodes: Any, weights: Any = None, x: Any = X, name: str = "x", outputs: Any = ("y",)) -> bytes:
    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()]
    given = helper.make_tensor_value_info(name, TensorProto.FLOAT, list(x.shape))
    made = [helper.make_tensor_value_info(o, TensorProto.FLOAT, None) for o in outputs]
    graph = helper.make_graph(nodes, "g", [given], made, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()


def f32(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def check(data: bytes, x: Any = X) -> Any:
    eager = eager_model(import_onnx(data).graph)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    wanted = session.run(None, {session.get_inputs()[0].name: x})
    with torch.no_grad():
        found = eager.module(torch.from_numpy(x))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-5)
    return eager


def calls(eager: Any) -> list[str]:
    views = ("reshape", "expand", "permute", "slice", "getitem", "aten.t.")
    found = [str(n.target) for n in eager.module.graph.nodes if n.op == "call_function"]
    return [t for t in found if not any(v in t for v in views)]


ONE_CALL: dict[str, tuple[dict[str, Any], tuple[Any, ...], str | None]] = {
    "Relu": ({}, (), "aten.relu.default"),
    "Erf": ({}, (), "aten.erf.default"),
    "Sign": ({}, (), "aten.sign.default"),
    "Sigmoid": ({}, (), "aten.sigmoid.default"),
    "HardSwish": ({}, (), "aten.hardswish.default"),
    "HardSigmoid": ({"alpha": 1 / 6, "beta": 0.5}, (), "aten.hardsigmoid.default"),
    "LeakyRelu": ({"alpha": 0.2}, (), "aten.leaky_relu.default"),
    "Softmax": ({"axis": 1}, (), "aten._softmax.default"),
    "GlobalAveragePool": ({}, (), "aten.mean.dim"),
    "MaxPool": ({"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}, (), "aten.max_pool2d.default"),
    "Add": ({}, (f32(4, 1, 1),), "aten.add.Tensor"),
    "Div": ({}, (f32(1, 4, 8, 1),), "aten.div.Tensor"),
    "Max": ({}, (f32(8),), "aten.maximum.default"),
    "Clip": ({}, (np.float32(-0.5), np.float32(0.5)), "aten.clamp"),
    "PRelu": ({}, (f32(4, 1, 1),), "aten.prelu.default"),
    "MatMul": ({}, (f32(8, 5),), "aten.matmul.default"),
    "Gather": ({"axis": 2}, (np.array([[0, -1], [3, 3]]),), "aten.index"),
    "Conv": ({"pads": [1] * 4}, (f32(6, 4, 3, 3), f32(6)), "aten.convolution.default"),
    "BatchNormalization": (
        {},
        (*(f32(4, seed=i) for i in range(3)), np.abs(f32(4, seed=3)) + 1),
        "aten.batch_norm.default",
    ),
    "InstanceNormalization": ({}, (f32(4), f32(4, seed=1)), "aten.instance_norm.default"),
    "LayerNormalization": ({"axis": -1}, (f32(8), f32(8, seed=1)), "aten.native_layer_norm.default"),
    "Transpose": ({"perm": [0, 2, 3, 1]}, (), None),
    "Concat": ({"axis": 1}, (f32(1, 2, 8, 8, seed=1),), "aten.cat.default"),
}


@pytest.mark.parametrize("op", few(ONE_CALL, 8))
def test_one_call_per_operator(op: str) -> None:
    attributes, operands, target = ONE_CALL[op]
    names = [f"w{k}" for k in range(len(operands))]
    node = helper.make_node(op, ["x", *names], ["y"], name="n", **attributes)
    eager = check(make([node], dict(zip(names, operands, strict=True))))
    assert (eager.operators, dict(eager.parts)) == (1, {})
    found = calls(eager)
    assert len(found) == (target is not None)
    assert target is None or found[0].startswith(target)


@pytest.mark.parametrize(
    ("attributes", "target"),
    [
        ({"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, "nearest2d"),
        ({"mode": "linear"}, "bilinear2d"),
        ({"mode": "linear", "coordinate_transformation_mode": "align_corners"}, "bilinear2d"),
        ({"mode": "nearest", "nearest_mode": "ceil"}, None),
        ({"mode": "linear", "coordinate_transformation_mode": "asymmetric"}, None),
    ],
)
def test_resize_is_one_call_only_where_it_means_the_same(attributes: dict[str, Any], target: str | None) -> None:
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], **attributes)
    eager = check(make([node], {"s": np.array([1, 1, 2, 3], np.float32)}))
    if target is None:
        assert dict(eager.parts) == {"Resize": 1}
    else:
        assert len(calls(eager)) == 1 and target in calls(eager)[0] and not eager.parts


@pytest.mark.parametrize("trans", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("scale", [(1.0, 1.0), (0.5, 2.0)])
def test_gemm(trans: tuple[int, int], scale: tuple[float, float]) -> None:
    x = f32(3, 5)
    m, k = x.shape[::-1] if trans[0] else x.shape
    y = f32(*((7, k) if trans[1] else (k, 7)), seed=1)
    node = helper.make_node(
        "Gemm", ["x", "b", "c"], ["y"], transA=trans[0], transB=trans[1], alpha=scale[0], beta=scale[1]
    )
    eager = check(make([node], {"b": y, "c": f32(7, seed=2)}, x), x)
    assert len(calls(eager)) == 1 and not eager.parts
    assert eager.module(torch.from_numpy(x))[0].shape == (m, 7)


def test_uneven_pads_cost_a_second_call_and_say_so() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 0, 0, 1])
    eager = check(make([node], {"w": f32(6, 4, 3, 3)}))
    assert dict(eager.parts) == {"Conv": 1}


def network(prefix: str = "net") -> bytes:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name=f"{prefix}/conv", pads=[1] * 4),
        helper.make_node("BatchNormalization", ["a", "g", "b", "m", "v"], ["n"], name=f"{prefix}/norm"),
        helper.make_node("Relu", ["n"], ["r"], name=f"{prefix}/act"),
        helper.make_node("Add", ["r", "x"], ["s"], name=f"{prefix}/add"),
        helper.make_node("Split", ["s"], ["p", "q"], name=f"{prefix}/split", axis=1, num_outputs=2),
        helper.make_node("Mul", ["p", "q"], ["y"], name=f"{prefix}/mul"),
    ]
    weights = {
        "w": f32(4, 4, 3, 3),
        **{k: f32(4, seed=i) for i, k in enumerate("gbm", 1)},
        "v": np.abs(f32(4, seed=4)) + 1,
    }
    return make(nodes, weights)


def test_nothing_is_fused_or_folded() -> None:
    eager = check(network())
    assert [t.split(".")[1] for t in calls(eager)] == ["convolution", "batch_norm", "relu", "add", "mul"]
    assert eager.operators == 6 and not eager.parts
    assert len(dict(eager.module.named_buffers())) == 5, "weights as they stand in the file"


def test_torch_compile_takes_it() -> None:
    eager = check(network())
    torch._dynamo.reset()
    compiled = torch.compile(eager.module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.from_numpy(X)), eager.module(torch.from_numpy(X)))
    torch._dynamo.reset()


def test_names_of_the_model_reach_no_source_text() -> None:
    hostile = "x'\n__import__('os').abort()#"
    nodes = [helper.make_node("Relu", [hostile], ["y"], name=hostile)]
    eager = check(make(nodes, name=hostile))
    assert "import" not in eager.module.code and "abort" not in eager.module.code


def test_what_torch_cannot_run_is_named() -> None:
    nodes = [helper.make_node("TopK", ["x", "k"], ["y", "i"], axis=-1)]
    data = make(nodes, {"k": np.array([2])})
    imported = import_onnx(data)
    if not imported.opaque:
        pytest.skip("the operator has a rule by now")
    with pytest.raises(UnsupportedError, match=r"onnx::TopK.*another runtime.*W201"):
        eager_model(imported.graph)


def test_rows_name_rules_and_operators_that_exist() -> None:
    from weft.fission.registry import RULES

    assert set(ROWS) <= set(RULES)
    with pytest.raises(Exception, match="names"):
        resolve("os.system")
