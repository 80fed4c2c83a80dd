"""Tiles, waves and bytes as numbers: the vectors of the performance notes, and what must hold for any values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.costmodel.profile import costs_of
from weft.costmodel.roofline import (
    Product,
    Tile,
    chained_us,
    gap_us,
    halo_ratio,
    memory_us,
    overlapped,
    product_us,
    tile_efficiency,
    tile_us,
    wave_efficiency,
)
from weft.device.cuda.facts import GpuFacts, profile

H200 = GpuFacts()


@pytest.mark.parametrize(
    ("blocks", "efficiency"),
    [
        (66, 0.500), (131, 0.992), (132, 1.0), (133, 0.504), (198, 0.750), (263, 0.996), (264, 1.0), (265, 0.669),
        (1057, 0.890), (1187, 0.999),
    ],
)  # fmt: skip
def test_waves(blocks: int, efficiency: float) -> None:
    """Section 2, the corrected row of the table."""
    assert wave_efficiency(blocks, 132) == pytest.approx(efficiency, abs=5e-4)


def test_tiles() -> None:
    assert tile_efficiency((256, 128), (128, 128)) == 1.0
    assert tile_efficiency((129, 100), (128, 128)) == pytest.approx(129 * 100 / (256 * 128))


@pytest.mark.parametrize(
    ("tile", "kernel", "stride", "ratio"),
    [(8, 3, 1, 1.56), (16, 3, 1, 1.27), (32, 3, 1, 1.13), (8, 3, 2, 1.13), (16, 5, 1, 1.56), (16, 7, 1, 1.89)],
)
def test_halo(tile: int, kernel: int, stride: int, ratio: float) -> None:
    """Section 5."""
    assert halo_ratio((tile,) * 2, (kernel,) * 2, (stride,) * 2, (1, 1)) == pytest.approx(ratio, abs=5e-3)


def test_halo_with_dilation_and_gaps() -> None:
    assert halo_ratio((16, 16), (3, 3), (1, 1), (2, 2)) == halo_ratio((16, 16), (5, 5), (1, 1), (1, 1))
    assert halo_ratio((16,), (1,), (2,), (1,)) == 31 / 32  # every second element is never read


def test_concurrent_costs() -> None:
    assert overlapped((), H200) == 0.0 and overlapped((3.0,), H200) == 3.0
    assert overlapped((1.0, 5.0, 2.0), H200) == 5.0 + costs_of(H200).roofline.overlap * 2.0


def test_traffic_never_falls_with_size() -> None:
    sizes = [1 << k for k in range(8, 33)]
    for read_share in (0, 1, 2):
        times = [memory_us(H200, s * read_share // 2, s - s * read_share // 2) for s in sizes]
        assert times == sorted(times) and times[0] > 0
    assert memory_us(H200, 0, 0) == 0.0
    assert memory_us(H200, 1 << 29, 1 << 29) == pytest.approx((1 << 30) / 4200 / 1e3, rel=0.01)
    assert chained_us(H200.bandwidth, 1 << 20) == pytest.approx((1 << 20) / 800 / 1e3)


def test_few_blocks_do_not_fill_the_memory() -> None:
    size = 1 << 28
    full, few = memory_us(H200, size, size), memory_us(H200, size, size, active_sms=16)
    assert few == pytest.approx(2 * size / (16 * 32 * 1.755) / 1e3) and few > 4 * full
    assert memory_us(H200, size, size, active_sms=1000) == full


def test_a_gap_is_shorter_where_launches_may_overlap() -> None:
    assert gap_us(H200) == 0.55 and gap_us(profile("a100")) == 1.0


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("n", [4096, 8192])
def test_a_large_product_is_near_what_a_library_reaches(dtype: str, n: int) -> None:
    product = Product(n, n, n, dtype=dtype)
    time, tile = product_us(H200, product)
    assert 0.8 * 780e12 < product.flops / time * 1e6 < 800e12 and tile.m * tile.n >= 128 * 128 and tile.split == 1


def test_long_contractions_of_few_rows_are_split() -> None:
    _, tile = product_us(H200, Product(49, 512, 4608))
    assert tile.split > 1 and tile.m <= 64
    whole = tile_us(H200, Product(49, 512, 4608), replace(tile, split=1))
    assert whole > 1.5 * tile_us(H200, Product(49, 512, 4608), tile)


def test_more_work_takes_no_less_time() -> None:
    for tile in (Tile(64, 64), Tile(128, 256), Tile(64, 128, 4)):
        base = Product(500, 500, 500)
        time = tile_us(H200, base, tile)
        for field in ("m", "n", "k", "batch"):
            assert tile_us(H200, replace(base, **{field: 3 * getattr(base, field)}), tile) >= time


def test_one_more_block_than_fits_costs_a_wave() -> None:
    tile = Tile(128, 128)
    fits, over = Product(128 * 132, 128, 8192), Product(128 * 132 + 1, 128, 8192)
    assert tile_us(H200, over, tile) > 1.6 * tile_us(H200, fits, tile)


def test_types_without_a_rate_of_their_own() -> None:
    times = [product_us(H200, Product(2048, 2048, 2048, 1, d, 4))[0] for d in ("f16", "f32", "i32", "f64")]
    assert times[0] < times[1] <= times[2] < times[3] * 1.5
