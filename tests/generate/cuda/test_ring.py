"""The one mbarrier ring and its prologue, as texts and by walking round it."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft.generate.cuda
from weft.generate.cuda.intrinsics.ring import Ring, initialised, prefetched, prologue

PACKAGE = Path(weft.generate.cuda.__file__).parent


@pytest.mark.parametrize("call", ["w_bar_ready(", "w_map_prefetch("])
def test_one_file_writes_prologues(call: str) -> None:
    assert [path.name for path in PACKAGE.rglob("*.py") if call in path.read_text(encoding="utf-8")] == ["ring.py"]


def test_texts() -> None:
    ring = Ring(3)
    assert str(ring.slot()) == "it % 3"
    assert ring.parity() == "it / 3 & 1"
    assert ring.await_filled("slot", "lap") == "w_bar_wait(sb + FULL + 8 * slot, lap);"
    assert ring.await_read("slot", "lap ^ 1") == "w_bar_wait(sb + EMPTY + 8 * slot, lap ^ 1);"
    assert ring.release(ring.slot("it + 1")) == "if (lane == 0) w_bar_arrive(sb + EMPTY + 8 * ((it + 1) % 3));"
    assert ring.advance() == "if (++slot == 3) { slot = 0; parity ^= 1; }"
    assert prefetched("ma", "mw") == "w_map_prefetch(&ma); w_map_prefetch(&mw);"
    assert prologue(initialised(4, Ring(2, "full", "empty")), then="x;") == (
        "if (t == 0) { for (int i = 0; i < 2; ++i) { w_bar_init(full + 8 * i, 1); w_bar_init(empty + 8 * i, 4); }"
        " w_bar_ready(); x; }"
    )


def test_a_single_stage_has_no_slot() -> None:
    ring = Ring(1)
    assert ring.await_filled(ring.slot(), ring.parity()) == "w_bar_wait(sb + FULL, it & 1);"


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_counted_slots_and_parities_are_those_of_the_number(stages: int) -> None:
    ring = Ring(stages)
    assert ring.counted() == f"slot = slot == {stages - 1} ? 0 : slot + 1, lap ^= slot == 0"
    slot = lap = 0
    for it in range(4 * stages):
        assert (slot, lap) == (it % stages, it // stages & 1)
        slot = 0 if slot == stages - 1 else slot + 1  # the text above
        lap ^= slot == 0
