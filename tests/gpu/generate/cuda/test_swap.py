"""The transposed template on a real Hopper GPU: exact on integers, near float64 on random numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.generate.cuda.gemm.test_swap import CASES, made, shape
from tests.generate.cuda.products import BF16, F16, product
from tests.gpu.generate.cuda.test_tma import check
from tests.gpu.machine import Gpu, Known

from weft.device.cuda.driver import primary_context
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.generate.cuda.gemm.swap_ab.kernel import SwapAbConfig
from weft.kernels.candidate import Problem

pytestmark = pytest.mark.gpu

LIMIT_S = 60
ROWS = (1, 7, 8, 9, 16, 23, 24, 32, 40, 50, 64)
SIZES = ((72, 520), (1032, 4096), (4096, 1000))
SWEEP: dict[str, tuple[Problem, SwapAbConfig]] = {
    f"{m} x {n} x {k}, {'constant' if weight else 'nt' if turned else 'nn'}, {dtype.value}, {bn} by {split}": (
        product((m, k), (n, k) if turned else (k, n), weight=weight, turn_right=turned, dtype=dtype),
        shape(-(-m // 8) * 8, bn, stages=4, split=split),
    )
    for i, m in enumerate(ROWS)
    for j, (n, k) in enumerate(SIZES)
    for weight, turned, dtype, bn, split in (
        (False, True, (F16, BF16)[(i + j) % 2], (64, 128, 256)[(i + j) % 3], (1, 2, 4)[i % 3]),
        ((i + j) % 2 == 0, False, (BF16, F16)[(i + j) % 2], (64, 128)[(i + j) % 2], (1, 2, 4)[j % 3]),
    )
}


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc), nvrtc.reason
    torch.zeros(1, device="cuda")
    with primary_context():
        facts = gpu_facts(tmp_path_factory.mktemp("facts"), calibrate=False)
        if facts.capability != 90:
            pytest.skip("the transposed template is for compute capability 9.0")
        sources = [made(*case, "k0") for case in (*CASES.values(), *SWEEP.values())]
        yield Gpu(Known(nvrtc, facts.arch, sources), facts.arch)


@pytest.mark.parametrize("name", list(CASES))
def test_every_feature(name: str, gpu: Gpu) -> None:
    problem, s = CASES[name]
    check(gpu, problem, [made(problem, s, "k0")])


@pytest.mark.parametrize("name", list(SWEEP))
def test_sizes(name: str, gpu: Gpu) -> None:
    problem, s = SWEEP[name]
    check(gpu, problem, [made(problem, s, "k0")])
