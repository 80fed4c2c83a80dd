"""ONNX files of which no graph holds the whole: the part that Weft compiles, and the rest by ONNX Runtime."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import weft
from weft.errors import UnsupportedError
from weft.frontends.onnx import import_onnx, import_partitioned
from weft.frontends.onnx import whole as whole_file
from weft.frontends.onnx.partition import Partition
from weft.frontends.onnx.wire import WireError, partition_from_message, partition_to_message
from weft.ir.types import Array
from weft.pipeline.finish import wins

ort = pytest.importorskip("onnxruntime")
F, INT = TensorProto.FLOAT, TensorProto.INT64
Value = tuple[str, int, Sequence[Any] | None]


def values(given: Sequence[Value]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(*x) for x in given]


def model(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[Value], outputs: Sequence[Value], **weights: Array
) -> onnx.ModelProto:
    initializers = [numpy_helper.from_array(x, name) for name, x in weights.items()]
    graph = helper.make_graph(nodes, "g", values(inputs), values(outputs), initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def wanted(made: onnx.ModelProto | Path, *inputs: Array) -> list[Array]:
    """By ONNX Runtime, operator by operator."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(made) if isinstance(made, Path) else made.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {x.name: y for x, y in zip(session.get_inputs(), inputs, strict=True)}))


def compiled(made: onnx.ModelProto | Path, *inputs: Array, budget_s: float = 0.0, **options: Any) -> weft.Compiled:
    source = made if isinstance(made, Path) else made.SerializeToString()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = weft.compile(
            source, [torch.from_numpy(x) for x in inputs], options=weft.Options(budget_s=budget_s, **options)
        )
    assert any("ONNX Runtime runs the rest" in str(w.message) for w in told)
    return found


def held(found: weft.Compiled, made: onnx.ModelProto | Path, *inputs: Array) -> list[Array]:
    """What it gives, which is what ONNX Runtime gives."""
    got = found(*(torch.from_numpy(x) for x in inputs))
    got = [got] if isinstance(got, torch.Tensor) else list(got)
    want = wanted(made, *inputs)
    assert len(got) == len(want)
    for y, z in zip(got, want, strict=True):
        assert y.numpy().dtype == z.dtype and np.allclose(y.numpy(), z, atol=1e-5)
    return want


def detector() -> onnx.ModelProto:
    """A convolution, boxes and scores of its result, those that do not overlap, and the scores as they are."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Reshape", ["b", "by_box"], ["flat"]),
        helper.make_node("Slice", ["flat", "zero", "four", "two"], ["boxes"]),
        helper.make_node("Slice", ["flat", "four", "six", "two"], ["two_scores"]),
        helper.make_node("Transpose", ["two_scores"], ["scores"], perm=[0, 2, 1]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "iou", "least"], ["kept"]),
        helper.make_node("Gather", ["kept", "last"], ["index"], axis=1),
        helper.make_node("Gather", ["flat_boxes", "index"], ["picked"], axis=0),
        helper.make_node("Reshape", ["boxes", "rows"], ["flat_boxes"]),
        helper.make_node("ReduceMax", ["scores"], ["best"], keepdims=0),
    ]
    i = lambda *x: np.array(x, np.int64)  # noqa: E731
    return model(
        nodes, [("x", F, [1, 3, 8, 8])], [("picked", F, None), ("best", F, []), ("kept", INT, None)],
        w=rng.standard_normal((6, 3, 3, 3)).astype(np.float32), by_box=i(1, -1, 6), rows=i(-1, 4), zero=i(0),
        four=i(4), six=i(6), two=i(2), most=i(64), last=i(2), iou=np.array([0.3], np.float32),
        least=np.array([2.5], np.float32),
    )  # fmt: skip


def pictures(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((1, 3, 8, 8)).astype(np.float32)


def test_what_is_before_the_boxes_is_a_plan_and_what_depends_on_them_is_not() -> None:
    made = detector()
    with pytest.raises(UnsupportedError, match="NonMaxSuppression"):
        import_onnx(made.SerializeToString())
    found = import_partitioned(made.SerializeToString())
    assert found.operators == {"NonMaxSuppression": 1, "Gather": 2}
    assert [n.op_type for n in onnx.load_from_string(found.rest).graph.node] == [
        "NonMaxSuppression",
        "Gather",
        "Gather",
    ]
    assert found.results == (0, -1 - 3, 1) and len(found.fed) == 3 and found.compiled.operators == 8
    exe = compiled(made, pictures(0))
    (part,) = exe.parts
    assert part.plan is not None and exe.record.chosen == "parts" and exe.record.operators == 8
    assert any("NonMaxSuppression" in note for note in exe.record.notes)
    counts = {held(exe, made, pictures(k))[2].shape[0] for k in range(6)}
    assert len(counts) > 1, "as many boxes as there are"
    with pytest.raises(weft.WeftError, match="W401"):
        exe.save("nowhere.weft")


def test_with_a_budget_the_two_are_timed_beside_the_whole_file() -> None:
    made = detector()
    exe = compiled(made, pictures(0), budget_s=20.0)
    timed = {p.name: p.samples_us for p in exe.record.plans}
    assert set(timed) == {"parts", "eager"} and all(0 < us < 1e6 for samples in timed.values() for us in samples)
    assert exe.record.chosen == ("parts" if wins(timed["parts"], timed["eager"]) else "eager")
    held(exe, made, pictures(3))


def test_other_shapes_are_partitioned_anew() -> None:
    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("Unique", ["e"], ["y"])]
    made = model(nodes, [("x", F, ["n"])], [("y", F, None)])
    exe = compiled(made, np.ones(3, np.float32))
    for x in ([0.0, 1, 1], [2.0, 2, 2, 2], [1.0]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held(exe, made, np.array(x, np.float32))


def test_a_loop_that_ends_when_it_will_reads_values_of_both_sides() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["v", "twice"], ["v_out"]),  # `twice` is computed outside
            helper.make_node("ReduceSum", ["v_out"], ["s"], keepdims=0),
            helper.make_node("Less", ["s", "most"], ["go"]),
            helper.make_node("Identity", ["v_out"], ["seen"]),
        ],
        "body", values([("i", INT, []), ("c", TensorProto.BOOL, []), ("v", F, [30])]),
        values([("go", TensorProto.BOOL, []), ("v_out", F, [30]), ("seen", F, [30])]),
    )  # fmt: skip
    nodes = [
        helper.make_node("Add", ["t", "t"], ["twice"]),
        helper.make_node("Abs", ["x"], ["start"]),
        helper.make_node("Loop", ["", "yes", "start"], ["y", "steps"], body=body),
        helper.make_node("Neg", ["y"], ["z"]),
    ]
    made = model(
        nodes,
        [("x", F, [30]), ("t", F, [30])],
        [("z", F, [30]), ("start", F, [30]), ("steps", F, None)],
        yes=np.array(True),
        most=np.array(90, np.float32),
    )
    x, t = np.linspace(-1, 1, 30, dtype=np.float32), np.full(30, 1.1, np.float32)
    exe = compiled(made, x, t)
    (z, _, steps), (longer, _, more) = held(exe, made, x, t), held(exe, made, x * 0.01, t)
    assert -z.sum() >= 90 and -longer.sum() >= 90 and more.shape[0] > steps.shape[0]


def test_values_of_other_types_stay_where_they_are_made() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Cast", ["r"], ["u"], to=TensorProto.UINT16),
        helper.make_node("Cast", ["u"], ["f"], to=F),
        helper.make_node("NonZero", ["f"], ["y"]),
        helper.make_node("Exp", ["r"], ["e"]),
    ]
    outputs: list[Value] = [("y", INT, None), ("u", TensorProto.UINT16, [4]), ("e", F, [4])]
    made = model(nodes, [("x", F, [4])], outputs)
    found = import_partitioned(made.SerializeToString())
    assert found.operators["NonZero"] == 1 and found.compiled.operators >= 2
    x = np.array([3, -1, 0, 7], np.float32)
    held(compiled(made, x), made, x)


def test_a_file_of_which_nothing_is_left_to_compile() -> None:
    made = model([helper.make_node("NonZero", ["x"], ["y"])], [("x", F, [2, 3])], [("y", INT, None)])
    found = import_partitioned(made.SerializeToString())
    assert found.fed == (-1,) and not found.compiled.graph.outputs
    x = np.array([[1, 0, 2], [0, 0, 3]], np.float32)
    exe = compiled(made, x)
    assert not exe.parts and exe.record.chosen == "parts"
    held(exe, made, x)


def test_weights_beside_the_file_and_new_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    w, v = (rng.standard_normal((40, 40)).astype(np.float32) for _ in range(2))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("ReduceSum", ["a", "axis"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"]),
        helper.make_node("Compress", ["a", "c"], ["b"], axis=0),
        helper.make_node("MatMul", ["b", "v"], ["y"]),
    ]
    small = {"axis": np.array([1]), "zero": np.array(0, np.float32)}
    made = model(nodes, [("x", F, [9, 40])], [("y", F, None)], w=w, v=v, **small)
    path = tmp_path / "m.onnx"
    onnx.save(made, str(path), save_as_external_data=True, location="m.data", size_threshold=1024)
    x = rng.standard_normal((9, 40)).astype(np.float32)
    exe = compiled(path, x)
    assert 0 < held(exe, path, x)[0].shape[0] < 9
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exe.refit({"w": 2 * w, "v": -v})
    a = x @ (2 * w)
    assert np.allclose(exe(torch.from_numpy(x)).numpy(), a[a.sum(1) > 0] @ -v, atol=1e-3)


def test_values_of_data_make_no_plan_but_few_floats_and_integers_do() -> None:
    nodes = [helper.make_node("Greater", ["x", "zero"], ["c"]), helper.make_node("Compress", ["x", "c"], ["y"])]
    for size, one_plan in ((16, True), (17, False)):
        made = model(nodes, [("x", F, [size])], [("y", F, None)], zero=np.array(0, np.float32))
        x = np.linspace(-1, 1, size, dtype=np.float32)
        found = import_onnx(made.SerializeToString(), example_inputs=[x])
        assert [g.input_index for g in found.guards] == [0]  # who asks for it
        if one_plan:
            exe = weft.compile(made.SerializeToString(), [torch.from_numpy(x)], options=weft.Options(budget_s=0.0))
            assert exe.record.chosen != "parts"
            held(exe, made, x)
            held(exe, made, x[::-1].copy())  # another plan
        else:
            exe = compiled(made, x)
            assert exe.record.chosen == "parts"
            held(exe, made, x - 0.5)


def test_where_it_stays_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = detector().SerializeToString()
    for options in ({"in_parts": False}, {"memory_limit_bytes": 1 << 30}, {"check_indices": True}):
        with pytest.raises(UnsupportedError, match="NonMaxSuppression"):
            weft.compile(made, options=weft.Options(budget_s=0.0, **options))
    unpool = model(
        [helper.make_node("MaxUnpool", ["x", "i", "size"], ["y"], kernel_shape=[2, 2], strides=[2, 2])],
        [("x", F, [1, 1, 1, 1]), ("i", INT, [1, 1, 1, 1]), ("size", INT, [4])], [("y", F, None)],
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="is not ONNX's"):
        import_partitioned(unpool.SerializeToString())
    texts = model(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING)],
        [("x", F, [2])],
        [("y", TensorProto.STRING, [2])],
    )
    with pytest.raises(UnsupportedError):
        weft.compile(texts.SerializeToString(), options=weft.Options(budget_s=0.0))
    monkeypatch.setattr(whole_file, "_tried", lambda *_: "it hangs")
    with pytest.raises(UnsupportedError, match="NonMaxSuppression"):
        weft.compile(made, options=weft.Options(budget_s=0.0))


@pytest.mark.parametrize(
    "change",
    [
        {"rest": [0, 1 << 40]}, {"rest": [-1, 4]}, {"fed": [9]}, {"fed": [-3]}, {"fed": ["0"]}, {"results": [1]},
        {"results": [0, 0]}, {"results": [-9]}, {"operators": 3},
    ],
)  # fmt: skip
def test_a_forged_answer_of_the_parsing_process_is_none(change: dict[str, Any]) -> None:
    found = import_partitioned(detector().SerializeToString())
    told = partition_to_message(found, 0)
    block = memoryview(found.rest)
    assert partition_from_message(found.compiled, told, block) == Partition(
        found.compiled, found.rest, found.fed, found.results, found.operators
    )
    with pytest.raises(WireError):
        partition_from_message(found.compiled, {**told, **change}, block)
