"""Tiles of the tma template that the blocks which share their steps finish together."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest
from tests.generate.cuda.gemm import test_bytes_tma as integers
from tests.generate.cuda.gemm.test_tma import compile_all, contraction, linear, made
from tests.generate.cuda.gemm.test_tma_tiles import nn, nt
from tests.generate.cuda.products import BF16, F32, convolution, product
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.codec import kernel_from_json, kernel_to_json
from weft.kernels.source import CudaSource


def together(bm: int, bn: int, blocks: int, **changes: object) -> TmaConfig:
    return linear(bm, bn, stream_k=True, coop_fixup=True, persistent_ctas=blocks, **changes)


CASES: dict[str, tuple[Problem, TmaConfig]] = {
    "two": (nt(100, 90, 264), together(64, 64, 8)),
    "two, bf16": (nt(100, 90, 264, BF16), together(64, 64, 8)),
    "two, nn": (nn(250, 160, 520), together(128, 128, 8, consumers=2, stages=3)),
    "two, packed": (product((100, 264), (90, 264), turn_right=True), together(64, 64, 8)),
    "two, woven": (nt(100, 128, 264), together(64, 64, 8, interleaved=True)),
    "two, tf32": (nt(100, 90, 264, F32), together(64, 64, 8)),
    "three of four pieces, nothing behind": (nt(200, 120, 520, bias=False), together(128, 64, 12, stages=3)),
    "three, a step more for one": (nt(60, 96, 456), together(64, 96, 3)),
    "four": (nt(250, 160, 520), together(128, 128, 16, consumers=2, stages=3)),
    "two, three pieces": (nt(100, 96, 264), together(64, 96, 4)),
    "residual": (convolution(1, 264, 7, 8, 40, 1, residual=True), together(64, 64, 2)),
    "pairs below": (nt(150, 90, 264), together(64, 64, 16, multicast=1)),
    "pairs beside, three": (nt(100, 186, 520), together(64, 96, 12, multicast=2)),
    "two by two, nn": (nn(150, 248, 520), together(64, 64, 32, multicast=3)),
    "batch": (product((2, 70, 200), (2, 72, 200), weight=False, turn_right=True), together(64, 64, 16)),
}  # fmt: skip
BYTES = (integers.product(70, 120, 528), together(64, 64, 8))


def gang(source: CudaSource) -> CudaSource:
    """With the blocks of a tile as one cluster: the emulation runs those at once, and others one after another."""
    count = re.search(r"share = unit % (\d+)", source.text)
    assert count is not None
    real = source.launches[0].cluster[0]
    launch = replace(source.launches[0], cluster=(int(count[1]) * real, 1, 1))
    text, found = re.subn(r"W_DYNAMIC\(sm\);", f"W_DYNAMIC(sm); w_mates = {real if real > 1 else 0};", source.text)
    assert found == 1
    return replace(source, launches=(launch,), text=text)


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    found = {name: made(*case, f"k{i}") for i, (name, case) in enumerate(CASES.items())}
    return {name: gang(x) for name, x in (found | {"bytes": integers.written(*BYTES, "bytes")}).items()}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources, "bytes"))


@pytest.mark.parametrize("defer", [0, 1, 2], ids=["at once", "late", "products late"])
@pytest.mark.parametrize("name", few(CASES, 2))
def test_sums_of_integers_are_exact(name: str, defer: int, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, CASES[name][0], sources[name], defer=defer)


def test_bytes_are_exact(sources: dict[str, CudaSource], kernels: Emulated) -> None:
    integers.assert_bits(kernels, BYTES[0], sources["bytes"], defer=True)


def test_sums_that_are_read_too_early_are_seen(sources: dict[str, CudaSource]) -> None:
    """The emulation is no rubber stamp: blocks that do not wait miss what others leave."""
    early, count = re.subn(r"w_await\(flag \+ [^;]*\);", "*(flag + share * 4) = 0;", sources["two"].text)
    assert count == 1
    wrong = dataclasses.replace(sources["two"], text=early)
    with pytest.raises(AssertionError):
        assert_exact(Emulated([wrong]), CASES["two"][0], wrong, defer=0)


def test_a_part_that_nobody_finishes_is_seen(sources: dict[str, CudaSource]) -> None:
    source = sources["two"]
    less = source.text.replace("if (o / 2 % 2 == unit % 2) {", "if (o / 2 % 2 == 0 && unit % 2 == 0) {")
    assert less != source.text
    wrong = dataclasses.replace(source, text=less)
    with pytest.raises(AssertionError):
        assert_exact(Emulated([wrong]), CASES["two"][0], wrong, defer=0)


def test_every_block_writes_and_reads_its_share_of_a_tile(sources: dict[str, CudaSource]) -> None:
    """Of four blocks each leaves three quarters of its sums, and flags for each of the others."""
    source = sources["four"]
    assert source.workspace_bytes == 16 * 128 * 128 * 4
    assert source.state_bytes == 16 * 8 * 4 * 4
    assert source.text.count("w_raise(flag") == 1
    assert "lane < 4 && lane != share" in source.text


@pytest.mark.parametrize(("name", "count"), [("two", 2), ("four", 4), ("pairs below", 4), ("two by two, nn", 8)])
def test_the_launch_says_how_many_wait_for_each_other(name: str, count: int) -> None:
    source = made(*CASES[name], "k")
    assert source.launches[0].co_resident == count
    assert kernel_from_json(kernel_to_json(source)) == source
    assert made(CASES[name][0], linear(64, 64), "k").launches[0].co_resident == 1


def test_a_small_part_of_a_gpu_has_room_for_twice_what_waits() -> None:
    """A seventh of an H200: even the last blocks of two such kernels leave room for the next."""
    deep = contraction(product((128, 16384), (128, 16384), weight=False, bias=False, turn_right=True))
    small = replace(GpuFacts(), sms=16)
    found = [tma.emit(deep, s.schedule(), "k") for _, s in tma_choose.shapes(deep, small, 16) if s.coop_fixup]
    assert found
    for source in found:
        assert isinstance(source, CudaSource)
        assert 2 * source.launches[0].co_resident <= 16


def test_they_compile_without_spills() -> None:
    deep = nt(1024, 1024, 8192, bias=False)
    found = [
        together(128, 256, 128, consumers=2, stages=4),
        together(128, 256, 128, consumers=2, stages=4, multicast=1),
        together(256, 128, 128, consumers=2, stages=4, multicast=2),
        together(128, 128, 128, consumers=2, stages=7, multicast=3),
    ]
    compile_all([made(deep, s, f"k{i}") for i, s in enumerate(found)])


@pytest.mark.parametrize(
    ("problem", "shape"),
    [
        (nt(100, 90, 264), linear(64, 64, coop_fixup=True, persistent_ctas=8)),
        (nt(100, 90, 264), together(64, 64, 5)),
        (nt(100, 90, 264), together(64, 80, 8)),
        (nt(60, 60, 520), together(64, 64, 4)),
        (nt(60, 60, 520), together(64, 64, 1)),
        (nt(128, 128, 264, bias=False), together(64, 64, 8, store=32)),
    ],
    ids=["not even", "uneven shares", "pieces of 16", "more blocks than pieces", "one block", "boxes"],
)
def test_tiles_that_blocks_cannot_finish_together_are_declined(problem: Problem, shape: TmaConfig) -> None:
    found = tma.emit(contraction(problem), shape.schedule(), "k")
    assert isinstance(found, Declined)
    assert "cooperative fix-up" in found.reason


def test_a_schedule_is_read_back() -> None:
    s = together(64, 64, 8)
    assert TmaConfig.of(s.schedule()) == s
    assert "coop_fixup" not in dict(replace(s, coop_fixup=False).schedule().params)


def test_long_sums_of_few_tiles_are_offered_first() -> None:
    deep = contraction(product((512, 8192), (512, 8192), weight=False, bias=False, turn_right=True))
    found = [s for _, s in tma_choose.shapes(deep, GpuFacts(), 4)]
    assert found[0].coop_fixup
    assert found[0].multicast
    for s in found:
        assert not s.coop_fixup or (s.stream_k and not s.pingpong and s.persistent_ctas <= GpuFacts().sms)


def test_short_sums_and_many_tiles_are_not_divided() -> None:
    for m, n, k in ((512, 512, 512), (8192, 8192, 1024)):
        p = contraction(product((m, k), (n, k), weight=False, bias=False, turn_right=True))
        assert not any(s.coop_fixup for _, s in tma_choose.shapes(p, GpuFacts(), 4))
