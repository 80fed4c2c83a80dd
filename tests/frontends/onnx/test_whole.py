"""Whole models by ONNX Runtime: right, from one file or several, and refused without harm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from weft.frontends.onnx.limits import Limits
from weft.frontends.onnx.whole import OnnxRuntimeModel, onnxruntime_model
from weft.ir.declined import Declined
from weft.ir.types import DType, TensorType

pytest.importorskip("onnxruntime")
ROWS, WIDTH = 8, 64
TYPES = (TensorType(DType.F32, (ROWS, WIDTH)),)


@pytest.fixture
def weight() -> np.ndarray:
    return np.random.default_rng(7).standard_normal((WIDTH, WIDTH)).astype(np.float32)


@pytest.fixture
def model(weight: np.ndarray) -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    shape = [ROWS, WIDTH]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, shape)],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(source: Path | bytes, *, results: int = 1, seconds: float = 60.0) -> OnnxRuntimeModel | Declined:
    return onnxruntime_model(source, TYPES, results, limits=Limits(), threads=1, seconds=seconds)


def test_a_model_in_one_file_and_in_two(model: onnx.ModelProto, weight: np.ndarray, tmp_path: Path) -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    want = torch.relu(x @ torch.from_numpy(weight))
    whole = run(model.SerializeToString())
    onnx.save_model(model, str(tmp_path / "m.onnx"), save_as_external_data=True, location="w.bin", size_threshold=0)
    beside = run(tmp_path / "m.onnx")
    for made in (whole, beside):
        assert isinstance(made, OnnxRuntimeModel), made
        (y,) = made(x)
        torch.testing.assert_close(y, want)
        first = y.clone()
        made(x + 1)
        assert torch.equal(y, first), "results are the caller's own"


def test_data_outside_of_the_folder_are_refused(model: onnx.ModelProto, weight: np.ndarray, tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(weight.tobytes())
    inside = tmp_path / "folder"
    inside.mkdir()
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="../secret.bin")
    (inside / "m.onnx").write_bytes(model.SerializeToString())
    made = run(inside / "m.onnx")
    assert isinstance(made, Declined) and "W113" in made.reason


@pytest.mark.parametrize(
    ("results", "seconds", "reason"), [(2, 60.0, "gives 1 results, Weft 2"), (1, 0.01, "took more than")]
)
def test_what_does_not_fit_is_declined(model: onnx.ModelProto, results: int, seconds: float, reason: str) -> None:
    made = run(model.SerializeToString(), results=results, seconds=seconds)
    assert isinstance(made, Declined) and reason in made.reason


def test_no_model_at_all(model: onnx.ModelProto, tmp_path: Path) -> None:
    for source in (model.SerializeToString()[:50], b"", tmp_path / "nothing.onnx", tmp_path):
        assert isinstance(run(source), Declined)


def test_types_without_an_array_are_declined(model: onnx.ModelProto) -> None:
    types = (TensorType(DType.BF16, (ROWS, WIDTH)),)
    made = onnxruntime_model(model.SerializeToString(), types, 1, limits=Limits(), threads=1, seconds=60.0)
    assert made == Declined("NumPy has no bf16")
