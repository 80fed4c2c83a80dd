"""ONNX operators without a rule by ATen, as a plan for a GPU calls them, against ONNX Runtime."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from tests.generate.library import onnx_cases as cases
from tests.runtime.fake_cuda import install
from tests.slow import few

from weft.device.cuda.facts import profile
from weft.device.facts import CpuFacts
from weft.frontends.onnx import import_onnx
from weft.generate.library import ON_DEVICE, LibraryGenerator
from weft.generate.library.covered import is_covered
from weft.generate.library.execute import is_capturable
from weft.ir import attrs as a
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.ir.types import Array, DType, TensorType
from weft.kernels.candidate import Problem
from weft.kernels.formats import Format
from weft.kernels.plan import Plan
from weft.kernels.source import LibraryCall, Schedule
from weft.options import Options
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline.problems import collect
from weft.pipeline.setting import Setting, limits_of
from weft.pipeline.untuned import plan_in
from weft.platform.cuda.platform import Cuda
from weft.runtime.admitted import needs_trust
from weft.runtime.cuda_executable import CudaExecutable
from weft.runtime.executable import Linked, to_torch


def planned(data: bytes) -> tuple[Graph, Plan]:
    """The library plan of a model on an H200. The stand-in for one is put in place later, only to run it."""
    options, facts = Options(device="cuda", budget_s=0), profile("h200")
    cleaned = clean_up(import_onnx(data).graph, strict=False).graph
    found = find_alternatives(cleaned, strict=False, on_gpu=True)
    candidates = enumerate_candidates(found.graph, limits_of(options, facts), found, stop=lambda: True).candidates
    setting = Setting(options, Cuda(facts))
    return found.graph, plan_in("library", collect(found.graph, candidates, found, facts), found, setting)


def targets(plan: Plan) -> list[str]:
    return [s.target for step in plan.steps if isinstance(step.kernel, LibraryCall) for s in step.kernel.run]


def results(graph: Graph, plan: Plan, inputs: Mapping[str, Array]) -> list[Array]:
    exe = CudaExecutable(Linked(graph, plan, {}, None, None, 0, {"gpu": "H200"}), device=torch.device("cpu"))
    types = [graph.type_of(n).dtype for n in graph.inputs]
    return [y.numpy() for y in exe(*(to_torch(x, t) for x, t in zip(inputs.values(), types, strict=True)))]


def check(monkeypatch: pytest.MonkeyPatch, data: bytes, inputs: Mapping[str, Array], *, exact: bool) -> Plan:
    """One graph, no step on the host, the same results twice, and ONNX Runtime's."""
    graph, plan = planned(data)
    assert "weft.opaque_onnx" not in targets(plan)
    cuda = install(monkeypatch)
    got = results(graph, plan, inputs)
    assert len(cuda.graphs) == 1
    for mine, again, want in zip(got, results(graph, plan, inputs), cases.expected(data, inputs), strict=True):
        cases.assert_results(mine, again, want, exact=exact, rtol=1e-5, atol=1e-6)
    return plan


TYPES = [np.float32, np.float64, np.int32, np.int64]


@pytest.mark.parametrize(
    ("dtype", "opset"),
    [(np.float32, 9), (np.float32, 10), (np.float64, 10), *((t, n) for t in TYPES for n in (11, 24))],
)
def test_top_k_with_ties(monkeypatch: pytest.MonkeyPatch, dtype: Any, opset: int) -> None:
    shape, k = (4, 7, 40), 5
    data, inputs = cases.top_k(shape, dtype, k=k, opset=opset, axis=1)
    plan = check(monkeypatch, data, inputs, exact=True)
    assert targets(plan)[0] == "aten.sort.stable"
    assert not any(needs_trust(step.kernel) for step in plan.steps)


@pytest.mark.parametrize(
    ("shape", "axis", "k", "largest"),
    few(
        [
            (shape, axis, k, largest)
            for shape in ((9,), (3, 11), (2, 5, 6))
            for axis in range(-len(shape), len(shape))
            for k in sorted({1, 2, shape[axis]})
            for largest in (0, 1)
        ],
        12,
        unpack=True,
    ),
)
def test_top_k_along_every_axis(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], axis: int, k: int, largest: int
) -> None:
    data, inputs = cases.top_k(shape, k=k, axis=axis, largest=largest)
    check(monkeypatch, data, inputs, exact=True)


def test_zeros_of_both_signs_and_infinities_tie_as_in_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    data, _ = cases.top_k((2, 6), k=4, axis=1)
    x = np.array([[0.0, -0.0, 0.0, -1, -0.0, -2], [np.inf, 1, np.inf, -np.inf, 2, np.inf]], np.float32)
    graph, plan = planned(data)
    install(monkeypatch)
    for mine, want in zip(results(graph, plan, {"x": x}), cases.expected(data, {"x": x}), strict=True):
        assert np.array_equal(mine, want)


def test_one_result_of_two_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    nodes = [helper.make_node("TopK", ["x", "k"], ["y", "i"], axis=-1), helper.make_node("Neg", ["i"], ["z"])]
    data = cases.model(nodes, {"x": x}, ["z"], {"k": np.array([2])})
    check(monkeypatch, data, {"x": x}, exact=True)


SCATTERS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "elements": ("ScatterElements", (40, 60), (40, 50), {"axis": 1}),
    "elements of the first axis": ("ScatterElements", (60, 5, 9), (50, 4, 9), {"axis": 0, "dtype": np.int64}),
    "elements, some twice": ("ScatterElements", (7, 400), (7, 400), {"axis": 1, "repeated": True}),
    "elements of f16": ("ScatterElements", (40, 60), (40, 50), {"axis": 1, "dtype": np.float16}),
    "elements of a vector": ("ScatterElements", (3000,), (2500,), {"dtype": np.float64}),
    "rows": ("ScatterND", (2500, 1), (2400, 1), {}),
    "elements by all their indices": ("ScatterND", (50, 60, 1), (45, 50, 2), {"dtype": np.int32}),
    "rows, some twice": ("ScatterND", (2500, 2), (2400, 1), {"repeated": True}),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_scattered_updates(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    op, shape, index, attributes = SCATTERS[name]
    data, inputs = cases.scatter(op, shape, index, **attributes)
    plan = check(monkeypatch, data, inputs, exact=True)
    assert "aten.scatter_reduce.two" in targets(plan)


def test_what_is_scattered_outside_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the rule, where it takes the operator; ONNX Runtime refuses it."""
    data, inputs = cases.scatter("ScatterElements", (2100,), (2000,))
    inputs["i"][:3] = 2100, -2101, 1 << 40
    graph, plan = planned(data)
    install(monkeypatch)
    want = inputs["x"].copy()
    want[inputs["i"][3:].astype(np.int64) % 2100] = inputs["u"][3:]
    assert np.array_equal(results(graph, plan, inputs)[0], want)


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_updates_that_are_combined_stay_on_the_host(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    index = (40, 60) if op == "ScatterElements" else (40, 60, 2)
    data, inputs = cases.scatter(op, (40, 60), index, repeated=True, reduction="mul")
    graph, plan = planned(data)
    assert "weft.opaque_onnx" in targets(plan)
    install(monkeypatch)
    for mine, want in zip(results(graph, plan, inputs), cases.expected(data, inputs), strict=True):
        assert np.array_equal(mine, want, equal_nan=True)


LAYERS = [("LSTM", {}), ("GRU", {"linear_before_reset": 1}), ("RNN", {})]


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("given", ["", "B", "Bhc", "h"])
@pytest.mark.parametrize(("op", "attributes"), LAYERS, ids=lambda x: str(x)[:4])
def test_recurrent_layers(
    monkeypatch: pytest.MonkeyPatch, op: str, attributes: dict[str, Any], given: str, direction: str
) -> None:
    if "c" in given and op != "LSTM":
        given = given.replace("c", "")
    data, inputs = cases.recurrent(op, given=given, direction=direction, **attributes)
    check(monkeypatch, data, inputs, exact=False)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 1, 2, 40), (12, 4, 33, 30)])
@pytest.mark.parametrize(("op", "attributes"), LAYERS, ids=lambda x: str(x)[:4])
def test_weights_of_every_size_are_turned_once(
    monkeypatch: pytest.MonkeyPatch, op: str, attributes: dict[str, Any], sizes: tuple[int, int, int, int]
) -> None:
    """Small ones lie in the operator's payload, others are constants of the graph."""
    data, inputs = cases.recurrent(op, sizes=sizes, direction="bidirectional", **attributes)
    plan = check(monkeypatch, data, inputs, exact=False)
    assert not {"weft.recurrent_weights", "aten.index_select.default", "weft.tensor"} & set(targets(plan))


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("RNN", {"activations": ["Relu"]}),
        ("RNN", {"activations": ["Tanh", "Tanh"], "direction": "bidirectional"}),
        ("LSTM", {"activations": ["sigmoid", "Tanh", "tanh"], "input_forget": 0}),
        ("GRU", {"activations": ["Sigmoid", "Tanh"], "linear_before_reset": 1, "direction": "reverse"}),
        ("LSTM", {"lengths": [5, 5]}),
        ("LSTM", {"opset": 7}),
        ("LSTM", {"outputs": ["h"]}),
        ("LSTM", {"outputs": ["c", "y"]}),
    ],
    ids=str,
)
def test_what_else_is_the_same(monkeypatch: pytest.MonkeyPatch, op: str, attributes: dict[str, Any]) -> None:
    data, inputs = cases.recurrent(op, **attributes)
    check(monkeypatch, data, inputs, exact=False)


def test_a_network_of_them_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    data, inputs = cases.network()
    plan = check(monkeypatch, data, inputs, exact=False)
    assert {"aten.lstm.input", "aten.sort.stable"} < set(targets(plan))


HOSTED: dict[str, tuple[str, dict[str, Any]]] = {
    "peepholes": ("LSTM", {"given": "BP"}),
    "clip": ("LSTM", {"clip": 0.5}),
    "coupled gates": ("LSTM", {"input_forget": 1}),
    "another gate": ("LSTM", {"activations": ["HardSigmoid", "Tanh", "Tanh"]}),
    "another state": ("GRU", {"activations": ["Sigmoid", "Relu"], "linear_before_reset": 1}),
    "two kinds": ("RNN", {"activations": ["Tanh", "Relu"], "direction": "bidirectional"}),
    "a slope": ("RNN", {"activations": ["LeakyRelu"], "activation_alpha": [0.2]}),
    "reset before the product": ("GRU", {}),
    "sequences end": ("GRU", {"lengths": [5, 3], "linear_before_reset": 1}),
    "weights are inputs": ("RNN", {"computed": True}),
}


@pytest.mark.parametrize("name", HOSTED)
def test_what_the_framework_computes_otherwise_stays_on_the_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    op, attributes = HOSTED[name]
    data, inputs = cases.recurrent(op, **attributes)
    graph, plan = planned(data)
    assert "weft.opaque_onnx" in targets(plan)
    install(monkeypatch)
    for mine, want in zip(results(graph, plan, inputs), cases.expected(data, inputs), strict=True):
        assert np.array_equal(mine, want)


def test_an_order_that_nothing_defines_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    data, inputs = cases.top_k((4, 9), sorted=0)
    graph, plan = planned(data)
    assert "weft.opaque_onnx" in targets(plan)
    install(monkeypatch)
    for mine, want in zip(results(graph, plan, inputs), cases.expected(data, inputs), strict=True):
        assert np.array_equal(mine, want)


def test_on_a_processor_it_is_onnx_runtimes() -> None:
    graph = import_onnx(cases.top_k((4, 9))[0]).graph
    facts = CpuFacts()
    (task, *_) = collect(
        graph, enumerate_candidates(graph).candidates, find_alternatives(graph), profile("h200")
    ).tasks.values()
    on_cpu, on_gpu = (LibraryGenerator().schedules(task.problem, f) for f in (facts, profile("h200")))
    assert not isinstance(on_cpu, Declined) and not isinstance(on_gpu, Declined)
    assert [s.param("form") for s in on_cpu] == ["primitives"]
    assert [s.param("form") for s in on_gpu] == [ON_DEVICE, "primitives"]
    calls = [LibraryGenerator().emit(task.problem, s) for s in on_gpu]
    assert [isinstance(c, LibraryCall) and is_capturable(c) for c in calls] == [True, False]
    assert all(isinstance(c, LibraryCall) and is_covered(task.problem, c, "cuda") for c in calls)


def payload(*nodes: onnx.NodeProto, constants: Mapping[str, Array] = cases.NOTHING) -> str:
    x = np.zeros((4, 9), np.float32)
    data = cases.model(nodes, {"x": x}, [nodes[-1].output[0]], constants)
    return json.dumps({"model": base64.b64encode(data).decode()})


K = {"k": np.array([3])}
TOP_K = helper.make_node("TopK", ["x", "k"], ["y", "i"])
PAYLOADS = {
    "no text": "[",
    "no model": "{}",
    "a number": '{"model": 7}',
    "no base64": '{"model": "!"}',
    "no protobuf": json.dumps({"model": base64.b64encode(b"\xff\xff").decode()}),
    "an operand that is not there": payload(TOP_K),
    "two operators": payload(
        helper.make_node("Neg", ["x"], ["n"]), helper.make_node("TopK", ["n", "k"], ["y", "i"]), constants=K
    ),
    "of another domain": payload(helper.make_node("TopK", ["x", "k"], ["y", "i"], domain="com.microsoft"), constants=K),
    "another operator": payload(helper.make_node("Relu", ["x"], ["y"])),
    "no rank": payload(helper.make_node("LSTM", ["x", "x", "x"], ["y"], hidden_size=1)),
    "no operands": payload(helper.make_node("TopK", ["", "k"], ["y", "i"]), constants=K),
    "more elements than there are": payload(TOP_K, constants={"k": np.array([10])}),
    "elements of a negative number": payload(TOP_K, constants={"k": np.array([-1])}),
    "a file": payload(TOP_K, constants=K),
}


def external(text: str) -> str:
    """The payload with its constant in a file."""
    made = onnx.load_model_from_string(base64.b64decode(json.loads(text)["model"]))
    (constant,) = made.graph.initializer
    constant.data_location = onnx.TensorProto.EXTERNAL
    constant.external_data.add(key="location", value="/etc/passwd")
    return json.dumps({"model": base64.b64encode(made.SerializeToString()).decode()})


@pytest.mark.parametrize("name", PAYLOADS)
def test_what_is_no_such_operator_is_declined(name: str) -> None:
    text = external(PAYLOADS[name]) if name == "a file" else PAYLOADS[name]
    b, f32 = GraphBuilder(), TensorType(DType.F32, (4, 3))
    x = b.input(TensorType(DType.F32, (4, 9)))
    attrs = a.OpaqueAttrs("onnx", "onnx::TopK", text, 0, (f32, TensorType(DType.I64, (4, 3))))
    graph = b.build([b.add(Prim.OPAQUE, x, attrs=attrs)])
    problem = Problem(graph, name, (Format.ROW,), (Format.ROW,))
    assert isinstance(LibraryGenerator().emit(problem, Schedule("library", (("form", ON_DEVICE),))), Declined)
