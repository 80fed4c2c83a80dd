"""Tiles whose columns are no whole pieces of 32, f32 columns in the order of registers, and clusters of eight."""

from __future__ import annotations

import pytest
from tests.generate.cuda.gemm import test_bytes_tma as integers
from tests.generate.cuda.gemm.test_tma import compile_all, contraction, linear, made
from tests.generate.cuda.products import BF16, F32, product
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact
from tests.slow import asked, few

from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource


def nt(m: int, n: int, k: int, dtype: DType = DType.F16, *, bias: bool = True) -> Problem:
    return product((m, k), (n, k), turn_right=True, weight=False, dtype=dtype, bias=bias)


def nn(m: int, n: int, k: int) -> Problem:
    return product((m, k), (k, n), weight=False)


CASES: dict[str, tuple[Problem, TmaConfig]] = {
    "16 columns": (nt(70, 40, 136), linear(64, 16)),
    "80 columns": (nt(70, 200, 136, BF16), linear(64, 80)),
    "80 columns, nothing behind": (nt(70, 200, 136, bias=False), linear(64, 80)),
    "112 columns, nothing behind": (nt(150, 234, 264, bias=False), linear(128, 112, consumers=2)),
    "112 columns in turn": (
        nt(200, 248, 264), linear(64, 112, consumers=2, pingpong=True, persistent_ctas=3, stages=4)
    ),
    "112 columns of three warpgroups": (nt(200, 120, 136), linear(192, 112, consumers=3)),
    "112 columns shared evenly": (nt(250, 216, 520), linear(64, 112, stream_k=True, persistent_ctas=5, stages=4)),
    "112 columns by pairs": (nt(150, 248, 264), linear(64, 112, multicast=1)),
    "112 columns by fours": (nt(150, 248, 264, bias=False), linear(64, 112, multicast=3)),
    "112 columns by eights": (nt(300, 248, 136), linear(64, 96, multicast=6, stages=4)),
    "112 columns, tf32": (nt(70, 120, 132, F32), linear(64, 112)),
    "112 columns, batch": (
        product((2, 70, 72), (2, 120, 72), weight=False, turn_right=True), linear(64, 112)
    ),
    "woven, tf32": (nt(70, 96, 132, F32), linear(64, 64, interleaved=True)),
    "woven, tf32, nothing behind": (nt(70, 96, 132, F32, bias=False), linear(64, 96, interleaved=True)),
    "woven, tf32, split": (nt(70, 96, 260, F32), linear(64, 64, interleaved=True, split=2)),
    "woven, tf32, by pairs": (nt(150, 160, 132, F32), linear(64, 64, interleaved=True, multicast=1)),
    "woven, tf32, by fours": (nt(150, 160, 132, F32), linear(64, 128, interleaved=True, multicast=3)),
    "woven, tf32, in turn": (
        nt(200, 96, 200, F32), linear(64, 64, interleaved=True, consumers=2, pingpong=True, persistent_ctas=3, stages=4)
    ),
    "woven, tf32, shared evenly": (
        nt(250, 160, 260, F32), linear(64, 64, interleaved=True, stream_k=True, persistent_ctas=5, stages=4)
    ),
    "four by two": (nt(400, 200, 264), linear(64, 64, multicast=6, stages=4)),
    "four by two, more tiles than blocks": (nt(600, 200, 136), linear(64, 64, multicast=6, persistent_ctas=8)),
    "two by four, woven": (nt(150, 320, 264), linear(64, 64, multicast=7, interleaved=True)),
    "two by four, nn": (nn(150, 320, 264), linear(64, 64, multicast=7)),
    "four by two, tn": (product((136, 328), (136, 136), weight=False, turn_left=True), linear(64, 64, multicast=6)),
    "eight below": (nt(600, 72, 136), linear(64, 64, multicast=8)),
    "eight below, nn": (nn(600, 72, 264), linear(64, 64, multicast=8, stages=4)),
}  # fmt: skip
INTEGERS = {
    "80 columns of bytes": (integers.product(70, 168, 272), linear(64, 80)),
    "112 columns of bytes, scaled": (
        integers.product(70, 120, 272, out=BF16, scales="rows", bias=BF16), linear(64, 112)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    found = {name: made(*case, f"k{i}") for i, (name, case) in enumerate(CASES.items())}
    return found | {name: integers.written(*case, f"i{i}") for i, (name, case) in enumerate(INTEGERS.items())}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources))


@pytest.mark.parametrize("defer", few([2, 0, 1], 1), ids=["products late", "at once", "late"])
@pytest.mark.parametrize("name", few(CASES, 3))
def test_sums_of_integers_are_exact(name: str, defer: int, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, CASES[name][0], sources[name], defer=defer)


@pytest.mark.parametrize("name", list(INTEGERS))
def test_bytes_are_exact(name: str, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    integers.assert_bits(kernels, INTEGERS[name][0], sources[name], defer=True)


def test_they_compile() -> None:
    large = nt(4096, 4096, 1024)
    shapes = [
        linear(128, 112, consumers=2, stages=7, multicast=3),
        linear(128, 208, consumers=2, stages=5),
        linear(192, 144, consumers=3, stages=5),
        linear(128, 128, consumers=2, stages=7, multicast=8),
        linear(128, 128, consumers=2, stages=7, multicast=6, interleaved=True),
    ]
    found = [made(large, s, f"k{i}") for i, s in enumerate(shapes)]
    wide = nt(4096, 4096, 1024, F32, bias=False)
    found += [
        made(wide, linear(*s, consumers=2, stages=4, interleaved=True), f"w{s[0]}") for s in ((128, 256), (256, 128))
    ]
    compile_all(found)


@pytest.mark.parametrize(
    ("problem", "shape"),
    [
        (product((70, 136), (40, 136), turn_right=True), linear(64, 48)),
        (nt(70, 40, 264), linear(64, 48, split=2)),
        (nt(70, 96, 136), linear(64, 48, interleaved=True)),
        (nt(70, 40, 136), linear(64, 40)),
        (nn(70, 40, 136), linear(64, 48)),
    ],
    ids=["packed", "split", "woven", "8 columns", "nn"],
)
def test_columns_that_are_no_whole_pieces_are_declined(problem: Problem, shape: TmaConfig) -> None:
    found = tma.emit(contraction(problem), shape.schedule(), "k")
    assert isinstance(found, Declined)
    assert "no multiple of" in found.reason


def test_parts_of_columns_are_whole_units() -> None:
    found = tma.emit(contraction(nt(600, 160, 136)), linear(64, 80, multicast=4).schedule(), "k")
    assert isinstance(found, Declined)
    assert "no multiple of 8 columns" in found.reason
