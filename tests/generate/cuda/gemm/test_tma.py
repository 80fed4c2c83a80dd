"""The tma template without a GPU: emulated on the host, and compiled for sm_90a."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tests import goldens
from tests.generate.cuda.products import BF16, F32, ROW, convolution, heads_joined, heads_parted, product
from tests.generate.cuda.tensor_emulator import Emulated, assert_exact
from tests.slow import asked, few

from weft.device.cuda.facts import GpuFacts
from weft.device.cuda.nvrtc import CompiledCubin, CompileJob, find_nvrtc, gate
from weft.gemm.epilogue import epilogue
from weft.gemm.spec import Gemm
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.common.product import Product
from weft.generate.cuda.gemm.common.product import product as product_of
from weft.generate.cuda.gemm.tma import choose as tma_choose
from weft.generate.cuda.gemm.tma import kernel as tma
from weft.generate.cuda.gemm.tma.shape import StreamK, TmaConfig
from weft.generate.cuda.intrinsics.prelude import prelude, tma_header
from weft.ir.declined import Declined
from weft.kernels.candidate import Problem
from weft.kernels.source import CudaSource, Schedule, TensorMap


def linear(bm: int, bn: int, **changes: object) -> TmaConfig:
    base = TmaConfig(bm, bn, 64, 3, 1, False, 1, (1, 1, bm), 0, 1)
    return replace(base, **changes)  # type: ignore[arg-type]


def pixels(bm: int, bn: int, box: tuple[int, int, int], **changes: object) -> TmaConfig:
    return linear(bm, bn, box=box, **changes)


CASES: dict[str, tuple[Problem, TmaConfig]] = {
    "linear": (product((70, 264), (40, 264), turn_right=True), linear(64, 64)),
    "linear, bf16": (product((70, 136), (136, 40), dtype=BF16), linear(64, 32)),
    "two warpgroups share rows": (product((150, 264), (72, 264), turn_right=True), linear(128, 96, consumers=2)),
    "two warpgroups in turn": (
        product((200, 200), (72, 200), turn_right=True),
        linear(64, 32, consumers=2, pingpong=True, persistent_ctas=3, stages=4),
    ),
    "two warpgroups in turn, to which registers move": (
        product((200, 200), (72, 200), turn_right=True),
        linear(64, 32, consumers=2, pingpong=True, persistent_ctas=3, stages=4, register_split=True),
    ),
    "one block for all": (product((130, 136), (72, 136), turn_right=True), linear(64, 32, persistent_ctas=1, stages=2)),
    "split": (product((70, 520), (72, 520), turn_right=True), linear(64, 64, split=4)),
    "split, two warpgroups": (product((130, 520), (72, 520), turn_right=True), linear(128, 64, split=2, consumers=2)),
    "many rows of tiles": (product((70, 40), (2000, 40), turn_right=True), linear(64, 256, persistent_ctas=2)),
    "band of tiles": (product((700, 40), (100, 40), turn_right=True), linear(64, 32, persistent_ctas=5)),
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
    "1x1, in turn": (
        convolution(3, 40, 9, 9, 136, 1, residual=True, dtype=BF16),
        linear(64, 96, consumers=2, pingpong=True, persistent_ctas=2, stages=4),
    ),
    "1x1 strided": (convolution(2, 16, 9, 9, 24, 1, 2), pixels(64, 32, (2, 5, 5))),
    "3x3": (convolution(2, 64, 9, 9, 24, 3, 1, 1, residual=True), pixels(64, 32, (1, 7, 9))),
    "3x3 strided": (convolution(2, 64, 9, 11, 24, 3, 2, 1, dtype=BF16), pixels(64, 32, (2, 5, 6))),
    "3x3, 16 channels": (convolution(1, 16, 9, 9, 24, 3, 1, 1), pixels(64, 32, (1, 8, 8), panel=16)),
    "3x3, 24 channels": (convolution(1, 24, 9, 9, 24, 3, 1, 1), pixels(64, 32, (1, 4, 9), panel=32)),
    "3x3, 96 channels": (convolution(1, 96, 9, 9, 72, 3, 1, 1), pixels(64, 96, (1, 3, 9), panel=32)),
    "3x3, no padding": (convolution(1, 72, 9, 9, 24, 3), pixels(64, 32, (1, 7, 7))),
    "3x3, images together": (convolution(5, 64, 4, 4, 24, 3, 1, 1), pixels(64, 32, (3, 4, 4), persistent_ctas=1)),
    "5x5 dilated": (convolution(1, 64, 9, 9, 24, 5, 1, 4, 2), pixels(64, 32, (1, 7, 9))),
    "asymmetric": (convolution(1, 32, 7, 9, 24, 3, 2, before="constant"), pixels(64, 32, (1, 4, 5), panel=32)),
    "groups": (convolution(2, 64, 9, 9, 48, 3, 1, 1, 1, 2), pixels(64, 32, (1, 7, 9), panel=32)),
    "field": (convolution(1, 64, 9, 11, 24, 3, 1, 1, residual=True), pixels(64, 32, (1, 8, 8), halo_stages=2)),
    "field, rows of the kernel": (
        convolution(2, 96, 9, 16, 40, 3, 1, 1),
        pixels(
            128,
            64,
            (1, 12, 8),
            panel=32,
            halo_stages=2,
            consumers=2,
            pingpong=True,
            persistent_ctas=3,
            taps_per_stage=3,
        ),
    ),
    "field, rows of the kernel, split": (
        convolution(1, 128, 9, 16, 40, (2, 5), 1, 2),
        pixels(64, 64, (1, 8, 8), halo_stages=2, split=2, taps_per_stage=5),
    ),
    "field, one stage for each": (
        convolution(2, 256, 7, 8, 40, (1, 3), 1, 1),
        pixels(64, 64, (1, 8, 8), halo_stages=2, stages=3, taps_per_stage=3),
    ),
    "field, one stage for each, in turn": (
        convolution(2, 192, 7, 8, 40, (1, 3), 1, 1, dtype=BF16),
        pixels(
            64, 64, (1, 8, 8), halo_stages=2, consumers=2, pingpong=True, persistent_ctas=2, stages=4, taps_per_stage=3
        ),
    ),
    "field, two blocks of channels": (
        convolution(2, 96, 9, 16, 40, 3, 1, 1),
        pixels(128, 64, (1, 12, 8), halo_stages=2, consumers=2, persistent_ctas=3),
    ),
    "field, images together": (
        convolution(3, 64, 8, 8, 40, 3, 1, 1, dtype=BF16),
        pixels(128, 32, (2, 8, 8), halo_stages=2, consumers=2, pingpong=True, persistent_ctas=1, stages=4),
    ),
    "field, 5x5 dilated, no padding": (
        convolution(1, 72, 20, 17, 24, 5, 1, 0, 2),
        pixels(64, 32, (1, 8, 8), halo_stages=2),
    ),
    "field, 32 channels": (convolution(1, 32, 9, 11, 24, 3, 1, 1), pixels(64, 32, (1, 8, 8), panel=32, halo_stages=2)),
    "field, 48 channels": (
        convolution(2, 48, 8, 9, 40, 3, 1, 1, dtype=BF16),
        pixels(128, 64, (2, 8, 8), panel=16, halo_stages=2, consumers=2, stages=4),
    ),
    "field, 80 channels": (convolution(1, 80, 9, 8, 24, 3, 1, 1), pixels(64, 32, (1, 8, 8), panel=32, halo_stages=3)),
    "field, split": (convolution(1, 256, 6, 8, 24, 3, 1, 1), pixels(64, 32, (1, 6, 8), halo_stages=2, split=2)),
    "long kernel": (convolution(1, 64, 9, 9, 32, (1, 7), 1, 3), pixels(64, 32, (1, 9, 7))),
    "changing weight": (convolution(2, 64, 9, 9, 40, 3, 1, 1, changing=True), pixels(64, 64, (1, 7, 9))),
    "changing weight, 1x1 strided": (
        convolution(2, 64, 9, 9, 40, 1, 2, changing=True, dtype=BF16),
        pixels(64, 32, (2, 5, 5)),
    ),
    "changing weight, woven, strided": (
        convolution(2, 128, 9, 11, 64, 3, 2, 1, changing=True, dtype=BF16),
        pixels(64, 64, (2, 5, 6), interleaved=True),
    ),
    "changing weight, 96 channels, split": (
        convolution(1, 96, 9, 9, 72, (3, 2), 1, 1, changing=True),
        pixels(64, 96, (1, 3, 9), panel=32, split=2),
    ),
    "changing weight, dilated, in turn": (
        convolution(3, 64, 9, 9, 96, 3, 1, 2, 2, changing=True, residual=True),
        pixels(64, 96, (1, 7, 9), consumers=2, pingpong=True, persistent_ctas=3, stages=4),
    ),
    "changing weight, pair below, woven": (
        convolution(4, 64, 8, 8, 64, 3, 1, 1, changing=True, dtype=BF16),
        pixels(64, 64, (1, 8, 8), multicast=1, interleaved=True, persistent_ctas=2),
    ),
    "changing weight, even": (
        convolution(2, 64, 8, 8, 64, 3, 1, 1, changing=True, dtype=BF16),
        pixels(64, 64, (1, 8, 8), stream_k=True, persistent_ctas=5),
    ),
    "changing weight, field": (
        convolution(1, 128, 9, 11, 24, 3, 1, 1, changing=True, residual=True),
        pixels(64, 32, (1, 8, 8), halo_stages=2),
    ),
    "changing weight, field, rows of the kernel, woven": (
        convolution(2, 128, 9, 16, 64, 3, 1, 1, changing=True, dtype=BF16),
        pixels(
            128,
            64,
            (1, 12, 8),
            halo_stages=2,
            consumers=2,
            pingpong=True,
            persistent_ctas=3,
            taps_per_stage=3,
            interleaved=True,
        ),
    ),
    "changing weight, field, 32 channels, split": (
        convolution(1, 64, 6, 8, 24, 3, 1, 1, changing=True),
        pixels(64, 32, (1, 6, 8), panel=32, halo_stages=2, split=2, taps_per_stage=3),
    ),
    "pair below, packed": (
        product((300, 264), (72, 264), turn_right=True),
        linear(64, 64, multicast=1, persistent_ctas=4),
    ),
    "pair below, packed, an odd row of tiles": (
        product((290, 136), (136, 40)),
        linear(128, 32, multicast=1, consumers=2),
    ),
    "pair beside, packed": (
        product((150, 264), (120, 264), turn_right=True),
        linear(64, 64, multicast=2, persistent_ctas=2),
    ),
    "pair below, nt": (product((2, 150, 72), (2, 40, 72), weight=False, turn_right=True), linear(64, 64, multicast=1)),
    "pair beside, nt, an odd column of tiles": (
        product((2, 70, 72), (2, 136, 72), weight=False, turn_right=True),
        linear(64, 64, multicast=2, raster_group=1),
    ),
    "pair below, nt, woven": (
        product((300, 136), (96, 136), weight=False, turn_right=True),
        linear(64, 64, multicast=1, interleaved=True, persistent_ctas=4),
    ),
    "pair beside, nt, woven": (
        product((100, 136), (96, 136), weight=False, turn_right=True),
        linear(64, 64, multicast=2, interleaved=True),
    ),
    "pair below, nn": (product((3, 130, 136), (3, 136, 72), weight=False, bias=False), linear(64, 128, multicast=1)),
    "nn, columns to spare": (product((2, 70, 72), (2, 72, 200), weight=False), linear(64, 96, overfetch=32)),
    "pair below, nn, columns to spare": (
        product((2, 70, 72), (2, 72, 200), weight=False),
        linear(64, 160, overfetch=32, multicast=1),
    ),
    "pair beside, nn, in turn": (
        product((300, 200), (200, 200), weight=False),
        linear(64, 64, multicast=2, consumers=2, pingpong=True, persistent_ctas=4, stages=4),
    ),
    "pair below, tn, in turn": (
        product((136, 328), (136, 72), weight=False, turn_left=True),
        linear(128, 64, multicast=1, consumers=2, pingpong=True, persistent_ctas=2, stages=3, raster_group=2),
    ),
    "pair beside, tt": (
        product((136, 80), (72, 136), weight=False, turn_left=True, turn_right=True),
        linear(64, 96, multicast=2),
    ),
    "two by two, packed": (
        product((300, 264), (120, 264), turn_right=True),
        linear(64, 64, multicast=3, persistent_ctas=4),
    ),
    "two by two, nt, odd both ways": (
        product((2, 300, 72), (2, 136, 72), weight=False, turn_right=True),
        linear(64, 64, multicast=3, raster_group=1),
    ),
    "two by two, nn, columns to spare, in turn": (
        product((500, 200), (200, 312), weight=False),
        linear(64, 96, overfetch=32, multicast=3, consumers=2, pingpong=True, persistent_ctas=4, stages=4),
    ),
    "two by two, nt, woven": (
        product((300, 136), (96, 136), weight=False, turn_right=True),
        linear(64, 64, multicast=3, interleaved=True),
    ),
    "four below, nt": (product((300, 136), (40, 136), weight=False, turn_right=True), linear(64, 32, multicast=4)),
    "four below, tn, packed": (
        product((136, 328), (136, 72), turn_left=True),
        linear(64, 64, multicast=4, persistent_ctas=4),
    ),
    "four below, nn": (product((136, 328), (136, 72), weight=False, turn_left=True), linear(64, 128, multicast=4)),
    "four beside, nt": (product((100, 136), (200, 136), weight=False, turn_right=True), linear(64, 32, multicast=5)),
    "four beside, tn, packed": (product((136, 80), (136, 120), turn_left=True), linear(64, 32, multicast=5)),
    "three warpgroups, two by two": (
        product((500, 136), (136, 192), gelu=True),
        linear(192, 96, consumers=3, multicast=3, stages=4),
    ),
    "three warpgroups": (
        product((2, 250, 200), (2, 72, 200), weight=False, turn_right=True),
        linear(192, 32, consumers=3),
    ),
    "pair below, 1x1": (convolution(2, 24, 9, 9, 40, 1, residual=True), linear(64, 32, multicast=1, persistent_ctas=2)),
    "pair below, 3x3, 96 channels": (
        convolution(2, 96, 9, 9, 72, 3, 1, 1),
        pixels(64, 96, (1, 3, 9), panel=32, multicast=1, persistent_ctas=4),
    ),
    "pair below, field": (
        convolution(2, 96, 9, 16, 40, 3, 1, 1),
        pixels(
            128,
            64,
            (1, 12, 8),
            panel=32,
            halo_stages=2,
            consumers=2,
            pingpong=True,
            persistent_ctas=2,
            taps_per_stage=3,
            multicast=1,
        ),
    ),
    "pair below, tf32": (
        product((2, 150, 36), (2, 40, 36), weight=False, turn_right=True, dtype=F32),
        linear(64, 64, multicast=1),
    ),
    "even, three blocks": (
        product((200, 264), (72, 264), turn_right=True),
        linear(64, 32, stream_k=True, persistent_ctas=5),
    ),
    "even, a tile of many blocks": (
        product((2, 70, 584), (2, 40, 584), weight=False, turn_right=True),
        linear(64, 64, stream_k=True, persistent_ctas=13),
    ),
    "even, further tiles, two warpgroups": (
        product((500, 200), (200, 72), weight=False),
        linear(128, 64, stream_k=True, persistent_ctas=3, consumers=2, raster_group=2),
    ),
    "even, pair below": (
        product((300, 264), (72, 264), turn_right=True),
        linear(64, 64, stream_k=True, multicast=1, persistent_ctas=8),
    ),
    "even, pair beside": (
        product((300, 328), (40, 328), weight=False, turn_right=True, dtype=BF16),
        linear(64, 32, stream_k=True, multicast=2, persistent_ctas=6),
    ),
    "even, two by two": (
        product((300, 328), (104, 328), weight=False, turn_right=True),
        linear(64, 32, stream_k=True, multicast=3, persistent_ctas=16),
    ),
    "even, four below": (
        product((300, 328), (328, 72), weight=False),
        linear(64, 64, stream_k=True, multicast=4, persistent_ctas=12),
    ),
    "even, 3x3": (
        convolution(2, 64, 9, 9, 24, 3, 1, 1, residual=True),
        pixels(64, 32, (1, 7, 9), stream_k=True, persistent_ctas=3),
    ),
    "one row": (product((1, 136), (136, 72), weight=False), linear(64, 64)),
    "one row of a weight, split": (product((1, 264), (72, 264), turn_right=True), linear(64, 32, split=2)),
    "one row in each of a batch": (product((3, 1, 72), (3, 40, 72), weight=False, turn_right=True), linear(64, 64)),
    "one image, boxes of two": (convolution(1, 64, 4, 4, 24, 3, 1, 1), pixels(64, 32, (2, 4, 8), persistent_ctas=1)),
    "odd rows": (product((70, 101), (40, 101), weight=False, turn_right=True), linear(64, 64)),
    "odd columns": (product((101, 69), (101, 71), weight=False, turn_left=True), linear(64, 64, raster_group=1)),
    "odd columns, packed": (product((101, 69), (72, 101), turn_left=True, turn_right=True), linear(64, 64)),
    "odd rows, even shares, pairs": (
        product((300, 301), (301, 75), weight=False),
        linear(64, 64, stream_k=True, multicast=1, persistent_ctas=8),
    ),
    "odd rows, tf32": (
        product((70, 103), (40, 103), weight=False, turn_right=True, dtype=F32),
        linear(64, 64),
    ),
    "stored by boxes": (
        product((70, 264), (40, 264), turn_right=True, weight=False, bias=False),
        linear(64, 64, store=64),
    ),
    "stored by boxes of 32": (
        product((150, 72), (104, 72), turn_right=True, weight=False, bias=False, dtype=BF16),
        linear(64, 96, store=32, persistent_ctas=2),
    ),
    "stored by boxes, nn, two warpgroups": (
        product((300, 136), (136, 200), weight=False, bias=False),
        linear(128, 128, store=64, consumers=2, persistent_ctas=2),
    ),
    "stored by boxes, two warpgroups in turn": (
        product((200, 200), (72, 200), turn_right=True, weight=False, bias=False),
        linear(64, 64, store=64, consumers=2, pingpong=True, persistent_ctas=3, stages=4),
    ),
    "stored by boxes, bias": (
        product((150, 136), (136, 168)),
        linear(128, 128, consumers=2, store=64, persistent_ctas=2),
    ),
    "stored by boxes of 32, bias, one block": (
        product((290, 72), (72, 168)),
        linear(64, 96, store=32, persistent_ctas=1),
    ),
    "stored by boxes, not woven": (
        product((150, 136), (168, 136), weight=False, turn_right=True),
        linear(128, 128, consumers=2, store=64, persistent_ctas=2),
    ),
    "stored by boxes, woven": (
        product((300, 136), (96, 136), weight=False, turn_right=True, bias=False),
        linear(64, 64, interleaved=True, store=64, persistent_ctas=2),
    ),
    "stored by boxes, residual": (
        convolution(2, 24, 9, 9, 40, 1, residual=True),
        linear(64, 64, store=64, persistent_ctas=2),
    ),
    "stored by boxes, batch": (
        product((3, 70, 72), (3, 40, 72), weight=False, turn_right=True, bias=False),
        linear(64, 64, store=64, persistent_ctas=2),
    ),
    "stored by boxes, pair below": (
        product((300, 264), (72, 264), weight=False, turn_right=True, bias=False),
        linear(64, 64, multicast=1, persistent_ctas=4, store=64),
    ),
    "stored by boxes, pair beside, even": (
        product((300, 328), (40, 328), weight=False, turn_right=True, dtype=BF16, bias=False),
        linear(64, 32, stream_k=True, multicast=2, persistent_ctas=6, store=32),
    ),
    "tf32": (product((70, 132), (40, 132), turn_right=True, dtype=F32), linear(64, 64)),
    "tf32, split": (product((70, 260), (72, 260), turn_right=True, dtype=F32), linear(64, 64, split=4)),
    "tf32, nt": (product((2, 70, 36), (2, 40, 36), weight=False, turn_right=True, dtype=F32), linear(64, 64)),
    "tf32, two warpgroups in turn": (
        product((200, 100), (72, 100), turn_right=True, dtype=F32),
        linear(64, 32, consumers=2, pingpong=True, persistent_ctas=3, stages=4),
    ),
    "tf32, 3x3, 12 channels": (
        convolution(2, 12, 9, 9, 24, 3, 1, 1, dtype=F32, residual=True),
        pixels(64, 32, (1, 7, 9), panel=32),
    ),
    "tf32, 3x3 strided": (convolution(2, 32, 9, 11, 24, 3, 2, 1, dtype=F32), pixels(64, 32, (2, 5, 6))),
    "tf32, field": (
        convolution(2, 48, 9, 16, 40, 3, 1, 1, dtype=F32, residual=True),
        pixels(
            128,
            64,
            (1, 12, 8),
            panel=32,
            halo_stages=2,
            consumers=2,
            pingpong=True,
            persistent_ctas=3,
            taps_per_stage=3,
        ),
    ),
    "tf32, field, one by one": (
        convolution(1, 32, 9, 11, 24, 3, 1, 1, dtype=F32),
        pixels(64, 32, (1, 8, 8), halo_stages=2),
    ),
}


def contraction(problem: Problem) -> Product:
    p = product_of(problem, tf32=True, changing=True)
    assert isinstance(p, Product), p
    return p


def made(problem: Problem, shape: TmaConfig, entry: str) -> CudaSource:
    source = tma.emit(contraction(problem), shape.schedule(), entry)
    assert isinstance(source, CudaSource), source
    return source


@pytest.fixture(scope="module")
def sources() -> dict[str, CudaSource]:
    return {name: made(*case, f"k{i}") for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest, sources: dict[str, CudaSource]) -> Emulated:
    return Emulated(asked(request, sources))


PIPELINES = (
    "pair below, packed",
    "even, pair below",
    "pair beside, nn, in turn",
    "pair below, tn, in turn",
    "pair below, field",
    "two warpgroups in turn",
    "one block for all",
    "split, two warpgroups",
    "nn",
    "field, images together",
)
"""Cases that run once more with copies at once and products as late as may be."""


@pytest.mark.parametrize(
    ("name", "defer"), few([*((name, 1) for name in CASES), *((name, 2) for name in PIPELINES)], 10, unpack=True)
)
def test_sums_of_integers_are_exact(name: str, defer: int, sources: dict[str, CudaSource], kernels: Emulated) -> None:
    assert_exact(kernels, CASES[name][0], sources[name], defer=defer)


def compile_all(sources: list[CudaSource]) -> None:
    """For sm_90a: nothing spilled to speak of, nothing serialised, registers moved where that was asked for."""
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    results = nvrtc.compile_many([CompileJob(s.text, "sm_90a", s.flags) for s in sources])
    for source, result in zip(sources, results, strict=True):
        assert isinstance(result, CompiledCubin), result
        assert result.warnings == (), (str(source.schedule), result.warnings)
        own = result.of(source.entry)
        assert own.spill_stores + own.spill_loads <= 32, (str(source.schedule), own)
        assert gate(result, source.launches[0], GpuFacts()) is None


def test_every_role_compiles() -> None:
    relu = product((4096, 512), (512, 512), turn_right=True)
    turned = product((1, 512, 512), (1, 512, 512), weight=False, turn_left=True)
    compile_all(
        [
            made(relu, linear(128, 256, consumers=2, stages=4, persistent_ctas=132), "k0"),
            made(turned, linear(128, 192, consumers=2, pingpong=True, stages=4), "k1"),
            made(relu, linear(192, 192, consumers=3, stages=4, persistent_ctas=132), "k3"),
            made(turned, linear(192, 128, consumers=3, stages=4, multicast=3), "k4"),
            made(
                convolution(16, 128, 28, 28, 128, 3, 1, 1, residual=True),
                pixels(128, 64, (1, 14, 8), consumers=2, halo_stages=2, split=2, stages=4),
                "k2",
            ),
        ]
    )


@pytest.mark.slow
def test_large_tiles_compile_without_spills() -> None:
    gelu = product((4096, 512), (512, 3072), gelu=True)
    conv = convolution(16, 256, 28, 28, 512, 3, 1, 1, residual=True)
    tiles = ((128, 256, False), (256, 128, False), (128, 128, True), (64, 256, True))
    compile_all(
        [
            made(gelu, linear(m, n, consumers=2, pingpong=t, stages=4, persistent_ctas=132), f"k{i}")
            for i, (m, n, t) in enumerate(tiles)
        ]
        + [
            made(
                conv,
                pixels(m, n, (1, m // 8, 8), consumers=2, pingpong=t, stages=3, halo_stages=2, persistent_ctas=132),
                f"f{i}",
            )
            for i, (m, n, t) in enumerate(tiles)
        ]
    )


GOLDEN = {
    "tma_turns": (
        product((2048, 768), (768, 3072)),
        linear(128, 128, consumers=2, pingpong=True, stages=6, persistent_ctas=132),
    ),
    "tma_field": (
        convolution(16, 128, 28, 28, 128, 3, 1, 1),
        pixels(128, 128, (1, 14, 8), consumers=2, stages=6, halo_stages=2),
    ),
    "tma_split": (
        product((512, 4096), (256, 4096), turn_right=True, bias=False),
        linear(128, 64, consumers=2, split=4),
    ),
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_text(name: str) -> None:
    source = made(*GOLDEN[name], "ENTRY")
    text = f"// {source.schedule}\n{source.text.replace(prelude(), '').replace(tma_header(), '')}"
    goldens.check(f"cuda/kernels/{name}.cu", text)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (convolution(1, 3, 20, 20, 32, 3, 1, 1), "16-byte vectors"),
        (convolution(1, 16, 20, 20, 32, 3, before="reflect"), "other values than zeros"),
        (convolution(1, 64, 20, 20, 32, 3, 1, 1, fout=ROW), "not channels-last"),
    ],
)
def test_what_is_declined_says_why(problem: Problem, reason: str) -> None:
    found = tma.emit(contraction(problem), linear(64, 32).schedule(), "k")
    assert isinstance(found, Declined)
    assert reason in found.reason
    assert tma_choose.shapes(contraction(problem), GpuFacts()) == []


@pytest.mark.parametrize(
    ("problem", "changes", "reason"),
    [
        (product((70, 264), (40, 264), turn_right=True), {"store": 64, "bn": 96}, "boxes of 32 or 64"),
        (product((70, 264), (40, 264), turn_right=True), {"store": 64, "split": 2}, "without split-K"),
        (product((20, 40), (40, 18)), {"store": 32}, "whole 16-byte vectors"),
        (product((20, 40), (40, 24), out=F32), {"store": 32}, "another type"),
        (convolution(1, 64, 9, 9, 24, 3, 1, 1), {"store": 32, "box": (1, 7, 9)}, "need a matrix"),
        (heads_parted(2, 3, 20, 16, 40), {"store": 32}, "several dimensions"),
    ],
)
def test_results_that_the_copy_engine_does_not_take(problem: Problem, changes: dict[str, object], reason: str) -> None:
    shape = replace(linear(64, 64), **changes)  # type: ignore[arg-type]
    found = tma.emit(contraction(problem), shape.schedule(), "k")
    assert isinstance(found, Declined)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("name", "gone"),
    few(
        [
            ("stored by boxes, bias", "if (lane == 0) w_stores_read<1>(); __syncwarp();"),
            ("stored by boxes, nn, two warpgroups", "if (lane == 0) w_stores_done();"),
        ],
        1,
        unpack=True,
    ),
)
def test_boxes_that_are_filled_or_left_too_early_are_seen(name: str, gone: str, sources: dict[str, CudaSource]) -> None:
    source = sources[name]
    assert gone in source.text
    wrong = replace(source, text=source.text.replace(gone, ""))
    with pytest.raises(AssertionError):
        assert_exact(Emulated([wrong]), CASES[name][0], wrong, defer=True)


def test_f32_is_declined_where_it_may_not_be_rounded() -> None:
    exact = product_of(product((64, 64), (64, 64), dtype=F32))
    assert isinstance(exact, Product)
    found = tma.emit(exact, linear(64, 32).schedule(), "k")
    assert isinstance(found, Declined)
    assert "TF32" in found.reason
    assert tma_choose.shapes(exact, GpuFacts()) == []


def test_one_buffer_is_declined() -> None:
    found = tma.emit(contraction(CASES["linear"][0]), linear(64, 64, stages=1).schedule(), "k")
    assert isinstance(found, Declined)
    assert "a single stage" in found.reason


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("linear", {"multicast": 1, "split": 2}, "excludes split-K"),
        ("linear", {"multicast": 1, "min_ctas": 2}, "several CTAs per multiprocessor"),
        ("field", {"multicast": 2}, "1xN clusters of halo tiles"),
        ("3x3, 96 channels", {"multicast": 2, "bn": 64}, "multicast cannot slice"),
        ("asymmetric", {"multicast": 1}, "boxes of pixels"),
        ("linear", {"multicast": 2}, "packed columns"),
        ("linear", {"overfetch": 32}, "over-fetch"),
        ("two warpgroups in turn", {"stream_k": True}, "cooperative consumers"),
        ("linear", {"stream_k": True}, "cooperative consumers"),
        ("linear", {"stream_k": True, "persistent_ctas": 2}, "fill the grid"),
        ("linear", {"stream_k": True, "persistent_ctas": 132}, "CTAs per tile"),
        ("linear", {"stream_k": True, "persistent_ctas": 11}, "fewer k-tiles than CTAs"),
    ],
)
def test_blocks_that_cannot_work_together_are_declined(name: str, changes: dict[str, object], reason: str) -> None:
    problem, shape = CASES[name]
    found = tma.emit(contraction(problem), replace(shape, **changes).schedule(), "k")  # type: ignore[arg-type]
    assert isinstance(found, Declined)
    assert reason in found.reason


def test_a_schedule_tells_new_parameters_where_they_are_used() -> None:
    old, new = linear(64, 64).schedule(), linear(64, 64, multicast=1, stream_k=True, raster_group=4).schedule()
    assert not {"multicast", "stream_k", "raster_group", "overfetch"} & set(dict(old.params))
    assert TmaConfig.of(old) == linear(64, 64)
    assert TmaConfig.of(new) == linear(64, 64, multicast=1, stream_k=True, raster_group=4)


@pytest.mark.parametrize(("tiles", "units", "steps"), [(7, 5, 9), (3, 5, 9), (64, 6, 4), (10, 5, 3)])
def test_stream_k_covers_every_k_tile_once(tiles: int, units: int, steps: int) -> None:
    e = StreamK(tiles, units, steps)
    assert e.shared == {(7, 5): 7, (3, 5): 3, (64, 6): 10, (10, 5): 0}[tiles, units]
    by, over = [*map(int, re.findall(r"\d+", e.range_of("unit"))), 1][:2]  # "0" where no tile is shared
    starts = [unit * by // over for unit in range(units + 1)]
    assert starts[0] == 0
    assert starts[-1] == e.shared * steps
    assert max(b - a for a, b in pairwise(starts)) - min(b - a for a, b in pairwise(starts)) <= 1


def test_rows_within_sectors_are_offered_clusters_of_four() -> None:
    problem = product((968, 2616), (1376, 2616), weight=False, bias=False, turn_right=True)
    found = [s for _, s in tma_choose.shapes(contraction(problem), GpuFacts(), 12)]
    assert any(s.multicast_ctas == 4 for s in found), found
    assert all(s.persistent_ctas <= 30 * 4 for s in found if s.multicast_ctas == 4)


def test_large_products_are_offered_pairs_and_even_shares() -> None:
    found = [s for _, s in tma_choose.every(contraction(product((5120, 5120), (5120, 5120), weight=False)), GpuFacts())]
    assert any(s.multicast for s in found)
    assert any(s.stream_k for s in found)
    assert all(s.persistent_ctas for s in found if s.stream_k)


def test_other_architectures_have_no_shapes() -> None:
    p = contraction(product((2048, 768), (768, 3072)))
    assert tma_choose.shapes(p, GpuFacts(capability=80)) == []
    assert tma_choose.shapes(p, GpuFacts(capability=100)) == []


def test_few_shapes_that_fit() -> None:
    facts = GpuFacts()
    for problem in (GOLDEN["tma_turns"][0], GOLDEN["tma_field"][0], CASES["3x3 strided"][0], CASES["nn"][0]):
        p = contraction(problem)
        found = tma_choose.shapes(p, facts)
        assert 1 <= len(found) <= 4
        assert [x for x, _ in found] == sorted(x for x, _ in found)
        for _, shape in found:
            source = made(problem, shape, "k")
            assert source.launches[0].shared_bytes <= facts.shared_per_block
            assert source.launches[0].shared_bytes * shape.min_ctas <= facts.shared_per_sm - 1024 * shape.min_ctas
            assert shape.rows * shape.bn <= 128 * 128, "more sums than a thread has registers for"


@pytest.mark.parametrize("sizes", [(16, 14, 14), (16, 7, 7), (1, 56, 56), (3, 13, 17)])
@pytest.mark.parametrize("rows", [64, 128, 256])
def test_boxes_cover_the_pixels(sizes: tuple[int, int, int], rows: int) -> None:
    box = tma_choose.best_box(sizes, rows, (1, 2, 2))
    assert math.prod(box) <= rows
    assert all(1 <= b <= n for b, n in zip(box, sizes, strict=True))
    boxes = math.prod(-(-n // b) for n, b in zip(sizes, box, strict=True))
    assert math.prod(sizes) <= boxes * math.prod(box) <= 2 * math.prod(sizes) + rows


def test_boxes_are_offered_where_they_were_seen_to_gain() -> None:
    facts = GpuFacts()

    def boxed(m: int, n: int, k: int, **more: Any) -> list[dict[str, Any]]:
        problem = Gemm(m, n, k, layout="nt", **more).problem()
        found = templates.schedules(problem, facts)
        assert not isinstance(found, Declined)
        return [dict(s.params) for s in found if dict(s.params).get("store")]

    for size in ((4096, 4096, 1024), (8192, 4096, 512)):
        (one,) = boxed(*size)
        assert one["pingpong"] is True
        source = made(Gemm(*size, layout="nt").problem(), TmaConfig.of(Schedule("cuda", tuple(one.items()))), "k")
        assert source.launches[0].shared_bytes <= facts.shared_per_block
        assert any(isinstance(x, TensorMap) and x.base.kind == "out" for x in source.launches[0].arguments)
    assert boxed(2048, 3072, 768) == [], "a small result"
    assert boxed(4096, 4096, 4096) == [], "a long sum"
    assert boxed(4096, 4096, 1024, epilogue=epilogue("bias_relu")) == [], "something follows the sum"


def test_a_changing_weight_is_taken_where_its_sum_goes_along_memory() -> None:
    taken = convolution(1, 64, 9, 9, 32, 3, 1, 1, changing=True)
    p = product_of(taken, changing=True)
    assert isinstance(p, Product) and p.changing and p.w_load == "nk"
    assert isinstance(product_of(taken), Declined)
    rows = replace(taken, input_formats=(taken.input_formats[0], ROW, ROW))
    for other in (rows, convolution(1, 64, 9, 9, 32, 3, 1, 1, 1, 2, changing=True)):
        found = product_of(other, changing=True)
        assert isinstance(found, Declined) and "in groups or not channels-last" in found.reason
    few = tma.emit(
        contraction(convolution(1, 24, 9, 9, 32, 3, changing=True)), pixels(64, 32, (1, 7, 7)).schedule(), "k"
    )
    assert isinstance(few, Declined) and "no whole panels" in few.reason
    assert not contraction(convolution(1, 64, 9, 9, 32, 3)).changing
