"""Variants of products with few rows, and of how results are stored, for `benchmarks.gpu_gemm_parts`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from benchmarks.gpu_gemm_parts import WRONG, Variant, Written, tile
from weft.gemm.epilogue import epilogue
from weft.gemm.spec import Gemm
from weft.generate.cuda.templates import swap
from weft.generate.cuda.templates.tma_shape import Shape
from weft.ir.types import DType

RECORDED = Path(__file__).parent / "results" / "nvidia-h200" / "gemm.jsonl"
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


def turned(m: int, bn: int, stages: int, split: int = 1, *, ahead: int | None = None, deep: int = 1) -> swap.Shape:
    """A shape whose tile has all rows."""
    return swap.Shape(-(-m // 8) * 8, bn, deep, stages, split, 2 * stages if ahead is None else ahead)


def _all(shapes: Sequence[Shape | swap.Shape], promotion: int = 2) -> list[Variant]:
    return [("promotion 256" if promotion == 3 else "", s, None, promotion) for s in shapes]


def asking(text: str) -> list[Shape]:
    """A recorded shape of the copy engine's template, whose kernels ask the L2 cache ahead; fewer stages leave room
    for the next kernel's blocks."""
    s = Written(text).schedule()
    if s.param("template") != "tma":
        return []
    base = Shape.of(s)
    fewer = min(base.stages, (110 << 10) // base.stage_bytes)
    return [replace(base, stages=n, ask=k) for n in sorted({base.stages, max(3, fewer)}) for k in (0, 2 * n)][1:]


def asked_rows(text: str) -> str:
    """Of kernels that stream columns: warps ask the L2 cache for their first chunks before the wait, too."""
    found = re.search(r"for \(int u = 0; u < (\d+); \+\+u\) \{ const int k = at \+ u \* (\d+);", text)
    columns, chunks = re.search(r"j < (\d+); \+\+j\) h\[u\]\[j\] = k < (\d+) ", text).groups()  # type: ignore[union-attr]
    assert found
    ask = (
        f"#pragma unroll\nfor (int u = 0; u < {2 * int(found[1])}; ++u) {{ const int k = start + u * {found[2]};\n"
        f"if (k < {chunks} && lane % 2 == 0)\n#pragma unroll\n"
        f"for (int j = 0; j < {columns}; ++j) w_prefetch(w[j] + k); }}\n"
    )
    before = "w_wait(); w_release();\nread(start);"
    assert text.count(before) == 1
    return text.replace(before, ask + before)


def few() -> Iterator[tuple[Gemm, list[Variant]]]:
    """Products with few rows."""
    g = Gemm(16, 4096, 4096, layout="nt")
    more = [turned(16, 32, n, ahead=k) for n, k in ((8, 0), (8, 8), (8, 16), (8, 32), (6, 12), (12, 24), (16, 32))]
    more += [turned(16, 64, n, 2, ahead=k) for n, k in ((4, 8), (8, 0), (8, 8), (8, 16), (8, 32), (12, 24))]
    more += [
        turned(16, 32, 4, deep=2),
        turned(16, 64, 4, 2, deep=2),
        turned(16, 128, 4, 4),
        turned(16, 128, 4, 4, ahead=0),
    ]
    parts: list[Variant] = [("no left", s, WRONG["no left"], 2) for s in (more[2], more[10])]
    yield g, known(g) + _all(more) + _all([more[2], more[10]], 3) + parts
    constant = replace(g, constant=True)
    yield constant, _all([more[2], more[0], more[10], more[8]])
    for n, k in WIDE:
        for m in (1, 8, 16, 64, 128):
            g = Gemm(m, n, k, layout="nt", dtype=DType.BF16 if (m, n) == (8, 11008) else DType.F16)
            if (m, n, k) == (16, 4096, 4096):
                continue
            text = recorded().get(g.name) or recorded().get(g.name.replace("bf16", "f16")) or "cuda(template=mma)"
            shapes: list[Shape | swap.Shape] = []
            if m <= 16:
                splits = (2,) if n == 4096 else (1,)
                shapes += [turned(m, 64, x, s, ahead=y) for s in splits for x, y in ((5, 0), (5, 10), (8, 16))]
                shapes += [turned(m, 32, 6), turned(m, 32, 8), turned(m, 128, 4, 4 if n == 4096 else 1)]
                shapes += [turned(m, 64, 5, 4 if n == 4096 else 2)]
            else:
                splits = (2, 4, 8) if n == 4096 else (1, 2)
                shapes += [turned(m, 128, 110 // (16 + m // 8), s) for s in splits]
                shapes += [turned(m, 128, 110 // (16 + m // 8), splits[0], ahead=0)]
                shapes += [turned(m, 64, 110 // (8 + m // 8), max(1, splits[0] // 2)), turned(m, 256, 4, splits[1])]
                shapes += asking(text)
                if n == 4096:
                    low = tile(m, 128, 7 if m == 128 else 8, groups=m // 64, even=True, woven=True)
                    shapes += [
                        replace(low, blocks=x, pair=y, ask=z)
                        for x, y, z in ((132, 0, 14), (132, 2, 0), (120, 5, 0), (120, 5, 14))
                    ]
                else:
                    low = tile(m, 112 if n == 14336 else 96, 6, groups=m // 64, blocks=0)
                    shapes += [replace(low, pair=y, ask=z) for y, z in ((0, 0), (0, 12), (2, 12), (5, 12))]
            streamed: list[Variant] = []
            if m == 1 and "gemv" in text:
                streamed = [("asked", Written(text), asked_rows, 2)]
            yield g, known(g) + _all(shapes) + streamed
    for m in (32, 24, 100):
        g = Gemm(m, 4096, 4096, layout="nt")
        yield g, known(g) + _all([turned(m, 64, 6, 2), turned(m, 32, 6), turned(m, 128, 4, 4)])
    for text in ("bias_silu", "bias_residual"):
        g = Gemm(16, 4096, 4096, layout="nt", epilogue=epilogue(text))
        yield g, known(g) + _all([turned(16, 32, 8), turned(16, 64, 8, 2)])
    g = Gemm(16, 4096, 4096, layout="nn")
    yield g, known(g) + _all([turned(16, 64, 8, 2), turned(16, 64, 8, 2, ahead=0), turned(16, 128, 4, 4)])


def _stored(s: Shape) -> list[Shape]:
    """Boxes of 64 columns and of 32, of fragments and of woven vectors, with as many stages as fit."""
    found = []
    for store in (64, 32):
        for woven in sorted({False, s.woven}):
            x = replace(s, store=store, woven=woven)
            while x.shared_bytes() > 232448:
                x = replace(x, stages=x.stages - 1)
            if s.bn % store == 0:
                found.append(x)
    return found


def stores() -> Iterator[tuple[Gemm, list[Variant]]]:
    """Results by the copy engine or by threads."""

    def nt(m: int, n: int, k: int, text: str = "none") -> Gemm:
        return Gemm(m, n, k, layout="nt", dtype=DType.F16, epilogue=epilogue(text))

    wide, tall = tile(128, 256, 4, woven=True), tile(256, 128, 4, woven=True)
    turns, square = tile(64, 256, 5, turns=True, woven=True), tile(128, 128, 7, turns=True, woven=True)
    three = tile(128, 192, 5, woven=True)
    paired = [replace(x, pair=1) for x in (wide, turns)]
    large = [wide, tall, turns, square, three, *paired]
    without = [("no stores", wide, WRONG["no stores"], 2), ("no end", wide, WRONG["no end"], 2)]

    def all_of(shapes: Sequence[Shape]) -> list[Variant]:
        return _all([y for x in shapes for y in (x, *_stored(x))])

    yield nt(4096, 4096, 4096), [*all_of(large), *without]
    yield nt(4096, 4096, 1024), [*all_of(large), *without]
    yield nt(8192, 8192, 8192), all_of([wide, three, replace(wide, pair=1), square])
    small = [tile(64, 192, 7, groups=1, blocks=0, woven=True), tile(128, 96, 8, blocks=0, woven=True)]
    small += [tile(64, 128, 8, groups=1, blocks=0, woven=True)]
    yield nt(512, 3072, 768), all_of([*small, tile(64, 64, 6, groups=1, blocks=0, woven=True)])
    yield nt(2048, 2048, 2048), all_of([square, *small[:2], tile(128, 256, 4, blocks=0, woven=True)])
    yield nt(2048, 768, 3072), all_of(small)
    yield nt(2048, 3072, 768), all_of([square, turns, wide])
    ninety = tile(128, 96, 8, blocks=0, woven=True)
    yield nt(128, 11008, 4096), all_of([ninety, replace(ninety, pair=5)]) + _all([replace(ninety, stages=6, ask=12)])
    yield nt(8192, 1024, 1024), all_of([square, wide])
    yield nt(4096, 4096, 1024, "bias_silu"), all_of([wide, turns, square])
    yield nt(2048, 3072, 768, "bias_residual"), all_of([square, turns])
    constant = replace(nt(2048, 3072, 768, "bias_gelu"), constant=True)
    yield constant, all_of([replace(x, woven=False) for x in (square, wide)])
    yield Gemm(4096, 4096, 4096, layout="nn", dtype=DType.F16), all_of([replace(x, woven=False) for x in (wide, tall)])
    for m, n, k in ((1000, 1000, 1000), (968, 1376, 2616), (4096, 4352, 4096)):
        yield nt(m, n, k), all_of([ninety, small[0], replace(wide, pair=1, even=(n == 4352))])
