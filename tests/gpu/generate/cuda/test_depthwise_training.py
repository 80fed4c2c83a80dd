"""Depthwise convolutions of training steps on a real GPU: exact on integers and near float64 at sizes of networks."""

from __future__ import annotations

import pytest
from tests.generate.cuda.conv.test_depthwise_training import CASES, LAYERS
from tests.generate.cuda.conv.test_depthwise_wgrad import CASES as SUMS
from tests.generate.cuda.depthwise import Sizes, data_gradient, forward, weight_gradient
from tests.generate.cuda.products import BF16, F16, F32
from tests.gpu.generate.cuda.test_templates import check
from tests.gpu.machine import Gpu

from weft.device.cuda.facts import GpuFacts
from weft.ir.types import DType

pytestmark = pytest.mark.gpu

MAKERS = {"forward": forward, "data": data_gradient, "weight": weight_gradient}
ODD: dict[str, tuple[Sizes, int, int, int, int]] = {
    "5x5": ((4, 96, 28, 28), 5, 1, 2, 1),
    "5x5 strided": ((4, 96, 28, 28), 5, 2, 2, 1),
    "7x7": ((2, 64, 14, 14), 7, 1, 3, 1),
    "odd size": ((3, 48, 37, 29), 3, 1, 1, 1),
    "odd size, strided": ((3, 48, 37, 29), 3, 2, 1, 1),
    "odd size, 5x5 strided": ((3, 40, 31, 27), 5, 2, 2, 1),
    "12 channels": ((4, 12, 28, 28), 3, 1, 1, 1),
    "7 channels, strided": ((4, 7, 29, 30), 3, 2, 1, 1),
    "dilated": ((2, 32, 28, 28), 3, 1, 2, 2),
    "dilated and strided": ((2, 32, 29, 28), 3, 2, 2, 2),
    "no padding": ((2, 32, 30, 28), 3, 1, 0, 1),
    "stride 3": ((2, 32, 31, 28), 3, 3, 1, 1),
}
"""Sizes, window, stride, padding and dilation."""


@pytest.mark.parametrize("what", MAKERS)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda x: "x".join(map(str, x)))
def test_a_layer(layer: tuple[int, int, int], what: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    channels, size, stride = layer
    check(machine, MAKERS[what]((8, channels, size, size), 3, stride, 1, dtype=BF16), facts, exact=True)


@pytest.mark.parametrize("what", MAKERS)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda d: d.value)
@pytest.mark.parametrize("name", ODD)
def test_odd_ones(name: str, dtype: DType, what: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    check(machine, MAKERS[what](*ODD[name], dtype=dtype), facts, exact=True)


@pytest.mark.parametrize("name", [*CASES, *SUMS])
def test_cases_of_the_emulation(name: str, gpu: tuple[Gpu, GpuFacts]) -> None:
    machine, facts = gpu
    check(machine, (CASES.get(name) or SUMS[name])[0], facts, exact=True)
