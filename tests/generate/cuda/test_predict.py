"""Every schedule that a ranked template offers has a prediction, and it is what ranked it."""

from __future__ import annotations

from types import ModuleType

import pytest
from tests.generate.cuda.products import LAST, convolution, product

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda import templates
from weft.generate.cuda.conv.halo import choose as halo_choose
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.product import product as normal_form
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.predict import predicted_us
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import Schedule

H200 = GpuFacts()
PROBLEMS = {
    "3x3": convolution(1, 64, 28, 28, 64, 3, 1, 1, residual=True),
    "1x1": convolution(2, 64, 14, 14, 256, 1),
    "depthwise": convolution(1, 64, 14, 14, 64, 3, 1, 1, groups=64, fin=LAST),
    "few rows": product((3, 520), (12, 520), turn_right=True),
    "linear": product((512, 1024), (1024, 1024), turn_right=True),
}


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_schedules_that_are_offered_have_a_prediction(name: str) -> None:
    problem = PROBLEMS[name]
    found = templates.schedules(problem, H200)
    assert not isinstance(found, Declined) and len(found) >= 3
    for schedule in found:
        us = predicted_us(problem, schedule, H200)
        assert us is not None and 0.5 < us < 200, str(schedule)


@pytest.mark.parametrize("choose", [halo_choose, tma_choose], ids=["halo", "tma"])
def test_it_is_what_ranked_them(choose: ModuleType) -> None:
    problem = PROBLEMS["3x3"]
    p = normal_form(problem)
    assert isinstance(p, Product)
    for cycles, shape in choose.shapes(p, H200, 3):
        us = predicted_us(problem, shape.schedule(), H200)
        assert us == pytest.approx(cycles / H200.clock_ghz / 1e3)


@pytest.mark.parametrize("name", ["mma", "depthwise", "halo", "tma", "attention", "of the future"])
def test_what_nothing_ranks_has_none(name: str) -> None:
    problem: Problem = PROBLEMS["linear"]
    assert predicted_us(problem, Schedule("cuda", (("template", name),)), H200) is None
    assert predicted_us(problem, Schedule("library", (("form", "cublaslt"),)), H200) is None
