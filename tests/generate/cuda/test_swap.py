"""The transposed template for few rows without a GPU: emulated on the host, and compiled for sm_90a."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.generate.cuda.products import BF16, F32, convolution, product
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact
from tests.generate.cuda.test_tma import contraction

from weft.generate.cuda.templates import swap
from weft.generate.cuda.templates.swap import Shape
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource

NARROW = Shape(8, 64, 1, 3, 1, 0)


def shape(bm: int, bn: int, **changes: int) -> Shape:
    return replace(NARROW, bm=bm, bn=bn, **changes)


CASES: dict[str, tuple[Problem, Shape]] = {
    "one row": (product((1, 264), (72, 264), weight=False, turn_right=True), shape(8, 64, stages=4)),
    "one row, packed": (product((1, 136), (136, 72)), shape(8, 64)),
    "seven rows, bf16": (product((7, 264), (72, 264), weight=False, turn_right=True, dtype=BF16), shape(8, 64)),
    "13 rows, nn": (product((13, 200), (200, 136), weight=False), shape(16, 64, ahead=2)),
    "24 rows, packed": (product((24, 264), (104, 264), turn_right=True), shape(24, 64, ahead=9)),
    "32 columns": (product((8, 264), (72, 264), weight=False, turn_right=True), shape(8, 32, stages=2)),
    "32 columns, packed, gelu": (product((12, 264), (264, 72), gelu=False), shape(16, 32, stages=4)),
    "two warpgroups": (product((20, 200), (264, 200), weight=False, turn_right=True), shape(24, 128, ahead=3)),
    "two warpgroups, packed": (product((64, 264), (200, 264), turn_right=True), shape(64, 128, stages=2)),
    "two warpgroups, nn": (product((5, 200), (200, 200), weight=False), shape(8, 128)),
    "four warpgroups, split": (product((30, 520), (300, 520), turn_right=True), shape(32, 256, split=2)),
    "split": (product((9, 520), (72, 520), weight=False, turn_right=True), shape(16, 64, split=4, stages=2, ahead=1)),
    "split, packed": (product((16, 520), (72, 520), turn_right=True, dtype=BF16), shape(16, 64, split=8, ahead=2)),
    "split, 32 columns": (product((8, 520), (40, 520), turn_right=True), shape(8, 32, split=2)),
    "stages of two panels": (
        product((8, 512), (72, 512), weight=False, turn_right=True),
        shape(8, 64, deep=2, split=2, ahead=2),
    ),
    "stages of four panels, packed": (product((16, 768), (72, 768), turn_right=True), shape(16, 64, deep=4, ahead=2)),
    "stages of two panels, nn": (product((8, 256), (256, 72), weight=False), shape(8, 64, deep=2, stages=2)),
    "two tiles of rows": (product((50, 264), (72, 264), weight=False, turn_right=True), shape(32, 64)),
    "batch": (product((3, 10, 72), (3, 40, 72), weight=False, turn_right=True), shape(16, 64)),
    "batch, nn, split": (product((3, 10, 264), (3, 264, 72), weight=False, bias=False), shape(16, 64, split=2)),
    "one result wide": (product((10, 136), (136, 27)), shape(16, 32)),
    "stored as f32": (product((10, 136), (136, 24), out=F32), shape(16, 32)),
    "residual": (convolution(1, 64, 3, 3, 40, 1, residual=True), shape(16, 64)),
}


def made(problem: Problem, s: Shape, entry: str) -> CudaSource:
    source = swap.emit(contraction(problem), s.schedule(), entry)
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: made(*case, f"k{i}") for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def kernels(sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(list(sources.values()))


@pytest.mark.parametrize("defer", [1, 2])
@pytest.mark.parametrize("name", list(CASES))
def test_sums_of_integers_are_exact(name: str, defer: int, sources: dict[str, CudaSource], kernels: Emulated):
    assert_exact(kernels, CASES[name][0], sources[name], defer=defer)
