"""Where the framework must be started (ONNX Runtime): it is timed beside the plans, and answers where it is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from onnx import TensorProto, helper

import weft
from weft.errors import DifferenceWarning
from weft.frontends.onnx import whole
from weft.ir.declined import Declined

Run = Callable[..., Sequence[torch.Tensor]]


@pytest.fixture
def model() -> bytes:
    nodes = [helper.make_node("Sin", ["x"], ["y"]), helper.make_node("ReduceSum", ["y"], ["z"], keepdims=0)]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


@pytest.fixture
def options(tmp_path: Path) -> weft.Options:
    return weft.Options(cache_dir=tmp_path / "cache", budget_s=60, keep_per_problem=1)


def instead(monkeypatch: pytest.MonkeyPatch, made: Run | Declined) -> list[int]:
    """ONNX Runtime is this; how often it was started."""
    started = []

    def start(*arguments: object, **named: object) -> Run | Declined:
        started.append(1)
        return made

    monkeypatch.setattr(whole, "onnxruntime_model", start)
    return started


X = torch.linspace(0, 9, 1 << 16)


@pytest.mark.slow
def test_it_answers_where_it_is_faster(model: bytes, options: weft.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = torch.sin(X.double()).sum().float()

    def quick(*tensors: torch.Tensor) -> list[torch.Tensor]:
        calls.append(tensors)
        return [right]

    started = instead(monkeypatch, quick)
    compiled = weft.compile(model, X, options=options)
    assert compiled.record.chosen == "onnxruntime" and started == [1]
    calls.clear()
    assert compiled(X) is right and len(calls) == 1
    again = weft.compile(model, X, options=options)  # remembered: started once more, since it had won
    assert started == [1, 1] and again(X) is right
    torch.testing.assert_close(again.executable(X)[0], right, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_a_slow_one_and_none_at_all_leave_the_plan(
    model: bytes, options: weft.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*tensors: torch.Tensor) -> list[torch.Tensor]:
        time.sleep(0.05)
        return [torch.sin(tensors[0].double()).sum().float()]

    for made in (slow, Declined("not installed")):
        instead(monkeypatch, made)
        compiled = weft.compile(model, X[: 1 << 12] if made is slow else X, options=options)
        assert compiled.record.chosen != "onnxruntime"
        assert ("onnxruntime" in {p.name for p in compiled.record.plans}) == (made is slow)


def test_a_wrong_one_never_answers(model: bytes, options: weft.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, lambda *tensors: [torch.tensor(7.0)])
    with pytest.warns(DifferenceWarning, match="onnxruntime gives other results"):
        compiled = weft.compile(model, X, options=options)
    assert compiled.record.chosen != "onnxruntime"
    assert not next(p for p in compiled.record.plans if p.name == "onnxruntime").verified


def test_nothing_is_started_where_nothing_is_timed(
    model: bytes, options: weft.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = instead(monkeypatch, Declined("never asked"))
    weft.compile(model, X, options=weft.Options(cache_dir=options.cache_dir, budget_s=0))
    assert not started
