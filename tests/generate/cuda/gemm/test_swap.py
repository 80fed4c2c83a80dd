"""The transposed template for few rows without a GPU: emulated on the host, and compiled for sm_90a."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest
from tests.generate.cuda.gemm.test_tma import compile_all, contraction
from tests.generate.cuda.products import BF16, F32, convolution, product
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.gemm.spec import Gemm
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.swap_ab import choose as swap_choose
from weft.generate.cuda.gemm.swap_ab import kernel as swap
from weft.generate.cuda.gemm.swap_ab.kernel import SwapAbConfig
from weft.generate.cuda.predict import predicted_us
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

NARROW = SwapAbConfig(8, 64, 3, 1)


def shape(bm: int, bn: int, **changes: int) -> SwapAbConfig:
    return replace(NARROW, bm=bm, bn=bn, **changes)


CASES: dict[str, tuple[Problem, SwapAbConfig]] = {
    "one row": (product((1, 264), (72, 264), weight=False, turn_right=True), shape(8, 64, stages=4)),
    "one row, packed": (product((1, 136), (136, 72)), shape(8, 64)),
    "seven rows, bf16": (product((7, 264), (72, 264), weight=False, turn_right=True, dtype=BF16), shape(8, 64)),
    "13 rows, nn": (product((13, 200), (200, 136), weight=False), shape(16, 64)),
    "24 rows, packed": (product((24, 264), (104, 264), turn_right=True), shape(24, 64)),
    "12 rows, packed, fewer steps than stages": (product((12, 264), (264, 72)), shape(16, 64, stages=8)),
    "two warpgroups": (product((20, 200), (264, 200), weight=False, turn_right=True), shape(24, 128)),
    "two warpgroups, packed": (product((64, 264), (200, 264), turn_right=True), shape(64, 128, stages=2)),
    "two warpgroups, nn": (product((5, 200), (200, 200), weight=False), shape(8, 128)),
    "four warpgroups, split": (product((30, 520), (300, 520), turn_right=True), shape(32, 256, split=2)),
    "split": (product((9, 520), (72, 520), weight=False, turn_right=True), shape(16, 64, split=4, stages=2)),
    "split by three": (product((8, 520), (40, 520), turn_right=True), shape(8, 64, split=3)),
    "split, packed": (product((16, 520), (72, 520), turn_right=True, dtype=BF16), shape(16, 64, split=8)),
    "two tiles of rows": (product((50, 264), (72, 264), weight=False, turn_right=True), shape(32, 64)),
    "batch": (product((3, 10, 72), (3, 40, 72), weight=False, turn_right=True), shape(16, 64)),
    "batch, nn, split": (product((3, 10, 264), (3, 264, 72), weight=False, bias=False), shape(16, 64, split=2)),
    "odd columns of results": (product((10, 136), (136, 27)), shape(16, 64)),
    "stored as f32": (product((10, 136), (136, 24), out=F32), shape(16, 64)),
    "residual": (convolution(1, 64, 3, 3, 40, 1, residual=True), shape(16, 64)),
    "104 rows, nn": (product((230, 200), (200, 200), weight=False), shape(104, 128, stages=4)),
    "one below the other": (product((230, 264), (264, 200), weight=False), shape(104, 128, multicast=1)),
    "side by side, packed": (product((100, 264), (264, 128)), shape(40, 64, multicast=2)),
    "two by two, nt": (product((100, 264), (200, 264), weight=False, turn_right=True), shape(40, 64, multicast=3)),
    "two by four": (product((100, 520), (520, 328), weight=False), shape(24, 64, multicast=7)),
    "four by two, packed": (product((100, 264), (264, 256)), shape(24, 64, multicast=6)),
    "four below, one of them has rows": (product((20, 264), (264, 256)), shape(24, 64, multicast=4)),
    "residual, several vectors of a thread": (convolution(1, 64, 7, 8, 40, 1, residual=True), shape(56, 64)),
}


def made(problem: Problem, s: SwapAbConfig, entry: str) -> CudaSource:
    source = swap.emit(contraction(problem), s.schedule(), entry)
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: made(*case, f"k{i}") for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources))


@pytest.mark.parametrize("defer", [1, 2])
@pytest.mark.parametrize("name", few(CASES, 4))
def test_sums_of_integers_are_exact(name: str, defer: int, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, CASES[name][0], sources[name], defer=defer)


def test_a_stage_that_is_given_back_too_early_is_seen() -> None:
    """Deferred copies overwrite what products have not read: the emulation is no rubber stamp."""
    problem, s = CASES["two warpgroups, packed"]
    source = made(problem, s, "k0")
    early = re.sub(r"w_group_wait<1>\(\);(?=\n//[^\n]*\nif \(it > 0 && lane == 0\))", "", source.text)
    assert early != source.text
    wrong = dataclasses.replace(source, text=early)
    with pytest.raises(AssertionError):
        assert_exact(Emulated([wrong]), problem, wrong, defer=True)


def test_constants_are_copied_before_the_wait(sources: dict[str, CudaSource]) -> None:
    for name, first in (("24 rows, packed", True), ("split", False)):
        text = sources[name].text
        body = text[text.index(f" {sources[name].entry}(") :]
        assert (body.index("w_bulk(to" if first else "w_tma(&mw") < body.index("role.pdl_wait()")) == first
        assert bool(sources[name].replaces_weights) == first


def test_large_tiles_compile_without_spills() -> None:
    nt = product((64, 4096), (4096, 4096), weight=False, turn_right=True)
    compile_all(
        [
            made(product((64, 4096), (4096, 4096), gelu=True), shape(64, 128, stages=4, split=4), "k0"),
            made(nt, shape(64, 256, stages=4, split=2), "k1"),
            made(product((16, 4096), (4096, 4096), weight=False), shape(16, 64, stages=8), "k2"),
        ]
    )


@pytest.mark.parametrize(
    ("problem", "s", "reason"),
    [
        (product((300, 64), (64, 64)), shape(264, 64, stages=4), "rows by eights"),
        (product((300, 64), (64, 256)), shape(256, 256, stages=2), "do not fit"),
        (product((65, 264), (264, 64)), shape(16, 64, split=2, multicast=1), "beside cluster multicast"),
        (product((65, 264), (264, 64)), shape(16, 64, multicast=2), "does not divide evenly along N"),
        (product((8, 64), (64, 64), dtype=F32), shape(8, 64), "16-bit"),
        (product((8, 65), (64, 65), weight=False, turn_right=True), shape(8, 64), "16-byte vectors"),
        (convolution(1, 64, 4, 4, 24, 3, 1, 1), shape(16, 64), "windows"),
        (convolution(1, 16, 9, 9, 24, 1, 2), shape(32, 64), "several dimensions"),
        (product((8, 64), (64, 64)), shape(12, 64), "rows by eights"),
        (product((8, 64), (64, 64)), shape(8, 48), "columns by 64"),
        (product((8, 64), (64, 64)), shape(8, 64, split=2), "more CTAs than k-tiles"),
        (product((8, 64), (64, 64)), shape(8, 64, stages=1), "two stages"),
        (product((136, 16), (136, 72), weight=False, turn_left=True), shape(16, 64), "along rows"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, s: SwapAbConfig, reason: str) -> None:
    found = swap.emit(contraction(problem), s.schedule(), "k")
    assert isinstance(found, Declined)
    assert reason in found.reason


def test_a_schedule_is_read_back() -> None:
    s = shape(24, 128, stages=6, split=4)
    assert SwapAbConfig.of(s.schedule()) == s
    assert s.schedule().param("template") == "swap_ab"
    assert "multicast" not in dict(s.schedule().params)
    assert SwapAbConfig.of(replace(s, multicast=7, split=1).schedule()).multicast == 7


def offered(m: int, facts: GpuFacts, **more: object) -> list[SwapAbConfig]:
    found = templates.schedules(Gemm(m, 4096, 4096, layout="nt", **more).problem(), facts)  # type: ignore[arg-type]
    assert not isinstance(found, Declined)
    return [SwapAbConfig.of(s) for s in found if s.param("template") == "swap_ab"]


def test_few_rows_are_offered_transposed_shapes_on_hopper_alone() -> None:
    facts = GpuFacts()
    for m in (1, 8, 16, 32):
        found = offered(m, facts)
        assert found
        assert all(s.bm == -(-m // 8) * 8 for s in found)
        assert len({(s.bn, s.split) for s in found}) == len(found) <= 3
    assert offered(16, facts, constant=True)
    assert offered(swap_choose.MOST + 1, facts) == []
    assert offered(16, facts, dtype=F32) == []
    assert offered(16, replace(facts, capability=80)) == []


def test_what_is_offered_fits_and_has_a_price() -> None:
    facts = GpuFacts()
    for m, n, k in ((1, 4096, 4096), (9, 72, 264), (32, 14336, 4096), (16, 4096, 14336), (3, 50257, 768)):
        problem = Gemm(m, n, k, layout="nt").problem()
        for modelled, s in swap_choose.every(contraction(problem), facts):
            source = made(problem, s, "k")
            assert source.launches[0].shared_bytes <= facts.shared_per_block
            assert source.launches[0].grid[0] % s.split == 0
            us = predicted_us(problem, s.schedule(), facts)
            assert us is not None
            assert us * facts.clock_ghz * 1e3 == pytest.approx(modelled)
            assert us > n * k * 2 / facts.read_bandwidth[-1][1] / 1e3


def of_many(m: int, n: int, k: int, facts: GpuFacts | None = None, **more: object) -> list[SwapAbConfig]:
    given = {"weight": False, "bias": False, **more}
    p = contraction(product((m, k), (n, k) if given.get("turn_right") else (k, n), **given))  # type: ignore[arg-type]
    return [s for _, s in swap_choose.shapes(p, facts or GpuFacts())]


def test_many_rows_are_offered_tiles_that_all_run_at_once() -> None:
    first = of_many(968, 1376, 2616)[0]
    assert (first.bm, first.bn, first.multicast) == (104, 128, 7)  # 10 by 11 tiles, 15 clusters of eight
    assert (144, 128, 0) in [(s.bm, s.bn, s.multicast) for s in of_many(1536, 1536, 1536)]
    for m, n, k in ((968, 1376, 2616), (1536, 1536, 1536), (1000, 1000, 1000), (600, 5000, 512)):
        for s in of_many(m, n, k):
            source = made(product((m, k), (k, n), weight=False, bias=False), s, "k0")
            assert source.launches[0].grid[0] <= GpuFacts().sms


def test_many_rows_are_not_offered_where_other_tiles_fit_as_well() -> None:
    assert of_many(968, 1376, 2616, turn_right=True) == []
    assert of_many(968, 1376, 2616, weight=True) == []
    assert of_many(4096, 4096, 4096) == []  # no tile is large enough for one round
    assert of_many(100, 4096, 4096) == []
    assert of_many(968, 1376, 2616, GpuFacts(capability=80)) == []


def test_tiles_of_many_rows_compile_without_spills() -> None:
    found = [
        SwapAbConfig(104, 128, 7, 1, 7),
        SwapAbConfig(144, 128, 6, 1),
        SwapAbConfig(160, 192, 5, 1, 2),
        SwapAbConfig(200, 128, 5, 1, 3),
    ]
    nn = product((1536, 2616), (2616, 1376), weight=False, gelu=True)
    compile_all([made(nn, s, f"k{i}") for i, s in enumerate(found)])
