"""Calls that stand for ONNX Runtime's are held to what it gives: right ones pass, wrong ones do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.generate.library import onnx_cases as cases

from weft.device.cuda.facts import profile
from weft.frontends.onnx import import_onnx
from weft.generate.library import ON_DEVICE, LibraryGenerator, has_device_form
from weft.generate.library.execute import BoundCall
from weft.ir.passes import clean_up
from weft.ir.prims import Prim
from weft.kernels.candidate import Problem
from weft.kernels.measurement import Verdict
from weft.kernels.source import CallStep, LibraryCall, Schedule
from weft.orchestrate.alternatives import find_alternatives
from weft.orchestrate.enumerate import enumerate_candidates
from weft.pipeline.problems import collect
from weft.tune.inputs import Domain, InputSet, draw
from weft.tune.verify import Case, build_reference, compare, opaque_case, weight_positions


def posed(data: bytes) -> Problem:
    """The problem of a model's one opaque operator."""
    graph = clean_up(import_onnx(data).graph, strict=False).graph
    found = find_alternatives(graph, strict=False, on_gpu=True)
    tasks = collect(graph, enumerate_candidates(graph).candidates, found, profile("h200")).tasks.values()
    return next(t.problem for t in tasks if any(n.prim is Prim.OPAQUE for n in t.problem.graph.nodes))


def made(problem: Problem, form: str) -> LibraryCall:
    call = LibraryGenerator().emit(problem, Schedule("library", (("form", form),)))
    assert isinstance(call, LibraryCall)
    return call


def judged(problem: Problem, call: LibraryCall, kind: InputSet) -> set[Verdict]:
    case: Case = opaque_case(problem.graph, kind, draw(problem.graph, kind, Domain.ZERO_MEAN, seed=1), 1)
    assert len(case.expected) == len(problem.graph.outputs)
    weights = {k: case.inputs[k] for k in weight_positions(problem.graph)}
    outputs = BoundCall(call, weights).run(case.inputs)
    return {compare(y, want, "here").verdict for y, want in zip(outputs, case.expected, strict=True)}


MODELS = {
    "elements": lambda: cases.scatter("ScatterElements", (40, 60), (40, 50), axis=1),
    "rows": lambda: cases.scatter("ScatterND", (2500, 2), (2400, 1)),
    "top k": lambda: cases.top_k((6, 50), k=7),
    "LSTM": lambda: cases.recurrent("LSTM", sizes=(20, 3, 40, 32), direction="bidirectional"),
    "small LSTM": lambda: cases.recurrent("LSTM"),
    "GRU": lambda: cases.recurrent("GRU", sizes=(20, 3, 40, 32), linear_before_reset=1),
    "RNN": lambda: cases.recurrent("RNN", sizes=(20, 3, 40, 64)),
    "RNN of relu": lambda: cases.recurrent("RNN", sizes=(20, 3, 40, 64), activations=["Relu"]),
}


@pytest.mark.parametrize("kind", [InputSet.INTEGERS, InputSet.NORMAL])
@pytest.mark.parametrize("name", MODELS)
def test_both_forms_are_right(name: str, kind: InputSet) -> None:
    problem = posed(MODELS[name]()[0])
    assert has_device_form(problem.graph)
    for form in (ON_DEVICE, "primitives"):
        assert judged(problem, made(problem, form), kind) == {Verdict.OK}, form


@pytest.mark.parametrize("name", ["LSTM", "small LSTM", "GRU"])
def test_gates_in_another_order_are_found(name: str) -> None:
    problem = posed(MODELS[name]()[0])
    call = made(problem, ON_DEVICE)

    def wrong(step: CallStep) -> CallStep:
        order = step.args[0] if step.target == "weft.tensor" else None
        if not isinstance(order, tuple) or order not in ((0, 2, 3, 1), (1, 0, 2)):
            return step
        return replace(step, args=(tuple(range(len(order))), *step.args[1:]))

    other = replace(call, prepare=tuple(map(wrong, call.prepare)))
    assert other != call
    assert Verdict.WRONG in judged(problem, other, InputSet.NORMAL)


def test_another_order_of_equal_elements_is_found() -> None:
    problem = posed(MODELS["top k"]()[0])
    call = made(problem, ON_DEVICE)
    least = [replace(s, kwargs=tuple((k, v if k != "descending" else False) for k, v in s.kwargs)) for s in call.run]
    assert Verdict.WRONG in judged(problem, replace(call, run=tuple(least)), InputSet.INTEGERS)
    case = opaque_case(
        problem.graph, InputSet.INTEGERS, draw(problem.graph, InputSet.INTEGERS, Domain.ZERO_MEAN, seed=1), 1
    )
    (x,), wants = case.inputs, {w.rounded.dtype: w for w in case.expected}
    values, positions = torch.sort(x.flip(1), dim=1, descending=True, stable=True)
    assert compare(values[:, :7], wants[torch.float32], "here").verdict is Verdict.OK
    assert compare(x.shape[1] - 1 - positions[:, :7], wants[torch.int64], "here").verdict is Verdict.WRONG


def test_on_a_processor_there_is_one_way_and_nothing_to_compare_with() -> None:
    problem = posed(MODELS["top k"]()[0])
    assert all(not c.expected for c in build_reference(problem, seed=0).cases)


def test_an_operator_without_another_form_is_told_apart() -> None:
    problem = posed(cases.recurrent("GRU")[0])
    assert has_device_form(problem.graph), "by its name alone"
    assert not isinstance(LibraryGenerator().emit(problem, Schedule("library", (("form", ON_DEVICE),))), LibraryCall)
