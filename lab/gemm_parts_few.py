"""Variants of products with few rows, and of how results are stored, for `lab.gpu_gemm_parts`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from benchmarks.harness.record import RESULTS

from lab.gpu_gemm_parts import Variant, Written, tile
from weft.gemm.epilogue import epilogue
from weft.gemm.spec import Gemm
from weft.generate.cuda.gemm.swap_ab import kernel as swap
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir.types import DType

RECORDED = RESULTS / "nvidia-h200" / "gemm.jsonl"
WIDE = ((4096, 4096), (11008, 4096), (4096, 11008), (14336, 4096), (4096, 14336))


@cache
def recorded() -> dict[str, str]:
    """The fastest schedule of each product that was measured before, by the product's name."""
    lines = (json.loads(x) for x in RECORDED.read_text().splitlines() if x.startswith("{"))
    return {x["case"]: x["weft_name"] for x in lines if x.get("record") == "case"}


def known(g: Gemm) -> list[Variant]:
    """That of a product, or of the same one in f16."""
    text = recorded().get(g.name) or recorded().get(g.name.replace("bf16", "f16"))
    return [("recorded", Written(text), None, 2)] if text else []


def turned(m: int, bn: int, stages: int, split: int = 1) -> swap.SwapAbConfig:
    """A shape whose tile has all rows."""
    return swap.SwapAbConfig(-(-m // 8) * 8, bn, stages, split)


def _all(shapes: Sequence[TmaConfig | swap.SwapAbConfig]) -> list[Variant]:
    return [("", s, None, 2) for s in shapes]


def few() -> Iterator[tuple[Gemm, list[Variant]]]:
    """Products with few rows: tiles of 64 and 128 columns, stages, and splits of the sum."""
    narrow = ((64, 12, 1), (64, 16, 1), (64, 20, 1), (64, 8, 2), (64, 12, 2), (64, 16, 2), (64, 8, 3), (64, 6, 4))
    wide = ((64, 4, 1), (64, 5, 1), (64, 6, 1), (64, 8, 1), (128, 5, 1), (128, 8, 1), (128, 12, 1))
    for m in (16, 1, 8, 32):
        for n, k in WIDE:
            g = Gemm(m, n, k, layout="nt", dtype=DType.BF16 if (m, n) == (8, 11008) else DType.F16)
            tiles = (*narrow, (128, 5, 4), (128, 8, 4)) if n == 4096 else wide
            yield g, known(g) + _all([turned(m, *x) for x in tiles])
    for m in (24, 48, 64):
        for n, k in WIDE[:3]:
            g = Gemm(m, n, k, layout="nt")
            other = [tile(64, 64, 7, consumers=1, persistent_ctas=0, interleaved=True, split=2)] if n == 4096 else []
            other += (
                [tile(64, 96, 5, consumers=1, persistent_ctas=0, interleaved=True, min_ctas=2)] if n == 11008 else []
            )
            few = ((64, 6, 2), (64, 8, 2), (64, 12, 1)) if n == 4096 else wide[:3]
            yield g, known(g) + _all([*(turned(m, *x) for x in few), *other])
    for text in ("bias_silu", "bias_residual"):
        g = Gemm(16, 4096, 4096, layout="nt", epilogue=epilogue(text))
        yield g, known(g) + _all([turned(16, 64, 12), turned(16, 64, 8, 2), turned(16, 64, 12, 2)])
    g = Gemm(16, 4096, 4096, layout="nt", constant=True)
    streamed = (
        "cuda(bk=64,bm=16,bn=32,cluster=True,group=False,split=2,stages=5,template=mma,wk=2,wm=16,wn=16)",
        "cuda(bk=64,bm=16,bn=64,cluster=True,group=False,split=4,stages=5,template=mma,wk=1,wm=16,wn=32)",
    )
    constants: list[Variant] = [("", Written(x), None, 2) for x in streamed]
    yield g, constants + _all([turned(16, 64, 12), turned(16, 64, 8, 2), turned(16, 64, 12, 2)])
    g = Gemm(16, 4096, 4096, layout="nn")
    yield g, known(g) + _all([turned(16, 64, 12), turned(16, 64, 8, 2), turned(16, 64, 12, 2)])


def _stored(s: TmaConfig) -> list[TmaConfig]:
    """Boxes of 32 columns, of fragments and of woven vectors, with as many stages as fit."""
    found = []
    for store in (32,):
        for woven in sorted({False, s.interleaved}):
            x = replace(s, store=store, interleaved=woven)
            while x.shared_bytes() > 232448:
                x = replace(x, stages=x.stages - 1)
            if s.bn % store == 0:
                found.append(x)
    return found


def stores() -> Iterator[tuple[Gemm, list[Variant]]]:
    """Results by TMA or by threads: short sums, tiles that warpgroups take in turn."""
    square, low = (tile(*x, pingpong=True, interleaved=True) for x in ((128, 128, 7), (64, 256, 5)))
    wide = tile(128, 256, 4, interleaved=True)
    sizes = [(4096, 4096, k) for k in (1024, 512, 768, 1536, 2048)]
    sizes += [(8192, 4096, 1024), (4096, 8192, 512), (8192, 8192, 1024), (4096, 3072, 768), (3152, 3072, 768)]
    for m, n, k in [*sizes, (8192, 1024, 1024), (16384, 1024, 1024), (2048, 3072, 768)]:
        shapes = [square, low, replace(low, multicast=1)]
        boxed = [y for x in shapes for y in (x, *_stored(x))]
        yield Gemm(m, n, k, layout="nt", dtype=DType.F16), _all([*boxed, wide])
    for text in ("bias", "bias_relu"):
        g = Gemm(4096, 4096, 1024, layout="nt", dtype=DType.F16, epilogue=epilogue(text))
        yield g, _all([y for x in (square, low) for y in (x, *_stored(x))])
