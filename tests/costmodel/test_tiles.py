"""The cost of a tile of a product: what must hold for any values, and products measured outside of the fit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from weft.costmodel.tiles import TILE_SHAPES, Sizes, TileCost, TileShape, least_cycles
from weft.device.cuda.facts import GpuFacts, profile
from weft.ir.types import DType

H200 = replace(GpuFacts(), clock_ghz=1.98, l2_bandwidth=7890.0, dependent_launch_us=0.6)
PLAIN = Sizes(DType.F16, 784, 256, 1152, 1, "taps", "packed", 0, 8, 1, 2, 0, 2)
TILE = TileShape(64, 64, 64, 64, 64, group=True)


def us(p: Sizes, tile: TileShape, split: int = 1, cluster: bool = False, facts: GpuFacts = H200) -> float:
    cost = TileCost(p, tile, facts, tile.ctas_per_sm(facts, p.dtype.itemsize))
    return cost.cycles(split, cluster) / facts.clock_ghz / 1e3


def cube(n: int) -> Sizes:
    return Sizes(DType.F16, n, n, n, 1, "rows", "packed", 0, 8, 0, 0, 0, 2)


@pytest.mark.parametrize(
    ("n", "tile", "measured"),
    [
        (1024, TileShape(128, 96, 64, 64, 96, group=True), 7.46),
        (1024, TileShape(128, 64, 64, 32, 32), 10.48),
        (2048, TileShape(256, 128, 64, 64, 128, group=True, ahead=2), 27.39),
        (2048, TileShape(128, 256, 64, 64, 64, ahead=3), 45.94),
        (4096, TileShape(256, 128, 64, 64, 128, group=True, ahead=2), 206.11),
        (4096, TileShape(128, 256, 64, 64, 64, ahead=3), 354.5),
        (8192, TileShape(128, 256, 64, 64, 256, group=True, ahead=2), 1647.7),
        (8192, TileShape(128, 256, 64, 64, 64, ahead=3), 3344.0),
    ],
)
def test_large_products_that_no_constant_was_fitted_to(n: int, tile: TileShape, measured: float) -> None:
    """Microseconds on an NVIDIA H200; one CTA fits where the registers of two do not."""
    cost = TileCost(cube(n), tile, H200, max(1, min(2, tile.ctas_per_sm(H200, 2))))
    assert cost.cycles(1, False) / 1.98e3 == pytest.approx(measured, rel=0.3)


@pytest.mark.parametrize("field", ["m", "n", "k", "z", "operands", "plain", "special", "stored"])
@pytest.mark.parametrize("tile", [tile for shapes in TILE_SHAPES.values() for tile in shapes], ids=str)
def test_more_work_takes_no_less_time(field: str, tile: TileShape) -> None:
    p = replace(PLAIN, dtype=DType.F32) if tile in TILE_SHAPES["simt"] else PLAIN
    more = replace(p, **{field: 2 * getattr(p, field) + 1})
    for split in (1, 4):
        assert us(more, tile, split, split > 1) >= us(p, tile, split, split > 1)


def test_how_operands_are_found_matters() -> None:
    found = [us(replace(PLAIN, a_load=a), TILE) for a in ("rows", "taps", "elements")]
    assert found == sorted(found) and found[2] > 3 * found[0]
    assert us(replace(PLAIN, a_load="elements", tables=64), TILE) > found[2]
    assert us(replace(PLAIN, w_load="elements"), TILE) > found[1]
    assert us(replace(PLAIN, width=1), TILE) > found[1]


def test_one_more_block_than_there_are_multiprocessors_costs() -> None:
    p = replace(PLAIN, m=64 * 132, n=64)
    one, more = us(p, TILE), us(replace(p, m=64 * 132 + 1), TILE)
    assert more > one
    tight = TileCost(p, TILE, H200, 1)
    assert TileCost(replace(p, m=64 * 132 + 1), TILE, H200, 1).cycles(1, False) > 1.5 * tight.cycles(1, False)


def test_long_sums_of_few_tiles_are_worth_a_split_and_short_ones_are_not() -> None:
    long, short = replace(PLAIN, m=49, n=512, k=4608), replace(PLAIN, m=3136, n=256, k=64)
    assert us(long, TILE, 4, True) < 0.6 * us(long, TILE)
    assert us(short, TILE, 4, True) > us(short, TILE)
    assert us(long, TILE, 4, True) < us(long, TILE, 4, False)  # through the cluster's memory, not the L2 cache


def test_what_does_not_fit_takes_forever() -> None:
    huge = TileShape(256, 256, 64, 64, 256, group=True, ahead=8)
    assert huge.ctas_per_sm(H200, 2) == 0 and us(PLAIN, huge) == math.inf


def test_weights_come_from_memory_at_its_rate() -> None:
    p = Sizes(DType.F16, 16, 1 << 16, 4096, 1, "rows", "packed", 0, 8, 0, 0, 0, 2)
    rate = H200.read_bandwidth[-1][1]
    assert us(p, TileShape(16, 64, 64, 16, 32, 2)) >= p.n * p.k * 2 / rate / 1e3


@pytest.mark.parametrize("name", ["h200", "h100", "a100"])
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
def test_the_least_of_usual_tiles(name: str, dtype: DType) -> None:
    facts = profile(name)
    p = replace(PLAIN, dtype=dtype)
    kinds = ["simt"] if dtype is DType.F32 else ["mma"] if facts.capability < 90 else ["mma", "group"]
    least = least_cycles(facts, p) / facts.clock_ghz / 1e3
    times = [us(p, tile, facts=facts) for kind in kinds for tile in TILE_SHAPES[kind]]
    assert 0 < least <= min(times) < math.inf
    flops = 2.0 * p.m * p.n * p.k
    assert least >= flops / facts.peak_flops("f32" if dtype is DType.F32 else dtype.value) * 1e6


def test_columns_and_transposed_weights_take_no_warpgroups() -> None:
    big = cube(4096)
    assert least_cycles(H200, replace(big, a_load="columns")) > 1.3 * least_cycles(H200, big)
    assert least_cycles(H200, replace(big, w_load="kn")) > 1.3 * least_cycles(H200, big)
