"""ONNX files of others: which are looked at, on what inputs, and what is said of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tools.foreign_onnx import (
    Attempt,
    NotRunError,
    Source,
    difference,
    drawn,
    fetch,
    files,
    run_file,
    summary_of,
    wanted,
)

from tools import foreign_onnx


def model(
    path: Path, op: str, inputs: list[tuple[str, int, list[Any]]], kind: int = TensorProto.FLOAT, **attrs: Any
) -> Path:
    """A file of one operator."""
    given = [helper.make_tensor_value_info(name, dtype, shape) for name, dtype, shape in inputs]
    node = helper.make_node(op, [name for name, _, _ in inputs], ["y"], **attrs)
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", kind, None)])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(made, str(path))
    return path


pytestmark = pytest.mark.filterwarnings("default:Weft compiles")
FLOATS = ("x", TensorProto.FLOAT, ["n", 3])


def test_a_file_that_is_right_and_one_with_an_operator_of_a_library(tmp_path: Path) -> None:
    assert run_file(model(tmp_path / "a.onnx", "Relu", [FLOATS])) == {"status": "right"}
    places: list[Any] = [
        ("x", TensorProto.FLOAT, [1, 1, 4, 4]),
        ("r", TensorProto.FLOAT, [1, 4]),
        ("b", TensorProto.INT64, ["n"]),
    ]
    found = run_file(model(tmp_path / "b.onnx", "RoiAlign", places))
    assert found == {"status": "opaque", "opaque": ["onnx::RoiAlign"]}
    found = run_file(model(tmp_path / "c.onnx", "NonZero", [FLOATS], TensorProto.INT64))
    assert found == {"status": "split"}


def test_what_the_runtime_does_not_run_counts_for_nobody(tmp_path: Path) -> None:
    found = run_file(model(tmp_path / "a.onnx", "NoSuchOperator", [FLOATS]))
    assert found["status"] == "not_run" and "NoSuchOperator" in found["reason"]
    random = model(tmp_path / "b.onnx", "RandomNormalLike", [FLOATS])
    assert run_file(random) == {"status": "not_run", "reason": "random: RandomNormalLike"}
    texts = model(tmp_path / "c.onnx", "Identity", [("x", TensorProto.STRING, [2])], TensorProto.STRING)
    with pytest.raises(NotRunError, match="is a tensor"):
        wanted(texts)


def test_sizes_are_those_with_which_it_runs(tmp_path: Path) -> None:

    path = model(tmp_path / "a.onnx", "Add", [("x", TensorProto.FLOAT, ["n", 3]), ("z", TensorProto.FLOAT, [16, 3])])
    inputs, (y,) = wanted(path)
    assert inputs["x"].shape == (1, 3) and y.shape == (16, 3)  # two rows do not go with sixteen
    inputs, _ = wanted(
        model(tmp_path / "b.onnx", "Gather", [("x", TensorProto.FLOAT, [5]), ("i", TensorProto.INT64, ["n"])])
    )
    assert set(inputs["i"].tolist()) <= {0, 1}


@pytest.mark.parametrize(
    ("got", "want", "why"),
    [
        ([np.ones(3, np.float32)], [], "1 outputs instead of 0"),
        ([np.ones(3, np.float32)], [np.ones((3, 1), np.float32)], "is float32[3] instead of float32[3, 1]"),
        ([np.ones(3, np.int32)], [np.array([1, 2, 1], np.int32)], "1 of 3 elements differ"),
        ([np.array([1, np.nan], np.float32)], [np.array([1, np.inf], np.float32)], "other infinities or NaN"),
        ([np.array([1, 2.01], np.float32)], [np.array([1, 2], np.float32)], "off by 5.00e-03"),
        ([np.array([1e-6, 2], np.float32)], [np.array([0, 2], np.float32)], ""),
        ([np.array([np.nan, -np.inf], np.float32)], [np.array([np.nan, -np.inf], np.float32)], ""),
        ([np.zeros(0, np.float32)], [np.zeros(0, np.float32)], ""),
    ],
)  # fmt: skip
def test_what_is_a_difference(got: Any, want: Any, why: str) -> None:
    found = difference(got, want)
    assert (why in found) if why else not found


def test_a_wrong_answer_and_a_refusal_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(tmp_path / "a.onnx", "Relu", [FLOATS])
    monkeypatch.setattr(
        foreign_onnx, "wanted", lambda path: ({"x": np.ones((2, 3), np.float32)}, [np.zeros((2, 3), np.float32)])
    )
    assert run_file(path)["status"] == "wrong"
    path.write_bytes(b"not a model")
    found = run_file(path)
    assert found["status"] == "refused" and found["code"].startswith("W1")


def test_equal_files_count_once_and_a_run_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a/one.onnx", "b/two.onnx"):
        model(tmp_path / "files" / name, "Relu", [FLOATS])
    model(tmp_path / "files" / "b" / "three.onnx", "Abs", [FLOATS])
    names = [str(p.relative_to(tmp_path / "files")) for p in files(tmp_path / "files")]
    assert names == ["a/one.onnx", "b/three.onnx"]
    record = tmp_path / "record.jsonl"
    monkeypatch.setattr(foreign_onnx, "RECORD", record)
    monkeypatch.setattr(sys, "argv", ["foreign_onnx", str(tmp_path / "files"), "--jobs", "1"])
    assert foreign_onnx.main() == 0
    head, *lines, summary = map(json.loads, record.read_text().splitlines())
    assert head["record"] == "environment" and [x["case"] for x in lines] == names
    assert summary == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["total"], summary["right"], summary["share"], summary["others"]) == (2, 2, 1.0, {})
    monkeypatch.setattr(sys, "argv", ["foreign_onnx", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="--fetch brings some"):
        foreign_onnx.main()


def test_the_share_is_of_those_that_the_runtime_runs() -> None:
    kinds = ("right", "opaque", "split", "refused", "wrong", "crashed", "not_run", "not_run")
    found = summary_of([{"case": str(k), "status": x} for k, x in enumerate(kinds)])
    assert (found["total"], found["run_by_onnxruntime"], found["right"], found["share"]) == (8, 6, 3, 0.5)
    assert found["others"] == {"3": "refused", "4": "wrong", "5": "crashed"}


def test_files_are_fetched_at_their_commit(tmp_path: Path) -> None:
    repository = tmp_path / "host" / "owner" / "name"
    model(repository / "deep" / "a.onnx", "Relu", [FLOATS])
    (repository / "other.txt").write_text("left where it is")

    def git(*command: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "uploadpack.allowAnySHA1InWant=true"]
        return subprocess.run(
            ["git", "-C", str(repository), *who, *command], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    git("config", "uploadpack.allowFilter", "true")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    git("add", "."), git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    (repository / "deep" / "a.onnx").unlink()
    git("commit", "-q", "-a", "-m", "two")
    for _ in range(2):  # once more does nothing
        fetch(tmp_path / "files", [Source("owner/name", commit)], f"file://{tmp_path}/host")
        assert [p.name for p in files(tmp_path / "files")] == ["a.onnx"]
    assert not (tmp_path / "files" / "owner" / "name" / "other.txt").exists()


def test_inputs_are_of_their_types() -> None:
    class Session:
        def get_inputs(self) -> list[Any]:
            from types import SimpleNamespace as N

            kinds = ("float16", "bool", "uint8", "int64")
            return [N(name=k, type=f"tensor({k})", shape=["n", 2] if k != "bool" else []) for k in kinds]

    found = drawn(Session(), Attempt(3, (1, 4)))
    assert {k: (x.dtype.name, x.shape) for k, x in found.items()} == {
        "float16": ("float16", (3, 2)), "bool": ("bool", ()), "uint8": ("uint8", (3, 2)), "int64": ("int64", (3, 2)),
    }  # fmt: skip
    assert found["int64"].min() >= 1 and found["int64"].max() <= 3
