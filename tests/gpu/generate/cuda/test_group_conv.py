"""Convolutions in groups on a real GPU: every type, width, stride and window, by the template's own first choices."""

from __future__ import annotations

import numpy as np
import pytest
from tests.generate.cuda.conv.test_group_conv import matched
from tests.generate.cuda.products import BF16, F16, convolution
from tests.generate.cuda.tensor_emulator import rounded, small_integers
from tests.gpu.machine import Gpu, Known, normal
from tests.typed import numbers

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.conv.groups import choose, kernel
from weft.ir.reference import evaluate
from weft.ir.types import DType
from weft.kernels.source import CudaSource

pytestmark = pytest.mark.gpu

WIDTHS = (4, 8, 16, 24, 32, 48, 64, 128)
WINDOWS = (3, 5, (1, 9))
TOO_LARGE = {(128, 1, 5), (128, 2, 5), (128, 2, (1, 9))}
"""Widths, strides and windows of which no three k-blocks of weights fit in shared memory: other templates take them."""
UNIT = {F16: 2.0**-11, BF16: 2.0**-8}


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=lambda d: d.value)
def test_a_width(
    dtype: DType, width: int, stride: int, window: int | tuple[int, int], gpu: tuple[Gpu, GpuFacts]
) -> None:
    """Small integers exactly, random numbers within a rounding of the result near float64."""
    machine, facts = gpu
    of = 6 if width == 4 else 3
    pad = 2 if window == 5 else 1
    problem = convolution(2, of * width, 15, 13, of * width, window, stride, pad, 1, of, dtype=dtype, residual=True)
    p = matched(problem)
    found = choose.shapes(p, facts)
    assert bool(found) == ((width, stride, window) not in TOO_LARGE)
    made = [kernel.emit(p, s.schedule(), f"k{i}") for i, (_, s) in enumerate(found)]
    sources = [x for x in made if isinstance(x, CudaSource)]
    assert sources == made
    machine = Gpu(Known(machine.nvrtc, machine.arch, sources), machine.arch)
    whole, random = small_integers(problem), normal(problem)
    exact, near = (evaluate(problem.graph, x, precise=True)[0] for x in (whole, random))
    rms = float(np.sqrt(np.mean(np.square(near))))
    k = width * int(np.prod(window if isinstance(window, tuple) else (window, window)))
    for source in sources:
        np.testing.assert_array_equal(machine.run(problem, source, whole)[0], rounded(exact, dtype))
        got = machine.run(problem, source, random)[0].astype(np.float64)
        error = float(np.sqrt(np.mean(np.square(got - numbers(near))))) / rms
        assert error <= UNIT[dtype] + 2.0**-24 * k**0.5, (str(source.schedule), error)
