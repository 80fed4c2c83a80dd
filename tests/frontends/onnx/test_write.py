"""Models with their weights beside them: what ONNX Runtime makes of them, names, and writers that die."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.typed import assert_allclose

from weft.errors import UnsupportedError
from weft.frontends.onnx import Limits, export, import_onnx, write, write_onnx
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType

X = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)


def network(seed: int = 1) -> Graph:
    """Weights of several types on both sides of the size from which they lie outside."""
    rng = np.random.default_rng(seed)
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (3, 40)), "x")
    y = b.add(Prim.MATMUL, x, b.constant(rng.normal(size=(40, 50)).astype(np.float32)))
    y = b.apply(Prim.ADD, y, b.broadcast(b.constant(rng.normal(size=(1, 50)).astype(np.float32)), (3, 50)))
    half = b.constant(rng.normal(size=(50, 20)).astype(np.float16))
    y = b.add(Prim.MATMUL, y, b.cast(half, DType.F32))
    mask = b.constant(rng.random((3, 20, 40)) > 0.5)
    table = b.constant(rng.integers(0, 9, (3, 20, 40)))
    wide = b.apply(Prim.MUL, b.cast(mask, DType.F32), b.cast(table, DType.F32))
    return b.build([b.apply(Prim.MUL, wide, b.broadcast(b.reshape(y, (3, 20, 1)), (3, 20, 40)))], ["y"])


def run(path: Any) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})


def external(path: Any) -> dict[str, dict[str, str]]:
    model = onnx.load(path, load_external_data=False)
    outside = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    return {t.name: {e.key: e.value for e in t.external_data} for t in outside}


@pytest.mark.parametrize("how", [{"external": True}, {"inline_bytes": 10_000}], ids=["asked", "too large"])
def test_weights_beside_the_model(tmp_path: Path, how: dict[str, Any]) -> None:
    graph, path = network(), tmp_path / "out.onnx"
    assert write_onnx(graph, path, **how) == (path, tmp_path / "out.onnx.data")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.onnx", "out.onnx.data"]
    entries = external(path)
    assert len(entries) == 4, "the bias of 200 bytes stays inside"
    assert {e["location"] for e in entries.values()} == {"out.onnx.data"}
    assert all(int(e["offset"]) % 4096 == 0 for e in entries.values())
    assert path.stat().st_size < 3000
    assert_allclose(run(path)[0], evaluate(graph, [X])[0], rtol=2e-5, atol=1e-5)
    onnx.checker.check_model(str(path))


def test_small_models_are_one_file(tmp_path: Path) -> None:
    graph, path = network(), tmp_path / "out.onnx"
    assert write_onnx(graph, path) == (path,)
    assert [p.name for p in tmp_path.iterdir()] == ["out.onnx"]
    assert path.read_bytes() == export.export_onnx(graph)
    beside = tmp_path / "other.onnx"
    write_onnx(graph, beside, external=True)
    np.testing.assert_array_equal(run(path)[0], run(beside)[0])


def test_weft_reads_what_it_wrote(tmp_path: Path) -> None:
    write_onnx(network(), tmp_path / "m.onnx", external=True)
    again = import_onnx(tmp_path / "m.onnx", limits=Limits(model_bytes=4000))
    assert_allclose(evaluate(again.graph, [X])[0], evaluate(network(), [X])[0], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["a b.onnx", "-x.onnx", "..onnx", "ü.onnx", "a\\b.onnx", "a\nb.onnx", "x" * 150 + ".onnx", "[bold].onnx"]
)
def test_names_that_mean_something_to_others(tmp_path: Path, name: str) -> None:
    path, beside = write_onnx(network(), tmp_path / name, external=True)
    assert beside.parent == tmp_path
    assert write._PLAIN.fullmatch(beside.name)
    assert {e["location"] for e in external(path).values()} == {beside.name}
    assert import_onnx(path).operators > 0


def test_an_older_pair_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write_onnx(network(1), path, external=True)
    before = run(path)[0]
    write_onnx(network(2), path, external=True)
    assert_allclose(run(path)[0], evaluate(network(2), [X])[0], rtol=2e-5, atol=1e-5)
    assert not np.allclose(before, run(path)[0])
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("dies_at", [0, 1, 2])
def test_no_model_lies_beside_the_weights_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """Whichever rename the writer dies at, a model that is there gives its own results."""
    path = tmp_path / "m.onnx"
    write_onnx(network(1), path, external=True)
    renames: list[Any]
    wanted, renames = run(path)[0], []
    replace = os.replace

    def dying(source: Any, target: Any) -> None:
        if len(renames) == dies_at:
            raise OSError(28, "No space left on device")
        renames.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", dying)
    if dies_at == 2:
        write_onnx(network(2), path, external=True)
        wanted = evaluate(network(2), [X])[0]
    else:
        with pytest.raises(OSError, match="No space"):
            write_onnx(network(2), path, external=True)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".tmp")]
    if path.exists():
        np.testing.assert_allclose(run(path)[0], wanted, rtol=2e-5, atol=1e-5)
    else:
        assert dies_at < 2


def test_an_export_that_is_refused_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    write_onnx(network(), path, external=True)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    b = GraphBuilder()
    x = b.input(TensorType(DType.BF16, (2,)), "x")
    with pytest.raises(UnsupportedError, match="bf16"):
        write_onnx(b.build([b.apply(Prim.ADD, x, x)], ["y"]), path, external=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        write_onnx(network(), tmp_path / "pipe", external=True)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    write_onnx(network(), tmp_path.joinpath("/dev/null"))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_one_protobuf_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_BYTES", 5000)
    with pytest.raises(UnsupportedError, match="inside one model"):
        export.export_onnx(network())
