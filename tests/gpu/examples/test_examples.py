"""The examples on a real GPU: kernels learn as well as modules (how fast is for `python -m benchmarks.gpu_mlp`)."""

from __future__ import annotations

import pytest
from tests.examples.test_examples import load

pytestmark = pytest.mark.gpu
LIMIT_S = 300


def test_on_a_gpu_kernels_learn_as_well_as_modules() -> None:
    found = load("image_regression").main(["--device", "cuda", "--steps", "300"])
    assert len(found) == 8
    for (_, _, decibels, seconds), (_, _, own, own_seconds) in zip(found[::2], found[1::2], strict=True):
        assert own > decibels - 0.5
        assert seconds > 0 and own_seconds > 0  # other tests run beside this one
    for called, recorded in ((found[i], found[i + 2]) for i in (0, 1, 4, 5)):
        assert recorded[2] == pytest.approx(called[2], abs=0.5)
    plain, *others = load("signed_distance").main(["--device", "cuda", "--steps", "150"])
    assert len(others) == 3 and all(x[1] < 1.5 * plain[1] + 2e-3 for x in others)
