"""Variants for products that lose to the library (`gpu_gemm_parts --weak`).

What is counted: 968x1376x2616 has rows of 5232 bytes, which begin within lines and within sectors, so that the L2 cache
looks up twice what it gives; 88 tiles of 128x128 leave 44 multiprocessors idle, 120 of 128x96 take as long because more
is copied. Tiles of 112 columns (104) make 28 clusters of four. TF32 with results of f32: four lanes that have 8
neighbours each fill half sectors; columns in the order of registers fill whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lab.gpu_gemm_parts import WRONG, Variant, tile
from weft.gemm.spec import Gemm
from weft.generate.cuda.gemm.tma.shape import CLUSTER_SHAPES, TmaConfig
from weft.ir.types import DType


def weak() -> Iterator[tuple[Gemm, list[Variant]]]:
    """Products with at most a dozen variants each."""
    mid, low = tile(128, 128, 7, persistent_ctas=0), tile(128, 112, 7, persistent_ctas=0)
    no_products = [
        ("no products", x, WRONG["no products"], 2) for x in (replace(low, multicast=3), replace(mid, multicast=4))
    ]
    yield (
        Gemm(968, 1376, 2616, layout="nt"),
        [
            *pairs(replace(mid, interleaved=True), 3, 4, 6, 7, 8),
            *pairs(low, 0, 1, 2, 3),
            *pairs(tile(192, 112, 5, consumers=3, persistent_ctas=0), 1),
            *no_products,
        ],
    )
    turned = [*pairs(mid, 1, 2, 3, 4, 5, 6, 7), *pairs(tile(128, 128, 7, stream_k=True), 1, 3)]
    wide = [*pairs(tile(128, 192, 5, persistent_ctas=0), 3, 5), *pairs(tile(256, 128, 4, stream_k=True), 2)]
    yield Gemm(968, 1376, 2616, layout="nn"), [*turned, *wide]
    yield Gemm(968, 1376, 2616, layout="tn"), [*pairs(mid, 1, 2, 3, 4, 5, 6, 7)]
    large = [tile(256, 128, 4), tile(128, 256, 4), tile(128, 192, 5), tile(128, 128, 7, pingpong=True)]
    woven = [replace(x, interleaved=True) for x in large]
    three = [
        replace(tile(192, 192, 4, consumers=3), interleaved=True),
        replace(tile(192, 160, 5, consumers=3), interleaved=True),
    ]
    both = [replace(woven[0], multicast=2), replace(woven[1], multicast=1), replace(woven[3], multicast=1)]
    ends: list[Variant] = [("no end", x, WRONG["no end"], 2) for x in (large[0], woven[0])]
    yield (
        Gemm(4096, 4096, 1024, layout="nt", dtype=DType.F32),
        [*all_of([*large[:2], large[3], *woven, *three, *both]), *ends],
    )
    yield (
        Gemm(2048, 3072, 768, layout="nt", dtype=DType.F32),
        all_of([large[0], large[1], *woven, tile(192, 160, 5, consumers=3, interleaved=True), tile(128, 208, 5)]),
    )
    yield (
        Gemm(2048, 2048, 2048, layout="nt", dtype=DType.F32),
        all_of([*large, *woven]),
    )
    square = [tile(128, n, 6 if n < 176 else 5, persistent_ctas=0, multicast=x) for n in (144, 176) for x in (0, 1, 2)]
    woven_ = [
        tile(128, 160, 6, persistent_ctas=0, interleaved=True),
        tile(192, 96, 6, consumers=3, persistent_ctas=0, interleaved=True),
    ]
    yield (
        Gemm(1536, 1536, 1536, layout="nt"),
        all_of(
            [*woven_, *square, tile(192, 112, 5, consumers=3, persistent_ctas=0), tile(256, 80, 5, persistent_ctas=0)]
        ),
    )
    for n in (2560, 5120):
        shapes = [tile(128, 256, 4, interleaved=True), tile(128, 256, 4, interleaved=True, stream_k=True, multicast=1)]
        shapes += [tile(128, 144, 6, multicast=1), tile(128, 176, 5, multicast=1), tile(256, 112, 4, multicast=2)]
        shapes += [tile(192, 176, 4, consumers=3), tile(128, 208, 5), tile(256, 144, 4)]
        yield Gemm(n, n, n, layout="nt"), all_of(shapes)


def all_of(shapes: Sequence[TmaConfig]) -> list[Variant]:
    """As they are."""
    return [("", s, None, 2) for s in shapes]


def pairs(s: TmaConfig, *kinds: int, **more: Any) -> list[Variant]:
    """A tile with these ways to share operands."""
    woven = [s.interleaved and s.bn % (32 * CLUSTER_SHAPES[x][0]) == 0 for x in kinds]
    return all_of([replace(s, multicast=x, interleaved=w, **more) for x, w in zip(kinds, woven, strict=True)])
