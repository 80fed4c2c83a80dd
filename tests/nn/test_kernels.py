"""What is said of kernels before one is compiled, and of tensors that are compared, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch

from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import Nvrtc
from weft.generate.cuda.training import Activation, Network
from weft.ir.types import DType
from weft.nn.judge import Judge
from weft.nn.kernels import Kernels
from weft.nn.timing import near, normal_like

NET = Network((4, 8, 2), (Activation("relu"), Activation()), (True, True), DType.BF16, DType.BF16)


def test_what_cannot_be_compared_is_taken() -> None:
    one = torch.ones(4)
    assert near(one, torch.full((4,), float("inf")), 0.1)
    assert near(torch.zeros(4), torch.zeros(4), 0.1) and not near(one, torch.zeros(4), 0.1)


def test_trials_are_the_same_each_time_and_leave_the_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    x = torch.empty(5, 2, dtype=torch.float16)
    assert torch.equal(normal_like(x), normal_like(x)) and float(normal_like(x).std()) > 0.3
    assert torch.equal(before, torch.get_rng_state())


def test_rows_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    asked: Callable[[Network], Kernels] = lambda net: Kernels(  # noqa: E731
        net, profile("h200"), cast("Nvrtc", None), cast("Judge", None)
    )
    assert asked(NET).refused(100) is None and asked(NET).backward_refused() is None
    wide = Network((4, 600, 2), NET.acts, NET.biases, DType.BF16, DType.BF16)
    refused = asked(wide).refused(100)
    assert refused is not None and "600 columns" in refused.reason
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = asked(NET).refused(100)
    assert captured is not None and "while a CUDA graph is captured" in captured.reason
