"""What is done with kernels before they are used, without a GPU: wrong ones are refused, whatever their time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import cast

import pytest
import torch

from weft.device.cuda.facts import profile
from weft.device.cuda.nvrtc import Nvrtc
from weft.generate.cuda.training import Activation, Network
from weft.ir.types import DType
from weft.nn import kernels
from weft.nn.kernels import Backward, Kernels
from weft.nn.timing import near, normal_like

NET = Network((4, 8, 2), (Activation("relu"), Activation()), (True, True), DType.BF16, DType.BF16)


class Fake:
    """Writes what it is told to; of a backward pass, and of its call for some rows."""

    scratch_bytes = 64

    def __init__(self, dx: float, sums: float, rows: int = 0) -> None:
        self.values, self.rows = (dx, sums), rows

    def image(self) -> torch.Tensor:
        return torch.zeros(1)

    def call(self, net: Network, rows: int, image: torch.Tensor) -> Fake:
        return Fake(*self.values, rows)

    def pack(self, parameters: list[int], stream: int) -> None:
        pass

    def run(self, x: int, dy: int, dx: int, sums: int, scratch: int, stream: int) -> None:
        written = torch.full((self.rows, 4), self.values[0]).bfloat16(), torch.full((NET.elements,), self.values[1])
        for to, values in zip((dx, sums), written, strict=True):
            if to:
                ctypes.memmove(to, values.data_ptr(), values.numel() * values.element_size())


@pytest.mark.parametrize(
    ("dx", "sums", "key", "right"),
    [
        (1.0, 2.0, (True, True), True),
        (1.1, 2.1, (True, True), True),
        (0.0, 2.0, (True, True), False),
        (1.0, -2.0, (True, True), False),
        (float("nan"), 2.0, (True, True), False),
        (9.0, 2.0, (False, True), True),
        (1.0, 9.0, (True, False), True),
    ],
)
def test_wrong_gradients_are_refused(
    monkeypatch: pytest.MonkeyPatch, dx: float, sums: float, key: tuple[bool, bool], right: bool
):
    monkeypatch.setattr(kernels, "least", lambda call: 5.0)
    monkeypatch.setattr(kernels, "stream", lambda: 0)
    made = Kernels(NET, profile("h200"), cast("Nvrtc", None))
    x, dy = torch.ones(3000, 4).bfloat16(), torch.ones(3000, 2).bfloat16()
    wanted = torch.ones(2048, 4), torch.full((made.elements,), 2.0)
    fake = cast("Backward", Fake(dx, sums))
    found = made._tried(fake, x, dy, [], (*key, DType.F32), dy[:2048], wanted)
    assert found == (5.0 if right else float("inf"))


def test_what_cannot_be_compared_is_taken():
    one = torch.ones(4)
    assert near(one, torch.full((4,), float("inf")), 0.1)
    assert near(torch.zeros(4), torch.zeros(4), 0.1) and not near(one, torch.zeros(4), 0.1)


def test_trials_are_the_same_each_time_and_leave_the_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    x = torch.empty(5, 2, dtype=torch.float16)
    assert torch.equal(normal_like(x), normal_like(x)) and float(normal_like(x).std()) > 0.3
    assert torch.equal(before, torch.get_rng_state())


def test_rows_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    asked: Callable[[Network], Kernels] = lambda net: Kernels(net, profile("h200"), cast("Nvrtc", None))  # noqa: E731
    assert asked(NET).refused(100) is None and asked(NET).backward_refused() is None
    wide = Network((4, 600, 2), NET.acts, NET.biases, DType.BF16, DType.BF16)
    refused = asked(wide).refused(100)
    assert refused is not None and "600 columns" in refused.reason
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = asked(NET).refused(100)
    assert captured is not None and "while a CUDA graph is captured" in captured.reason
