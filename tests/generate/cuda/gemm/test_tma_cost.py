"""The model of products through TMA: what an NVIDIA H200 showed, and what must hold for any product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.generate.cuda.products import F32, product
from tests.orchestrate.test_estimate_cuda import convolved

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.product import product as normal_form
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma.cost import Case, cycles
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.kernels.candidate import Problem

H200 = GpuFacts()
TURNS = TmaConfig(128, 64, 64, 8, 2, True, 1, (1, 1, 128), 132, 1)
SMALL = TmaConfig(64, 64, 64, 4, 1, False, 1, (1, 1, 64), 0, 2)


def case_of(problem: Problem) -> Case:
    p = normal_form(problem)
    assert isinstance(p, Product)
    found = tma_choose.case_of(p, H200)
    assert found is not None
    return found


def rows(m: int, n: int, k: int, **options: Any) -> Case:
    return case_of(product((m, k), (n, k), turn_right=True, **options))


def us(case: Case, s: TmaConfig) -> float:
    return cycles(case, s, H200) / H200.clock_ghz / 1e3


def test_columns_that_fill_no_vectors_are_stored_one_by_one() -> None:
    whole, odd = rows(43264, 256, 256), rows(43264, 255, 256)
    assert (whole.sizes.width, odd.sizes.width) == (8, 1)
    assert us(odd, TURNS) > 3 * us(whole, TURNS)  # measured: 87 us against 10
    assert us(whole, TURNS) < us(rows(43264, 254, 256), TURNS) < us(odd, TURNS)


def test_results_of_f32_fill_half_sectors() -> None:
    narrow, wide = (rows(43264, 64, 64, out=out) for out in (None, F32))
    assert (narrow.stored, wide.stored) == ((2,), (4,))
    assert us(wide, TURNS) > 1.5 * us(narrow, TURNS)


def test_an_end_with_exact_divisions_shows() -> None:
    ends = {end: case_of(convolved(end, wide=True)) for end in ("none", "over 6", "over 8", "exp")}
    assert [(c.clipped, c.divided, c.exact) for c in ends.values()] == [(0, 0, 0), (1, 0, 0), (0, 0, 0), (0, 1, 1)]
    times = {end: us(c, replace(TURNS, stages=3)) for end, c in ends.items()}
    assert times["over 6"] > times["over 8"] + 3 and times["exp"] > times["none"] + 1
    narrow = case_of(convolved("over 6"))
    assert (narrow.clipped, narrow.divided, narrow.exact) == (0, 0, 0)  # 16 bits: the machine's own functions


def test_clusters_that_do_not_fit_at_once_take_two_turns() -> None:
    split = TmaConfig(128, 128, 64, 7, 2, False, 8, (1, 1, 128), 0, 1)
    fit, more = (us(rows(128 * tiles, 128, 4608), split) for tiles in (14, 16))
    assert more > 1.25 * fit  # measured: 12.3 us for 14, 16.9 for 16


def test_weights_come_from_memory() -> None:
    few = rows(16, 4096, 4096)
    least = 4096 * 4096 * 2 / H200.read_bandwidth[-1][1] / 1e3
    assert us(few, SMALL) > least


@pytest.mark.parametrize(
    "shape", [TURNS, SMALL, replace(TURNS, pingpong=False), replace(SMALL, min_ctas=1, split=2)], ids=str
)
@pytest.mark.parametrize("field", ["m", "n", "k", "plain", "special", "stored"])
def test_more_work_takes_no_less_time(field: str, shape: TmaConfig) -> None:
    size = {"m": 4096, "n": 1024, "k": 512}
    case = rows(**size)
    if field in size:
        more = rows(**(size | {field: 2 * size[field]}))
    else:
        more = replace(case, sizes=replace(case.sizes, **{field: getattr(case.sizes, field) + 4}))
    assert us(more, shape) >= us(case, shape) > 1


@pytest.mark.parametrize("pairs", [(1, 2), (4, 5)], ids=["pairs", "fours"])
def test_of_two_ways_the_one_that_copies_less_is_first(pairs: tuple[int, int]) -> None:
    case = rows(8192, 8192, 8192)
    right, left = (TmaConfig(128, 256, 64, 4, 2, False, 1, (1, 1, 128), 132, 1, multicast=x) for x in pairs)
    assert us(case, right) < us(case, left)  # of 256 columns and 128 rows, parts of the columns
    right, left = (TmaConfig(256, 128, 64, 4, 2, False, 1, (1, 1, 256), 132, 1, multicast=x) for x in pairs)
    assert us(case, left) < us(case, right)
