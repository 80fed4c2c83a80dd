"""What latency-critical kernels use of each unit: counted by hand for one, and nowhere above the unit's peak."""

from __future__ import annotations

import pytest
from benchmarks.cases.colocate_lc import lc_kernel, lc_names
from benchmarks.cases.lc_units import BOUND, FLOP_PER_CYCLE, used
from tools.pair_tables import lc_units

from weft.costmodel.profile import costs_of
from weft.device.cuda.facts import profile
from weft.ir.declined import Declined


def test_a_product_counted_by_hand() -> None:
    found = used(lc_kernel("bert_base/product-2048x3072x768"), 1840.0)
    assert not isinstance(found, Declined)
    facts, costs = profile("h200"), costs_of(profile("h200")).tma
    cycles = found.us * 1840.0 * facts.sms
    tiles, k_blocks = (2048 // 128) * (3072 // 96), 768 // 64
    loaded = (128 + 96) * 64 * 2
    read = 2 * (64 + 96) * 64 * 2  # two consumer warpgroups, each reads 64 rows and all columns
    assert found.tile == "128x96"
    assert found.port == pytest.approx(tiles * k_blocks * loaded / cycles / costs.port)
    assert found.shared == pytest.approx(tiles * k_blocks * (loaded + read) / cycles / costs.shared)
    assert found.tensor == pytest.approx(2 * 2048 * 3072 * 768 / cycles / FLOP_PER_CYCLE)
    slower = used(lc_kernel("bert_base/product-2048x3072x768"), 920.0)
    assert not isinstance(slower, Declined) and slower.port == pytest.approx(2 * found.port)
    assert slower.memory == found.memory, "bytes of memory are by the second"


@pytest.mark.parametrize("name", lc_names())
def test_no_share_is_above_the_peak(name: str) -> None:
    found = used(lc_kernel(name))
    if isinstance(found, Declined):
        assert name == "vit_b16/conv16x16s16-3-768-224" and "another template" in found.reason
        return
    shares = (found.tensor, found.shared, found.port, found.memory)
    assert all(0 < x < 1 for x in shares)
    assert (found.bound == "latency") == (max(shares) < BOUND)


def test_the_table_has_all_kernels() -> None:
    lines = lc_units().splitlines()
    assert [x.split("`")[1] for x in lines[2:]] == lc_names()
    assert sum("not counted" in x for x in lines) == 1
