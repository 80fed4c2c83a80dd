"""Saved plans from elsewhere: what was made to do harm is refused, what is malformed is a clear error."""

from __future__ import annotations

import ast
import hashlib
import json
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.plans import executable

from weft.errors import ArtifactError, WeftError
from weft.generate import library
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.prims import Prim
from weft.ir.types import DType, TensorType
from weft.kernels.source import CallStep, LibraryCall, Ref, Schedule
from weft.runtime import artifact
from weft.runtime.admitted import CHECKED, needs_trust


def network() -> Graph:
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (8, 16)))
    w = b.constant(np.arange(128, dtype=np.float32).reshape(16, 8) / 128)
    y = b.apply(Prim.TANH, b.add(Prim.MATMUL, x, w))
    return b.build([y, b.reduce(Prim.REDUCE_SUM, b.apply(Prim.MUL, y, 2.0), (1,))])


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Of a plan of library calls, which needs no trust."""
    path = tmp_path_factory.mktemp("plan") / "plan.weft"
    artifact.save(executable(network()).linked, path, trust_dir=None)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def written(path: Path, parts: Mapping[str, bytes], **manifest: Any) -> Path:
    """A file whose digests all fit."""
    rest = {k: v for k, v in parts.items() if k != "manifest.json"}
    digests = {k: {"sha256": hashlib.sha256(v).hexdigest(), "bytes": len(v)} for k, v in rest.items()}
    head = {**json.loads(parts["manifest.json"]), "members": digests, **manifest}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {"manifest.json": json.dumps(head).encode(), **rest}.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


def places(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [x for k, v in inside for x in [(*before, k), *places(v, (*before, k))]]


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at a place."""
    copy = json.loads(json.dumps(value))
    inner = copy
    for k in place[:-1]:
        inner = inner[k]
    inner[place[-1]] = new
    return copy


def call(*steps: CallStep) -> LibraryCall:
    return LibraryCall(Schedule("library"), (), steps, (Ref("tmp", len(steps) - 1),))


@pytest.mark.parametrize(
    "step",
    [
        CallStep("aten._sparse_coo_tensor_unsafe.default", (Ref("in", 0), Ref("in", 0), (4,))),
        CallStep("aten.as_strided.default", (Ref("in", 0), (4,), (1,), 0)),
        CallStep("mkldnn._linear_pointwise.default", (Ref("in", 0), Ref("in", 0), None, "none", (), "")),
        CallStep("weft.opaque_aten", ('{"op": "aten::_nested_view_from_buffer", "overload": ""}', 0)),
        CallStep("weft.opaque_aten", ('{"op": "prims::topk", "overload": "", "kwargs": {}}', 0)),
        CallStep("weft.opaque_aten", ('{"op": "aten::full", "kwargs": {"layout": {"layout": "strided"}}}', 0)),
        CallStep("weft.opaque_aten", ('{"op": "aten::topk"}', 0)),
        CallStep("weft.opaque_aten", ("[", 0)),
        CallStep("weft.opaque_aten", (7, 0)),
        CallStep("weft.opaque_aten", ()),
        CallStep("weft.opaque_onnx", ("{}", 0)),
        CallStep("weft.recurrent_weights", (2, 1 << 40, 4, 1, Ref("in", 0))),
        CallStep("aten.lstm.input", (Ref("in", 0), (), (), False, 1, 0.0, False, False, False)),
        CallStep("aten.sort.values_stable", (Ref("in", 0),), (("indices", Ref("in", 1)), ("values", Ref("in", 0)))),
        CallStep("aten.sum.dim_IntList", (Ref("in", 0), (0,), True), (("dtype", -1),)),
        CallStep("aten.clone.default", (Ref("in", 0),), (("memory_format", 77),)),
        CallStep("aten.full.default", ((4,), 0), (("layout", 9),)),
    ],
)
def test_operators_that_believe_what_they_are_given_need_trust(step: CallStep) -> None:
    assert needs_trust(call(step))
    assert needs_trust(call(CallStep("aten.relu.default", (Ref("in", 0),)), step))
    assert needs_trust(LibraryCall(Schedule("library"), (step,), (), ()))


def test_operators_that_check_need_none() -> None:
    dtype = (("dtype", "dtype:f32"),)
    assert not needs_trust(call(CallStep("aten.sum.dim_IntList", (Ref("in", 0), (0,), True), dtype)))
    assert not needs_trust(call(CallStep("weft.tensor", ((1.0,), "dtype:f32", ()))))
    assert not needs_trust(call(CallStep("aten.sort.stable", (Ref("in", 0),), (("dim", 9), ("stable", True)), -1)))
    topk = {"op": "aten::topk", "overload": "", "args": [{"tensor": 0}, 3], "kwargs": {}}
    assert not needs_trust(call(CallStep("weft.opaque_aten", (json.dumps(topk), -1, Ref("in", 0)), (), -1)))
    assert all(hasattr(torch.ops.aten, name) for name in CHECKED)
    assert not [name for name in CHECKED if "sparse" in name or "nested" in name or "unsafe" in name]


def test_what_the_table_of_primitives_writes_needs_no_trust() -> None:
    """All operators of `translate.py`, as its source names them."""
    text = (Path(library.__file__).parent / "translate.py").read_text()
    names = [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    found = {n.split(".")[1] for n in names if n.startswith("aten.") and n.count(".") == 2}
    assert len(found) > 60
    fused = {"cudnn_convolution", "_addmm_activation"}  # what the forms of a GPU's libraries write themselves
    assert found - CHECKED <= {"upsample_nearest2d", "upsample_bilinear2d", "", *fused}


def test_a_plan_with_such_a_call_is_refused(members: dict[str, bytes], tmp_path: Path) -> None:
    body = json.loads(members["plan.json"])
    place = ("plan", "steps", 3, "kernel", "run", 0, "kwargs", 0, 1)
    bad = {**members, "plan.json": json.dumps(changed(body, place, -1)).encode()}
    with pytest.raises(ArtifactError, match="not trusted, or calls that can do what such code can"):
        artifact.load(written(tmp_path / "bad.weft", bad))
    assert artifact.load(written(tmp_path / "good.weft", members))(torch.ones(8, 16))[1].shape == (8, 1)


VALUES = [None, -1, 0, 7, 1 << 40, -(1 << 63), 1e308, "", "x", [], {}, [1, 2], True, {"ref": "tmp", "index": 5}]


def test_changed_plans_end_in_an_error_of_ours_or_load(members: dict[str, bytes], tmp_path: Path) -> None:
    chance = random.Random(0)
    body = json.loads(members["plan.json"])
    ways = [p for p in places(body) if p != ("graph",)]
    refused = 0
    for _ in range(250):
        bad = changed(body, chance.choice(ways), chance.choice(VALUES))
        try:
            artifact.load(written(tmp_path / "bad.weft", {**members, "plan.json": json.dumps(bad).encode()}))
        except WeftError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("name", ["plan.json", "weights.safetensors"])
def test_damage_under_digests_that_fit_is_an_error_of_ours(
    name: str, members: dict[str, bytes], tmp_path: Path
) -> None:
    chance = random.Random(1)
    refused = 0
    for _ in range(100):
        data = bytearray(members[name])
        data[chance.randrange(min(len(data), 400))] = chance.randrange(256)
        try:
            artifact.load(written(tmp_path / "bad.weft", {**members, name: bytes(data)}))
        except WeftError:
            refused += 1
    assert refused > 20
    with pytest.raises(ArtifactError, match="malformed"):
        artifact.load(written(tmp_path / "bad.weft", {**members, name: members[name][:-3]}))


@pytest.mark.parametrize("about", ["x", None, {}, {"sha256": 1}, []])
def test_a_manifest_without_digests_is_an_error_of_ours(
    about: object, members: dict[str, bytes], tmp_path: Path
) -> None:
    listed = {k: about for k in members if k != "manifest.json"}
    with pytest.raises(ArtifactError, match=r"no readable plan|is damaged"):
        artifact.load(written(tmp_path / "bad.weft", members, members=listed))
    with pytest.raises(ArtifactError):
        artifact.load(written(tmp_path / "bad.weft", members, facts=7))
