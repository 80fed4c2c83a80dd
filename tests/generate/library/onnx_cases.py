"""Models of one ONNX operator without a rule, as files have them, and what ONNX Runtime says of these."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tests.typed import assert_allclose

from weft.ir.types import Array

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
NOTHING: Mapping[str, Array] = {}


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Array],
    outputs: Sequence[str],
    constants: Mapping[str, Array] = NOTHING,
    opset: int = 17,
) -> bytes:
    """Inputs of the types and shapes of these values."""

    def info(name: str, value: Array) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    graph = helper.make_graph(
        list(nodes),
        "g",
        [info(k, v) for k, v in inputs.items()],
        [onnx.ValueInfoProto(name=k) for k in outputs],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid(*x) for x in (("", opset), ("com.microsoft", 1))], ir_version=8
    )
    return bytes(onnx.shape_inference.infer_shapes(made).SerializeToString())


def top_k(
    shape: Sequence[int], dtype: Any = np.float32, *, k: int = 3, opset: int = 17, **attributes: Any
) -> tuple[bytes, dict[str, Array]]:
    """Values and positions of a tensor that has few distinct values."""
    rng = np.random.default_rng(len(shape) * 100 + k)
    x = rng.integers(0 if dtype is np.uint8 else -3, 4, tuple(shape)).astype(dtype)
    if opset < 10:
        node = helper.make_node("TopK", ["x"], ["y", "i"], k=k, **attributes)
        return model([node], {"x": x}, ["y", "i"], opset=opset), {"x": x}
    node = helper.make_node("TopK", ["x", "k"], ["y", "i"], **attributes)
    return model([node], {"x": x}, ["y", "i"], {"k": np.array([k])}, opset), {"x": x}


def recurrent(
    op: str,
    *,
    sizes: tuple[int, int, int, int] = (5, 2, 3, 4),
    direction: str = "forward",
    given: str = "B",
    outputs: Sequence[str] = ("y", "h", "c"),
    lengths: Sequence[int] | None = None,
    opset: int = 17,
    computed: bool = False,
    **attributes: Any,
) -> tuple[bytes, dict[str, Array]]:
    """A layer of `sizes` (steps, batch, elements of an input, of a state).

    `given`: which of B, h, c and P it has; states are inputs of the model. `lengths` are a constant. `computed`: so is
    no weight. Weights are so large that states neither saturate nor grow apart by rounding.
    """
    t, b, i, h = sizes
    d, rng = 2 if direction == "bidirectional" else 1, np.random.default_rng(sum(sizes))

    def drawn(*shape: int) -> Array:
        return (rng.standard_normal(shape) / np.sqrt(max(i, h))).astype(np.float32)

    weights: dict[str, Array] = {"w": drawn(d, GATES[op] * h, i), "r": drawn(d, GATES[op] * h, h)}
    inputs = {"x": drawn(t, b, i)}
    if "B" in given:
        weights["b"] = drawn(d, 2 * GATES[op] * h)
    if "P" in given:
        weights["p"] = drawn(d, 3 * h)
    inputs.update({f"{k}0": drawn(d, b, h) for k in "hc" if k in given})
    constants = {} if computed else dict(weights)
    if lengths is not None:
        constants["n"] = np.array(lengths, np.int32)
    names = ["x", "w", "r", "b", "n", "h0", "c0", "p"]
    present = {**inputs, **weights, **constants}
    names = [n if n in present else "" for n in names]
    while not names[-1]:
        names.pop()
    made = [n if n in outputs else "" for n in ("y", "h", "c")[: 3 if op == "LSTM" else 2]]
    while not made[-1]:
        made.pop()
    node = helper.make_node(op, names, made, hidden_size=h, direction=direction, **attributes)
    inputs.update(weights if computed else {})
    return model([node], inputs, [n for n in made if n], constants, opset), inputs


def scatter(
    op: str,
    shape: Sequence[int],
    index: Sequence[int],
    dtype: Any = np.float32,
    *,
    axis: int = 0,
    repeated: bool = False,
    reduction: str = "none",
) -> tuple[bytes, dict[str, Array]]:
    """Updates at random places, negative ones among them; `repeated`: some are written more than once."""
    rng, shape = np.random.default_rng(sum(index)), tuple(shape)
    attributes: dict[str, Any] = {"reduction": reduction}
    axis = axis % len(shape)
    if op == "ScatterElements":
        attributes["axis"] = axis
        many = np.stack([rng.permutation(shape[axis])[: index[axis]] for _ in range(math.prod(index) // index[axis])])
        others = [n for k, n in enumerate(index) if k != axis]
        places = np.moveaxis(many.reshape(*others, index[axis]), -1, axis) - shape[axis] * rng.integers(
            0, 2, tuple(index)
        )
        update = tuple(index)
    else:
        deep, rows = index[-1], math.prod(index[:-1])
        flat = rng.permutation(math.prod(shape[:deep]))[:rows]
        places = np.stack(np.unravel_index(flat, shape[:deep]), -1).reshape(tuple(index))
        places -= np.array(shape[:deep]) * rng.integers(0, 2, tuple(index))
        update = (*index[:-1], *shape[deep:])
    if repeated:
        places = np.where(rng.random(places.shape) < 0.5, places % 3, places)
    node = helper.make_node(op, ["x", "i", "u"], ["y"], **{k: v for k, v in attributes.items() if v != "none"})
    inputs = {
        "x": rng.integers(0, 90, shape).astype(dtype),
        "i": places.astype(np.int64),
        "u": rng.integers(0, 90, update).astype(dtype),
    }
    return model([node], inputs, ["y"], opset=18), inputs


def network() -> tuple[bytes, dict[str, Array]]:
    """A layer, a product, the largest of its results."""
    rng = np.random.default_rng(5)
    i, h = 16, 32
    constants = {
        "w": rng.standard_normal((1, 4 * h, i)) / 6,
        "r": rng.standard_normal((1, 4 * h, h)) / 6,
        "b": rng.standard_normal((1, 8 * h)) / 6,
        "v": rng.standard_normal((h, 200)) / 6,
    }
    nodes = [
        helper.make_node("Relu", ["x"], ["p"]),
        helper.make_node("LSTM", ["p", "w", "r", "b"], ["", "last", ""], hidden_size=h),
        helper.make_node("MatMul", ["last", "v"], ["s"]),
        helper.make_node("Softmax", ["s"], ["q"]),
        helper.make_node("TopK", ["q", "k"], ["y", "places"]),
        helper.make_node("Sqrt", ["y"], ["root"]),
    ]
    values = {k: v.astype(np.float32) for k, v in constants.items()} | {"k": np.array([5])}
    x = rng.standard_normal((12, 3, i)).astype(np.float32)
    return model(nodes, {"x": x}, ["root", "places"], values), {"x": x}


def expected(data: bytes, inputs: Mapping[str, Array]) -> list[Array]:
    """Results of the whole model in ONNX Runtime."""
    import onnxruntime  # what is drawn needs none

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # what is written twice, the last one writes
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return [np.asarray(y) for y in session.run(None, dict(inputs))]


def assert_results(mine: Array, again: Array, want: Array, *, exact: bool, rtol: float, atol: float) -> None:
    """The same in two runs, and what is wanted: bit by bit, or within these."""
    assert (mine.dtype, mine.shape) == (want.dtype, want.shape)
    assert np.array_equal(mine, again)
    if exact:
        assert np.array_equal(mine, want)
    else:
        assert_allclose(mine, want, rtol=rtol, atol=atol)
