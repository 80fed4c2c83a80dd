from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest
import torch
from tests.typed import assert_allclose

import weft
from weft import fission
from weft.device.facts import CpuFacts
from weft.errors import ArtifactError
from weft.generate.library import LibraryGenerator
from weft.generate.library.execute import BoundCall, resolve
from weft.generate.library.operators import OPERATORS
from weft.ir.declined import Declined
from weft.ir.graph import Graph, GraphBuilder
from weft.ir.passes import clean_up
from weft.ir.reference import evaluate
from weft.ir.types import DType, TensorType
from weft.kernels.candidate import Kind, Problem
from weft.kernels.measurement import Verdict
from weft.kernels.source import LibraryCall, Schedule
from weft.orchestrate.enumerate import enumerate_candidates
from weft.orchestrate.extract import extract, format_choices
from weft.tune.verify import LibrarySubject, reference_of, verify

IMAGE, ROWS = (2, 6, 8, 8), (4, 10)
_GRADIENT = {"strides": (2, 2), "pads": (1, 1), "dilations": (1, 1)}
CASES: dict[str, tuple[list[tuple[int, ...]], dict[str, object]]] = {
    "softmax": ([ROWS], {"axis": -1}),
    "log_softmax": ([ROWS], {"axis": 0}),
    "layer_norm": ([ROWS, (10,), (10,)], {"axes": (1,), "eps": 1e-5}),
    "group_norm": ([IMAGE, (6,), (6,)], {"groups": 3, "eps": 1e-5}),
    "instance_norm": ([IMAGE, (6,), (6,)], {"eps": 1e-5}),
    "gelu": ([ROWS], {"approximate": "tanh"}),
    "silu": ([ROWS], {}),
    "mish": ([ROWS], {}),
    "sigmoid": ([ROWS], {}),
    "hard_swish": ([ROWS], {}),
    "softplus": ([ROWS], {"beta": 1.0, "threshold": 20.0}),
    "elu": ([ROWS], {"alpha": 0.7}),
    "leaky_relu": ([ROWS], {"alpha": 0.2}),
    "linear": ([ROWS, (7, 10), (7,)], {}),
    "conv": ([IMAGE, (4, 6, 3, 3), (4,)], {"strides": (1, 1), "pads_lo": (1, 1), "pads_hi": (1, 1), "dilations": (1, 1),
                                            "groups": 1}),
    "conv_weight_gradient": ([(2, 4, 4, 4), IMAGE], {**_GRADIENT, "kernel": (3, 3)}),
    "sdpa": ([(1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)], {"causal": False}),
    "max_pool": ([IMAGE], {"kernel": (3, 3), "strides": (2, 2), "pads_lo": (1, 1), "pads_hi": (1, 1),
                           "dilations": (1, 1)}),
    "avg_pool": ([IMAGE], {"kernel": (2, 2), "strides": (2, 2), "pads_lo": (0, 0), "pads_hi": (0, 0)}),
    "reduce_mean": ([IMAGE], {"axes": (2, 3), "keepdims": True}),
}  # fmt: skip


def calls_of(rule: str, shapes: list[tuple[int, ...]], params: dict[str, Any]) -> list[tuple[Problem, object]]:
    """What the library says to the problem that is exactly one operator."""
    b = GraphBuilder()
    ids = [b.input(TensorType(DType.F32, s)) for s in shapes]
    operands = [*ids, -1] if rule == "sdpa" else ids
    results = fission.apply(b, rule, operands, params)
    assert not isinstance(results, Declined)
    graph = b.build(results)
    found: list[tuple[Problem, object]] = []
    for candidate in enumerate_candidates(graph).candidates:
        if candidate.kind is Kind.CONVERT:
            continue
        choice = format_choices(graph, candidate)[0]
        cut = extract(graph, candidate, choice.inputs, choice.outputs)
        if cut.problem.origin_rule != rule:
            continue
        schedules = LibraryGenerator().schedules(cut.problem, CpuFacts())
        assert not isinstance(schedules, Declined)
        operator = next(s for s in schedules if s.param("form") == "operator")
        found.append((cut.problem, LibraryGenerator().emit(cut.problem, operator)))
    return found


@pytest.mark.parametrize("rule", CASES)
def test_one_call_equals_the_primitives(rule: str) -> None:
    ((problem, call),) = calls_of(rule, *CASES[rule])
    assert isinstance(call, LibraryCall), call
    right(problem, call)


def right(problem: Problem, call: LibraryCall) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(problem.graph.type_of(i).shape).astype(np.float32) for i in problem.graph.inputs]
    want = evaluate(problem.graph, arrays)[0]
    out = torch.empty(want.shape)
    BoundCall(call, {}).launcher([torch.from_numpy(x) for x in arrays], [out])()
    assert_allclose(out.numpy(), want, rtol=2e-4, atol=2e-5)


def test_a_call_that_says_finite_is_held_to_finite_inputs() -> None:
    ((problem, call),) = calls_of("conv_weight_gradient", *CASES["conv_weight_gradient"])
    assert isinstance(call, LibraryCall)
    assert call.schedule.param("finite") is True
    reference = reference_of(problem.graph, seed=0).laid_out(problem)
    assert {c.kind for c in reference.cases} > {c.kind for c in reference.of_kernel(call).cases}
    found = [
        verify(problem, LibrarySubject(problem, call), x, {}, slow_s=1e9, clock=perf_counter_ns).finding.verdict
        for x in (reference, reference.of_kernel(call))
    ]
    assert found == [Verdict.NAN_CLASS, Verdict.OK]
    ((problem, call),) = calls_of("silu", *CASES["silu"])
    assert isinstance(call, LibraryCall)
    assert reference.of_kernel(call) is reference


HEADS: list[tuple[int, ...]] = [(1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)]
POOL = {"kernel": (2, 2), "strides": (1, 1), "pads_lo": (1, 1), "pads_hi": (1, 1)}
CHANGED: list[tuple[str, list[tuple[int, ...]], dict[str, object], bool]] = [
    ("sdpa", HEADS, {"softcap": 2.0}, False),
    ("sdpa", HEADS, {"causal": True, "causal_offset": 1}, False),
    ("sdpa", HEADS, {"softcap": 0.0, "causal": True, "causal_offset": 0}, True),
    ("silu", [ROWS], {"alpha": 1.7}, False),
    ("silu", [ROWS], {"alpha": 1.0}, True),
    ("elu", [ROWS], {"alpha": 1.5, "scale": 1.25, "input_scale": 0.5}, True),
    ("avg_pool", [IMAGE], {**POOL, "dilations": (2, 2)}, False),
    ("avg_pool", [IMAGE], {**POOL, "count_include_pad": True}, True),
    ("avg_pool", [IMAGE], {**POOL, "pads_lo": (2, 2), "pads_hi": (2, 2), "count_include_pad": True}, False),
    ("max_pool", [IMAGE], {**POOL, "pads_lo": (2, 2), "pads_hi": (2, 2)}, False),
    ("max_pool", [IMAGE], {**POOL, "dilations": (2, 2)}, True),
]


@pytest.mark.parametrize(("rule", "shapes", "params", "taken"), CHANGED)
def test_a_parameter_is_meant_or_declined(
    rule: str, shapes: list[tuple[int, ...]], params: dict[str, Any], taken: bool
) -> None:
    for problem, call in calls_of(rule, shapes, params):
        assert isinstance(call, LibraryCall) is taken, call
        if isinstance(call, LibraryCall):
            right(problem, call)


def folded(rule: str, shapes: list[tuple[int, ...]], params: dict[str, Any]) -> list[tuple[Problem, object]]:
    """What the library says to an operator whose constants clean-ups gave new shapes."""
    b = GraphBuilder()
    rng = np.random.default_rng(0)
    x = b.input(TensorType(DType.F32, IMAGE))
    constants = [b.constant(rng.uniform(1.5, 2.5, s).astype(np.float32)) for s in shapes]
    results = fission.apply(b, rule, [x, *constants], params)
    assert not isinstance(results, Declined)
    return of_rule(clean_up(b.build(results)).graph, rule)


def of_rule(graph: Graph, rule: str) -> list[tuple[Problem, object]]:
    found: list[tuple[Problem, object]] = []
    for candidate in enumerate_candidates(graph).candidates:
        choice = format_choices(graph, candidate)[0]
        problem = extract(graph, candidate, choice.inputs, choice.outputs).problem
        if problem.origin_rule == rule:
            found.append((problem, LibraryGenerator().emit(problem, Schedule("library", (("form", "operator"),)))))
    return found


def test_an_operand_that_was_folded_away_is_not_an_absent_one() -> None:
    ((_, call),) = folded("conv", *(CASES["conv"][0][1:], CASES["conv"][1]))
    assert isinstance(call, Declined)
    assert "changed by the clean-ups" in call.reason


@pytest.mark.parametrize("rule", ["instance_norm", "group_norm"])
def test_the_scale_and_shift_of_a_norm_are_found_again(rule: str) -> None:
    ((problem, call),) = folded(rule, [(6,), (6,)], CASES[rule][1])
    assert min(problem.origin_operand_nodes) < -1
    assert isinstance(call, LibraryCall), call
    right(problem, call)


def test_the_deviation_of_one_image_is_no_scale() -> None:
    """Without a scale and a shift, which clean-ups drop, the last product of a norm is by its reciprocal deviation."""
    b = GraphBuilder()
    x = b.input(TensorType(DType.F32, (1, *IMAGE[1:])))
    ones, zeros = b.constant(np.ones(6, np.float32)), b.constant(np.zeros(6, np.float32))
    results = fission.apply(b, "instance_norm", [x, ones, zeros], {"eps": 1e-5})
    assert not isinstance(results, Declined)
    graph = clean_up(b.build(results)).graph
    ((problem, call),) = of_rule(graph, "instance_norm")
    assert isinstance(call, LibraryCall), call
    assert call.run[-1].args[1] is None, "the deviation of the one image is not taken for a scale"
    right(problem, call)


@pytest.mark.parametrize(
    ("params", "taken"),
    [
        ({"coordinate_mode": "asymmetric", "nearest_mode": "floor"}, True),
        ({"coordinate_mode": "half_pixel", "nearest_mode": "floor"}, False),
        ({"coordinate_mode": "asymmetric", "nearest_mode": "ceil"}, False),
    ],
)
def test_a_resize_is_one_call_where_its_indices_are_those_of_the_operator(params: dict[str, Any], taken: bool) -> None:
    sizes = {"sizes": (2, 6, 16, 24), "scales_text": "1.0,1.0,2.0,3.0"}
    ((_, call),) = calls_of("resize_nearest", [IMAGE], {**sizes, **params})
    assert isinstance(call, LibraryCall) is taken, call


def test_a_parameter_that_no_row_reads_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATORS, "leaky_relu", lambda o: o.call("aten.leaky_relu.default", o.ref(0)))
    ((_, call),) = calls_of("leaky_relu", [ROWS], {"alpha": 0.2})
    assert isinstance(call, Declined)
    assert "alpha" in call.reason


def test_a_result_of_another_shape_is_stored_as_the_primitives_store_it() -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(6, 5)).eval()

    class Mean(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return module(x).mean((2, 3))

    x = torch.randn(2, 3, 8, 8)
    compiled = weft.compile(Mean(), x, options=weft.Options(budget_s=0))
    torch.testing.assert_close(compiled.executable(x)[0], Mean()(x))


def test_every_case_is_a_row() -> None:
    assert set(CASES) <= set(OPERATORS)


@pytest.mark.parametrize("target", ["os.system", "weft.shell", "aten.__class__.default", "aten.no_such_thing.default"])
def test_a_foreign_operator_is_refused(target: str) -> None:
    with pytest.raises(ArtifactError, match="W401"):
        resolve(target)


@pytest.mark.parametrize(
    "target",
    ["aten.from_file.default", "aten.zero_.default", "aten.set_.source_Storage", "aten.randn.generator", "aten.copy_",
     "aten._index_put_impl_.default", "aten.resize_.default"],
)  # fmt: skip
def test_an_operator_with_effects_outside_its_results_is_not_admitted(target: str) -> None:
    """A plan from elsewhere could write files or the caller's tensors by it."""
    with pytest.raises(ArtifactError, match="effects outside"):
        resolve(target)


def test_a_result_may_be_given() -> None:
    assert resolve("aten.amax.out")(torch.ones(2, 3), [1], out=torch.empty(2)).tolist() == [1.0, 1.0]
