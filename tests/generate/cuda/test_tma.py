"""The tma template without a GPU: emulated on the host, and compiled for sm_90a."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.generate.cuda.products import BF16, F32, convolution, heads_joined, heads_parted, product
from tests.generate.cuda.tensor_emulator import Emulated, rounded, run, small_integers

from weft.generate.cuda.templates import tma
from weft.generate.cuda.templates.product import Product
from weft.generate.cuda.templates.product import product as product_of
from weft.generate.cuda.templates.tma import Shape
from weft.ir.reference import evaluate
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource


def linear(bm: int, bn: int, **changes: object) -> Shape:
    base = Shape(bm, bn, 64, 3, 1, False, 1, (1, 1, bm), 0, 1)
    return replace(base, **changes)  # type: ignore[arg-type]


def pixels(bm: int, bn: int, box: tuple[int, int, int], **changes: object) -> Shape:
    return linear(bm, bn, box=box, **changes)


CASES: dict[str, tuple[Problem, Shape]] = {
    "linear": (product((70, 264), (40, 264), turn_right=True), linear(64, 64)),
    "linear, bf16": (product((70, 136), (136, 40), dtype=BF16), linear(64, 32)),
    "two warpgroups share rows": (product((150, 264), (72, 264), turn_right=True), linear(128, 96, groups=2)),
    "two warpgroups in turn": (
        product((200, 200), (72, 200), turn_right=True),
        linear(64, 32, groups=2, turns=True, blocks=3, stages=4),
    ),
    "one block for all": (product((130, 136), (72, 136), turn_right=True), linear(64, 32, blocks=1, stages=2)),
    "split": (product((70, 520), (72, 520), turn_right=True), linear(64, 64, split=4)),
    "split, two warpgroups": (product((130, 520), (72, 520), turn_right=True), linear(128, 64, split=2, groups=2)),
    "many rows of tiles": (product((70, 40), (2000, 40), turn_right=True), linear(64, 256, blocks=2)),
    "band of tiles": (product((700, 40), (100, 40), turn_right=True), linear(64, 32, blocks=5)),
    "nt": (product((2, 70, 72), (2, 40, 72), weight=False, turn_right=True), linear(64, 64)),
    "nn": (product((3, 50, 136), (3, 136, 72), weight=False, bias=False), linear(64, 128)),
    "tn": (product((136, 80), (136, 72), weight=False, turn_left=True), linear(128, 64)),
    "tt": (product((136, 80), (72, 136), weight=False, turn_left=True, turn_right=True), linear(64, 96)),
    "tn, weight": (product((136, 80), (136, 72), turn_left=True), linear(64, 64)),
    "broadcast batch": (product((2, 3, 33, 16), (3, 16, 24), weight=False), linear(64, 64)),
    "heads joined": (heads_joined(2, 3, 20, 16, 24), pixels(64, 32, (1, 3, 20), panel=16)),
    "heads parted": (heads_parted(2, 3, 20, 16, 40), linear(64, 32)),
    "stored as f32": (product((20, 40), (40, 24), out=F32), linear(64, 32)),
    "narrow columns": (product((20, 40), (40, 18)), linear(64, 32)),
    "1x1": (convolution(2, 24, 9, 9, 40, 1, residual=True), linear(64, 64)),
    "1x1 strided": (convolution(2, 16, 9, 9, 24, 1, 2), pixels(64, 32, (2, 5, 5))),
    "3x3": (convolution(2, 64, 9, 9, 24, 3, 1, 1, residual=True), pixels(64, 32, (1, 7, 9))),
    "3x3 strided": (convolution(2, 64, 9, 11, 24, 3, 2, 1, dtype=BF16), pixels(64, 32, (2, 5, 6))),
    "3x3, 16 channels": (convolution(1, 16, 9, 9, 24, 3, 1, 1), pixels(64, 32, (1, 8, 8), panel=16)),
    "3x3, 24 channels": (convolution(1, 24, 9, 9, 24, 3, 1, 1), pixels(64, 32, (1, 4, 9), panel=32)),
    "3x3, 96 channels": (convolution(1, 96, 9, 9, 72, 3, 1, 1), pixels(64, 96, (1, 3, 9), panel=32)),
    "3x3, no padding": (convolution(1, 72, 9, 9, 24, 3), pixels(64, 32, (1, 7, 7))),
    "3x3, images together": (convolution(5, 64, 4, 4, 24, 3, 1, 1), pixels(64, 32, (3, 4, 4), blocks=1)),
    "5x5 dilated": (convolution(1, 64, 9, 9, 24, 5, 1, 4, 2), pixels(64, 32, (1, 7, 9))),
    "asymmetric": (convolution(1, 32, 7, 9, 24, 3, 2, before="constant"), pixels(64, 32, (1, 4, 5), panel=32)),
    "groups": (convolution(2, 64, 9, 9, 48, 3, 1, 1, 1, 2), pixels(64, 32, (1, 7, 9), panel=32)),
    "long kernel": (convolution(1, 64, 9, 9, 32, (1, 7), 1, 3), pixels(64, 32, (1, 9, 7))),
}


def contraction(problem: Problem) -> Product:
    p = product_of(problem)
    assert isinstance(p, Product), p
    return p


def made(problem: Problem, shape: Shape, entry: str) -> CudaSource:
    source = tma.emit(contraction(problem), shape.schedule(), entry)
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: made(*case, f"k{i}") for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def kernels(sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(list(sources.values()))


@pytest.mark.parametrize("defer", [1, 2], ids=["late", "late products"])
@pytest.mark.parametrize("name", list(CASES))
def test_sums_of_integers_are_exact(name: str, defer: int, sources: dict[str, CudaSource], kernels: Emulated):
    problem = CASES[name][0]
    inputs = small_integers(problem)
    exact = evaluate(problem.graph, inputs, precise=True)
    got = run(kernels, problem, sources[name], inputs, defer=defer)  # type: ignore[arg-type]
    for x, y, node in zip(got, exact, problem.graph.outputs, strict=True):
        np.testing.assert_array_equal(x, rounded(y, problem.graph.type_of(node).dtype))
