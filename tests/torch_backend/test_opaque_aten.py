"""Payloads of opaque calls are data: what they name is checked before anything runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from weft.errors import ArtifactError
from weft.generate.library import opaque_aten
from weft.generate.library.opaque_aten import input_dtypes, run_aten


def payload(op: str = "aten::cumsum", overload: str = "", args: Any = ({"tensor": 0}, 0), **more: Any) -> Any:
    return json.dumps({"op": op, "overload": overload, "inputs": ["f32"], "args": list(args), **more})


def test_a_call() -> None:
    x = torch.randn(3, 2)
    (y,) = run_aten(payload(), [x])
    torch.testing.assert_close(y, x.cumsum(0))
    assert input_dtypes(payload()) == ("f32",)


def test_several_results_keywords_and_constants() -> None:
    x = torch.randn(5)
    values, where = run_aten(payload("aten::topk", args=({"tensor": 0}, 2), kwargs={"largest": False}), [x])
    assert values.tolist() == x.topk(2, largest=False).values.tolist()
    assert where.dtype is torch.int64
    (y,) = run_aten(payload(kwargs={"dtype": {"dtype": "float64"}}), [x])
    assert y.dtype is torch.float64
    (z,) = run_aten(payload("aten::full", args=([2], {"float": "-inf"})), [])
    assert z.tolist() == [float("-inf")] * 2


def test_recurrent_layers_get_states_that_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN refuses others: a state of zeros may be one zero, expanded."""
    seen: list[torch.Tensor] = []

    def layer(*given: torch.Tensor) -> torch.Tensor:
        seen.extend(given)
        return given[0]

    monkeypatch.setattr(opaque_aten, "resolve", lambda *_: layer)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        run_aten(payload(f"aten::{name}", "dense", args=({"tensor": 0},)), [torch.zeros(()).expand(2, 1, 8)])
    opaque_aten._parse.cache_clear()
    assert len(seen) == 4 and all(x.is_contiguous() for x in seen)


def test_results_that_are_left_out() -> None:
    args = [{"tensor": 0}, {"tensor": 1}, {"tensor": 2}, None, [1], [0], [1], False, [0], 1, [True, False, False]]
    x = torch.randn(1, 2, 4)
    found = run_aten(payload("aten::convolution_backward", args=args), [x, x, torch.randn(2, 2, 1)])
    assert [t.shape for t in found] == [x.shape]


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        payload("os::system"),
        payload("aten::__class__"),
        payload("aten::cumsum.out"),
        payload("aten::no_such_thing"),
        payload("quantized::linear"),
        payload("aten::cumsum", "__call__"),
        payload("aten::cumsum", "dimname_of_mine"),
        payload("aten::add_", "Tensor"),
        payload("aten::from_file", args=["/tmp/x", True, 8]),
        payload("aten::cumsum", "out"),
        payload(args=[{"tensor": 3}, 0]),
        payload(args=[{"tensor": True}, 0]),
        payload(args=[{"tensor": 0, "x": 1}, 0]),
        payload(args=[{"dtype": "load"}, 0]),
        payload(args=[{"eval": "1"}, 0]),
        payload(kwargs={"a-b": 1}),
        payload("aten::len", "Tensor", args=[{"tensor": 0}]),
    ],
)
def test_anything_else_is_refused(bad: str) -> None:
    with pytest.raises(ArtifactError) as error:
        run_aten(bad, [torch.ones(2)])
    assert error.value.code == "W401"
