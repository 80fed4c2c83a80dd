"""What bounds the copies of products that lose to the library, and shares of sums that blocks finish together.

    python -m lab.gpu_gemm_parts --local [--only TEXT]      the variants below
    python -m lab.gemm_parts_local --places                 which multiprocessors get which blocks
    ncu ... python -m lab.gemm_parts_local --once           each kernel of a few once, for a profiler

Questions to the copies of 1024x1024x8192, whose kernels get 95 bytes per nanosecond and multiprocessor where those of
the library get 125: do they wait for memory (the same columns again and again), for the L2 cache (all blocks read the
same rows), for too few stages under way, or for what neighbouring multiprocessors ask for (the order of tiles)?
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lab.gemm_parts_weak import all_of, pairs
from lab.gpu_gemm_parts import WRONG, Patch, Variant, built, tile
from weft.device.cuda.facts import gpu_facts
from weft.device.cuda.nvrtc import Nvrtc, find_nvrtc
from weft.gemm.spec import Gemm
from weft.generate.cuda.gemm.swap_ab import kernel as swap
from weft.generate.cuda.gemm.tma.shape import TmaConfig
from weft.ir.declined import Declined
from weft.ir.types import DType


def then(*patches: Patch) -> Patch:
    """One change after the other."""

    def patch(text: str) -> str:
        for p in patches:
            text = p(text)
        return text

    return patch


def replaced(pattern: str, by: str) -> Patch:
    """A change of what must be there."""

    def patch(text: str) -> str:
        found, count = re.subn(pattern, by, text)
        assert count, pattern
        return found

    return patch


COPIES = then(WRONG["no products"], WRONG["no end"])
SAME_COLUMNS = then(COPIES, replaced(r"const int kb = st;", "const int kb = st & 7;"))
SAME_ROWS = then(
    COPIES,
    replaced(r"(\bn0 = )[^,;]*([,;])", r"\g<1>0\2"),
    replaced(r"(const int i0 = )[^,;]*,", r"\g<1>0,"),
)
_PREFETCH = """W_FN void w_ahead(const w_map* m, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(m), "r"(x), "r"(y) : "memory");
}
"""


def ahead(steps: int, rows: int, columns: int) -> Patch:
    """Each step of each box is asked for in the L2 cache so many steps earlier, by one of the blocks that read it."""

    def patch(text: str) -> str:
        head, mark, body = text.rpartition('extern "C" __global__')
        own = re.search(r"w_tma(?:_shared)?\(&ma, [^;]*?, (c, [^;]*)\);", body)
        other = re.search(r"w_tma(?:_shared)?\(&mw, [^;]*?, (c, [^;]*)\);", body)
        assert own
        assert other
        places = [(f"st % {columns} == tn", "ma", own[1]), (f"st % {rows} == tm", "mw", other[1])]
        asked = " ".join(f"if ({when}) w_ahead(&{name}, {at});" for when, name, at in places)
        asked = f"if (st + {steps} < last) {{ const int c = (st + {steps}) * 64; {asked} }}"
        body, count = re.subn(r"(const int kb = st; \(void\)kb;)", rf"\1 {asked}", body)
        assert count == 1
        return f"{head}{_PREFETCH}{mark}{body}"

    return patch


ORDERS = {
    "columns": "tm = r / 8, tn = r % 8",
    "2 by 4 each": "y_ = (r + 60) % 64, g_ = y_ % 8, i_ = y_ / 8, tm = g_ % 4 * 2 + i_ % 2, tn = g_ / 4 * 4 + i_ / 2",
    "4 by 2 each": "y_ = (r + 60) % 64, g_ = y_ % 8, i_ = y_ / 8, tm = g_ % 2 * 4 + i_ % 4, tn = g_ / 2 * 2 + i_ / 4",
    "2 by 4 at once": "g_ = r / 8, i_ = r % 8, tm = g_ % 4 * 2 + i_ % 2, tn = g_ / 4 * 4 + i_ / 2",
    "4 by 2 at once": "g_ = r / 8, i_ = r % 8, tm = g_ % 2 * 4 + i_ % 4, tn = g_ / 2 * 2 + i_ / 4",
    "4 by 4 at once": "g_ = r / 16, i_ = r % 16, tm = g_ % 2 * 4 + i_ % 4, tn = g_ / 2 * 4 + i_ / 4",
    "2 by 4 as seen": (
        "y_ = r < 4 ? r : r < 36 ? 4 + (r - 4) % 8 * 8 + (r - 4) / 8 : 0,"
        " h_ = r < 36 ? 0 : (r - 36) % 7, k_ = r < 36 ? 0 : 4 + (r - 36) / 7,"
        " g_ = r < 4 ? 6 : r < 36 ? (r - 4) % 8 : (h_ < 6 ? h_ : 7), i_ = r < 4 ? 4 + r : r < 36 ? (r - 4) / 8 : k_,"
        " tm = g_ % 4 * 2 + i_ % 2 + 0 * y_, tn = g_ / 4 * 4 + i_ / 2"
    ),
}
"""Orders of 8 by 8 pairs of tiles, by which clusters that run on neighbouring multiprocessors may share operands.
Clusters of two are dealt to the eight processor clusters by turns, the first four aside; one of these has room for half
as many."""


def ordered(s: TmaConfig) -> list[Variant]:
    """The same tiles in these orders."""
    return [(name, s, replaced(r"const int band = [^;]*;", f"const int {text};"), 2) for name, text in ORDERS.items()]


def shared(s: TmaConfig, *kinds: int, persistent_ctas: int = 128) -> list[Variant]:
    """Shares that end with their tiles, finished by one block or by all of them."""
    found = [replace(s, multicast=k, stream_k=True, persistent_ctas=persistent_ctas, interleaved=False) for k in kinds]
    return all_of([y for x in found for y in (replace(x, coop_fixup=True), x)])


def mutual(s: TmaConfig, *kinds: int, persistent_ctas: int = 128) -> list[Variant]:
    """Those that all persistent_ctas finish."""
    return [
        x for x in shared(s, *kinds, persistent_ctas=persistent_ctas) if isinstance(x[1], TmaConfig) and x[1].coop_fixup
    ]


def turned(bm: int, bn: int, stages: int, *kinds: int) -> list[Variant]:
    """Transposed tiles: any multiple of 8 rows, boxes of a cluster copied by turns."""
    return [("", swap.SwapAbConfig(bm, bn, stages, 1, n), None, 2) for n in kinds]


def persistent(s: object) -> TmaConfig:
    """A shape by blocks that go on to further tiles: as many as clusters find room for."""
    assert isinstance(s, TmaConfig)
    return replace(s, persistent_ctas=132 if s.multicast_ctas < 4 else 120)


def banded(s: TmaConfig, *bands: int) -> list[Variant]:
    """The same in other orders of tiles."""
    return all_of([replace(s, raster_group=n) for n in bands])


def local() -> Iterator[tuple[Gemm, list[Variant]]]:
    """Products with their variants, the most telling first."""
    low, flat = tile(64, 128, 8, consumers=1, persistent_ctas=0), tile(128, 64, 8, persistent_ctas=0)
    mid, wide, tall = tile(128, 128, 7, persistent_ctas=0), tile(128, 256, 4), tile(256, 128, 4)
    three, deep = tile(192, 128, 5, consumers=3), tile(128, 192, 5)
    lows = [replace(low, multicast=n) for n in (0, 1)]
    parts: list[Variant] = [("no products, no end", s, COPIES, 2) for s in (*lows, replace(flat, multicast=2))]
    parts += [("no products", replace(mid, split=2), WRONG["no products"], 2)]
    parts += [("no products, no end", replace(lows[1], stages=n), COPIES, 2) for n in (4, 6)]
    parts += [("no products, no end", replace(lows[1], raster_group=n), COPIES, 2) for n in (1, 2, 4)]
    parts += [("no products, same columns", s, SAME_COLUMNS, 2) for s in lows]
    parts += [("no products, same rows", s, SAME_ROWS, 2) for s in lows]
    parts += [(f"ahead {n}", lows[1], ahead(n, 8, 8), 2) for n in (10, 16)]
    parts += [("ahead 12", replace(flat, multicast=2), ahead(12, 8, 8), 2)]
    parts += [(f"policy {n}", lows[1], None, 2 + 10 * n) for n in (1, 2)]
    orders = [*banded(lows[1], 8, 1, 2, 4), *banded(replace(flat, multicast=2), 8, 1, 2, 4)]
    orders += banded(replace(mid, split=2), 8, 1, 2, 4)
    shares = [*shared(wide, 0), *mutual(wide, 1, 2), *mutual(tall, 0, 1, 2), *shared(mid, 1), *mutual(mid, 0, 2)]
    both = [replace(mid, multicast=n, stream_k=True, coop_fixup=True, persistent_ctas=128) for n in (1, 2)]
    orders += [
        x
        for s in (*both, replace(wide, multicast=2, stream_k=True, coop_fixup=True, persistent_ctas=128))
        for x in banded(s, 1, 2, 4)
    ]
    orders += [
        *ordered(lows[1]),
        *ordered(replace(flat, multicast=2)),
        *banded(low, 1, 2, 4, 16),
        *banded(flat, 1, 2, 4, 8),
    ]
    orders += [x for n in (0, 1) for x in turned(64, 128, 8, n)]
    yield Gemm(1024, 1024, 8192, layout="nt"), [*shares, *orders, *parts]
    alone = pairs(mid, 3, 4)
    cut: list[Variant] = [("no products, no end", x[1], COPIES, 2) for x in alone]
    cut += [(name, alone[1][1], WRONG[name], 2) for name in ("no end", "no stores")]
    cut += [("no products, same columns", alone[1][1], SAME_COLUMNS, 2)]
    shares = [
        *shared(tall, 0, persistent_ctas=132),
        *mutual(tall, 1, persistent_ctas=132),
        *mutual(three, 0, 1, persistent_ctas=132),
    ]
    shares += mutual(deep, 0, 1, 2)
    across = [*turned(104, 128, 7, 0, 1, 2, 5, 7, 3), *turned(112, 128, 7, 3), *turned(88, 128, 8, 7, 1)]
    halves = all_of(
        [replace(deep, split=2, persistent_ctas=0), replace(deep, split=2, persistent_ctas=0, raster_group=2)]
    )
    yield Gemm(968, 1376, 2616, layout="nn"), [*across, *shares, *alone, *halves, *cut]
    shares += mutual(tile(256, 96, 5), 0, persistent_ctas=120)
    yield (
        Gemm(968, 1376, 2616, layout="nt"),
        [*across, *shares, *alone[1:], *pairs(tile(128, 112, 7, persistent_ctas=0), 3)],
    )
    thin = [
        *pairs(tile(128, 80, 8, persistent_ctas=0), 2, 3, 5),
        *pairs(tile(64, 144, 7, consumers=1, persistent_ctas=0), 1, 3),
    ]
    yield Gemm(1000, 1000, 1000, layout="nt"), [*turned(72, 128, 8, 0, 1, 2, 5, 7), *thin, *pairs(flat, 2)]
    across = [*turned(96, 192, 6, 0, 1, 2, 3), *turned(96, 192, 5, 0), *turned(144, 128, 6, 0, 1, 2)]
    yield (
        Gemm(1536, 1536, 1536, layout="nn"),
        [*across, *pairs(replace(tile(128, 160, 5, persistent_ctas=0), overfetch=32), 4)],
    )
    short, half = tile(64, 256, 5, consumers=1), tile(64, 192, 7, consumers=1)
    before = all_of([replace(flat, stream_k=True, multicast=2, persistent_ctas=128)])
    shares = [*mutual(low, 0, 1, 2), *mutual(short, 0, 1), *mutual(mid, 0, 1, persistent_ctas=64)]
    yield Gemm(512, 512, 8192, layout="nt"), [*shares, *before]
    shares = [*mutual(half, 0, 1), *mutual(short, 0, persistent_ctas=120), *mutual(mid, 0, persistent_ctas=96)]
    shares += [*shared(low, 0, persistent_ctas=96), *all_of([replace(low, split=2)])]
    yield Gemm(512, 768, 3072, layout="nn"), shares
    yield Gemm(1024, 1024, 8192, layout="nt", dtype=DType.BF16), [*mutual(wide, 0, 1), *mutual(tall, 2)]
    large = [tile(192, 176, 4, consumers=3), tile(256, 144, 4), tile(256, 160, 4), tile(192, 192, 4, consumers=3)]
    sorts = [*(x for s in large for x in pairs(s, 0, 1, 2)), *pairs(tile(128, 208, 5), 1), *pairs(wide, 1, 3)]
    yield Gemm(7384, 7384, 7384, layout="nt"), [(a, persistent(s), c, d) for a, s, c, d in sorts]
    for n in (5120, 4096):
        kinds = [
            *large,
            tile(192, 176, 4, consumers=3),
            tile(256, 112, 4, multicast=2),
            tile(128, 144, 6, multicast=1),
            tile(128, 256, 4),
        ]
        kinds += [
            tile(128, 128, 7, pingpong=True),
            tile(128, 208, 5),
            tile(128, 192, 5, multicast=1),
            tile(256, 128, 4),
        ]
        yield (
            Gemm(n, n, n, layout="nt"),
            all_of([replace(s, interleaved=s.bn % 32 == 0 and not s.multicast) for s in kinds]),
        )


PROFILED: Sequence[tuple[Gemm, int, Sequence[Variant]]] = (
    (
        Gemm(1024, 1024, 8192, layout="nt"),
        0,
        all_of(
            [
                tile(64, 128, 8, consumers=1, persistent_ctas=0, multicast=1),
                tile(128, 64, 8, persistent_ctas=0, multicast=2),
                tile(128, 128, 7, split=2, persistent_ctas=0),
                tile(128, 256, 4, stream_k=True, coop_fixup=True, persistent_ctas=128),
            ]
        ),
    ),
    (
        Gemm(968, 1376, 2616, layout="nn"),
        3,
        [
            *all_of(
                [
                    tile(128, 128, 7, persistent_ctas=0, multicast=4),
                    tile(256, 128, 4, stream_k=True, coop_fixup=True, persistent_ctas=132),
                ]
            ),
            *turned(104, 128, 7, 7),
        ],
    ),
)


def _nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if isinstance(found, Declined):
        raise SystemExit(found.reason)
    return found


def once(profiled: Sequence[tuple[Gemm, int, Sequence[Variant]]]) -> None:
    """Each kernel once on one set of operands; the library's best algorithm, as measured before, first."""
    import torch
    from benchmarks.harness.race import Race

    from weft.device.cuda.cublaslt import find_cublaslt

    torch.zeros(1, device="cuda")
    facts, lt = gpu_facts(None, calibrate=False), find_cublaslt()
    if isinstance(lt, Declined):
        raise SystemExit(lt.reason)
    for g, best, variants in profiled:
        race = Race(g, 1)
        number = next(x for x in race.add_library(lt) if x.name == f"algorithm {best}")
        race._launch(number, 0)
        for name, source, cubin, _, _ in built(g, variants, facts, _nvrtc(), None):
            print(g.name, source.entry, name, flush=True)
            race._launch(race.add_kernel(name, source, str(cubin.path)), 0)


_PROBE = """typedef unsigned long long u64;
extern "C" __global__ void probe(unsigned* out) {
  extern __shared__ unsigned char room[];
  if (threadIdx.x == 0) {
    unsigned sm; u64 then, now;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    out[blockIdx.x] = sm;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(then));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - then < 30000);
  }
}
"""


def places() -> None:
    """Processor clusters, by which multiprocessors share clusters of blocks, and where the blocks of a grid go."""
    import torch

    from weft.device.cuda.driver import Module

    torch.zeros(1, device="cuda")
    cubin = _nvrtc().compile(_PROBE, arch="sm_90a")
    function = Module(str(cubin.path)).function("probe")
    out = torch.zeros(132, dtype=torch.int32, device="cuda")
    room = 200 << 10

    def run(blocks: int, cluster: int) -> list[int]:
        function.prepare(room, (cluster, 1, 1))
        stream = torch.cuda.current_stream().cuda_stream
        function.launch(
            (blocks, 1, 1), (32, 1, 1), [out.data_ptr()], shared_bytes=room, cluster=(cluster, 1, 1), stream=stream,
            dependent=False,
        )  # fmt: skip
        torch.cuda.synchronize()
        return [int(x) for x in out[:blocks].tolist()]

    group = list(range(132))
    for size in (2, 3, 4, 5, 6, 7, 8):
        for _ in range(12):
            found = run(120 // size * size, size)
            for i in range(0, len(found), size):
                for other in found[i + 1 : i + size]:
                    one, two = group[found[i]], group[other]
                    group = [one if x == two else x for x in group]
    names = {x: i for i, x in enumerate(dict.fromkeys(group))}
    print(json.dumps({"groups": [[sm for sm in range(132) if group[sm] == x] for x in names]}))
    for cluster in (1, 2, 4, 8):
        for _ in range(2):
            found = run(128 // cluster * cluster if cluster < 4 else 120, cluster)
            heads = found[::cluster]
            print(json.dumps({"cluster": cluster, "groups": [names[group[sm]] for sm in heads], "first": heads[:24]}))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="lab.gemm_parts_local", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--places", action="store_true", help="where blocks go")
    parser.add_argument("--once", action="store_true", help="each kernel once, for a profiler")
    parser.add_argument("--orders", action="store_true", help="with --once: orders of tiles instead")
    given = parser.parse_args(arguments)
    if given.places:
        places()
    if given.once:
        low = replace(tile(64, 128, 8, consumers=1, persistent_ctas=0), multicast=1)
        orders = [(Gemm(1024, 1024, 8192, layout="nt"), 0, [*ordered(low), *all_of([replace(low, multicast=0)])])]
        once(orders if given.orders else PROFILED)


if __name__ == "__main__":
    main()
