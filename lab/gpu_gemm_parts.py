"""What bounds the products of the tma template on an NVIDIA H200: the same kernel with one thing changed at a time.

    python -m lab.gpu_gemm_parts [--only TEXT] [--seconds 80] [--out FILE] [--dry]

Per product: cuBLASLt's best algorithm and the name of its kernel, then variants of a schedule, and kernels without
copies, without stores, or without the end of a tile, whose results are wrong on purpose. All are CUDA graphs in
interleaved rounds on operands that rotate through three times the L2 cache; whatever should be right is checked against
float64 first. Also how many clusters of each size run at once, and the clock while a kernel runs.

Everything runs in a process of its own, which is replaced when it does not answer; what ran then is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import sys
import tempfile
import time
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.child import Child, Silence

from weft.device.cuda import driver, tensor_map
from weft.device.cuda.facts import GpuFacts, gpu_facts, profile
from weft.device.cuda.nvrtc import CompiledCubin, Nvrtc, find_nvrtc, gate
from weft.errors import WeftError
from weft.gemm.spec import Gemm
from weft.generate.cuda import templates
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.gemm.swap_ab import kernel as swap
from weft.generate.cuda.gemm.tma.shape import CLUSTER_SHAPES, TmaConfig
from weft.ir.declined import Declined
from weft.ir.types import DType
from weft.kernels.source import CudaSource, Schedule

Patch = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Cores:
    """A shape of products on CUDA cores."""

    shape: mma.MmaConfig

    def schedule(self) -> Schedule:
        """As a schedule of the cuda generator."""
        return self.shape.schedule("simt")


@dataclass(frozen=True, slots=True)
class Written:
    """A schedule as a file of results has it."""

    text: str

    @property
    def short(self) -> str:
        """Template and tile."""
        known = dict(self.schedule().params)
        parts = [
            f"{name}{known[name]}" for name in ("bm", "bn", "cols", "warps", "split", "multicast") if name in known
        ]
        return " ".join([str(known["template"]), *parts])

    def schedule(self) -> Schedule:
        """What the text says."""
        generator, _, rest = self.text.partition("(")
        found = re.findall(r"(\w+)=(\([^)]*\)|[^,)]+)", rest)
        return Schedule(generator, tuple((name, x if name == "template" else literal_eval(x)) for name, x in found))


Variant = tuple[str, TmaConfig | Cores | Written | swap.SwapAbConfig, Patch | None, int]
"""Name, schedule, change of the text, promotion into the L2 cache; and ten times how clusters are placed."""
ROUNDS = 5


def tile(
    bm: int,
    bn: int,
    stages: int,
    *,
    consumers: int = 2,
    pingpong: bool = False,
    persistent_ctas: int = 132,
    **more: Any,
) -> TmaConfig:
    """A schedule whose rows are one dimension."""
    base = TmaConfig(bm, bn, 64, stages, consumers, pingpong, 1, (1, 1, bm), persistent_ctas, 1)
    return replace(base, **more)


def _replaced(pattern: str, by: str) -> Patch:
    def patch(text: str) -> str:
        found, count = re.subn(pattern, by, text)
        assert count, pattern
        return found

    return patch


def without_copies(text: str) -> str:
    """Products of whatever lies in shared memory."""
    text = _replaced(r"w_tma(_shared)?\(&m[aw], [^;]*;", "")(text)
    return _replaced(r"w_bar_expect\(bar, \d+u\)", "w_bar_arrive(bar)")(text)


def clocked(text: str) -> str:
    """The thread that copies writes cycles and nanoseconds of its loop behind the result's first bytes."""
    now = 'clock64(); unsigned long long {}; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"({}));'
    begin = f"const long long c0 = {now.format('g0', 'g0')}"
    text = _replaced(r"u32 it = 0;\n#pragma", f"u32 it = 0; {begin}\n#pragma")(text)
    end = f"const long long c1 = {now.format('g1', 'g1')}"
    store = "if (blockIdx.x == 0) { w_ticks[0] = c1 - c0; w_ticks[1] = (long long)(g1 - g0); }"
    head, mark, tail = text.partition("} }\n__syncwarp(); w_cluster_sync();\n} else {")
    if not mark:
        head, mark, tail = text.partition("} }\n} else {")
    assert mark
    text = f"{head}}} {end} {store} }}{mark[3:]}{tail}"
    return text.replace(
        'extern "C" __global__ void __launch_bounds__(3',
        '__device__ long long w_ticks[2];\nextern "C" __global__ void __launch_bounds__(3',
    )


RACES = ("released", "no barrier")
"""What is wrong only where copies are faster than products."""


def clocked_cores(text: str) -> str:
    """The same for kernels of CUDA cores: the first thread tells of the first block."""
    now = 'clock64(); unsigned long long {}; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"({}));'
    text = _replaced(r"(const int t = role\.thread\(\),[^;]*;)", rf"\1 const long long c0 = {now.format('g0', 'g0')}")(
        text
    )
    store = f"if (blockIdx.x == 0 && t == 0) {{ const long long c1 = {now.format('g1', 'g1')}"
    store += " w_ticks[0] = c1 - c0; w_ticks[1] = (long long)(g1 - g0); }"
    text = _replaced(r"(w_arrived<0>\(\); __syncthreads\(\);)", rf"\1 {store}")(text)
    head, mark, tail = text.rpartition('extern "C" __global__')
    return f"{head}__device__ long long w_ticks[2];\n{mark}{tail}"


WRONG: dict[str, Patch] = {
    "no products": _replaced(r"(?s)w_product_\w+\(acc\[i\].*?\| q\);", "acc[i][0] = (float)st;"),
    "no copies": without_copies,
    "no stores": _replaced(r"\*\(uint4\*\)\(y0\) =", "if (acc[0][0] == 12345.678f) *(uint4*)(y0) ="),
    "no end": _replaced(r"(#pragma unroll\nfor \(int o = 0; o < \d+; \+\+o\) \{\nconst int h)", r"if (n0 < 0)\n\1"),
}
"""What makes the result wrong."""


def _all(shapes: Sequence[TmaConfig]) -> list[Variant]:
    return [("", s, None, 2) for s in shapes]


def cases() -> Iterator[tuple[Gemm, list[Variant]]]:
    """Products with (name, schedule, change of the text, promotion into the L2 cache)."""
    wide, tall, three = tile(128, 256, 4), tile(256, 128, 4), tile(128, 192, 5)
    pingpong = tile(64, 256, 5, pingpong=True)
    square = tile(128, 128, 7, pingpong=True)
    paired = [replace(s, multicast=1) for s in (wide, tall, pingpong, three, square)]
    woven = [replace(s, interleaved=True) for s in (wide, replace(wide, multicast=1), replace(tall, multicast=2))]
    large = [
        wide,
        *woven,
        *paired,
        replace(wide, multicast=1, raster_group=4),
        replace(wide, multicast=2),
        replace(tall, multicast=2),
    ]
    parts: list[Variant] = [(name, s, patch, 2) for s in paired[:1] for name, patch in WRONG.items()]
    parts += [("clock", s, clocked, 2) for s in (wide, replace(wide, multicast=1))]

    def nt(m: int, n: int, k: int) -> Gemm:
        return Gemm(m, n, k, layout="nt", dtype=DType.F16)

    yield nt(4096, 4096, 4096), _all(large) + parts
    yield (
        nt(7384, 7384, 7384),
        [*_all(large), ("promotion 256", wide, None, 3), ("promotion 64", wide, None, 1)],
    )
    for k in (4104, 4112, 4128):
        narrow: Variant = ("no products", replace(wide, panel=32), WRONG["no products"], 2)
        plain = _all([wide, replace(wide, multicast=1), replace(wide, panel=32)])
        yield nt(4096, 4096, k), [*plain, narrow, *(x for x in parts if x[0] == "no products")]
    yield nt(7424, 7424, 7424), _all([wide, replace(wide, multicast=1)]) + parts[-2:]
    yield (
        nt(8192, 8192, 8192),
        _all([*large, replace(wide, multicast=1, raster_group=2), replace(wide, raster_group=16)]) + parts[-2:],
    )
    small = [
        tile(128, 192, 5, split=2, persistent_ctas=0),
        tile(128, 96, 8, persistent_ctas=0),
        tile(128, 96, 8, persistent_ctas=0, multicast=1),
    ]
    small += [
        tile(128, 96, 8, persistent_ctas=0, multicast=2),
        tile(64, 192, 7, consumers=1, persistent_ctas=0, multicast=1),
    ]
    yield nt(968, 1376, 2616), _all(small)
    few = [tile(64, 128, 8, consumers=1, persistent_ctas=0, multicast=x) for x in (0, 1, 2)]
    none: list[Variant] = [("no products", s, WRONG["no products"], 2) for s in few]
    yield nt(1000, 1000, 1000), _all([*few, tile(128, 64, 8, persistent_ctas=0, multicast=1)]) + none
    yield nt(1001, 1003, 1005), _all([*few, tile(128, 128, 7, split=2, persistent_ctas=0)])
    yield nt(1024, 1024, 1024), _all([*few, tile(128, 64, 8, persistent_ctas=0, multicast=1)]) + none
    yield (
        Gemm(1536, 1536, 1536, layout="nn", dtype=DType.F16),
        _all(
            [tile(128, n, 5, persistent_ctas=0, multicast=x, overfetch=-n % 64) for n in (192, 160) for x in (0, 1, 2)]
        ),
    )
    yield (
        nt(1536, 1536, 1536),
        _all(
            [
                *(tile(128, 160, 6, persistent_ctas=0, multicast=x) for x in (0, 1, 2)),
                tile(128, 192, 5, persistent_ctas=0, multicast=1),
            ]
        )
        + _all([tile(128, 128, 7, stream_k=True, multicast=1), tile(128, 256, 4, stream_k=True, multicast=1)]),
    )
    even = [
        replace(x, stream_k=True)
        for x in (wide, replace(wide, multicast=1), replace(tall, multicast=2), replace(three, multicast=1))
    ]
    more = [*even, tile(128, 160, 6, multicast=1), tile(256, 96, 5, multicast=2)]
    for m, n, k in ((2560, 2560, 2560), (4096, 4352, 4096), (5120, 5120, 5120)):
        yield nt(m, n, k), _all([*large, *more])
    yield nt(6144, 6144, 6144), _all([*large, *even[1:]])
    yield nt(3072, 3072, 3072), _all([*large, *even[1:]])
    yield nt(4096, 4096, 1024), _all(large) + parts
    mid, half, low = tile(128, 128, 7), tile(128, 64, 8), tile(64, 128, 8, consumers=1)
    long = [
        tile(128, 128, 7, split=2, persistent_ctas=0),
        *(replace(half, multicast=x, persistent_ctas=0) for x in (0, 1, 2)),
    ]
    long += [
        replace(low, multicast=1, persistent_ctas=0),
        replace(mid, multicast=1, stream_k=True, persistent_ctas=128),
        even[1],
    ]
    yield nt(1024, 1024, 8192), _all(long)
    split = [
        tile(128, 192, 5, split=8, persistent_ctas=0),
        *(tile(128, 128, 7, split=n, persistent_ctas=0) for n in (4, 6)),
    ]
    shares = [
        replace(x, stream_k=True, persistent_ctas=128)
        for x in (half, replace(half, multicast=2), replace(low, multicast=1), mid)
    ]
    yield nt(512, 512, 8192), _all([*split, *shares, replace(mid, multicast=1, stream_k=True, persistent_ctas=128)])
    tiny = tile(64, 64, 8, consumers=1, stream_k=True, persistent_ctas=128)
    shares = [
        tiny,
        replace(tiny, multicast=1),
        replace(shares[1], persistent_ctas=128),
        replace(shares[0], persistent_ctas=128),
    ]
    yield nt(256, 256, 16384), _all([tile(64, 96, 5, consumers=1, split=8, persistent_ctas=0), *shares])


def promotions() -> Iterator[tuple[Gemm, list[Variant]]]:
    """Products whose operands are promoted into the L2 cache by nothing, 64, 128 and 256 bytes."""
    few: list[tuple[tuple[int, int, int], list[TmaConfig]]] = [
        (
            (1024, 1024, 8192),
            [
                tile(128, 128, 7, split=2, persistent_ctas=0),
                tile(64, 128, 8, consumers=1, persistent_ctas=0, multicast=1),
            ],
        ),
        ((968, 1376, 2616), [tile(128, 96, 8, persistent_ctas=0, multicast=1)]),
        ((1536, 1536, 1536), [tile(128, 160, 6, persistent_ctas=0, interleaved=True)]),
        (
            (1000, 1000, 1000),
            [
                tile(64, 128, 8, consumers=1, persistent_ctas=0, multicast=1),
                tile(128, 64, 8, persistent_ctas=0, multicast=2),
            ],
        ),
        ((4096, 4096, 4096), [tile(128, 256, 4, interleaved=True)]),
        ((5120, 5120, 5120), [tile(256, 128, 4, interleaved=True, stream_k=True, multicast=2)]),
        ((7384, 7384, 7384), [tile(128, 256, 4, multicast=1)]),
    ]
    names = ("promotion 0", "promotion 64", "promotion 128", "promotion 256")
    for (m, n, k), shapes in few:
        yield Gemm(m, n, k, layout="nt"), [(name, s, None, x) for s in shapes for x, name in enumerate(names)]


def released_at_once(text: str) -> str:
    """Stages are given back before they are multiplied: how long is the way around the ring?"""
    arrive = re.search(r"w_group_wait<0>\(\); (if \(lane[^;]*;)", text)
    assert arrive
    give = re.sub(r"EMPTY \+ 8 \* \(.*?\)(?=,|\);)", "EMPTY + 8 * slot", arrive[1])
    text = _replaced(r"(w_bar_wait\(sb \+ FULL[^;]*;)\nw_group_begin", rf"\1 {give}\nw_group_begin")(text)
    return _replaced(r"w_group_wait<0>\(\); if \(lane[^;]*;", "w_group_wait<0>();")(
        _replaced(r"\nif \(st > first && lane[^;]*EMPTY[^;]*;", "")(text)
    )


def staggered(step: int) -> Patch:
    """Tiles begin at different steps of the sum, so that not all ask for the same columns of their rows at once."""
    return _replaced(r"const int kb = st;", f"const int kb = (st + (tm + tn) * {step}) % last;")


def places() -> Iterator[tuple[Gemm, list[Variant]]]:
    """Pairs that copy for each other: where their blocks are, and the order of tiles."""

    def placed(shapes: Sequence[TmaConfig], *policies: int) -> list[Variant]:
        return [(f"policy {n}", s, None, 2 + 10 * n) for n in policies for s in shapes]

    low = [tile(64, 128, 8, consumers=1, multicast=x, persistent_ctas=0) for x in (0, 1, 4)]
    banded = [replace(s, raster_group=n) for s in low[:2] for n in (1, 2, 4, 16)]
    yield Gemm(1024, 1024, 8192, layout="nt"), _all([*low, *banded]) + placed(low[1:], 1, 2)
    ninety = [replace(tile(128, 96, 8), multicast=x, persistent_ctas=0) for x in (0, 1, 4)]
    banded = [replace(s, raster_group=n) for s in ninety for n in (2, 4)]
    yield Gemm(968, 1376, 2616, layout="nt"), _all([*ninety, *banded]) + placed(ninety[1:], 1, 2)


def cores() -> Iterator[tuple[Gemm, list[Variant]]]:
    """A product of f32 on CUDA cores: what bounds it?"""
    found = [
        Cores(mma.MmaConfig(bm, bn, bk, 64, 64, 1, stages, 1, False))
        for bm, bn, bk, stages in ((64, 128, 16, 4), (128, 128, 16, 4), (128, 128, 16, 5), (128, 128, 32, 3))
    ]
    found += [
        Cores(mma.MmaConfig(128, 256, 16, 64, 64, 1, 4, 1, False)),
        Cores(mma.MmaConfig(64, 64, 32, 64, 64, 1, 3, 1, False)),
    ]
    found += [
        Cores(mma.MmaConfig(128, 128, 32, 32, 64, 1, 3, 1, False)),
        Cores(mma.MmaConfig(128, 128, 16, 32, 64, 1, 4, 1, False)),
    ]
    no_copies = _replaced(r"w_copy16\((?!u32)[^;]*;", ";")
    no_barrier = _replaced(r"(w_arrived<\d>\(\);)\n__syncthreads\(\);", r"\1")
    patched: list[Variant] = [("clock", s, clocked_cores, 2) for s in found[:2]]
    patched += [("no copies", s, no_copies, 2) for s in found[:2]]
    patched += [("no barrier", s, no_barrier, 2) for s in found[:2]]
    g = Gemm(4096, 4096, 4096, layout="nn", dtype=DType.F32)
    yield g, [("", s, None, 2) for s in found] + patched


def in_batches(count: int, stages: int) -> Patch:
    """So many stages are copied one right after the other: neighbouring lines of every row at nearly the same time."""
    last = f"it + {count - 1}u"
    wait = f"w_bar_wait(sb + EMPTY + 8 * (({last}) % {stages}), ({last}) / {stages} & 1 ^ 1);"
    return _replaced(r"(w_bar_wait\(sb \+ EMPTY)", rf"if (it % {count} == 0) {wait} \1")


def targets() -> Iterator[tuple[Gemm, list[Variant]]]:
    """Products that lose to the library, with clusters of four, tiles of 192 rows and staggered sums."""

    def nt(m: int, n: int, k: int) -> Gemm:
        return Gemm(m, n, k, layout="nt", dtype=DType.F16)

    def pairs(s: TmaConfig, *kinds: int, **more: Any) -> list[TmaConfig]:
        woven = [x for x in kinds if s.bn % (32 * CLUSTER_SHAPES[x][0]) == 0]
        return [
            replace(s, multicast=x, interleaved=x in woven and s.interleaved, persistent_ctas=0, **more) for x in kinds
        ]

    def even(s: TmaConfig, *kinds: int) -> list[TmaConfig]:
        at_once = {1: 132, 2: 132, 4: 120}
        return [replace(x, stream_k=True, persistent_ctas=at_once[x.multicast_ctas]) for x in pairs(s, *kinds)]

    def parts(label: str, patch: Patch, shapes: Sequence[TmaConfig]) -> list[Variant]:
        return [(label, s, patch, 2) for s in shapes]

    def stagger(shapes: Sequence[TmaConfig], *steps: int) -> list[Variant]:
        return [x for n in steps for x in parts(f"stagger{n}", staggered(n), shapes)]

    low, flat, mid = tile(64, 128, 8, consumers=1), tile(128, 64, 8), tile(128, 128, 7)
    yield (
        nt(1024, 1024, 8192),
        _all([*pairs(low, 0, 1, 2, 3, 4), *pairs(flat, 2, 3), replace(mid, split=2, persistent_ctas=0), *even(mid, 1)])
        + stagger(pairs(low, 0, 1, 3), 1, 8)
        + parts("no products", WRONG["no products"], pairs(low, 0, 1, 2, 3, 4))
        + parts("released", released_at_once, pairs(low, 0, 1, 3)),
    )
    ninety, wide = tile(128, 96, 8), tile(128, 160, 6)
    tall, three = tile(192, 96, 6, consumers=3), tile(192, 64, 7, consumers=3)
    yield (
        nt(968, 1376, 2616),
        _all([*pairs(ninety, 0, 1, 2, 3, 4), *pairs(mid, 3, 4, 5), *pairs(three, 2, 3, 5), *pairs(tall, 1, 2)])
        + _all([*even(mid, 1, 3, 4), *even(wide, 1, 4), *even(tile(128, 192, 5), 1, 3)])
        + stagger(pairs(ninety, 1, 4), 1, 4)
        + parts("no products", WRONG["no products"], pairs(ninety, 0, 1, 4)),
    )
    spare = replace(tile(128, 160, 5), overfetch=32)
    yield (
        Gemm(1536, 1536, 1536, layout="nn", dtype=DType.F16),
        _all([*pairs(spare, 0, 1, 2, 3, 4, 5), *pairs(tile(192, 128, 5, consumers=3), 0, 1)])
        + stagger(pairs(spare, 0, 1, 3), 1, 3)
        + parts("no products", WRONG["no products"], pairs(spare, 0, 1, 3)),
    )
    woven = [replace(x, interleaved=True) for x in (wide, tall)]
    yield (
        nt(1536, 1536, 1536),
        _all([*pairs(woven[0], 0, 2, 3, 4), *pairs(woven[1], 0, 1, 2, 3)])
        + stagger([*pairs(woven[0], 0), *pairs(woven[1], 0)], 1, 3),
    )
    ninety, mid, half = (replace(x, interleaved=True) for x in (ninety, mid, tile(128, 192, 5)))
    plain = pairs(ninety, 0, 2, 5)
    yield (
        nt(128, 11008, 4096),
        _all([*plain, *even(ninety, 0, 2), *even(mid, 0), *even(replace(wide, interleaved=True), 0)])
        + _all(
            [
                replace(half, split=2, persistent_ctas=0),
                replace(tile(128, 256, 4, interleaved=True), split=3, persistent_ctas=0),
            ]
        )
        + [("promotion 256", s, None, 3) for s in (*plain, *even(mid, 0))]
        + [("promotion 0", s, None, 0) for s in plain[:2]]
        + stagger(plain, 1, 4)
        + [x for n in (2, 4) for x in parts(f"batches of {n}", in_batches(n, 8), plain)]
        + parts("no products", WRONG["no products"], plain),
    )
    square = tile(192, 192, 4, consumers=3, interleaved=True)
    large = tile(128, 256, 4, interleaved=True)
    yield (
        nt(3072, 3072, 3072),
        _all([replace(x, persistent_ctas=132) for x in pairs(square, 0, 1, 2)] + even(large, 1))
        + stagger([replace(square, persistent_ctas=132)], 1, 4),
    )
    yield nt(4096, 4096, 4096), _all([large, replace(square, persistent_ctas=132)]) + stagger([large], 1, 4, 16)
    yield from cores()


def built(
    g: Gemm, variants: Sequence[Variant], facts: GpuFacts, nvrtc: Nvrtc, cache: Path | None
) -> list[tuple[str, CudaSource, CompiledCubin, bool, int]]:
    """(name, kernel, cubin, whether its result must be right, promotion) of what compiles."""

    def one(variant: Variant) -> Any:
        label, shape, patch, promotion = variant
        name = f"{label or 'kernel'} {_short(shape)}"
        source = templates.emit(g.problem(), shape.schedule())
        if isinstance(source, Declined):
            return f"{g.name} {name}: {source.reason}"
        if patch is not None:
            source = replace(source, text=patch(source.text))
        try:
            made = nvrtc.compile(source.text, arch="sm_90a", flags=source.flags, cache_dir=cache)
        except WeftError as error:
            return f"{g.name} {name}: {error}"
        declined = gate(made, source.launches[0], facts)
        if isinstance(declined, Declined):
            return f"{g.name} {name}: {declined.reason}"
        return name, source, made, label.split(",")[0] not in (*WRONG, *RACES), promotion

    with ThreadPoolExecutor(14 if cache else 1) as pool:
        found = list(pool.map(one, variants))
    for x in found:
        if isinstance(x, str):
            say({"refused": x})
    return [x for x in found if not isinstance(x, str)]


def _short(s: TmaConfig | Cores | Written | swap.SwapAbConfig) -> str:
    if hasattr(s, "short"):  # a class of this module, which may be there twice
        return str(s.short)
    if isinstance(s, swap.SwapAbConfig):
        return (
            f"swap {s.bm}x{s.bn}x{s.stages}"
            + f" split{s.split}" * (s.split > 1)
            + f" pair{s.multicast}" * (s.multicast > 0)
        )
    if isinstance(s, Cores):
        x = s.shape
        return f"{x.bm}x{x.bn}x{x.bk} {x.wm}x{x.wn} stages{x.stages}"
    parts = [f"{s.bm}x{s.bn}x{s.stages}", *["pingpong"] * s.pingpong, *["stream_k"] * s.stream_k]
    parts += ["coop_fixup"] * s.coop_fixup
    usually = (("multicast", 0), ("split", 1), ("panel", 64), ("raster_group", 8), ("interleaved", False), ("store", 0))
    for name, usual in usually:
        parts += [f"{name}{getattr(s, name)}"] * (getattr(s, name) != usual)
    return " ".join(parts)


def say(line: dict[str, Any]) -> None:
    """One JSON line."""
    print(json.dumps(line), flush=True)


def clusters(source: CudaSource, path: str) -> dict[str, int]:
    """How many clusters of so many blocks the GPU runs at once, by their size."""
    from cuda.bindings import driver as cu

    from weft.device.cuda.driver import Module, _launch_attributes

    function = Module(path).function(source.entry)
    launch = source.launches[0]
    function.prepare(launch.shared_bytes, (2, 1, 1))
    found = {}
    for size in range(1, 9):
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = size * 132, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.shared_bytes
        config.attrs = _launch_attributes(cu, (size, 1, 1), dependent=False)
        config.numAttrs = len(config.attrs)
        error, count = cu.cuOccupancyMaxActiveClusters(function._handle, config)
        found[str(size)] = int(count) if int(error) == 0 else -int(error)
    return found


def with_policy(policy: int) -> Callable[..., list[Any]]:
    """Attributes of a launch whose clusters are spread (1) or balanced (2); 0: as the driver does."""
    usual = driver._launch_attributes

    def attributes(api: Any, cluster: tuple[int, int, int], *, dependent: bool) -> list[Any]:
        found = usual(api, cluster, dependent=dependent)
        if policy and cluster != (1, 1, 1):
            value = api.CUlaunchAttributeValue()
            value.clusterSchedulingPolicyPreference = api.CUclusterSchedulingPolicy(policy)
            name = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
            found.append(driver._attribute(api, name, value))
        return found

    return attributes


def measure(g: Gemm, made: Sequence[tuple[str, CudaSource, CompiledCubin, bool, int]], bad: set[str]) -> None:
    """One product, on the GPU."""
    import torch
    from benchmarks.harness.race import Race

    from weft.device.cuda.cublaslt import find_cublaslt

    lt = find_cublaslt()
    if isinstance(lt, Declined):
        raise SystemExit(lt.reason)
    tf32 = g.dtype is DType.F32 and not any("simt" in str(source.schedule) for _, source, *_ in made)
    race = Race(g, 60 << 20, tf32=tf32)
    graphs: dict[str, tuple[Any, int]] = {}
    errors: dict[str, float] = {}
    modules: dict[str, Any] = {}
    library = race.add_library(lt, tf32=tf32)
    for x in library:
        race._verify(x)
        if not x.refused:
            graphs[x.name] = race._record(x)
    for name, source, cubin, right, promotion in made:
        if name in bad:
            continue
        say({"running": name})
        tensor_map._PROMOTION_128, usual = promotion % 10, driver._launch_attributes
        driver._launch_attributes = with_policy(promotion // 10)
        contender = race.add_kernel(name, source, str(cubin.path))
        tensor_map._PROMOTION_128, driver._launch_attributes = 2, usual
        race._verify(contender)
        errors[name] = contender.error
        if right and contender.refused:
            say({"case": g.name, "name": name, "wrong": contender.refused})
            continue
        contender.refused = ""
        graphs[name] = race._record(contender)
        modules[name] = contender.kept[0]  # type: ignore[index]
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    rng = random.Random(0)
    for _ in range(ROUNDS):
        for name in rng.sample(list(graphs), len(graphs)):
            graph, launches = graphs[name]
            samples[name].append(race._sample(graph) / launches)
    own = {x.name for x in library}
    best = min((name for name in samples if name in own), key=lambda n: statistics.median(samples[n]))
    number = next(x for x in library if x.name == best)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        race._launch(number, 0)
        torch.cuda.synchronize()
    kernels = [e.key for e in profiler.key_averages()]
    us = statistics.median(samples[best])
    say({"case": g.name, "name": best, "us": round(us, 2), "tflops": round(g.flops / us / 1e6), "kernels": kernels})
    for name, values in samples.items():
        if name in own:
            continue
        mine = statistics.median(values)
        line = {"case": g.name, "name": name, "us": round(mine, 2), "ratio": round(us / mine, 3)}
        line |= {"tflops": round(g.flops / mine / 1e6), "spread": round((max(values) - min(values)) / mine, 3)}
        if name.startswith("clock"):
            line["ghz"] = ticks(modules[name])
        say(line)


def ticks(bound: Any) -> float:
    """The clock of the last run of a kernel that tells it, in GHz."""
    import ctypes

    from cuda.bindings import driver as cu

    error, address, size = cu.cuModuleGetGlobal(bound._module._handle, b"w_ticks")
    values = (ctypes.c_longlong * 2)()
    if int(error) == 0:
        cu.cuMemcpyDtoH(ctypes.addressof(values), address, size)
    return round(values[0] / values[1], 3) if values[1] else math.nan


def chosen(given: argparse.Namespace) -> Iterator[tuple[Gemm, list[Variant]]]:
    """The products that the command line names."""
    if given.few or given.stores:
        from lab import gemm_parts_few

        return gemm_parts_few.few() if given.few else gemm_parts_few.stores()
    if given.weak:
        from lab import gemm_parts_weak

        return gemm_parts_weak.weak()
    if given.local:
        from lab import gemm_parts_local

        return gemm_parts_local.local()
    if given.places:
        return places()
    return promotions() if given.promotions else targets() if given.targets else cases()


def child(given: argparse.Namespace) -> None:
    """All that is left, in this process."""
    import torch

    torch.zeros(1, device="cuda")
    facts, nvrtc = gpu_facts(None, calibrate=False), find_nvrtc()
    if isinstance(nvrtc, Declined):
        raise SystemExit(nvrtc.reason)
    known = [json.loads(x) for x in Path(given.out).read_text().splitlines() if x.startswith("{")]
    done = {x["end"] for x in known if "end" in x}
    bad = {(x["stuck"], x["name"]) for x in known if "stuck" in x}
    if not any("clusters" in x for x in known):
        first = built(Gemm(4096, 4096, 4096, layout="nt"), _all([tile(128, 256, 4)]), facts, nvrtc, Path(given.cache))
        try:
            say({"clusters": clusters(first[0][1], str(first[0][2].path))})
        except Exception as error:
            say({"clusters": f"{type(error).__name__}: {error}"})
    for g, variants in chosen(given):
        if g.name not in done and any(x in g.name for x in given.only.split(",")):
            say({"begin": g.name})
            made = built(g, variants, facts, nvrtc, Path(given.cache))
            try:
                measure(g, made, {name for case, name in bad if case == g.name})
            except Exception as error:
                say({"case": g.name, "failed": f"{type(error).__name__}: {error}"[:300]})
                if "cuda" in str(error).lower():  # the context is gone: another process goes on
                    raise SystemExit(1) from error
            torch.cuda.empty_cache()
            say({"end": g.name})
    say({"all": True})


def watch(given: argparse.Namespace, end: float) -> bool:
    """One child to its end, its stall or the end of the time; True: nothing is left."""
    command = [sys.executable, "-m", "lab.gpu_gemm_parts", "--child", "--out", given.out]
    command += ["--promotions"] * given.promotions + ["--targets"] * given.targets + ["--places"] * given.places
    command += ["--few"] * given.few + ["--stores"] * given.stores + ["--weak"] * given.weak
    command += ["--local"] * given.local
    case = name = ""
    with Child([*command, "--cache", given.cache, "--only", given.only]) as child_process:
        while True:
            try:
                text = child_process.line(min(end - time.monotonic(), 12.0 if case else 60.0))
            except Silence:
                text = None
            if text is None:
                if time.monotonic() >= end:
                    print("the time is up", flush=True)
                    return True
                keep(given, {"stuck": case, "name": name})
                return False
            line = json.loads(text) if text.startswith("{") else {}
            case, name = line.get("begin", case), line.get("running", name)
            if "all" in line:
                return True
            if "running" not in line and "begin" not in line and line:
                keep(given, line)


def keep(given: argparse.Namespace, line: dict[str, Any]) -> None:
    """Into the file, and told."""
    with Path(given.out).open("a") as out:
        out.write(json.dumps(line) + "\n")
    if "end" not in line:
        print(" ".join(str(x) for x in line.values()) if "us" in line else json.dumps(line), flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lab.gpu_gemm_parts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="products whose name has one of these texts, by commas")
    parser.add_argument("--seconds", type=float, default=80.0, help="when to stop (80)")
    parser.add_argument("--out", default="", help="file of results, JSON lines")
    parser.add_argument("--promotions", action="store_true", help="promotion into the L2 cache instead of parts")
    parser.add_argument("--targets", action="store_true", help="products that lose, by the newest shapes, instead")
    parser.add_argument("--places", action="store_true", help="where pairs of blocks are, instead")
    parser.add_argument("--few", action="store_true", help="products with few rows, transposed, instead")
    parser.add_argument("--stores", action="store_true", help="results by TMA or by threads, instead")
    parser.add_argument("--weak", action="store_true", help="products that lose, by tiles of any width, instead")
    parser.add_argument("--local", action="store_true", help="what bounds copies, and newer ways to share, instead")
    parser.add_argument("--dry", action="store_true", help="no GPU: write and compile")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.dry:
        nvrtc = find_nvrtc()
        if isinstance(nvrtc, Declined):
            raise SystemExit(nvrtc.reason)
        for g, variants in chosen(given):
            if any(x in g.name for x in given.only.split(",")):
                names = [x[0] for x in built(g, variants, profile("h200"), nvrtc, None)]
                print(g.name, len(variants), len(names), flush=True)
        return
    if given.child:
        child(given)
        return
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(prefix="weft-parts-") as folder:
        given.cache = folder
        given.out = given.out or str(Path(folder) / "results.jsonl")
        Path(given.out).touch()
        for _ in range(8):
            if time.monotonic() >= end or watch(given, end):
                break


if __name__ == "__main__":
    main()
