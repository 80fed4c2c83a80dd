"""with_strides: the same values in the memory order that eager would give."""

from __future__ import annotations

import pytest
import torch

from weft.torch_backend.region import with_strides


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 3), (3, 1)),
        ((2, 3), (1, 2)),
        ((2, 3, 4, 5), (60, 1, 15, 3)),
        ((2, 3), (0, 1)),
        ((2, 3, 4), (0, 4, 1)),
        ((2, 3), (0, 0)),
        ((1, 3), (7, 1)),
        ((), ()),
        ((0, 3), (3, 1)),
        ((4, 2), (5, 1)),
    ],
)
def test_strides_are_met(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    x = torch.arange(6.0)[: 1 if 0 in strides else None]
    x = torch.zeros(shape) + (x.sum() if 0 in strides else 0)
    if 0 not in strides:
        x = torch.randn(shape)
    y = with_strides(x, strides)
    torch.testing.assert_close(y, x)
    if x.numel():
        assert y.stride() == strides


def test_strides_that_overlap_are_given_up() -> None:
    x = torch.randn(3, 2)
    y = with_strides(x, (1, 1))
    torch.testing.assert_close(y, x)
    assert y.is_contiguous()


def test_equal_strides_cost_nothing() -> None:
    x = torch.randn(2, 3)
    assert with_strides(x, (3, 1)) is x
