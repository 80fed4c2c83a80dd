"""Norms on the way of a product's left operand, and partial sums of its result, on the device against float64."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.cases.norm_product import CASES, Data, checked, problems
from benchmarks.harness.kernel_cases import Shop

from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc

pytestmark = pytest.mark.gpu
LIMIT_S = 300


@pytest.mark.parametrize("way", ["leave", "parts", "own"])
@pytest.mark.parametrize("name", ["vit1 fc1", "bert16 qkv", "segformer 1", "segformer 3"])
def test_every_offered_kernel_is_right(name: str, way: str) -> None:
    nvrtc = find_nvrtc()
    assert isinstance(nvrtc, Nvrtc)
    facts = gpu_facts(None, calibrate=False)
    torch.zeros(1, device="cuda")
    case = CASES[name]
    shop = Shop(nvrtc, facts, facts.arch, threads=4, first=6, only=("",), end=math.inf, out=None)
    kernels = shop.kernels(problems(case)[way])
    assert kernels
    data = Data(case)
    for k in kernels:
        _, wrong = checked(data, way, k)
        assert not wrong, (str(k.source.schedule), wrong)
