"""Which schedules to measure: a small model of cycles ranks register tiles and partitions.

Per step of the sum a tile of R pixels by V vectors issues R*V multiply-adds (two per cycle) and R+V loads (two per
cycle), and draws V vectors of weights from the cache that holds them. Tiles at the edges cost their own shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.generate.contraction.match import Contraction
from weft.generate.cpp.templates.direct import DirectConfig
from weft.generate.cpp.templates.text import cost

_L2 = 1 << 20
"""Bytes of second-level cache per core that the model assumes."""
_L3_BYTES_PER_CYCLE = 12.0
_DRAM_BYTES_PER_CYCLE = 8.0


def registers(lanes: int) -> int:
    """Vector registers of the instruction set: 32 with AVX-512, 16 before."""
    return 32 if lanes == 16 else 16


def _parts(total: int, size: int) -> list[tuple[int, int]]:
    """(size, how many) of the full parts and the rest."""
    whole, rest = divmod(total, size)
    return [(size, whole)] * bool(whole) + [(rest, 1)] * bool(rest)


def tiles(c: Contraction, lanes: int) -> Iterable[tuple[int, int, int]]:
    """(th, tw, v) that fit the registers, without those that another one with equal cuts dominates."""
    rows, cols = c.dims[-2], c.dims[-1]
    vectors = -(-c.oc // lanes)
    limit = registers(lanes)
    seen = set()
    for v in range(1, min(vectors, 8) + 1):
        most = (limit - v - 1) // v
        if most < 1:
            continue
        widths = {math.ceil(cols / n) for n in range(-(-cols // most), -(-cols // most) + 6)} | {1, min(most, cols)}
        for tw in sorted(w for w in widths if 1 <= w <= most):
            heights = {1}
            if tw == cols or tw * 2 <= most:
                heights |= {math.ceil(rows / n) for n in range(1, rows + 1) if math.ceil(rows / n) * tw <= most}
            for th in heights:
                if th * tw * v + v + 1 <= limit and (th, tw, v) not in seen:
                    seen.add((th, tw, v))
                    yield th, tw, v


def cycles(c: Contraction, lanes: int, th: int, tw: int, v: int) -> float:
    """Modelled cycles of the whole contraction on one thread, without the packing of inputs."""
    taps = c.kernel[0] * c.kernel[1] * c.ic
    vectors = -(-c.oc // lanes)
    after = cost(c) * 0.5 + 2
    weights = vectors * lanes * taps * 4 * c.groups
    total = 0.0
    for h, nh in _parts(c.dims[-2], th):
        for w, nw in _parts(c.dims[-1], tw):
            for u, nu in _parts(vectors, v):
                r = h * w
                step = max(r * u / 2, (r + u) / 2, 4.0 / max(1, min(8, -(-8 // (r * u)))), u * 1.8)
                total += nh * nw * nu * (taps * step + r * u * after + 25)
    total *= c.groups * math.prod(c.dims[:-2])
    sweeps = max(1, math.prod(c.dims) // (th * tw)) if weights > 24 * _L2 else 1
    bandwidth = _DRAM_BYTES_PER_CYCLE if weights > 24 * _L2 else _L3_BYTES_PER_CYCLE
    return max(total, weights * min(sweeps, 4) / bandwidth)


def dots(c: Contraction, lanes: int) -> Iterable[tuple[float, int, int, int]]:
    """(cycles, th, tw, v) with lanes along the sum: for few output channels and a long contiguous sum."""
    near = c.pack is not None or c.a_layout.channel == 1
    if not c.w_const or not near or c.oc > lanes // 2 or c.ic * c.kernel[1] < lanes or c.oc >= lanes:
        return
    limit = registers(lanes)
    together = c.dilations[1] == 1 and c.groups == 1
    length = c.ic * c.kernel[1] if together else c.ic
    steps = c.kernel[0] * (1 if together else c.kernel[1]) * math.ceil(length / lanes)
    for v in range(1, min(c.oc, 6) + 1):
        most = (limit - v - 1) // v
        cols = c.dims[-1]
        for tw in sorted({math.ceil(cols / n) for n in range(-(-cols // most), -(-cols // most) + 3)}):
            if not 1 <= tw <= most:
                continue
            total = 0.0
            for w, nw in _parts(cols, tw):
                for u, nu in _parts(c.oc, v):
                    step = max(w * u / 2, (w + u) / 2, 4.0)
                    total += nw * nu * (steps * step + w * u * 5 + w * (cost(c) * 0.5 + 3) + 25)
            yield total * math.prod(c.dims[:-1]) * c.groups, 1, tw, v


def _partitions(
    c: Contraction, lanes: int, threads: int, th: int, tw: int, v: int, unit: int = 0
) -> list[tuple[int, int, int, str]]:
    """(bh, bw, og, order): bands that fit in half of L2 and balance the threads."""
    rows, cols = -(-c.dims[-2] // th), -(-c.dims[-1] // tw)
    blocks = math.ceil(math.ceil(c.oc / (unit or lanes)) / v)
    outer = math.prod(c.dims[:-2]) * c.groups
    taps = c.kernel[0] * c.kernel[1] * c.ic
    block_bytes = taps * v * lanes * 4
    weight_bytes = blocks * block_bytes
    found: list[tuple[int, int, int, str]] = []
    # Rows of tiles whose input fits beside a block of weights.
    wide = len(c.pack.cols) * c.strides[0] if c.pack is not None else cols * tw
    row_bytes = wide * c.ic * 4 * th
    room = max(_L2 // 2, _L2 - block_bytes) - 64 * 1024
    if rows > 1 or c.pack is not None:
        fit = max(1, min(rows, room // max(row_bytes, 1)))
        splits = [(-(-rows // n), cols) for n in _counts(rows, fit, threads, outer)]
        if c.pack is None and rows < threads:
            splits += [(1, -(-cols // n)) for n in _counts(cols, cols, threads, outer * rows)]
    else:
        fit = max(1, min(cols, room // max(c.ic * 4 * tw, 1)))
        splits = [(1, -(-cols // n)) for n in _counts(cols, fit, threads, outer)]
    for bh, bw in splits:
        bands = -(-rows // bh) * -(-cols // bw) * outer
        orders = ["oc"] if weight_bytes > _L2 // 2 or not c.w_const else ["px", "oc"]
        if bands >= threads and _balance(bands, threads) >= 0.8:
            found += [(bh, bw, blocks, order) for order in orders]
        if bands < 4 * threads and blocks > 1:
            for parts in (threads, 2 * threads, 4 * threads):
                if parts <= blocks and _balance(bands * parts, threads) >= 0.8:
                    found += [(bh, bw, -(-blocks // parts), order) for order in orders[:1]]
        if not found:
            found += [(bh, bw, max(1, -(-blocks // threads)), orders[0])]
    return list(dict.fromkeys(found))


def _counts(total: int, fit: int, threads: int, outer: int) -> list[int]:
    """Numbers of bands: as few as fit, then more for balance."""
    least = -(-total // fit)
    wanted = [least, threads, 2 * threads, 4 * threads, least * threads]
    good = sorted({n for n in wanted if least <= n <= total} | {least})
    return [n for n in good if _balance(n * outer, threads) >= 0.75][:3] or good[:2]


def _balance(tasks: int, threads: int) -> float:
    return tasks / (-(-tasks // threads) * threads)


def shapes(c: Contraction, lanes: int, threads: int, keep: int = 8) -> list[tuple[float, DirectConfig]]:
    """(modelled cycles, parameters) of the most promising parameter sets, best first."""
    ranked = []
    for th, tw, v in tiles(c, lanes):
        base = cycles(c, lanes, th, tw, v)
        for bh, bw, og, order in _partitions(c, lanes, threads, th, tw, v):
            ranked.append((base * _imbalance(c, lanes, threads, th, tw, v, bh, bw, og), th, tw, v, bh, bw, og, order))
    for base, th, tw, v in dots(c, lanes):
        for bh, bw, og, order in _partitions(c, lanes, threads, th, tw, v, 1):
            skew = _imbalance(c, lanes, threads, th, tw, v, bh, bw, og, 1)
            ranked.append((base * skew, th, tw, v, bh, bw, og, order + " dot"))
    # equal cost: wide tiles first, whose pixels lie side by side
    ranked.sort(key=lambda x: (x[0], -x[2]))
    out: list[tuple[float, DirectConfig]] = []
    per_tile: dict[tuple[int, int, int, bool], int] = {}
    for modelled, th, tw, v, bh, bw, og, order in ranked:
        key = (th, tw, v, order.endswith("dot"))
        if per_tile.get(key, 0) >= 3:
            continue
        per_tile[key] = per_tile.get(key, 0) + 1
        small = math.prod(c.dims) <= 4
        shape = DirectConfig(lanes, threads, th, tw, v, bh, bw, og, order.split()[0], 4, 2048 if small else 0, key[3])
        out.append((modelled, shape))
        if len(out) == keep:
            break
    return out


def _imbalance(
    c: Contraction, lanes: int, threads: int, th: int, tw: int, v: int, bh: int, bw: int, og: int, unit: int = 0
) -> float:
    """Longest thread over the mean, for tasks taken in order; plus a little for each task and repacked row."""
    rows, cols = -(-c.dims[-2] // th), -(-c.dims[-1] // tw)
    blocks = math.ceil(math.ceil(c.oc / (unit or lanes)) / v)
    outer = math.prod(c.dims[:-2]) * c.groups
    bands, slabs, packs = -(-rows // bh), -(-cols // bw), -(-blocks // og)
    tasks = outer * bands * slabs * packs
    # the last band may be smaller, so count in pixels
    sizes: list[float] = []
    for b in range(bands):
        h = min(c.dims[-2] - b * bh * th, bh * th)
        for x in range(slabs):
            w = min(c.dims[-1] - x * bw * tw, bw * tw)
            for o in range(packs):
                sizes.append(h * w * min(blocks - o * og, og))
                if len(sizes) > 512:
                    break
    loads = [0.0] * threads
    for size in sizes * min(outer, 8):
        loads[loads.index(min(loads))] += size
    skew = max(loads) / (sum(loads) / threads)
    repack = 0.0
    if c.pack is not None:
        halo = (bh * th * c.strides[0] + (c.kernel[0] - 1) * c.dilations[0]) / max(1, bh * th * c.strides[0])
        repack = packs * halo * 2.0 / (c.oc / lanes * c.kernel[0] * c.kernel[1] * 8)
    elif not c.w_const:
        repack = bands * slabs * 16.0 / max(math.prod(c.dims[-2:]), 1)
    work = c.flops / (4 * lanes) / threads
    return (skew + repack + 300.0 * tasks / threads / max(work, 1.0)) / threads
